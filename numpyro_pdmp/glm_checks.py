# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Whether a model is the generalised linear model that it is said to be.

Arguments of :func:`~numpyro_pdmp.glm_bound` are checked, and some rows of the model are
compared with them. Symbols are those of ``glm.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_pdmp.control_variates import control_variate
from numpyro_pdmp.initialize import jit_arrays
from numpyro_pdmp.process.scale import LowRankScale, Scale
from numpyro_pdmp.subsample import SubsampledModel

#: rows and places at which the model is compared with what is said of it
CHECKED_ROWS, CHECKED_PLACES = 64, 4
#: relative difference that counts as rounding there
CHECK_TOLERANCE = 1e-2
#: how far a centre is moved that is no place for a derivative, in whitened coordinates
NUDGE = 1e-3


class GLMValues(NamedTuple):
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


def flat_features(features: Any, model: SubsampledModel) -> np.ndarray:
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


def per_row(name: str, value: Any, num_rows: int) -> np.ndarray:
    array = np.asarray(value, float)
    if array.shape not in ((), (num_rows,)) or not np.all(np.isfinite(array)):
        raise ValueError(
            f"`{name}` must be a finite number or one for each of {num_rows} rows, got "
            f"{value!r}."
        )
    return np.broadcast_to(array, (num_rows,))


def curvature_limits(curvature: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    pair = curvature if isinstance(curvature, tuple) else (0.0, curvature)
    if len(pair) != 2:
        raise ValueError(
            "`curvature` must be a bound or a pair `(lower, upper)`, got "
            f"{curvature!r}."
        )
    lower, upper = (per_row("curvature", value, num_rows) for value in pair)
    if np.any(upper < lower) or np.any(upper < 0) or np.any(lower > 0):
        raise ValueError(
            f"`curvature` must not be negative, got {curvature!r}; it bounds the "
            "second derivative of a row's potential from above. Give `(lower, upper)` "
            "if that can be negative."
        )
    return lower, upper


def off_zeros(scale: Any, features: np.ndarray) -> Any:
    """The scale, moved by next to nothing if a row's predictor is 0 at its centre.

    There automatic differentiation of ``log1p(exp(-abs(t)))`` and the like, as in
    NumPyro's Bernoulli distribution, is wrong.
    """
    predictor = features @ np.asarray(scale.center, features.dtype)
    if np.all(predictor[np.any(features != 0, 1)] != 0):
        return scale
    noise = random.normal(random.key(1), scale.center.shape, scale.center.dtype)
    return scale._replace(center=scale.position(NUDGE * noise))


def look_at(
    model: Callable,
    args: tuple,
    kwargs: dict,
    plate: str,
    scale: Scale | LowRankScale,
    order: int,
    features: np.ndarray,
) -> GLMValues:
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
        return GLMValues(
            gradient, curvature, *priors, jnp.max(off, 1), predictor, *derivatives
        )

    return jit_arrays(evaluate, args, kwargs)(jnp.asarray(rows), chosen)


def check_rows(
    found: GLMValues, lower: np.ndarray, upper: np.ndarray, third: np.ndarray | None
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


def check_prior(found: GLMValues, prior_curvature: Any, dim: int) -> Array | None:
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
