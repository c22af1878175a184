# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Zig-Zag sampler."""

from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.samplers import ZigZagProcess


class ZigZag(PDMPKernel):
    r"""Zig-Zag sampler.

    Every coordinate of the whitened position moves with velocity :math:`\pm 1`;
    coordinate :math:`i` turns at rate
    :math:`\max(0, v_i\,(A^T\nabla U)_i)`. It needs no refreshment. One event changes
    one coordinate, so a unit of process time costs gradients in proportion to the
    dimension: at its best in low dimension, or with bounds that subsampling makes
    cheap.

    **References:**

    1. *The Zig-Zag Process and Super-Efficient Sampling for Bayesian Analysis of Big
       Data*, Joris Bierkens, Paul Fearnhead, Gareth Roberts (2019)

    :param refresh_rate: refreshments per unit of process time; may be zero, which is
        what ``"auto"`` is.
    :param float refresh_mix: probability that a coordinate keeps its velocity at one.
    :param str refresh_law: ``"exponential"`` (the default) or ``"regular"`` times
        between them.

    The other arguments are those of :class:`~numpyro_pdmp.Boomerang`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import ZigZag
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(ZigZag(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True

    With a prior probability of 0.3 that a coefficient is other than zero, which here
    the data raise to 0.49:

    >>> def model():
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Normal(beta, 0.5), obs=1.0)
    >>> kernel = ZigZag(model, sticky={"beta": 0.3})
    >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=1000, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs((mcmc.get_samples()["beta"] != 0).mean() - 0.49) < 0.1)
    True
    """

    process = ZigZagProcess
