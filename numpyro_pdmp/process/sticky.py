# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Sticky paths: coordinates that stay at zero for a while (Bierkens, Grazzi, van der
Meulen, Schauer 2023, *Sticky PDMP samplers for sparse and local inference problems*).

The target has atoms at zero,

.. math:: \mu(dx) \propto
    e^{-U(x)} \prod_i \big(dx_i + \kappa_i^{-1} \delta_0(dx_i)\big).

A coordinate that arrives at zero *freezes* there for an exponential time of rate
:math:`\kappa_i |\dot x_i|` and then goes on as it came. While frozen it keeps its
velocity and does not move, and the others are a path on the subspace: its part of the
gradient is left out of rates and jumps.

Why it is invariant: with the velocity's law :math:`\phi` independent of the position,
coordinates arrive at zero with velocity :math:`v` at rate :math:`p(0)\,\phi(v)\,|v|`,
and leave at rate :math:`\kappa |v|` from a mass of :math:`\kappa^{-1} p(0)\,\phi(v)`.
So given that a coordinate is frozen its velocity has the law :math:`\phi` too, and
refreshments may draw its size anew. They do, as in the authors' code: coordinates
arrive with density :math:`\propto |v|\,\phi(v)`, and of a velocity that is kept the
time :math:`\sim 1/(\kappa|v|)` has infinite variance if :math:`\phi` is Gaussian. The
sign stays, so that a coordinate passes through zero.
"""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.randomness import exponential
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale

#: speed of a path of which nothing moves: its windows need no limit
AT_REST = 1e-3


def later(time: Array) -> Array:
    """Not now: a window of no length has no line."""
    return jnp.maximum(time, jnp.finfo(time.dtype).eps)


class Stuck(NamedTuple):
    """State of a sticky path."""

    frozen: Array  # (d,) which coordinates do not move
    frozen_from: Array  # (d,) which of them did not on the last stretch
    time: Array  # () next freezing or thawing, from the anchor
    which: Array  # () its coordinate


def start_stuck(z: Array) -> Stuck:
    """Before the first tick: everything moves."""
    moving = jnp.zeros(z.shape, bool)
    time = jnp.full((), jnp.inf, z.dtype)
    return Stuck(moving, moving, time, jnp.zeros((), int))


class MovingPart:
    """A sampler on the coordinates that are not frozen.

    Has the methods of :class:`~numpyro_pdmp.process.Sampler` that act on a path.

    :param sampler: the process.
    :param frozen: (d,) which coordinates do not move.
    :param zero: (d,) where the sampled variable is zero, in whitened coordinates.
    """

    def __init__(self, sampler: Sampler, frozen: Array, zero: Array):
        self._sampler, self._frozen, self._zero = sampler, frozen, zero

    def moving(self, v: Array) -> Array:
        """The velocity with which the position moves."""
        return jnp.where(self._frozen, 0, v)

    def flow(self, z, v, t):
        new_z, new_v = self._sampler.flow(z, v, t)
        frozen = self._frozen
        return jnp.where(frozen, self._zero, new_z), jnp.where(frozen, v, new_v)

    def rates(self, z, v, gradient):
        return self._sampler.rates(z, self.moving(v), self.moving(gradient))

    def slopes(self, z, v, gradient, curvature):
        v, gradient = self.moving(v), self.moving(gradient)
        return self._sampler.slopes(z, v, gradient, curvature)

    def jump(self, z, v, gradient, index, noise):
        new = self._sampler.jump(z, v, self.moving(gradient), index, noise)
        return jnp.where(self._frozen, v, new)

    def refresh(self, v, noise):
        new = self._sampler.refresh(v, noise)
        return jnp.where(self._frozen, jnp.copysign(new, v), new)

    def speed(self, z, v):
        # Of the moving part, not diluted by the rest.
        share = jnp.mean(~self._frozen, dtype=v.dtype)
        root = jnp.sqrt(jnp.maximum(share, 0.5 / v.size))
        z = jnp.where(self._frozen, 0, z)
        speed = self._sampler.speed(z / root, self.moving(v) / root)
        return jnp.where(share > 0, speed, AT_REST)

    def rate_mask(self, num_rates: int) -> Array:
        """Which of the rates can be positive at all, (k,)."""
        if num_rates == self._frozen.size:
            return ~self._frozen
        return jnp.broadcast_to(jnp.any(~self._frozen), (num_rates,))


class Sticky:
    """Freezing and thawing in whitened coordinates.

    :param kappa: (d,) rates of thawing over the speed in the sampled variable;
        infinite for coordinates that never freeze.
    :param sampler: the process.
    :param scale: whitening map, diagonal.
    """

    def __init__(self, kappa: Array, sampler: Sampler, scale: Scale):
        self._sampler = sampler
        self._sticks = jnp.isfinite(kappa)
        self._thaw_rate = jnp.where(self._sticks, kappa, 0) * scale.factor
        self._zero = scale.whiten(jnp.zeros_like(scale.center))

    def part(self, frozen: Array) -> MovingPart:
        """The process on the coordinates that are not frozen."""
        return MovingPart(self._sampler, frozen, self._zero)

    def next(
        self, z: Array, v: Array, frozen: Array, uniform: Array
    ) -> tuple[Array, Array]:
        """Time and coordinate of the next freezing or thawing.

        :param uniform: (2,) uniform variables.
        """
        hits = hit_times(self._sampler.flow_name, z, v, self._zero)
        hits = jnp.where(self._sticks & ~frozen, hits, jnp.inf)
        # One clock for all that are frozen, and which of them it is for.
        rates = jnp.cumsum(jnp.where(frozen, self._thaw_rate * jnp.abs(v), 0))
        thaw = exponential(uniform[0], rates[-1])
        thawing = jnp.argmax(rates > uniform[1] * rates[-1])
        freezing = jnp.argmin(hits)
        first = hits[freezing]
        which = jnp.where(first < thaw, freezing, thawing)
        return later(jnp.minimum(first, thaw)), which

    def switch(
        self, happens: Array, which: Array, frozen: Array, z: Array
    ) -> tuple[Array, Array]:
        """Position, and what is frozen, after the event."""
        here = happens & (jnp.arange(z.size) == which)
        return jnp.where(here, self._zero, z), frozen ^ here


def hit_times(flow_name: str, z: Array, v: Array, target: Array) -> Array:
    r"""Times at which coordinates next arrive at ``target``; infinite if never.

    On lines :math:`(\zeta - z) / v`, if positive. On circles the coordinate is
    :math:`r\cos(t + \psi)`, above :math:`\zeta` for angles within
    :math:`\alpha = \arccos(\zeta/r)` of zero, so it arrives at :math:`\alpha` from
    above and at :math:`2\pi - \alpha` from below. Which side it is on is looked up and
    not computed, so that one that just left does not arrive again by rounding.

    :param flow_name: ``"linear"`` or ``"elliptic"``.
    :param z: (d,) positions.
    :param v: (d,) velocities.
    :param target: (d,) where to.

    **Example**

    >>> z, v, zero = jnp.array([1.0, 0.0]), jnp.array([-2.0, 1.0]), jnp.zeros(2)
    >>> hit_times("linear", z, v, zero).tolist()
    [0.5, inf]
    >>> [round(t, 2) for t in hit_times("elliptic", z, v, zero).tolist()]
    [0.46, 3.14]
    """
    gap = z - target
    if flow_name == "linear":
        approaches = gap * v < 0
        return jnp.where(approaches, -gap / jnp.where(approaches, v, 1), jnp.inf)
    radius = jnp.sqrt(z * z + v * v)
    reaches = jnp.abs(target) < radius
    alpha = jnp.arccos(jnp.where(reaches, target / jnp.where(reaches, radius, 1), 0))
    psi = jnp.arctan2(-v, z)  # in [-pi, pi]
    above = jnp.where(gap == 0, v > 0, gap > 0)
    psi = jnp.where(gap == 0, jnp.where(above, -alpha, alpha), psi)
    below = 2 * jnp.pi - alpha - jnp.where(psi < 0, psi + 2 * jnp.pi, psi)
    time = jnp.maximum(jnp.where(above, alpha - psi, below), 0)
    return jnp.where(reaches, time, jnp.inf)
