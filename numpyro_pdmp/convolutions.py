# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Convolutions in the layout that is fast in loops on CPU.

XLA:CPU has a fast routine for convolutions of images ``NHWC`` with kernels ``HWIO``.
It brings others into this layout, but not in the body of a loop: there it takes a naive
routine instead, many times slower. Derivatives of a convolution in that very layout are
in others, so all of our loops are concerned. Here the operations of a function are
gone through and convolutions given transposed operands, which costs next to nothing.
Of vectorised chains each has its own kernels: these are convolved one after the other.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
import jax.numpy as jnp

#: primitives whose operations are as good in the place of the call
CALLS = ("jit", "pjit", "closed_call")


def _called(eqn: Any) -> ClosedJaxpr | None:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    is_call = eqn.primitive.name in CALLS and isinstance(inner, ClosedJaxpr)
    return inner if is_call else None


def _has_convolution(jaxpr: Jaxpr) -> bool:
    def concerns(eqn):
        inner = _called(eqn)
        if inner is not None:
            return _has_convolution(inner.jaxpr)
        return eqn.primitive is lax.conv_general_dilated_p

    return any(map(concerns, jaxpr.eqns))


def _convolve(eqn: Any, x: Array, kernel: Array) -> Array:
    """A convolution with batch and feature axes where the fast routine has them."""
    params = dict(eqn.params)
    lhs, rhs, out = params["dimension_numbers"]
    rank = len(lhs)
    # Specifications list the axes (N, C, spatial...) and (O, I, spatial...).
    x = jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    kernel = jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0]))
    last, inner = rank - 1, tuple(range(1, rank - 1))
    image = (0, last, *inner)
    numbers = lax.ConvDimensionNumbers(image, (last, rank - 2, *range(rank - 2)), image)
    params["dimension_numbers"] = numbers

    @custom_vmap
    def convolve(x, kernel):
        return lax.conv_general_dilated_p.bind(x, kernel, **params)

    @convolve.def_vmap
    def one_by_one(axis_size, batched, x, kernel):
        # Several kernels at once would be a grouped convolution, which is naive too.
        def of(i):
            pairs = zip((x, kernel), batched, strict=True)
            return convolve(*(a[i] if is_batched else a for a, is_batched in pairs))

        return lax.map(of, jnp.arange(axis_size)), True

    result = convolve(x, kernel)
    back = [0] * rank
    for axis, place in zip((0, last, *inner), out, strict=True):
        back[place] = axis
    return jnp.transpose(result, back)


def _evaluate(closed: ClosedJaxpr, args: Any) -> list:
    """The values of a function from its operations, with convolutions replaced."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}

    def read(var):
        return var.val if isinstance(var, Literal) else values[var]

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        given = [read(var) for var in eqn.invars]
        inner = _called(eqn)
        if inner is not None and _has_convolution(inner.jaxpr):
            found = _evaluate(inner, given)
        elif eqn.primitive is lax.conv_general_dilated_p:
            found = [_convolve(eqn, *given)]
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            # Before JAX 0.10 functions come apart.
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            found = eqn.primitive.bind(*functions, *given, **params)
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def fast_in_loops(fn: Callable) -> Callable:
    """The same function, with convolutions that are fast in loops on CPU.

    Convolutions inside of loops, conditions or checkpoints of ``fn`` stay as they are.

    :param fn: a function of arrays that is differentiated no further but in forward
        mode.
    """

    def wrapped(*args):
        if jax.default_backend() != "cpu":
            return fn(*args)
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        if _has_convolution(closed.jaxpr):
            out = _evaluate(closed, leaves)
        else:
            out = jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return wrapped
