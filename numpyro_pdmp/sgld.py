# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic gradient Langevin dynamics."""

from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.sgmcmc import TARGET_BIAS, SGMCMCKernel


def langevin_step(
    z: Array, grad: Array, noise: Array, step_size: Array | float
) -> Array:
    r""":math:`z - \tfrac\epsilon2 \nabla U(z) + \sqrt\epsilon\,\xi`.

    :param z: position.
    :param grad: (estimate of the) gradient of the potential there.
    :param noise: standard normal.
    :param step_size: :math:`\epsilon`.
    """
    return z - 0.5 * step_size * grad + jnp.sqrt(step_size) * noise


class SGLD(SGMCMCKernel):
    r"""Stochastic gradient Langevin dynamics.

    .. math:: x' = x - \frac\epsilon2 A A^T \widehat{\nabla U}(x) + \sqrt\epsilon A \xi

    with a fresh mini-batch for every step and :math:`A = I`, or the scale of whitened
    coordinates. The noise has variance :math:`\epsilon`; BlackJAX writes
    :math:`h = \epsilon/2` for the step. There is no accept step, so the draws are
    biased: on a Gaussian in whitened coordinates with a gradient whose variance over
    batches is :math:`\sigma^2` the variance of the draws is

    .. math:: \frac{1 + \epsilon\sigma^2/4}{1 - \epsilon/4}

    times the posterior's. With a constant step that does not go away; a schedule that
    falls to zero removes it, but the later a draw, the less the chain has moved.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, Max Welling, Yee
       Whye Teh (2011)
    2. *Control Variates for Stochastic Gradient MCMC*, Jack Baker, Paul Fearnhead,
       Emily Fox, Christopher Nemeth (2019)

    :param model: Python callable containing NumPyro primitives, with or without
        subsampled plates.
    :param potential_fn: Python callable that calculates the potential energy given
        unconstrained parameters; ``init_params`` of ``MCMC.run`` is then required.
    :param step_size: :math:`\epsilon`: a number; a function of the number of steps
        since the start, warm-up included, such as an Optax schedule; or ``"auto"``,
        which is :math:`0.1/(1 + \sigma^2)` in whitened coordinates, for variances that
        are 2.5 % too large on a Gaussian (measured with control variates: 1.8 % on
        the mean of 100 observations, 2.0 % on a logistic regression, with errors of
        1.0 and 0.8 %). ``init`` measures :math:`\sigma^2`.
    :param int num_steps: steps a draw.
    :param precondition: whether to run in whitened coordinates, of ``reference`` or
        ``inverse_mass_matrix``, or of the curvature at the mode. Default: if one of
        them is given, or ``step_size="auto"``. A step size that you give is else in
        the model's own unconstrained coordinates, as in the literature.
    :param reference: Gaussian that gives centre and scale, and the start of all chains
        unless there are ``init_params``; see :class:`~numpyro_pdmp.Boomerang`.
    :param inverse_mass_matrix: estimate of the posterior covariance, as in NumPyro's
        HMC.
    :param center: point of the control variates, if there is no reference.
    :param bool find_mode: whether ``init`` looks for the mode, to start around it and
        for control variates. That is done unless ``reference``,
        ``inverse_mass_matrix`` or ``center`` is given, for subsampled models up to
        256 dimensions.
    :param control_variates: order of the control variates of a subsampled model, 1 or
        2, or None for none. ``"auto"`` measures which is best if there is a point to
        expand around.
    :param str batching: how rows are drawn, see :class:`~numpyro_pdmp.Boomerang`.
    :param callable init_strategy: a per-site initialization function.
    :param bool forward_mode_differentiation: whether to use forward-mode
        differentiation, for models that need it.
    :param bool potential_energy: whether to evaluate the potential energy of every
        draw, from one batch if subsampled; else the field is NaN.

    Warm-up is burn-in: nothing is tuned. A step that is not finite is not made, and
    its draw is flagged as ``diverging``.

    **Example**

    >>> from jax import random
    >>> import optax
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import SGLD
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with numpyro.plate("data", len(y), subsample_size=10):
    ...         y = numpyro.subsample(y, event_dim=0)
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> y = 3 + random.normal(random.key(1), (1000,))
    >>> mcmc = MCMC(SGLD(model), num_warmup=100, num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(0), y)
    >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.02)
    True
    >>> falling = SGLD(model, step_size=optax.linear_schedule(1e-4, 0.0, 10_000))
    """

    def _update(self, z, memory, grad, noise, step):
        return langevin_step(z, grad, noise, step.size), memory

    def _auto_step_size(self, variance):
        return 4 * TARGET_BIAS / (1 + variance)
