# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""What makes a sampler: a flow, signed rates, a jump and a velocity law.

Notation. ``z`` position and ``v`` velocity in whitened coordinates
(:mod:`~numpyro_pdmp.process.scale`), :math:`E` the energy in ``z``, ``gradient`` its
gradient. An event of type ``i`` happens at rate :math:`\max(0, g_i)`, where the
*signed rates* :math:`g_1, \dots, g_k` are what :meth:`Sampler.rates` returns.
A new sampler is a subclass of :class:`Sampler`, usually of a few lines.
"""

from dataclasses import dataclass

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from numpyro_pdmp.process.motion import (
    elliptic_flow,
    flip,
    linear_flow,
    reflect,
    refresh as refresh_velocity,
)
from numpyro_pdmp.process.randomness import exponential


@dataclass(frozen=True)
class Sampler:
    """Base of all samplers: linear flow, one rate, Gaussian velocities."""

    refresh_rate: float = 1.0  # rate of velocity refreshment, per unit of time
    refresh_mix: float = 0.0  # rho of partial refreshment
    refresh_law: str = "exponential"  # of the time between them, or "regular"

    #: ``"linear"`` or ``"elliptic"``, for exact integrals along a segment
    flow_name = "linear"
    #: share of proposals that warm-up lets exceed the envelope
    target_violation = 0.005

    def flow(self, z: Array, v: Array, t: Array) -> tuple[Array, Array]:
        """Position and velocity after moving freely for time ``t``."""
        return linear_flow(z, v, t)

    def energy_gradient(self, z: Array, gradient: Array) -> Array:
        r"""From :math:`\nabla U` (whitened) to :math:`\nabla E`."""
        return gradient

    def rates(self, z: Array, v: Array, gradient: Array) -> Array:
        r"""Signed rates, shape ``(k,)``; here :math:`v\cdot\nabla E`."""
        return (v @ gradient)[None]

    def slopes(self, z: Array, v: Array, gradient: Array, curvature: Array) -> Array:
        r"""Time derivative of :meth:`rates`.

        ``curvature`` is :math:`\nabla^2 E\, v`.
        """
        return (v @ curvature)[None]

    def jump(
        self, z: Array, v: Array, gradient: Array, index: Array, noise: Array
    ) -> Array:
        """Velocity after an event of type ``index``; ``noise`` is standard normal."""
        return reflect(v, gradient)

    def velocity(self, noise: Array) -> Array:
        """A draw from the invariant law of the velocity."""
        return noise

    def refresh(self, v: Array, noise: Array) -> Array:
        """Velocity after a refreshment."""
        return refresh_velocity(v, self.velocity(noise), self.refresh_mix)

    def refresh_time(self, uniform: Array, rate: ArrayLike) -> Array:
        """Time to the next refreshment.

        Exponential, as in the literature, or of constant length. A refreshment
        leaves the target invariant whenever it happens independently of the state,
        so both laws are exact; regular times mix faster where paths are periodic.
        """
        time = exponential(uniform, rate)
        if self.refresh_law == "regular":
            rate = jnp.asarray(rate, uniform.dtype)
            time = jnp.where(jnp.isfinite(time), 1 / jnp.where(rate > 0, rate, 1), time)
        return time

    def speed(self, z: Array, v: Array) -> Array:
        """How fast rates change, relative to a typical path.

        Windows are divided by it and offsets multiplied.
        """
        return jnp.sqrt(jnp.mean(jnp.square(v)))

    def tuned(self, bounce_rate: Array) -> "Sampler":
        """The sampler for a target with so many bounces a unit of time.

        That number is measured in warm-up, and constant after it.
        """
        return self

    def num_rates(self, dim: int) -> int:
        """Number ``k`` of signed rates in dimension ``dim``."""
        return 1

    def event_time(self, dim: int) -> float:
        """Mean time between events on a whitened Gaussian; scales first windows."""
        return 2.5 / dim**0.5

    def longest_window(self, dim: int) -> float:
        """Upper limit on an envelope's window."""
        return 10 * self.event_time(dim)

    def rate_size(self, dim: int) -> float:
        """Typical size of a signed rate there; scales first offsets."""
        return dim**0.5


@dataclass(frozen=True)
class BouncyParticle(Sampler):
    r"""Bouncy particle sampler (Bouchard-Cote, Vollmer, Doucet 2018).

    Straight lines, rate :math:`\max(0, v\cdot\nabla U)`, reflection in the gradient,
    velocities :math:`N(0, I)`.
    """


@dataclass(frozen=True)
class BoomerangProcess(Sampler):
    r"""Boomerang sampler (Bierkens, Grazzi, Kamatani, Roberts 2020).

    Circles around the centre of a Gaussian reference, here :math:`N(0, I)`; the
    reference is invariant under the flow alone, and events correct for the rest,
    :math:`E(z) = U - |z|^2/2`. With ``residual=False`` the energy is :math:`U` itself,
    so the target is the posterior times the reference: the paper's reading, in which
    the reference takes the place of the prior.
    """

    refresh_rate: float = 0.45
    refresh_law: str = "regular"
    residual: bool = True
    flow_name = "elliptic"
    target_violation = 0.02  # most events correct for little, so a miss matters less

    def flow(self, z, v, t):
        return elliptic_flow(z, v, t)

    def energy_gradient(self, z, gradient):
        return gradient - z if self.residual else gradient

    def slopes(self, z, v, gradient, curvature):
        return (v @ curvature - z @ gradient)[None]

    def speed(self, z, v):
        # Time is an angle, but far out rates grow like the square of the radius,
        # which is constant along the path and about 1 in this scale.
        return 0.5 * (jnp.mean(jnp.square(z)) + jnp.mean(jnp.square(v)))

    def event_time(self, dim):
        return 0.75

    def longest_window(self, dim):
        # Rates turn with the circle: a line is a poor guess over more than a radian.
        return 1.3

    def rate_size(self, dim):
        return 0.5 * dim**0.5


@dataclass(frozen=True)
class ZigZagProcess(Sampler):
    r"""Zig-Zag sampler (Bierkens, Fearnhead, Roberts 2019).

    Velocities :math:`\pm 1`; coordinate ``i`` flips at rate
    :math:`\max(0, v_i \partial_i U)`. Ergodic without refreshment.
    """

    refresh_rate: float = 0.0

    def rates(self, z, v, gradient):
        return v * gradient

    def slopes(self, z, v, gradient, curvature):
        return v * curvature

    def jump(self, z, v, gradient, index, noise):
        return flip(v, index)

    def velocity(self, noise):
        return jnp.where(noise < 0, -1, 1).astype(noise.dtype)

    def refresh(self, v, noise):
        # Each sign is drawn anew with probability 1 - rho, decided by |noise|.
        redraw = jnp.abs(noise) >= ndtri(0.5 + 0.5 * self.refresh_mix)
        return jnp.where(redraw, self.velocity(noise), v)

    def num_rates(self, dim):
        return dim

    def event_time(self, dim):
        return 2.5 / dim

    def rate_size(self, dim):
        return 1.0
