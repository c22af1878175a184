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
    discriminant = a * a + 2 * b * e
    root = a + jnp.sqrt(jnp.maximum(discriminant, 0))
    reached = (discriminant >= 0) & ((root > 0) | rising)
    return jnp.where(reached, start + 2 * e / jnp.where(root > 0, root, 1), jnp.inf)


def clamped_line(value: ArrayLike, slope: ArrayLike, time: ArrayLike) -> Array:
    r"""The rate :math:`\max(0, a + b s)` whose arrivals :func:`line_arrival` draws."""
    a, b, s = jnp.asarray(value), jnp.asarray(slope), jnp.asarray(time)
    return jnp.maximum(a + b * s, 0)
