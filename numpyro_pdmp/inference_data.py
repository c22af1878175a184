# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a finished run to ArviZ."""

from typing import Any

import numpy as np

from numpyro.infer import MCMC
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.sgmcmc import SGMCMCKernel

#: state fields that become variables of ``sample_stats``, with ArviZ's names
SAMPLE_STATS = {
    "accept_prob": "acceptance_rate",
    "diverging": "diverging",
    "excess": "excess",
    "num_bounces": "num_bounces",
    "num_grad": "num_grad",
    "num_proposals": "num_proposals",
    "num_refreshments": "num_refreshments",
    "num_violations": "num_violations",
    "potential_energy": "lp",
}

#: for ``MCMC.run(..., extra_fields=ALL_STATS)``
ALL_STATS = tuple(name for name in SAMPLE_STATS if name != "diverging")


def to_inference_data(mcmc: MCMC, **kwargs: Any) -> Any:
    """Convert a finished run to :class:`arviz.InferenceData`.

    On top of :func:`arviz.from_numpyro`: every collected statistic of the kernel is in
    ``sample_stats``, under ArviZ's name where it has one (``acceptance_rate``,
    ``lp``, ``diverging``), and the kernel's settings, with what warm-up tuned, are in
    the attributes of ``posterior``. To collect all statistics, run with
    ``extra_fields=ALL_STATS``.

    :param mcmc: an ``MCMC`` object that has run.
    :param kwargs: passed on to :func:`arviz.from_numpyro`; ``log_likelihood``
        defaults to False, since it takes an evaluation of the likelihood a draw.
    :return: the inference data.
    """
    import arviz as az

    kwargs.setdefault("log_likelihood", False)
    data = az.from_numpyro(mcmc, **kwargs)
    if "sample_stats" in data:
        stats = data["sample_stats"]
        names = {k: v for k, v in SAMPLE_STATS.items() if k in stats and k != v}
        data.sample_stats = stats.rename(names)
    sampler = mcmc.sampler
    if isinstance(sampler, SGMCMCKernel):
        data["posterior"].attrs.update(
            sampler=type(sampler).__name__,
            step_size=np.mean(mcmc.last_state.step_size).item(),
            num_steps=sampler._num_steps,
        )
    if not isinstance(sampler, PDMPKernel):
        return data
    adapted = mcmc.last_state.adapt_state
    data["posterior"].attrs.update(
        sampler=type(sampler).__name__,
        event_time=repr(sampler._scheme),
        draw_time=np.mean(adapted.draw_time).item(),
        refresh_rate=np.mean(adapted.refresh_rate).item(),
        target_violation=sampler._target_violation,
        window=np.mean(adapted.tuning.window).item(),
        offset=np.mean(adapted.tuning.offset).item(),
    )
    return data
