# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Boomerang sampler."""

import math

from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.samplers import BoomerangProcess


class Boomerang(PDMPKernel):
    r"""Boomerang sampler.

    The position moves on ellipses around the centre :math:`c` of a Gaussian reference
    :math:`N(c, A A^T)`, which that motion leaves invariant. Events correct for the
    difference between the reference and the posterior: with :math:`x = c + A z` and
    :math:`E(z) = U(x) - |z|^2/2` the velocity is reflected in :math:`\nabla E` at rate
    :math:`\max(0, v\cdot\nabla E)`. The better the reference, the fewer events, and
    the posterior is the target whatever the reference. Warm-up estimates it.

    Event times come from approximate envelopes by default, so there is a small bias;
    :func:`numpyro_pdmp.check` reports how often an envelope was exceeded, and
    ``event_time`` trades bias for cost.

    **References:**

    1. *The Boomerang Sampler*, Joris Bierkens, Sebastiano Grazzi, Kengo Kamatani,
       Gareth Roberts (2020)
    2. *Piecewise Deterministic Markov Processes for Bayesian Neural Networks*,
       Ethan Goan, Dimitri Perrin, Kerrie Mengersen, Clinton Fookes (2023)

    :param model: Python callable containing NumPyro primitives. If model is provided,
        ``potential_fn`` will be inferred using the model.
    :param potential_fn: Python callable that calculates the potential energy given
        unconstrained parameters; ``init_params`` of ``MCMC.run`` is then required.
    :param refresh_rate: refreshments of the velocity per unit of process time, or
        ``"auto"``: a constant in whitened time, 0.45 for Boomerang, 1 for BPS and 0 for
        ZigZag. Measured on Gaussians of 10 and 100 dimensions, the smallest effective
        sample size of :math:`x` and :math:`x^2` per gradient of BPS is best near 1 in
        both. A share of 0.78 of refreshments among events, which is optimal per event
        for the energy of BPS in many dimensions (Bierkens, Kamatani, Roberts 2018),
        gives 28 times less in 100 dimensions: 0.9 per 1000 gradients at a share of
        0.80, against 25 at a rate of 1.
    :param float refresh_mix: :math:`\rho` of the refreshment
        :math:`\rho v + \sqrt{1-\rho^2}\,\xi`; 0 draws a new velocity.
    :param str refresh_law: ``"regular"``, every ``1 / refresh_rate``, or
        ``"exponential"`` times as in the literature. Both are exact. Default: regular
        for Boomerang, whose paths are periodic, exponential for the others.
    :param str target: ``"posterior"``, or ``"reference_prior"`` for the paper's
        reading: the target is the density of the model *times* the reference, which
        stands in for the prior of a model without one. It needs ``reference``, or
        ``inverse_mass_matrix``, ``center`` and ``adapt_mass_matrix=False``.
    :param event_time: how event times are found:
        :class:`~numpyro_pdmp.Interpolation` (``"interpolation"``),
        :class:`~numpyro_pdmp.Tangent` (``"tangent"``),
        :class:`~numpyro_pdmp.RegressionBound` (``"regression"``),
        :class:`~numpyro_pdmp.PublishedInterpolation` (``"published"``), or
        :class:`~numpyro_pdmp.ExactBound` with a bound of your own.
    :param float target_violation: share of proposed events that may exceed their
        envelope: warm-up tunes the envelope's offset to it. Smaller is less biased and
        takes more gradients. Default: 0.02 for Boomerang, most of whose events correct
        for little, 0.005 for the others. Schemes with an offset of their own ignore it.
    :param draw_time: process time between draws, or ``"auto"``: a quarter turn
        (:math:`\pi/2`) for Boomerang and 1 for the others, and more where warm-up finds
        that successive draws of the slowest coordinate, or of its absolute value, have
        a correlation above 0.5; but not more than 50 gradients take.
    :param str record: ``"time"``: a draw is the position after each ``draw_time``, so
        averages over draws are time averages, which is what converges to the
        posterior. ``"events"``: a draw is the position at each event, as in the
        paper; in general these are *not* distributed as the posterior.
    :param reference: Gaussian that gives centre and scale, and the start of all chains
        unless there are ``init_params``: a :class:`~numpyro_pdmp.Scale` or
        :class:`~numpyro_pdmp.LowRankScale`, such as the result of
        :func:`~numpyro_pdmp.laplace_reference`; the result of
        :func:`~numpyro_pdmp.find_map`, which stands for its
        :func:`~numpyro_pdmp.laplace_reference`; or a pair ``(guide, params)`` of a
        fitted NumPyro guide: ``AutoDelta``, ``AutoNormal``, ``AutoDiagonalNormal``,
        ``AutoMultivariateNormal``, ``AutoLowRankMultivariateNormal`` or
        ``AutoLaplaceApproximation``. It serves all kernels. Warm-up keeps it as it is
        unless ``adapt_mass_matrix=True``. It takes the place of
        ``inverse_mass_matrix``, ``center``, ``dense_mass`` and ``low_rank``.
    :param inverse_mass_matrix: estimate of the posterior covariance to begin with: a
        number, a vector of variances, a matrix, or a dict by tuples of sites as in
        NumPyro's HMC. Default: found by a descent at the start of warm-up.
    :param center: centre of the coordinates (and of the reference) to begin with.
    :param adapt_mass_matrix: whether warm-up estimates centre and scale. Default: True,
        but False with a ``reference``.
    :param dense_mass: True for a dense matrix, False for a diagonal one, or a list of
        tuples of site names for dense blocks. Default: dense up to 256 dimensions,
        unless ``low_rank`` is given.
    :param int low_rank: estimate a diagonal and this many directions in which it is
        most wrong, at a cost of ``dimension * low_rank`` where a dense matrix has
        ``dimension ** 2``.
    :param bool cross_chain_adapt: whether vectorised chains share all that warm-up
        tunes: four chains know more than one. With False each chain tunes its own.
        Chains run in sequence or in parallel never share.
    :param callable init_strategy: a per-site initialization function.
    :param bool forward_mode_differentiation: whether to use forward-mode
        differentiation, for models that need it.
    :param bool potential_energy: whether the state has the potential energy of its
        draw. By default it does on full data, and evaluates it only where it is looked
        at: if it is one of ``extra_fields``, and otherwise, to see that it is
        finite, at all draws of warm-up and one in 16 after it, or all once one was not.
        With True it is evaluated at every draw and kept, also as an
        estimate from one batch if subsampled, at the cost of a batch (see
        :func:`~numpyro_pdmp.full_potential` for the exact one). With False it is NaN.
    :param bool hard_walls: whether to evaluate the potential with every gradient, for
        densities that are zero in a region where the gradient is finite. Without it
        such regions are entered, and of the draws there those that are looked at (see
        ``potential_energy``) are flagged as ``diverging``.
    :param int max_grad: bound on the gradient evaluations of a draw. A draw that
        reaches it is cut off and flagged as ``diverging``.
    :param str batch: for models with subsampled plates: ``"proposal"``, a fresh
        mini-batch for every evaluation, which leaves the posterior of all data
        invariant wherever the envelope holds; ``"event"``, one until the next event, as
        in the paper's code, which does not (a warning gives the inflation); or
        ``"euler"``, one for every step of :class:`~numpyro_pdmp.Euler`.
    :param str batching: how rows are drawn: ``"without_replacement"``,
        ``"with_replacement"``, ``"epoch"`` (every row once in a pass),
        ``"contiguous"`` (consecutive rows, for data in random order), or
        ``"importance"``: rows with more influence more often, and weighed for it.
        ``"auto"`` measures whether that is worth its cost; else takes consecutive rows
        if they are many and found to be in random order; else draws without
        replacement.
    :param control_variates: order of the control variates of a subsampled model, 1 or
        2, or None for none. ``"auto"`` measures which is best if there is a point to
        expand around: a ``reference`` or ``center`` (then of order 1), or up to 256
        dimensions the mode, found with a few passes over all data.
    :param bool recenter: whether to expand around the mean of the draws so far at the
        end of every warm-up window, with a pass over all data; for posteriors whose
        mode is far from their mean.
    :param bool run_ahead: whether a vectorised chain that is done with a draw goes on
        to its next ones, up to eight, instead of waiting for the slowest; draws are the
        same. Only up to 1024 dimensions, and not for ``sticky`` or
        ``record="events"``. False for a caller of ``sample`` that changes the data
        from one draw to the next.
    :param dict sticky: for variable selection: prior inclusion probabilities, numbers
        or arrays in (0, 1), by the names of sites with independent priors on the real
        line. The prior of each entry becomes ``w * prior + (1 - w) * delta_0``, and
        draws have exact zeros (Bierkens, Grazzi, van der Meulen, Schauer 2023). The
        metric is then diagonal. See :func:`~numpyro_pdmp.inclusion_probabilities`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import Boomerang
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(Boomerang(model), num_warmup=200, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].mean() - 3) < 1)
    True
    """

    process = BoomerangProcess
    needs_refreshment = "without refreshment Boomerang stays on one ellipse"
    first_draw_time = math.pi / 2

    def __init__(self, model=None, potential_fn=None, *, target="posterior", **kwargs):
        if target not in ("posterior", "reference_prior"):
            raise ValueError(
                f"`target` must be 'posterior' or 'reference_prior', got {target!r}."
            )
        if target == "reference_prior":
            given = [
                kwargs.get(k) is not None for k in ("inverse_mass_matrix", "center")
            ]
            fixed = kwargs.get("adapt_mass_matrix", True) is False and all(given)
            kept = (
                not kwargs.get("adapt_mass_matrix")
                and kwargs.get("reference") is not None
            )
            if not (fixed or kept):
                raise ValueError(
                    "`target='reference_prior'` makes the reference a part of the "
                    "target: give `reference`, or `inverse_mass_matrix`, `center` and "
                    "`adapt_mass_matrix=False`."
                )
        residual = target == "posterior"
        super().__init__(model, potential_fn, residual=residual, **kwargs)
