# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Sigma-BPS: the bouncy particle sampler with a diagonal preconditioner."""

from numpyro_pdmp.bps import BPS


class SigmaBPS(BPS):
    r"""Bouncy particle sampler with velocities scaled to each coordinate.

    The :math:`\sigma`\ BPS of the paper's Section 2.2: warm-up estimates the standard
    deviation :math:`\sigma_i` of each coordinate, and then velocities are
    :math:`N(0, \mathrm{diag}(\sigma^2))` and bounces reflect in that metric. It costs
    :math:`O(d)` and is meant for many dimensions, such as neural networks.

    Where this differs from the paper: moments are integrals along the path, exact on
    its straight lines, not averages over events; they are shrunk towards the scale in
    force by the number of refreshments seen, so few draws do no harm; and
    sampling goes on from where warm-up ended.

    **References:**

    1. *Piecewise Deterministic Markov Processes for Bayesian Neural Networks*,
       Ethan Goan, Dimitri Perrin, Kerrie Mengersen, Clinton Fookes (2023)

    The arguments are those of :class:`~numpyro_pdmp.BPS`, but for ``dense_mass`` and
    ``low_rank``: the metric is diagonal.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import SigmaBPS
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(SigmaBPS(model), num_warmup=300, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True
    """

    exact_moments = True

    def __init__(self, model=None, potential_fn=None, **kwargs):
        for name in ("dense_mass", "low_rank"):
            if kwargs.get(name):
                raise ValueError(
                    f"`{name}={kwargs[name]}`: the metric of SigmaBPS is diagonal; use "
                    f"`BPS(..., {name}={kwargs[name]})`."
                )
        dense_mass = None if kwargs.get("reference") is not None else False
        super().__init__(model, potential_fn, **{**kwargs, "dense_mass": dense_mass})
