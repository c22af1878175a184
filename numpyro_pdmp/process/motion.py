# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Deterministic motion between events, and jumps of the velocity at events."""

from collections.abc import Callable

from jax import Array
import jax.numpy as jnp

Flow = Callable[[Array, Array, Array], tuple[Array, Array]]


def linear_flow(z: Array, v: Array, t: Array) -> tuple[Array, Array]:
    r"""Straight line: :math:`z + t v`, with :math:`v` constant."""
    return z + t * v, v


def elliptic_flow(z: Array, v: Array, t: Array) -> tuple[Array, Array]:
    r"""Circle around the origin: :math:`z\cos t + v\sin t`,
    :math:`v\cos t - z\sin t`.

    In the sampled variable it is an ellipse around the reference centre. Hamiltonian
    flow of :math:`N(0, I) \otimes N(0, I)`, so the reference needs no events.
    """
    cos, sin = jnp.cos(t), jnp.sin(t)
    return z * cos + v * sin, v * cos - z * sin


def reflect(v: Array, gradient: Array) -> Array:
    r"""Bounce: :math:`v - 2\frac{g\cdot v}{g\cdot g} g`; :math:`|v|` is kept.

    In whitened coordinates; in the sampled variable it is the reflection in the
    metric :math:`(A A^T)^{-1}`, the paper's Equations 3 and 5. A zero gradient
    leaves ``v`` alone.
    """
    norm2 = gradient @ gradient
    return v - 2 * (gradient @ v) / jnp.where(norm2 > 0, norm2, 1) * gradient


def flip(v: Array, index: Array) -> Array:
    """Reverse the velocity of one coordinate."""
    return jnp.where(jnp.arange(v.size) == index, -v, v)


def refresh(v: Array, noise: Array, mix: float | Array = 0.0) -> Array:
    r"""Autoregressive refreshment :math:`\rho v + \sqrt{1-\rho^2}\,\xi`.

    Leaves :math:`N(0, I)` invariant for every :math:`|\rho| \le 1`.

    :param v: current velocity.
    :param noise: :math:`\xi`, standard normal, of the shape of ``v``.
    :param mix: :math:`\rho`; zero is full refreshment.
    """
    return mix * v + (1 - mix**2) ** 0.5 * noise
