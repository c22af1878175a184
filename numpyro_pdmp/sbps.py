# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic bouncy particle sampler."""

from numpyro_pdmp.bps import BPS


class SBPS(BPS):
    r"""Stochastic bouncy particle sampler.

    :class:`~numpyro_pdmp.BPS` whose event times come from a regression of the rates
    seen since the last event: they are proposed from the upper confidence line
    :math:`\hat\beta_0 + \hat\beta_1 s + k\,\rho(s)`, where :math:`\rho(s)` is the
    standard deviation of the next reading, see
    :class:`~numpyro_pdmp.RegressionBound`. Readings may be noisy, so it is made for
    models with subsampled plates: each evaluation has a fresh mini-batch, and the
    batch that accepts an event also does the bounce, which leaves the posterior of all
    data invariant wherever the confidence line is above the rate. How often it was not
    is counted, and warm-up keeps that near ``target_violation``. It serves on full
    data as well.

    The paper's preconditioned variant, in which velocities are scaled to each
    coordinate, is what all kernels here do: with :math:`x = c + A z` the sampler runs
    in z, and warm-up finds A. ``dense_mass=False`` gives the paper's diagonal
    :math:`A`, and ``inverse_mass_matrix=numpy.ones(d), adapt_mass_matrix=False`` none.

    **References:**

    1. *Stochastic Bouncy Particle Sampler*, Ari Pakman, Dar Gilboa, David Carlson,
       Liam Paninski (2017)

    :param event_time: default ``"regression"``, which all kernels take.
    :param str batch: default ``"proposal"``, a fresh mini-batch for every evaluation.

    The other arguments are those of :class:`~numpyro_pdmp.BPS`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import SBPS
    >>> y = 3 + random.normal(random.key(1), (1000,))
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with numpyro.plate("data", len(y), subsample_size=100):
    ...         y = numpyro.subsample(y, event_dim=0)
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> mcmc = MCMC(SBPS(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(0), y)
    >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.02)
    True
    """

    def __init__(self, model=None, potential_fn=None, **kwargs):
        options = {"event_time": "regression", **kwargs}
        super().__init__(model, potential_fn, **options)
