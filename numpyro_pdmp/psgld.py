# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Preconditioned stochastic gradient Langevin dynamics."""

import jax.numpy as jnp

from numpyro_pdmp.options import require_positive
from numpyro_pdmp.sgld import langevin_step
from numpyro_pdmp.sgmcmc import TARGET_BIAS, SGMCMCKernel


class PSGLD(SGMCMCKernel):
    r"""SGLD with the preconditioner of RMSprop.

    With :math:`V` a running mean of squared gradients, :math:`V' = \beta V + (1 -
    \beta) g^2`, and :math:`G = 1/(\lambda + \sqrt{V'})`,

    .. math:: x' = x - \frac\epsilon2 G g + \sqrt{\epsilon G}\,\xi.

    As Li et al. do in practice this leaves out the term for the change of :math:`G`
    with :math:`x`, so it has a bias that smaller steps do not remove. Unless
    ``freeze=False`` the preconditioner is therefore held after warm-up, and then it is
    SGLD with a fixed one. It costs no more than SGLD and is meant for models with too
    many parameters for a metric from curvatures.

    **Reference:** *Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural
    Networks*, Chunyuan Li, Changyou Chen, David Carlson, Lawrence Carin (2016)

    :param model: see :class:`~numpyro_pdmp.SGLD`, also for all that is not listed here.
    :param potential_fn: likewise.
    :param step_size: as for SGLD, with steps of :math:`\epsilon G`. The gradient is
        that of all data, where Li et al. have the mean over them: theirs times the
        number of rows is ours.
    :param float decay: :math:`\beta`, between 0 and 1.
    :param float damping: :math:`\lambda`, in units of the gradient.
    :param bool freeze: whether the preconditioner is held after warm-up.
    :param kwargs: as for :class:`~numpyro_pdmp.SGLD`.

    **Example**

    >>> from numpyro_pdmp import PSGLD
    >>> kernel = PSGLD(potential_fn=lambda z: z @ z / 2, step_size=1e-3)
    """

    def __init__(
        self,
        model=None,
        potential_fn=None,
        *,
        decay=0.99,
        damping=1e-5,
        freeze=True,
        **kwargs,
    ):
        super().__init__(model, potential_fn, **kwargs)
        if not 0 <= decay < 1:
            raise ValueError(
                f"`decay` must be in [0, 1), got {decay!r}; 0.99 remembers about 100 "
                "steps."
            )
        require_positive("damping", damping)
        self._decay = decay
        self._damping = damping
        self._freeze = freeze

    def _first_memory(self, noise):
        return jnp.zeros_like(noise)

    def _update(self, z, square, grad, noise, step):
        # At first the same for all: single squares of a gradient can be tiny.
        begins = step.number == 0
        new = self._decay * square + (1 - self._decay) * grad**2
        new = jnp.where(begins, jnp.mean(grad**2), new)
        if self._freeze:
            new = jnp.where(step.warmup | begins, new, square)
        metric = 1 / (self._damping + jnp.sqrt(new))
        return langevin_step(z, grad, noise, step.size * metric), new

    def _auto_step_size(self, variance):
        # G is then about 1 / sqrt(1 + variance), which makes SGLD's steps of these.
        return 4 * TARGET_BIAS / jnp.sqrt(1 + variance)
