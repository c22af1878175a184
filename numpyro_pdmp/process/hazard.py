# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""First arrival of a Poisson process whose rate is a clamped line."""

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike


def line_arrival(value: ArrayLike, slope: ArrayLike, mass: ArrayLike) -> Array:
    r"""First time at which a clamped line has accumulated a given hazard.

    Returns the smallest :math:`s \ge 0` with
    :math:`\int_0^s \max(0, a + b r)\, dr = e`, or infinity when the integral
    never reaches :math:`e`. With :math:`e` a unit exponential variable, :math:`s`
    is the first arrival of a Poisson process of rate :math:`\max(0, a + b s)`:
    Equation 11 of the paper with its sign corrected, written so that nothing
    cancels, and for every sign of :math:`a` and :math:`b`.

    :param value: :math:`a`, the line at time zero.
    :param slope: :math:`b`, its slope.
    :param mass: :math:`e > 0`, the hazard to accumulate.
    :return: arrival times, broadcast over the three arguments.

    **Example**

    >>> float(line_arrival(0.0, 2.0, 4.0))  # s^2 = 4
    2.0
    >>> float(line_arrival(-1.0, 1.0, 0.5))  # zero until s = 1
    2.0
    >>> float(line_arrival(1.0, -1.0, 0.6))  # total hazard is only 1/2
    inf
    """
    a, b, e = jnp.asarray(value), jnp.asarray(slope), jnp.asarray(mass)
    rising = b > 0
    # A rising line counts from its zero crossing.
    start = jnp.where(rising, jnp.maximum(-a, 0) / jnp.where(rising, b, 1), 0)
    a = jnp.maximum(a, 0)
    # The root of a^2 + 2be, without a square that overflows or vanishes.
    q = jnp.sqrt(2 * jnp.abs(b) * e)
    large = jnp.maximum(a, q)
    ratio = jnp.minimum(a, q) / jnp.where(large > 0, large, 1)
    rises = large * jnp.sqrt(1 + ratio * ratio)
    falls = jnp.sqrt(jnp.maximum(a - q, 0)) * jnp.sqrt(a + q)
    root = a + jnp.where(b < 0, falls, rises)
    reached = rising | ((a >= q) & (a > 0))
    return jnp.where(reached, start + 2 * e / jnp.where(root > 0, root, 1), jnp.inf)


def clamped_line(value: ArrayLike, slope: ArrayLike, time: ArrayLike) -> Array:
    r"""The rate :math:`\max(0, a + b s)` whose arrivals :func:`line_arrival` draws."""
    a, b, s = jnp.asarray(value), jnp.asarray(slope), jnp.asarray(time)
    return jnp.maximum(a + b * s, 0)
