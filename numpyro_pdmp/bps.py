# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bouncy particle sampler."""

from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.samplers import BouncyParticle


class BPS(PDMPKernel):
    r"""Bouncy particle sampler.

    The position moves on straight lines, :math:`x(t) = x + A v t`, and bounces at
    rate :math:`\max(0, v\cdot A^T\nabla U(x(t)))` by a reflection of the velocity in
    the gradient; at rate ``refresh_rate`` the velocity is drawn anew from
    :math:`N(0, I)`. Warm-up estimates :math:`A`. A draw is the position after each
    ``draw_time`` units of process time.

    **References:**

    1. *The Bouncy Particle Sampler: A Nonreversible Rejection-Free Markov Chain
       Monte Carlo Method*, Alexandre Bouchard-Cote, Sebastian J. Vollmer, Arnaud
       Doucet (2018)
    2. *Piecewise Deterministic Markov Processes for Bayesian Neural Networks*,
       Ethan Goan, Dimitri Perrin, Kerrie Mengersen, Clinton Fookes (2023)

    :param refresh_rate: refreshments per unit of process time; must be positive, since
        without them the process need not reach the whole space. ``"auto"`` is 1.
    :param float refresh_mix: share of the old velocity that a refreshment keeps.
    :param str refresh_law: ``"exponential"`` (the default) or ``"regular"`` times
        between them.

    The other arguments are those of :class:`~numpyro_pdmp.Boomerang`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import BPS
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(BPS(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True
    """

    process = BouncyParticle
    needs_refreshment = "without refreshment BPS need not reach the whole space"
