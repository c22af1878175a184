# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Moments of a window of warm-up, and the scale that they make."""

from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_pdmp.process.scale import LowRankScale, Scale

AnyScale = Scale | LowRankScale

#: draws that a low-rank scale keeps of a window, at most
MAX_ROWS = 512


class Moments(NamedTuple):
    """Sums over positions at equally spaced process times.

    In whitened coordinates; for a low-rank scale in units of its diagonal. Kept in few
    arrays, since every array of the loop's state is another piece of code to compile.
    """

    counts: Array  # (4,) see the properties
    rows: Array  # (4, d) likewise
    m2: Array  # (d,) or (d, d) Welford's sum of squares about the mean
    draws: Array  # (n, d) some of the draws, for a low-rank scale (else n = 0)
    moving: Array | None = None  # (2, d) as lag, of a sticky path's indicators: m, m m'

    @property
    def num(self) -> Array:
        """Of positions, of all chains that share them."""
        return self.counts[0]

    @property
    def pairs(self) -> Array:
        """Number of pairs of successive draws."""
        return self.counts[1]

    @property
    def num_refreshments(self) -> Array:
        """Of velocities."""
        return self.counts[2]

    @property
    def num_grad(self) -> Array:
        """Gradient evaluations."""
        return self.counts[3]

    @property
    def mean(self) -> Array:
        """Of positions, (d,)."""
        return self.rows[0]

    @property
    def lag(self) -> Array:
        """Sums over pairs: z z', |z|, |z| |z'|; (3, d)."""
        return self.rows[1:]


def zero_moments(scale: AnyScale, num_draws: int = 0, sticky: bool = False) -> Moments:
    """Empty sums, of the form that ``scale`` needs."""
    dim, dtype = scale.center.size, scale.factor.dtype
    return Moments(
        counts=jnp.zeros(4, dtype),
        rows=jnp.zeros((4, dim), dtype),
        m2=jnp.zeros((dim, dim) if scale.factor.ndim == 2 else dim, dtype),
        draws=jnp.zeros((num_draws, dim), dtype),
        moving=jnp.zeros((2, dim), dtype) if sticky else None,
    )


def update_moments(
    moments: Moments,
    z: Array,
    last: Array,
    mean: Array | None = None,
    within: Array | float = 0.0,
    weight: Array | None = None,
    complete: Array | None = None,
    num_refreshments: Array | float = 0.0,
    num_grad: Array | float = 0.0,
) -> Moments:
    """One more draw of each chain.

    :param moments: the sums so far.
    :param z: (chains, d) positions.
    :param last: (chains, d) positions before those.
    :param mean: (chains, d) what counts for the moments; default the positions.
    :param within: (chains, d) variance about ``mean`` of the path that led there.
    :param weight: (chains,) how much each counts; default 1.
    :param complete: (chains,) which are pairs with those before; default all.
    :param num_refreshments: of velocities, in all chains, since the last draw.
    :param num_grad: gradient evaluations, likewise.
    """
    num_chains = z.shape[0]
    mean = z if mean is None else mean
    weight = jnp.ones(num_chains, z.dtype) if weight is None else weight
    paired = jnp.ones(num_chains, z.dtype)
    if complete is not None:
        paired = complete.astype(z.dtype)
    first = moments.num == 0  # the draw before belongs to another window
    num = moments.num + jnp.sum(weight)
    delta = mean - moments.mean
    shift = weight @ delta / jnp.maximum(num, jnp.finfo(z.dtype).tiny)
    if moments.m2.ndim == 2:
        over_chains = (((0,), (0,)), ((), ()))
        square = lax.dot_general(weight[:, None] * delta, delta, over_chains)
        m2 = moments.m2 + square - num * jnp.outer(shift, shift)
    else:
        m2 = moments.m2 + weight @ (delta**2 + within) - num * shift**2
    size, last_size = jnp.abs(z), jnp.abs(last)
    lag = jnp.stack([z * last, 0.5 * (size + last_size), size * last_size])
    lag = jnp.where(first, 0, moments.lag + (paired[:, None] * lag).sum(1))
    pairs = jnp.where(first, 0, moments.pairs + jnp.sum(paired))
    counts = [
        num,
        pairs,
        moments.num_refreshments + num_refreshments,
        moments.num_grad + num_grad,
    ]
    moving, draws = moments.moving, moments.draws
    if moving is not None:  # frozen coordinates are exactly zero
        now, before = (z != 0).astype(z.dtype), (last != 0).astype(z.dtype)
        both = jnp.stack([0.5 * (now + before), now * before])
        moving = jnp.where(first, 0, moving + (paired[:, None] * both).sum(1))
    if len(draws):
        step = (moments.num / num_chains).astype(int)
        place, chain = step % len(draws), step % num_chains
        use = (paired[chain] > 0) | jnp.all(draws[place] == 0)
        draws = draws.at[place].set(jnp.where(use, z[chain], draws[place]))
    return Moments(
        counts=jnp.stack(counts),
        rows=jnp.concatenate([(moments.mean + shift)[None], lag]),
        m2=m2,
        draws=draws,
        moving=moving,
    )


def _diagonal(matrix: Array) -> Array:
    """As ``jnp.diagonal``, but without a gather, which takes longer to compile."""
    return jnp.ravel(matrix)[:: len(matrix) + 1]


def autocorrelations(moments: Moments) -> Array:
    """Of successive draws: of every coordinate and of its size, (2, d).

    Of a sticky path, of whether it moves, too: (3, d).
    """
    variance = moments.m2 if moments.m2.ndim == 1 else _diagonal(moments.m2)
    variance = variance / jnp.maximum(moments.num, 1)
    product, size, size_product = moments.lag / jnp.maximum(moments.pairs, 1)
    of_size = variance + moments.mean**2 - size**2
    eps = jnp.finfo(variance.dtype).tiny
    rho = (product - moments.mean**2) / jnp.maximum(variance, eps)
    rho_size = (size_product - size**2) / jnp.maximum(of_size, eps)
    rhos = [rho, rho_size]
    if moments.moving is not None:
        moves, both = moments.moving / jnp.maximum(moments.pairs, 1)
        rhos.append((both - moves**2) / jnp.maximum(moves - moves**2, eps))
    return jnp.clip(jnp.stack(rhos), 0, 0.999)


def effective_num(moments: Moments, refreshes: bool) -> Array:
    """A cautious number of independent draws in a window.

    From the autocorrelation of sizes, which decide scales. Between refreshments the
    speed stays as it is, so there are not many more independent ones than those.
    """
    rho = jnp.mean(autocorrelations(moments)[1])
    n = moments.num * jnp.minimum((1 - rho) / (1 + rho), 0.5)
    if refreshes:
        n = jnp.minimum(n, moments.num_refreshments)
    return jnp.maximum(n, 1)


def _shrunk_mean(moments: Moments, n: Array) -> Array:
    noise = moments.mean.size / n
    shift = jnp.sum(moments.mean**2)
    return moments.mean * jnp.maximum(0, 1 - noise / jnp.maximum(shift, noise))


def _shrunk_size(ratio: Array, n: Array) -> Array:
    """How far to believe that all variances changed by this common factor.

    In logarithms, where a factor and its inverse are equally far from 1.
    """
    distance = jnp.log(jnp.maximum(ratio, jnp.finfo(ratio.dtype).tiny)) ** 2
    # Coordinates share the radius of the path, which also moves more slowly than they
    # do: d of them are no better witnesses than one. On a Gaussian of condition 10^4
    # with a diagonal metric (d=50), this is 0.8 of the radius' true squared error. And
    # few draws of a path lie closer together than they should.
    error = 2 / n + 16 / n**2
    rho = error / jnp.maximum(distance, error)
    return ratio ** (1 - rho)


def _shrunk_variance(ratio: Array, n: Array) -> Array:
    """Variances over the old ones, shrunk as in :func:`renew_scale`."""
    size = jnp.mean(ratio)
    error = jnp.sum(ratio**2) * 2 / n
    rho = error / jnp.maximum(jnp.sum((ratio - size) ** 2), error)
    rho = jnp.maximum(rho, 1 / (1 + n))
    return _shrunk_size(size, n) / size * ((1 - rho) * ratio + rho * size)


def renew_scale(
    scale: AnyScale, moments: Moments, mask: np.ndarray | None, refreshes: bool = False
) -> AnyScale:
    r"""Centre and scale from the moments of a window, shrunk to those in force.

    In whitened coordinates the metric in force is the identity, whatever the units
    of the model, and a window tells :math:`d(d+1)/2` numbers about another one. Where
    that is mostly noise the old metric is better, up to a common factor :math:`\mu`:
    as in Ledoit and Wolf (2004), the estimate is :math:`(1-\rho) S + \rho \mu I`
    with :math:`\mu = \mathrm{tr}\,S / d` and :math:`\rho` the expected squared error
    of :math:`S` on a Gaussian over :math:`\|S - \mu I\|^2`. Likewise :math:`\log\mu`
    and the mean are shrunk to zero.

    :param scale: the one in force.
    :param moments: of draws in its coordinates.
    :param mask: which entries of a dense metric may be non-zero; None for all.
    :param refreshes: whether the process lives on refreshments.
    """
    n, dim = effective_num(moments, refreshes), moments.mean.size
    num = jnp.maximum(moments.num, 1)
    new: AnyScale
    if isinstance(scale, LowRankScale):
        new = _renew_low_rank(scale, moments, n)
    elif moments.m2.ndim == 2:
        center = scale.position(_shrunk_mean(moments, n))
        cov = moments.m2 / num
        size = jnp.sum(_diagonal(cov)) / dim
        unit = size * jnp.eye(dim, dtype=cov.dtype)
        square = jnp.vdot(cov, cov)
        error = (square + (dim * size) ** 2) / n
        rho = error / jnp.maximum(square - dim * size**2, error)  # |S - mu I|^2
        # A floor, since fewer draws than dimensions leave S singular.
        rho = jnp.maximum(rho, 1 / (1 + moments.num))
        cov = _shrunk_size(size, n) / size * ((1 - rho) * cov + rho * unit)
        # Of the transpose, which is the same: LAPACK wants columns, and so gets them
        # without a copy of all that the matrix was made of.
        factor = scale.factor @ lax.linalg.cholesky(cov.T, symmetrize_input=False)
        if mask is not None:
            factor = jnp.linalg.cholesky(jnp.where(mask, factor @ factor.T, 0))
        new = Scale(center, factor)
    else:
        center = scale.position(_shrunk_mean(moments, n))
        variance = _shrunk_variance(moments.m2 / num, n)
        new = Scale(center, scale.factor * jnp.sqrt(variance))
    good = jnp.stack([jnp.all(jnp.isfinite(a)) for a in new]).all()
    good &= moments.num > 1
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, scale)


def _renew_low_rank(scale: LowRankScale, moments: Moments, n: Array) -> LowRankScale:
    """As :func:`renew_scale`, with variances and the most telling directions."""
    num = jnp.maximum(moments.num, 1)
    old = scale.variance() / scale.factor**2
    variance = old * _shrunk_variance(moments.m2 / num / old, n)
    deviation = jnp.sqrt(variance)
    center = scale.center + scale.factor * _shrunk_mean(moments, n)
    draws = moments.draws
    present = jnp.any(draws != 0, axis=1)
    valid = jnp.sum(present)
    y = jnp.where(present[:, None], (draws - moments.mean) / deviation, 0)
    _, singular, vectors = jnp.linalg.svd(y, full_matrices=False)
    values = singular**2 / jnp.maximum(valid, 1)
    # Correlations have trace d: what the leading directions take, the others lack.
    dim, rank = moments.mean.size, min(scale.stretch.size, len(values))
    rest = jnp.maximum(dim - jnp.sum(values[:rank]), 0.05 * dim)
    values = values * ((dim - rank) / rest if dim > rank else 1)
    values = spike_variances(values, moments.mean.size / jnp.maximum(valid / 3, 1))
    return low_rank_scale(
        center, (scale.factor * deviation) ** 2, values, vectors.T, scale.stretch.size
    )


def spike_variances(values: Array, ratio: Array) -> Array:
    r"""Variances behind the eigenvalues of a noisy covariance of unit background.

    :param values: eigenvalues of the empirical covariance.
    :param ratio: :math:`\gamma = d/n`, dimensions over independent draws.
    :return: the shrunk variance of Donoho, Gavish and Johnstone (2018), which is 1
        where a value lies within the bulk of the noise.
    """
    root = jnp.sqrt(ratio)
    above, below = values > (1 + root) ** 2, (values < (1 - root) ** 2) & (ratio < 1)
    b = values + 1 - ratio
    half = jnp.sqrt(jnp.maximum(b**2 - 4 * values, 0))
    spike = jnp.where(above, b + half, b - half) / 2
    gap = jnp.where(above | below, spike - 1, 1)
    cosine = (1 - ratio / gap**2) / (1 + ratio / gap)
    cosine = jnp.clip(cosine, 0, 1)
    shrunk = cosine * spike + (1 - cosine)
    return jnp.where((above | below) & (shrunk > 0), shrunk, 1)


def low_rank_scale(
    center: Array, variance: Array, values: Array, vectors: Array, rank: int
) -> LowRankScale:
    """A scale with given marginal variances and the most telling directions.

    :param center: (d,) centre.
    :param variance: (d,) marginal variances.
    :param values: (k,) eigenvalues of the correlation matrix; if not all of them, in
        units of the others.
    :param vectors: (d, k) its eigenvectors.
    :param rank: how many to keep: those farthest from 1, in logarithm.
    """
    if len(values) == len(variance):
        values = values / jnp.median(values)
    order = jnp.argsort(-jnp.abs(jnp.log(jnp.maximum(values, 1e-10))))[:rank]
    values = jnp.maximum(values[order], 1e-10)
    vectors = vectors[:, order]
    if len(order) < rank:
        missing = rank - len(order)
        values = jnp.pad(values, (0, missing), constant_values=1)
        vectors = jnp.pad(vectors, ((0, 0), (0, missing)))
    # What is left out must not change the marginal variances.
    share = 1 + jnp.square(vectors) @ (values - 1)
    factor = jnp.sqrt(variance / jnp.maximum(share, 1e-3))
    return LowRankScale(center, factor, vectors, jnp.sqrt(values))
