# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bouncy particle samplers whose bounces are random."""

from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.generalised import (
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
)


class GeneralisedBPS(PDMPKernel):
    r"""Generalised bouncy particle sampler.

    As :class:`~numpyro_pdmp.BPS`, with another bounce. Let
    :math:`g = A^T\nabla U` be the gradient in whitened coordinates, :math:`n = g/|g|`
    and :math:`v = u n + w` with :math:`w \perp n`. At an event, which has the rate
    :math:`\max(0, u|g|)`, the velocity becomes

    .. math:: v' = -u\,n + \rho\,w + \sqrt{1-\rho^2}\,\xi, \qquad
        \xi \sim N(0, I - n n^T),

    so that its part along the gradient is reversed, and its part across is drawn anew
    (:math:`\rho = 0`) or partially. That leaves the posterior invariant for every
    :math:`\rho`: events see :math:`u > 0` with density proportional to
    :math:`u\,e^{-u^2/2}` and, independently of it, :math:`w \sim N(0, I - n n^T)`, and
    after them it must be the same with :math:`-u`, which the reversal and the draw do
    one by one. :mod:`numpyro_pdmp.process.generalised` has the condition in full. As
    bounces renew the velocity there is no need of refreshments; but in one dimension
    nothing is across, the speed would stay what it was at the start, and so
    ``refresh_rate`` should be positive. The energy changes slowly, since a bounce keeps
    :math:`|u|`: :class:`~numpyro_pdmp.ForwardBPS` draws that anew, too.

    **References:**

    1. *Generalized Bouncy Particle Sampler*, Changye Wu, Christian P. Robert (2017)

    :param refresh_rate: refreshments per unit of process time; may be zero, which is
        what ``"auto"`` is.
    :param float orthogonal_mix: :math:`\rho`, the share of the part across the gradient
        that a bounce keeps, in [0, 1); 0 is the paper's. Default:
        :math:`e^{-1/\lambda}` with :math:`\lambda` bounces a unit of process time, as
        measured in warm-up, so that velocities are renewed at rate 1. A whitened
        Gaussian has :math:`\lambda \approx 0.4\sqrt d`.

    The other arguments are those of :class:`~numpyro_pdmp.Boomerang`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import GeneralisedBPS
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0).expand([2]).to_event(1))
    >>> mcmc = MCMC(GeneralisedBPS(model), num_warmup=200, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True
    """

    process = GeneralisedBouncyParticle


class ForwardBPS(PDMPKernel):
    r"""Bouncy particle sampler with the bounces of forward event-chain Monte Carlo.

    As :class:`~numpyro_pdmp.GeneralisedBPS`, but the part along the gradient is not
    reversed: it is drawn anew from the law that it has after events,

    .. math:: v' = -r\,n + \rho\,w + \sqrt{1-\rho^2}\,\xi, \qquad
        r \sim r\,e^{-r^2/2}\ \text{(Rayleigh)}.

    The paper has velocities on the unit sphere, where r has the density proportional
    to :math:`r\,(1 - r^2)^{(d-3)/2}` on :math:`0 < r < 1`; with the Gaussian
    velocities of this package it is Rayleigh's, to which :math:`\sqrt{d}\,r` on the
    sphere tends. The paper also has bounces that keep the orthogonal part or renew a
    bit of it; here that is :math:`\rho`. Needs no refreshment in any dimension.

    **References:**

    1. *Forward Event-Chain Monte Carlo: Fast Sampling by Randomness Control in
       Irreversible Markov Chains*, Manon Michel, Alain Durmus, Stephane Senecal (2020)

    The arguments are those of :class:`~numpyro_pdmp.GeneralisedBPS`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import ForwardBPS
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(ForwardBPS(model), num_warmup=200, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True
    """

    process = ForwardBouncyParticle
