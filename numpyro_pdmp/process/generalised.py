# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Bounces that draw a part of the velocity anew.

Let :math:`n = \nabla E / |\nabla E|` and :math:`v = u n + w` with :math:`w \perp n`.
With straight lines, rate :math:`\max(0, v\cdot\nabla E)` and velocities
:math:`\psi = N(0, I)`, the generator applied to :math:`e^{-E}\psi` vanishes if and only
if the jump Q at events satisfies, for all velocities :math:`v'`,

.. math:: \int \max(0, v\cdot n)\,\psi(v)\,Q(v, v')\,dv = \max(0, -v'\cdot n)\,\psi(v').

Under :math:`\psi` the parts u and w are independent, so at events u has the density
:math:`u\,e^{-u^2/2}` on :math:`u > 0`, Rayleigh's law, and w is
:math:`N(0, I - n n^T)`. Hence Q leaves the target invariant whenever it turns the one
law into its mirror image and keeps the other:

=========== ============================== =======================================
sampler     :math:`u'`                     :math:`w'`
=========== ============================== =======================================
BPS         :math:`-u`                     :math:`w`
generalised :math:`-u`                     :math:`\rho w + \sqrt{1-\rho^2}\,\xi`
forward     :math:`-r`, r Rayleigh         :math:`\rho w + \sqrt{1-\rho^2}\,\xi`
=========== ============================== =======================================

with :math:`\xi \sim N(0, I - n n^T)`. What is *not* invariant: to draw u' from a
half-normal law, as a part of a fresh velocity would be, or to give w' another scale.
The condition holds for every gradient, so with that of a mini-batch, which decides the
event and does the jump, all averages are those of the full data.
"""

from dataclasses import dataclass, replace
import math

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import log_ndtr

from numpyro_pdmp.process.motion import refresh as refresh_velocity
from numpyro_pdmp.process.samplers import Sampler


@dataclass(frozen=True)
class GeneralisedBouncyParticle(Sampler):
    r"""Generalised bouncy particle sampler (Wu, Robert 2017).

    A bounce reverses the part of the velocity along the gradient and draws the part
    across it anew, of which ``orthogonal_mix`` is the share :math:`\rho` that is kept;
    by default :math:`e^{-1/\lambda}` with :math:`\lambda` bounces a unit of time, so
    that it is renewed at rate 1 whatever the target. Needs no refreshment in two or
    more dimensions.
    """

    refresh_rate: float = 0.0
    orthogonal_mix: float | Array | None = None

    def __post_init__(self):
        mix = self.orthogonal_mix
        if isinstance(mix, (int, float)) and not 0 <= mix < 1:
            raise ValueError(
                f"`orthogonal_mix` must be in [0, 1), got {self.orthogonal_mix}; 0 "
                "draws the orthogonal part anew, and what would keep all of it is BPS."
            )

    def tuned(self, bounce_rate):
        if self.orthogonal_mix is not None:
            return self
        return replace(self, orthogonal_mix=jnp.exp(-1 / bounce_rate))

    def parallel(self, u: Array, noise: Array) -> Array:
        """What a bounce makes of the part along the gradient."""
        return -u

    def jump(self, z, v, gradient, index, noise):
        norm = jnp.sqrt(gradient @ gradient)
        n = gradient / jnp.where(norm > 0, norm, 1)
        # The parts of `noise` along and across are independent, so it serves both.
        u, along = v @ n, noise @ n
        mix = self.orthogonal_mix
        if mix is None:
            mix = math.exp(-self.event_time(v.size))
        w = refresh_velocity(v - u * n, noise - along * n, mix)
        return self.parallel(u, along) * n + w


@dataclass(frozen=True)
class ForwardBouncyParticle(GeneralisedBouncyParticle):
    r"""Forward event-chain Monte Carlo (Michel, Durmus, Senecal 2020).

    As :class:`GeneralisedBouncyParticle`, but the part along the gradient is drawn
    anew, too, from the law that it has after events. A standard normal variable
    :math:`\eta` makes a Rayleigh one by :math:`\sqrt{-2\log\Phi(\eta)}`.
    """

    def parallel(self, u, noise):
        return -jnp.sqrt(-2 * log_ndtr(noise))
