# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Mini-batch gradients with less noise, from the full data at a reference point.

With :math:`U_B` the estimate of the potential :math:`U` from a batch and
:math:`\delta = x - c`, the gradient of order 1 is

.. math:: \nabla U_B(x) - \nabla U_B(c) + \nabla U(c)

and order 2 adds :math:`(\nabla^2 U(c) - \nabla^2 U_B(c))\,\delta`. Both are unbiased,
and exact where :math:`U_B - U` is linear (quadratic) in x. The prior adds no noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_pdmp.batch import Batch
from numpyro_pdmp.subsample import SubsampledModel


class ControlVariate(NamedTuple):
    """What is known of the full data around a reference point."""

    center: Any  # position
    energy_full: Array  # U(c)
    grad_full: Any  # gradient of U at c, as center
    hessian_full: Array | None  # (d, d) second derivative of U at c; None: order 1


def _add(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def _subtract(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


def _all_finite(*trees: Any) -> bool:
    return bool(jnp.all(jnp.isfinite(ravel_pytree(trees)[0])))


def _dot(a: Any, b: Any) -> Array:
    return jnp.vdot(ravel_pytree(a)[0], ravel_pytree(b)[0])


def _matvec(matrix: Array, v: Any) -> Any:
    flat, unravel = ravel_pytree(v)
    return unravel(matrix @ flat)


def taylor(fn: Callable, z: Any, cv: ControlVariate) -> Any:
    """What a control variate knows of ``fn``, linear in first derivatives, at ``z``."""
    if cv.hessian_full is None:
        return fn(cv.center)
    return _add(*jax.jvp(fn, (cv.center,), (_subtract(z, cv.center),)))


def _taylor_full(z: Any, cv: ControlVariate) -> Any:
    """The same of the gradient of all data."""
    if cv.hessian_full is None:
        return cv.grad_full
    offset = _subtract(z, cv.center)
    return _add(cv.grad_full, _matvec(cv.hessian_full, offset))


def control_variate(
    model: SubsampledModel, center: Any, order: int = 1, chunk_size: int | None = None
) -> ControlVariate:
    """Evaluate all data at the reference point.

    :param model: the model.
    :param center: reference point, best the mode: sites as a dict or a flat array.
    :param order: 1, or 2 for the second derivative too, a matrix.
    :param chunk_size: rows evaluated at once.
    """
    if order not in (1, 2):
        raise ValueError(f"`order` of control variates must be 1 or 2, got {order!r}.")
    center = jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(a, float)), center)
    energy, grad = model.full_gradient(center, chunk_size)
    if order == 1:
        return ControlVariate(center, energy, grad, None)
    x, unravel = ravel_pytree(center)

    def hessian(batch):
        grad_fn = jax.grad(lambda x: model.potential_fn(unravel(x), batch))
        # By few columns at a time: they are as large as the batch until summed.
        with model.loaded(batch):
            return lax.map(
                lambda v: jax.jvp(grad_fn, (x,), (v,))[1],
                jnp.eye(x.size, dtype=x.dtype),
                batch_size=min(x.size, 16),
            )

    return ControlVariate(
        center, energy, grad, model.over_all_data(hessian, chunk_size)
    )


def check_control(cv: ControlVariate | None) -> None:
    """Raise if all data do not have the finite gradient that a few rows have."""
    if cv is None or _all_finite(cv.energy_full, cv.grad_full):
        return
    raise ValueError(
        f"The potential energy of all data, {cv.energy_full}, or its gradient is not "
        "finite, though that of a few rows is: look for rows with missing or infinite "
        "values, and leave them out."
    )


def of_order(cv: ControlVariate | None, order: int) -> ControlVariate | None:
    """A control variate cut down to this order; 0 is none."""
    if cv is None or order == 0:
        return None
    return cv._replace(hessian_full=None) if order == 1 else cv


def gradient(
    model: SubsampledModel,
    z: Any,
    batch: Batch,
    cv: ControlVariate | None = None,
    grad: Callable = jax.grad,
    ahead: Sequence[Batch] = (),
) -> Any:
    """Unbiased estimate of the gradient of the potential.

    :param model: the model.
    :param z: position, as the centre of the control variate.
    :param batch: indices of each subsampled plate.
    :param cv: control variate; None for the gradient of the batch itself.
    :param grad: from a function to its gradient, such as ``jax.jacfwd``.
    :param ahead: the next batches, for rows that are fetched from the host.
    """
    batch = model.placed(batch)
    grad_fn = grad(lambda z: model.potential_fn(z, batch))
    with model.loaded(batch, ahead):
        if cv is None:
            return grad_fn(z)
        # Compiled together the two gather their rows once; stacking both positions for
        # one call would be no faster.
        noise = _subtract(grad_fn(z), taylor(grad_fn, z, cv))
    return _add(noise, _taylor_full(z, cv))


def value(
    model: SubsampledModel, z: Any, batch: Batch, cv: ControlVariate | None = None
) -> Array:
    """Unbiased estimate of the potential, of which :func:`gradient` is the gradient.

    :param model: the model.
    :param z: position.
    :param batch: indices of each subsampled plate.
    :param cv: control variate; None for the potential of the batch itself.
    """
    batch = model.placed(batch)
    with model.loaded(batch):
        return _value(model, z, batch, cv)


def _value(
    model: SubsampledModel, z: Any, batch: Batch, cv: ControlVariate | None
) -> Array:
    energy = model.potential_fn(z, batch)
    if cv is None:
        return energy
    offset = _subtract(z, cv.center)

    def at_center(c):
        return model.potential_fn(c, batch)

    def slope(c):
        return jax.jvp(at_center, (c,), (offset,))[1]

    taylor = at_center(cv.center) + slope(cv.center)
    full = cv.energy_full + _dot(cv.grad_full, offset)
    if cv.hessian_full is not None:
        taylor += 0.5 * jax.jvp(slope, (cv.center,), (offset,))[1]
        full += 0.5 * _dot(offset, _matvec(cv.hessian_full, offset))
    return energy - taylor + full
