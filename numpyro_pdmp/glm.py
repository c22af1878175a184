# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Exact event times for generalised linear models from mini-batches.

The potential is :math:`U(x) = P(x) + \sum_j \phi_j(f_j\cdot x)` with N rows of features
:math:`f_j` and bounded derivatives of :math:`\phi_j`. In whitened coordinates,
:math:`x = c + A z`, a row is :math:`w_j = A^T f_j`. By the mean value theorem

.. math:: \phi_j'(f_j\cdot x) - \phi_j'(f_j\cdot c) = \theta_j\,w_j\cdot z

with :math:`\theta_j` a mean of :math:`\phi_j''` between the two points. So the gradient
that a batch B of m rows gives with a control variate at c is a linear function which is
known, plus a *remainder* :math:`\frac{N}{m}\sum_{j\in B} r_j\,(w_j\cdot z)\,w_j` where

================ =========================================== =====================
control variates known part                                  remainder
================ =========================================== =====================
order 1          :math:`A^T\nabla U(c) + Q z`                :math:`r_j = \theta_j`
order 2          :math:`A^T\nabla U(c) + A^T\nabla^2U(c)A z` :math:`r_j = \theta_j -
                                                             \phi_j''(f_j\cdot c)`
================ =========================================== =====================

and :math:`Q = A^T \nabla^2 P A` for a Gaussian prior. If
:math:`l_j \le \phi_j'' \le u_j`, then :math:`|r_j| \le \kappa_j`, which is
:math:`\max(-l_j, u_j)` for order 1 and :math:`u_j - l_j` for order 2. Coordinate i of
the remainder is at most N times the average over the batch of

.. math:: \kappa_j |w_{ji}| |w_j\cdot z| \le \kappa_j |w_{ji}|
    \min\left(\|w_j\|_2 \|z\|_2,\ \|w_j\|_1 \|z\|_\infty,\
    \textstyle\sum_k |w_{jk}| |z_k|\right).

The average over any m different rows is at most that over the m largest, which is taken
factor by factor before sampling begins. If also
:math:`|\phi_j'''| \le \tau_j`, then
:math:`|r_j| \le \frac12 \tau_j |w_j\cdot z|` for order 2, and

.. math:: \tfrac12 \tau_j |w_{ji}| (w_j\cdot z)^2 \le \tfrac12 \tau_j |w_{ji}|
    \min\left(\|w_j\|_2^2 \|z\|_2^2,\ \|w_j\|_1^2 \|z\|_\infty^2\right)

are two more bounds. Whitened rows are of size :math:`N^{-1/2}`, so that the remainder
is O(1) in N by the first three, and :math:`O(N^{-1/2})` by these. For BPS the rate is
:math:`v\cdot A^T\nabla U`, and :math:`|w_j\cdot v|` takes the place of
:math:`|w_{ji}|`.

Each bound is convex along a straight line :math:`z + v s`, hence below its chord over
:math:`0 \le s \le h`: with the known part, which is linear there, it makes a line above
the rate up to the horizon h.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_pdmp.control_variates import control_variate
from numpyro_pdmp.initialize import jit_arrays
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.pages import explained
from numpyro_pdmp.process.events import ExactBound
from numpyro_pdmp.process.generalised import (
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
)
from numpyro_pdmp.process.samplers import BouncyParticle, ZigZagProcess
from numpyro_pdmp.process.scale import LowRankScale, Scale
from numpyro_pdmp.reference import reference_scale
from numpyro_pdmp.subsample import SubsampledModel, as_jax_rows
from numpyro_pdmp.zigzag import ZigZag

#: rows and places at which the model is compared with what is said of it
CHECKED_ROWS, CHECKED_PLACES = 64, 4
#: relative difference that counts as rounding there
CHECK_TOLERANCE = 1e-2
#: how far a centre is moved that is no place for a derivative, in whitened coordinates
NUDGE = 1e-3
#: the constants are raised by this times the rounding unit
ROUNDING = 8
#: processes on straight lines whose rates are bounded here
LINEAR = (
    ZigZagProcess,
    BouncyParticle,
    GeneralisedBouncyParticle,
    ForwardBouncyParticle,
)
#: a draw is not cut off: where it ends would depend on the rates
MAX_GRAD = 2**20


class Constants(NamedTuple):
    """Factors of the bounds on the remainder; N is in them."""

    norms: Any  # (2 or 4, k) of norm and largest entry of z, and of their squares
    entries: Any  # (d, d) of its entries


class _Model(NamedTuple):
    """What a model says of itself around the centre, in whitened coordinates."""

    gradient: Array  # (d,) of all data
    curvature: Array | None  # (d, d) of all data, for order 2
    prior: Array  # (p, d, d) second derivatives of the prior at each place
    prior_sampled: Array  # (p, d, d) the same in the sampled variable
    off: Array  # (r,) share of a row's gradient that is not along its features
    predictor: Array  # (r, p) linear predictors of rows, less those of the centre
    first: Array  # (r, p) derivatives of rows
    second: Array  # (r, p)
    third: Array  # (r, p)


def _flat_features(features: Any, model: SubsampledModel) -> np.ndarray:
    """Features as a matrix, in the order of the flat vector."""
    shapes = {name: model.shapes[name].shape for name in sorted(model.shapes)}
    ((plate, (num_rows, _)),) = model.plates.items()
    expected = {name: (num_rows, *shape) for name, shape in shapes.items()}
    if not isinstance(features, dict):
        dim = sum(int(np.prod(shape)) for shape in shapes.values())
        matrix = np.asarray(features)
        if matrix.shape != (num_rows, dim):
            raise ValueError(
                f"`features` has shape {matrix.shape}; plate '{plate}' has {num_rows} "
                f"rows and the sites {list(shapes)} have {dim} entries, so it must be "
                f"({num_rows}, {dim}), or a dict of arrays of shapes {expected}."
            )
    else:
        given = {name: np.shape(features[name]) for name in sorted(features)}
        if given != expected:
            raise ValueError(
                f"`features` has shapes {given}; the model's sites and the rows of "
                f"plate '{plate}' make it {expected}."
            )
        columns = [np.reshape(features[name], (num_rows, -1)) for name in shapes]
        matrix = np.concatenate(columns, 1)
    if not np.all(np.isfinite(matrix)):
        raise ValueError("`features` must be finite.")
    return matrix


def _per_row(name: str, value: Any, num_rows: int) -> np.ndarray:
    array = np.asarray(value, float)
    if array.shape not in ((), (num_rows,)) or not np.all(np.isfinite(array)):
        raise ValueError(
            f"`{name}` must be a finite number or one for each of {num_rows} rows, got "
            f"{value!r}."
        )
    return np.broadcast_to(array, (num_rows,))


def _curvature_limits(curvature: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    pair = curvature if isinstance(curvature, tuple) else (0.0, curvature)
    if len(pair) != 2:
        raise ValueError(
            "`curvature` must be a bound or a pair `(lower, upper)`, got "
            f"{curvature!r}."
        )
    lower, upper = (_per_row("curvature", value, num_rows) for value in pair)
    if np.any(upper < lower) or np.any(upper < 0) or np.any(lower > 0):
        raise ValueError(
            f"`curvature` must not be negative, got {curvature!r}; it bounds the "
            "second derivative of a row's potential from above. Give `(lower, upper)` "
            "if that can be negative."
        )
    return lower, upper


def _off_zeros(scale: Any, features: np.ndarray) -> Any:
    """The scale, moved by next to nothing if a row's predictor is 0 at its centre.

    There automatic differentiation of ``log1p(exp(-abs(t)))`` and the like, as in
    NumPyro's Bernoulli distribution, is wrong.
    """
    predictor = features @ np.asarray(scale.center, features.dtype)
    if np.all(predictor[np.any(features != 0, 1)] != 0):
        return scale
    noise = random.normal(random.key(1), scale.center.shape, scale.center.dtype)
    return scale._replace(center=scale.position(NUDGE * noise))


def _look_at(
    model: Callable,
    args: tuple,
    kwargs: dict,
    plate: str,
    scale: Scale | LowRankScale,
    order: int,
    features: np.ndarray,
) -> _Model:
    """Evaluate the model at the centre, and some rows and places for checks."""
    num_rows, dim = features.shape
    rows = np.unique(np.linspace(0, num_rows - 1, CHECKED_ROWS).astype(np.int32))
    # Rows of zeros say nothing, and have no direction.
    rows = rows[np.any(features[rows] != 0, 1)]
    dtype = scale.center.dtype
    noise = 3 * random.normal(random.key(0), (CHECKED_PLACES - 1, dim), dtype)
    places = jnp.concatenate([jnp.zeros((1, dim), dtype), noise])
    chosen = jnp.asarray(features[rows], dtype)

    def evaluate(args, kwargs, rows, chosen):
        subsampled = SubsampledModel(model, args, kwargs)
        nothing = {plate: jnp.zeros(0, jnp.int32)}

        def prior(x):
            return subsampled.potential_fn(x, nothing)

        def row_energy(x, row):
            return subsampled.potential_fn(x, {plate: row[None]}) - prior(x)

        def along(z, row, feature):
            x, unit = scale.position(z), feature / (feature @ feature)

            def phi(t):
                return row_energy(x + t * unit, row) / num_rows

            slopes = [jax.grad(phi)]
            for _ in range(2):
                slopes.append(jax.grad(slopes[-1]))
            first, second, third = (slope(jnp.zeros((), dtype)) for slope in slopes)
            gradient = jax.grad(row_energy)(x, row) / num_rows
            rest = jnp.linalg.norm(gradient - first * feature)
            size = jnp.linalg.norm(gradient)
            return rest / jnp.where(size > 0, size, 1), first, second, third

        by_place = jax.vmap(along, (0, None, None))
        off, *derivatives = jax.vmap(by_place, (None, 0, 0))(places, rows, chosen)
        control = control_variate(subsampled, scale.center, order)
        whiten = jax.vmap(scale.gradient)
        curvature = None
        if control.hessian_full is not None:
            curvature = whiten(whiten(control.hessian_full).T)
        hessian = jax.vmap(lambda z: jax.hessian(prior)(scale.position(z)))(places)
        whitened = jax.vmap(lambda matrix: whiten(whiten(matrix).T))(hessian)
        gradient = scale.gradient(control.grad_full)
        predictor = whiten(chosen) @ places.T
        priors = whitened, hessian
        return _Model(
            gradient, curvature, *priors, jnp.max(off, 1), predictor, *derivatives
        )

    return jit_arrays(evaluate, args, kwargs)(jnp.asarray(rows), chosen)


def _check_rows(
    found: _Model, lower: np.ndarray, upper: np.ndarray, third: np.ndarray | None
) -> None:
    """Raise where the model contradicts what is said of it."""
    off = float(jnp.max(found.off, initial=0.0))
    if not off < CHECK_TOLERANCE:
        raise ValueError(
            "`features`: the gradient of a row is not along its features (off by a "
            f"share of {off:.2g}). Columns must be in the order of the sites' names, "
            "with one of ones for an intercept, and sites must enter linearly, without "
            "constraints."
        )
    low, high = lower.min(), upper.max()
    slack = CHECK_TOLERANCE * max(high, -low)
    seen = np.min(found.second, initial=0), np.max(found.second, initial=0)
    if seen[0] < low - slack or seen[1] > high + slack:
        raise ValueError(
            f"`curvature` says that second derivatives are from {low:.4g} to {high:.4g}"
            f", but some of the model's are from {seen[0]:.4g} to {seen[1]:.4g}."
        )
    # Derivatives may jump where automatic differentiation sees nothing.
    change = np.asarray(found.first - found.first[:, :1])
    limits = np.sort(np.stack([low * found.predictor, high * found.predictor]), 0)
    slack = CHECK_TOLERANCE * np.abs(limits).max(initial=0)
    slack = slack + 1e-5 * np.abs(found.first).max(initial=0)
    if np.any(change < limits[0] - slack) or np.any(change > limits[1] + slack):
        raise ValueError(
            f"`curvature` says that second derivatives are from {low:.4g} to {high:.4g}"
            ", but some first derivatives change by more than that; the likelihood "
            "must be smooth."
        )
    if third is not None:
        most = float(np.max(np.abs(found.third), initial=0))
        if most > (1 + CHECK_TOLERANCE) * third.max():
            raise ValueError(
                f"`third_derivative` is {third.max():.4g} at most, but some of the "
                f"model's are {most:.4g}."
            )


def _check_prior(found: _Model, prior_curvature: Any, dim: int) -> Array | None:
    """Bounds on the prior's second derivatives; None if it is Gaussian."""
    if prior_curvature is None:
        spread = jnp.max(jnp.abs(found.prior - found.prior[0]))
        if spread > CHECK_TOLERANCE * (1e-2 + jnp.max(jnp.abs(found.prior[0]))):
            raise ValueError(
                "The prior is not Gaussian: its second derivative is not the same "
                "everywhere. Give `prior_curvature`, a bound on its absolute value."
            )
        return None
    limits = np.asarray(prior_curvature, float)
    fine = np.all((0 <= limits) & (limits < np.inf))
    if limits.shape not in ((), (dim,)) or not fine:
        raise ValueError(
            f"`prior_curvature` must be a number or one for each of {dim} coordinates, "
            f"finite and not negative, got {prior_curvature!r}."
        )
    limits = np.broadcast_to(limits, (dim,))
    seen = np.max(np.abs(found.prior_sampled), 0)
    allowed = np.diag((1 + CHECK_TOLERANCE) * limits) + 1e-6 * limits.max()
    if np.any(seen > allowed):
        raise ValueError(
            f"`prior_curvature` is {limits}, but the model's prior has second "
            f"derivatives of {np.diag(seen)}; coordinates must be independent."
        )
    return jnp.asarray(limits, found.gradient.dtype)


def _constants(
    rows: np.ndarray,
    bound: np.ndarray,
    third: np.ndarray | None,
    size: int,
    by_coordinate: bool,
) -> Constants:
    """Maxima over rows, or means over as many of the largest as are in a batch.

    :param rows: (N, d) whitened features.
    :param bound: (N,) of the absolute value of the remainder's factor.
    :param third: (N,) of the third derivative; None for order 1.
    :param size: different rows in a batch.
    :param by_coordinate: one rate a coordinate, else one in all.
    """
    columns = np.ascontiguousarray(np.abs(rows).T)
    num_rows = columns.shape[1]
    duals = np.sqrt(np.square(columns).sum(0)), columns.sum(0)

    def largest(values):
        values = np.stack(values)
        if size == 1:
            return num_rows * values.max(1)
        values.partition(num_rows - size, axis=1)
        return num_rows * values[:, num_rows - size :].mean(1)

    def of_norms(*sizes):
        pairs = list(zip(sizes, duals, strict=True))
        values = [bound * size * dual for size, dual in pairs]
        if third is not None:
            values += [0.5 * third * size * dual**2 for size, dual in pairs]
        return largest(values)

    # One coordinate at a time: this takes no more memory than the features.
    entries = np.stack([largest(bound * column * columns) for column in columns])
    if by_coordinate:
        norms = np.stack([of_norms(column, column) for column in columns], 1)
    else:
        norms = of_norms(*duals)[:, None]
    return Constants(norms, entries)


def _remainders(constants: Constants, z: Array, v: Array, by_coordinate: bool) -> Array:
    """All bounds on the remainder at ``z``, in the rates for the velocity ``v``.

    :return: (number of bounds, k).
    """
    norms, entries = constants

    def both(y):
        return jnp.stack([jnp.linalg.norm(y), jnp.max(jnp.abs(y))])[:, None]

    powers = jnp.concatenate([both(z), both(z) ** 2])[: len(norms)]
    by_entry = entries @ jnp.abs(z)
    if by_coordinate:
        return jnp.abs(v) * jnp.concatenate([norms * powers, by_entry[None]])
    speeds = jnp.concatenate([both(v), both(v)])[: len(norms)]
    by_entry = (jnp.abs(v) @ by_entry)[None, None]
    return jnp.concatenate([norms * powers * speeds, by_entry])


@explained("subsampling")
def glm_bound(
    model: Callable,
    reference: Any,
    *model_args: Any,
    features: Any,
    curvature: Any,
    third_derivative: Any = None,
    prior_curvature: Any = None,
    kernel: type[PDMPKernel] = ZigZag,
    **model_kwargs: Any,
) -> dict[str, Any]:
    r"""Options with which a kernel is exact on a subsampled generalised linear model.

    The potential is :math:`P(x) + \sum_j \phi_j(f_j\cdot x)`: the prior, and a function
    of a linear predictor for each row of the one subsampled plate. A bound on
    :math:`\phi_j''` bounds the rate of every mini-batch with control variates around
    the reference, so that thinning is exact: ZigZag with control variates of Bierkens,
    Fearnhead and Roberts (2019). With a bound on :math:`\phi_j'''` control variates are
    of order 2, and proposals in vain become rare as the data grow. The module's
    docstring has the mathematics.

    Some rows of the model are compared with what is said of them. That finds mistakes,
    but is no proof.

    ================= ==================== ================================
    likelihood        ``curvature``        ``third_derivative``
    ================= ==================== ================================
    logistic          1/4                  :math:`1/(6\sqrt 3) < 0.09623`
    binomial, n tries n/4, one a row       0.09623 n
    probit            1                    0.2958
    normal            :math:`1/\sigma^2`   0
    ================= ==================== ================================

    :param model: Python callable containing NumPyro primitives, with one subsampled
        plate.
    :param reference: the scale, kept as it is, whose centre is that of the control
        variates: see :func:`~numpyro_pdmp.laplace_reference`. The closer it is to the
        posterior, the tighter is the bound.
    :param model_args: arguments of the model.
    :param features: (N, d) the :math:`f_j`, in the order of the flat unconstrained
        vector (sites by name); or a dict with an array of shape (N, \*shape) for each
        site, such as ones for an intercept.
    :param curvature: upper bound on all :math:`\phi_j''`, which are not negative; else
        a pair of a lower and an upper bound. Numbers, or arrays with one a row.
    :param third_derivative: bound on all :math:`|\phi_j'''|`, for control variates of
        order 2. None: order 1.
    :param prior_curvature: bound on the absolute second derivatives of a prior of
        independent coordinates; a number, or one a coordinate. None: the prior is
        Gaussian.
    :param kernel: :class:`~numpyro_pdmp.ZigZag`, or a kernel of the bouncy particle
        sampler.
    :param model_kwargs: keyword arguments of the model.
    :return: options of the kernel.

    **Example**

    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import Scale, ZigZag, check, glm_bound
    >>> def model(x, y):
    ...     b = numpyro.sample("b", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(y), subsample_size=10):
    ...         x, y = (numpyro.subsample(a, event_dim=0) for a in (x, y))
    ...         numpyro.sample("y", dist.Bernoulli(logits=b * x), obs=y)
    >>> x = random.normal(random.key(0), (1000,))
    >>> y = random.bernoulli(random.key(1), 0.5, (1000,)).astype(float)
    >>> scale = Scale(jnp.zeros(1), jnp.full(1, 0.06))
    >>> options = glm_bound(model, scale, x, y, features={"b": x}, curvature=0.25)
    >>> mcmc = MCMC(ZigZag(model, **options), num_warmup=100, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(2), x, y)
    >>> float(check(mcmc).violation_rate)
    0.0
    """
    process = getattr(kernel, "process", None)
    if process not in LINEAR:
        raise ValueError(
            f"`kernel` must be ZigZag, BPS or one of its kin, got {kernel!r}: the "
            "bound is one along straight lines."
        )
    if reference is None:
        raise ValueError(
            "`reference` is missing: the bound is one around its centre, in its "
            "coordinates. See `laplace_reference`."
        )
    subsampled = SubsampledModel(model, model_args, model_kwargs)
    if len(subsampled.plates) != 1:
        raise ValueError(
            "`glm_bound` needs a model with one subsampled plate; this one has "
            f"{sorted(subsampled.plates) or 'none'}."
        )
    ((plate, (num_rows, size)),) = subsampled.plates.items()
    args, kwargs = as_jax_rows((model_args, model_kwargs), subsampled.plates)
    scale = reference_scale(reference, subsampled.shapes)
    dim, dtype = scale.center.size, scale.center.dtype
    matrix = _flat_features(features, subsampled)
    scale = _off_zeros(scale, matrix)
    lower, upper = _curvature_limits(curvature, num_rows)
    third, order = None, 1
    if third_derivative is not None:
        third, order = _per_row("third_derivative", third_derivative, num_rows), 2
        if np.any(third < 0):
            raise ValueError(
                f"`third_derivative` must not be negative, got {third_derivative!r}."
            )
    found = _look_at(model, args, kwargs, plate, scale, order, matrix)
    _check_rows(found, lower, upper, third)
    prior_limits = _check_prior(found, prior_curvature, dim)

    rows = np.asarray(jax.jit(jax.vmap(scale.gradient))(jnp.asarray(matrix, dtype)))
    by_coordinate = process is ZigZagProcess
    limit = np.maximum(upper, -lower) if order == 1 else upper - lower
    constants = _constants(rows, limit, third, size, by_coordinate)
    constants = Constants(*(jnp.asarray(a, dtype) for a in constants))
    linear = found.prior[0] if found.curvature is None else found.curvature
    if prior_limits is not None:  # then nothing is known of the prior but its bound
        linear = linear - found.prior[0]
    # Rounding in the gradients of rows and in their sum over all data.
    predictor = np.max(np.abs(matrix) @ np.abs(np.asarray(scale.center)))
    derivative = float(np.max(np.abs(found.first), initial=0))
    error = ROUNDING * jnp.finfo(dtype).eps * num_rows * np.abs(rows).max(0)
    error = jnp.asarray(error * (derivative + limit.max() * predictor), dtype)
    longest = 2 * process().event_time(dim)
    gradient, origin = found.gradient, scale._replace(center=jnp.zeros(dim, dtype))

    def rates(v, g):
        return v * g if by_coordinate else (v @ g)[None]

    def prior_part(z, v):
        if prior_limits is None:
            return 0.0
        force = prior_limits * jnp.abs(origin.direction(z))
        if not by_coordinate:
            return (jnp.abs(origin.direction(v)) @ force)[None]
        factor = jax.vmap(origin.direction, out_axes=1)(jnp.eye(dim, dtype=dtype))
        return jnp.abs(v) * (force @ jnp.abs(factor))

    def remainders(z, v):
        return _remainders(constants, z, v, by_coordinate) + prior_part(z, v)

    def bound(x, direction):
        z, v = scale.whiten(x), origin.whiten(direction)
        value, slope = rates(v, gradient + linear @ z), rates(v, linear @ v)
        start = remainders(z, v)
        # As a rule a proposal comes before the horizon: an end costs a gradient, too.
        total = jnp.sum(jnp.maximum(value + jnp.min(start, 0), 0))
        horizon = longest / (1 + total * longest / 3)
        end = remainders(z + horizon * v, v)
        best = jnp.argmin(start + end, 0)[None]
        start, end = (jnp.take_along_axis(a, best, 0)[0] for a in (start, end))
        value = value + start + rates(jnp.abs(v), error)
        return value, slope + (end - start) / horizon, horizon

    return {
        "event_time": ExactBound(bound, renew=True),
        "reference": scale,
        "adapt_mass_matrix": False,
        "control_variates": order,
        "batching": "without_replacement",
        "max_grad": MAX_GRAD,
    }
