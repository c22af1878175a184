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

from jax import Array, lax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

from numpyro_pdmp.operations import with_replaced


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


def fast_in_loops(fn: Callable) -> Callable:
    """The same function, with convolutions that are fast in loops on CPU.

    Convolutions inside of loops, conditions or checkpoints of ``fn`` stay as they are.

    :param fn: a function of arrays that is differentiated no further but in forward
        mode.
    """
    return with_replaced(fn, {lax.conv_general_dilated_p: _convolve})
