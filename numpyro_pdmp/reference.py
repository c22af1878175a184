# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Gaussian references of Boomerang from fitted guides and from curvature."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro_pdmp.find_map import MAP
from numpyro_pdmp.hessian import (
    DENSE_DIMENSIONS,
    EXACT_DIMENSIONS,
    dense_factor,
    fill_zeros,
    fisher_diagonal,
    hessian_dense,
    hessian_diagonal,
    hessian_low_rank,
    hutchinson_diagonal,
    lower_factor,
)
from numpyro_pdmp.initialize import check_sites, jit_arrays
from numpyro_pdmp.pages import explained
from numpyro_pdmp.process.scale import LowRankScale, Scale
from numpyro_pdmp.shards import plain
from numpyro_pdmp.subsample import (
    as_jax_rows,
    batch_potential,
    is_random,
    model_layout,
)

SUPPORTED_GUIDES = (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)


def _param(params: dict, name: str) -> Array:
    if name not in params:
        raise ValueError(
            f"`reference` has no parameter '{name}' for its guide; the given ones are "
            f"{sorted(params)}. Give `svi.run(...).params` of the same guide."
        )
    return jnp.asarray(params[name])


def _check_shapes(sites: dict, z: dict) -> None:
    shapes = {k: jnp.shape(v) for k, v in sorted(sites.items())}
    expected = {k: jnp.shape(v) for k, v in sorted(z.items())}
    if shapes != expected:
        raise ValueError(
            f"`reference` is a guide for unconstrained sites of shapes {shapes}; the "
            f"model's are {expected}. Fit the guide on the same model."
        )


def _guide_scale(guide: Any, params: Any, z: dict) -> Scale | LowRankScale:
    if not isinstance(guide, SUPPORTED_GUIDES):
        supported = ", ".join(g.__name__ for g in SUPPORTED_GUIDES)
        raise TypeError(
            f"`reference` has a guide of type {type(guide).__name__}, which has no "
            f"Gaussian in unconstrained space; the supported ones are {supported}."
        )
    if not isinstance(params, dict):
        raise TypeError(
            "`reference` must have the dict of the guide's parameters as its second "
            f"item, such as `svi.run(...).params`, got {type(params).__name__}."
        )
    if guide.prototype_trace is None:
        raise ValueError(
            f"`reference` has a guide ({type(guide).__name__}) that was never run; fit "
            "it with `SVI`, or call it once with the model's arguments."
        )
    prefix = guide.prefix
    if isinstance(guide, (AutoDelta, AutoNormal)):
        names = sorted(guide._init_locs)
        locs = {k: _param(params, f"{k}_{prefix}_loc") for k in names}
        if isinstance(guide, AutoDelta):
            supports = {k: guide.prototype_trace[k]["fn"].support for k in names}
            locs = {k: biject_to(supports[k]).inv(v) for k, v in locs.items()}
            scales = {k: jnp.ones_like(v) for k, v in locs.items()}
        else:
            scales = {k: _param(params, f"{k}_{prefix}_scale") for k in names}
        _check_shapes(locs, z)
        return Scale(ravel_pytree(locs)[0], ravel_pytree(scales)[0])

    loc = _param(params, f"{prefix}_loc")
    # The guide has an order of its own: where each of our entries is in its vector.
    places = guide._unpack_latent(jnp.arange(guide.latent_dim))
    _check_shapes(places, z)
    order = ravel_pytree(places)[0]
    if isinstance(guide, AutoDiagonalNormal):
        return Scale(loc[order], _param(params, f"{prefix}_scale")[order])
    if isinstance(guide, AutoLowRankMultivariateNormal):
        # The covariance is S (I + W W^T) S with W of any columns.
        scale = _param(params, f"{prefix}_scale")[order]
        columns = _param(params, f"{prefix}_cov_factor")[order]
        vectors, sizes, _ = jnp.linalg.svd(columns, full_matrices=False)
        return LowRankScale(loc[order], scale, vectors, jnp.sqrt(1 + sizes**2))
    if isinstance(guide, AutoMultivariateNormal):
        tril = _param(params, f"{prefix}_scale_tril")
    else:
        # Compiled, it is faster and does not warn of a singular Hessian, which is an
        # error here.
        tril = jax.jit(lambda params: guide.get_transform(params).scale_tril)(params)
    return Scale(loc[order], lower_factor(tril[order]))


def _check_scale(scale: Scale | LowRankScale, x: Array) -> Scale | LowRankScale:
    """The scale in the dtype of ``x``, if it is one for ``x``."""
    cast = type(scale)(*(jnp.asarray(a, x.dtype) for a in scale))
    dim = x.size
    shapes: list[tuple[tuple[int, ...], ...]]
    if isinstance(cast, LowRankScale):
        rank = cast.stretch.size
        shapes = [((dim,),), ((dim,),), ((dim, rank),), ((rank,),)]
        positive = [cast.factor, cast.stretch]
    else:
        shapes = [((dim,),), ((), (dim,), (dim, dim))]
        matrix = cast.factor.ndim == 2
        positive = [jnp.diagonal(cast.factor) if matrix else cast.factor]
    for name, array, allowed in zip(cast._fields, cast, shapes, strict=True):
        if array.shape not in allowed:
            raise ValueError(
                f"`reference.{name}` has shape {array.shape}; the model has {dim} "
                f"unconstrained dimensions, so it must be of shape "
                f"{' or '.join(map(str, allowed))}."
            )
        if not np.all(np.isfinite(array)):
            raise ValueError(f"`reference.{name}` must be finite, got {array}.")
    if isinstance(cast, Scale) and cast.factor.ndim == 2:
        if np.any(np.triu(cast.factor, 1)):
            raise ValueError(
                "`reference.factor` must be lower triangular, such as the Cholesky "
                f"factor of the covariance, got {cast.factor}."
            )
    if not all(np.all(np.asarray(a) > 0) for a in positive):
        raise ValueError(
            "`reference` must have a positive definite covariance; a scale in "
            f"{[np.asarray(a) for a in positive]} is not positive."
        )
    return cast


@explained("warmup")
def reference_scale(reference: Any, z: dict) -> Scale | LowRankScale:
    r"""A Gaussian on the flat unconstrained vector, from what describes one.

    :param reference: a :class:`~numpyro_pdmp.process.Scale` or
        :class:`~numpyro_pdmp.process.LowRankScale`, or a pair ``(guide, params)`` of a
        NumPyro guide and its fitted parameters. The guide is an ``AutoNormal``,
        ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal``, ``AutoLaplaceApproximation``, or an
        ``AutoDelta``. The last one only gives the centre, the variances are 1; note
        that it is a mode of the *constrained* density, and that bounds of a site which
        depend on other sites are taken from the guide's first run.
    :param z: unconstrained sites of the model, for their names, shapes and dtype.
    :return: centre and factor, in the order of ``ravel_pytree(z)``.
    """
    # Only shapes and dtypes of `z` matter, so this is done at once even under `jit`.
    with jax.ensure_compile_time_eval():
        z = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), z)
        return _reference_scale(reference, z)


def _reference_scale(reference: Any, z: dict) -> Scale | LowRankScale:
    x = ravel_pytree(z)[0]
    if isinstance(reference, (Scale, LowRankScale)):
        return _check_scale(reference, x)
    if not isinstance(reference, tuple) or len(reference) != 2:
        raise TypeError(
            "`reference` must be a `Scale`, a `LowRankScale`, the result of `find_map` "
            f"or a pair `(guide, params)`, got {type(reference).__name__}."
        )
    return _check_scale(_guide_scale(*reference, z), x)


@explained("warmup")
def laplace_reference(
    model: Callable,
    params: MAP | dict,
    *model_args: Any,
    kind: str = "auto",
    gamma: float = 1.0,
    damping: float = 0.0,
    rank: int = 16,
    num_probes: int = 128,
    num_batches: int = 32,
    batch: int | None = None,
    rng_key: Array | None = None,
    **model_kwargs: Any,
) -> Scale | LowRankScale:
    r"""Gaussian around a mode with the inverse curvature there as covariance.

    .. math:: \Sigma = \gamma \left(|H| + \delta I\right)^{-1}, \quad
        H = \nabla^2 U(x_\star)

    with :math:`U` the potential energy and :math:`\delta` the ``damping``; negative
    curvatures are taken by their absolute value. This is Equation 6 of Goan et al.
    (2023), who have the diagonal of :math:`H` and the likelihood alone in :math:`U`;
    here the prior is in it too, and the diagonal is inverted entry by entry.

    For a model with subsampled plates :math:`H` is an average over random batches.
    The diagonal by random probes, and the Fisher information, have a fresh batch for
    every probe, and the other kinds ``num_batches`` in all, for every product.

    :param model: Python callable containing NumPyro primitives.
    :param params: the result of :func:`~numpyro_pdmp.find_map.find_map`, or a dict of
        unconstrained values; the centre.
    :param model_args: arguments of the model.
    :param kind: ``"diagonal"``: exact up to 1024 dimensions, else by ``num_probes``
        random probes. ``"dense"``. ``"low_rank"``: the diagonal and ``rank`` directions
        in which it is most wrong. ``"fisher"``: diagonal, with the empirical Fisher
        information for the likelihood. ``"auto"``: dense up to 256 dimensions, else
        diagonal.
    :param gamma: :math:`\gamma`, factor of the covariance.
    :param damping: :math:`\delta`, precision added in every direction: no standard
        deviation exceeds :math:`\sqrt{\gamma / \delta}`.
    :param rank: of ``"low_rank"``.
    :param num_probes: random probes. The standard error of an entry counts as
        curvature, so that no entry is near zero by chance.
    :param num_batches: batches, for subsampled models.
    :param batch: batch size in place of that of the only subsampled plate.
    :param rng_key: for probes and batches. Default: a fixed one.
    :param model_kwargs: keyword arguments of the model.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp import Boomerang, laplace_reference
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> reference = laplace_reference(model, {"x": jnp.array(3.0)})
    >>> round(float(reference.factor[0, 0]), 3)
    2.0
    >>> kernel = Boomerang(model, reference=reference)
    """
    kinds = ("auto", "diagonal", "dense", "low_rank", "fisher")
    if kind not in kinds:
        raise ValueError(f"`kind` must be one of {kinds}, got {kind!r}.")
    if not gamma > 0:
        raise ValueError(f"`gamma` must be positive, got {gamma}.")
    if not damping >= 0:
        raise ValueError(f"`damping` must not be negative, got {damping}.")
    for name, number in (("num_probes", num_probes), ("num_batches", num_batches)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    shapes, plates = model_layout(model, model_args, model_kwargs, batch)
    values = params.params if isinstance(params, MAP) else params
    values = check_sites(values, shapes, "params")
    x = ravel_pytree(values)[0]
    if kind == "auto":
        kind = "dense" if x.size <= DENSE_DIMENSIONS else "diagonal"
    rank = min(rank, x.size)
    key = random.key(0) if rng_key is None else rng_key

    def scale(args, kwargs, x):
        of_batch = batch_potential(model, args, kwargs, plates)
        key_probes, key_batches, key_rank = random.split(key, 3)

        def average(x):
            if not is_random(plates):
                return of_batch(x, key_batches)
            # Recomputed in the backward pass: the memory is that of one batch.
            one = jax.checkpoint(lambda batch_key: of_batch(x, batch_key))
            return jnp.mean(lax.map(one, random.split(key_batches, num_batches)))

        if kind == "dense":
            return Scale(x, dense_factor(hessian_dense(average, x), damping))
        if x.size <= EXACT_DIMENSIONS:
            curvature = jnp.abs(hessian_diagonal(average, x, method="exact"))
        else:
            mean, error = hutchinson_diagonal(of_batch, x, key_probes, num_probes)
            curvature = jnp.hypot(mean, error)
        curvature = fill_zeros(curvature + damping)
        if kind == "diagonal":
            return Scale(x, 1 / jnp.sqrt(curvature))

        def damped(y):
            return average(y) + 0.5 * damping * jnp.sum(jnp.square(y - x))

        return hessian_low_rank(damped, x, curvature, rank, key_rank)

    if kind == "fisher":
        curvature = fisher_diagonal(
            model,
            values,
            model_args,
            model_kwargs,
            num_probes=num_probes,
            batch=batch,
            rng_key=key,
        )
        curvature = fill_zeros(jnp.abs(curvature) + damping)
        result: Scale | LowRankScale = Scale(x, 1 / jnp.sqrt(curvature))
    else:
        data = as_jax_rows((model_args, model_kwargs), plates)
        result = plain(jit_arrays(scale, *data)(x))
    finite = all(np.all(np.isfinite(a)) for a in result)
    if not finite:
        raise ValueError(
            f"`params`: the curvature of the potential is not finite at {values}; give "
            "another point, or check the model."
        )
    return result._replace(factor=gamma**0.5 * result.factor)
