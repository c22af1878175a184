# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A verdict on a finished run, in plain language."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import jax

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from numpyro_pdmp.process.events import ExactBound

#: shares above which :func:`check` speaks up
VIOLATION_LIMIT = 0.1
MISSED_TARGET = 3  # times the target
MISSED_LIMIT = 0.02  # and at least this
NONFINITE_LIMIT = 0.001
R_HAT_LIMIT = 1.05
ESS_LIMIT = 100


@dataclass
class Report:
    """What :func:`check` found; ``str(report)`` is the text."""

    num_draws: int  # kept, over all chains
    num_chains: int
    num_grad: float  # per step of the chain
    violation_rate: float  # of proposals, since warm-up
    excess: float  # mean of rate over envelope - 1, over violations
    acceptance: float  # mean acceptance probability of proposals
    nonfinite: int  # evaluations that were not finite, since warm-up
    diverging: int  # draws
    max_r_hat: float
    min_ess: float
    grad_per_ess: float
    ratio_histogram: np.ndarray  # counts of rate / envelope: 20 bins over 0..2, above
    draw_time: float  # process time between draws; as the next three, over all chains
    refresh_rate: float  # per unit of process time
    window: float  # of the envelope, in process time
    offset: float  # of the envelope
    target_violation: float  # NaN if the scheme has an offset of its own
    refreshment_share: float  # of refreshments among events, since warm-up
    advice: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is nothing to advise."""
        return not self.advice

    def __str__(self) -> str:
        lines = [
            f"{self.num_draws} draws of {self.num_chains} chain(s), "
            f"{self.num_grad:.1f} gradient evaluations a step.",
            f"Smallest effective sample size {self.min_ess:.0f} "
            f"({self.grad_per_ess:.1f} gradient evaluations each), "
            f"largest R-hat {self.max_r_hat:.3f}.",
            f"Proposals above their envelope: {100 * self.violation_rate:.2f} % "
            f"(by {100 * self.excess:.0f} % on average); "
            f"mean acceptance {self.acceptance:.2f}.",
            f"Draw time {self.draw_time:.3g}, refreshment rate "
            f"{self.refresh_rate:.3g} ({100 * self.refreshment_share:.0f} % of "
            "events).",
            f"Envelope window {self.window:.3g}, offset {self.offset:.3g}"
            + (
                "."
                if np.isnan(self.target_violation)
                else f", for a target of {100 * self.target_violation:.3g} % above it."
            ),
            f"Non-finite evaluations: {self.nonfinite}; diverging draws: "
            f"{self.diverging}.",
        ]
        more = "See the page docs/diagnosing.md of the documentation."
        verdict = ["Nothing to complain about."] if self.ok else [*self.advice, more]
        return "\n".join(lines + verdict)


def _advice(
    report: Report, exact: bool, missed: bool, max_grad: int, sticky: bool
) -> list[str]:
    advice = []
    if exact and report.violation_rate > 0:
        advice.append(
            "ERROR: the bound given to ExactBound was exceeded, so it is not a bound "
            "and the draws are not exact. Raise it."
        )
    elif report.violation_rate > VIOLATION_LIMIT:
        advice.append(
            "Many event times came from an envelope below the rate, so the draws are "
            "biased. Use a shorter window or a larger offset, for example "
            "event_time=Interpolation(t_init=..., offset=...), or a longer warm-up."
        )
    elif missed:
        advice.append(
            f"Proposals exceeded their envelope {100 * report.violation_rate:.1f} % of "
            f"the time, but the target was {100 * report.target_violation:.3g} %. Use "
            "a longer warm-up or a smaller `target_violation`."
        )
    if report.nonfinite > NONFINITE_LIMIT * report.num_grad * report.num_draws:
        advice.append(
            "The potential or its gradient was often not finite. The path was turned "
            "back there, so draws are finite, but check the model's support and scales."
        )
    if report.diverging > 0:
        advice.append(
            f"{report.diverging} draws are flagged as diverging: a rate or the energy "
            f"was not finite, or the draw was cut off after max_grad={max_grad} "
            "gradient evaluations. Reparameterise the model, raise `max_grad`, or set "
            "`hard_walls=True` if the density is zero in places."
        )
    if not report.max_r_hat < R_HAT_LIMIT:
        advice.append(
            "The chains disagree (R-hat). Draw more, warm up longer, or look at the "
            "traces for several modes."
        )
    if not report.min_ess >= ESS_LIMIT and sticky:
        advice.append(
            "Too few effective draws of some entry. Of sticky ones that are seldom "
            "other than zero this may be all right: see the errors of "
            "`inclusion_probabilities`. Else draw more, or set a longer `draw_time`."
        )
    elif not report.min_ess >= ESS_LIMIT:
        advice.append(
            "Too few effective draws for reliable summaries. Draw more, use "
            "dense_mass=True, or reparameterise the model."
        )
    return advice


def check(mcmc: MCMC) -> Report:
    """Report how a run of one of this package's PDMP kernels went.

    :param mcmc: an ``MCMC`` object that has run.
    :return: a :class:`Report`; print it.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import Boomerang, check
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(Boomerang(model), num_warmup=300, num_samples=1000,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> check(mcmc).ok
    True
    """
    if mcmc.last_state is None or not hasattr(mcmc.last_state, "totals"):
        raise ValueError(
            "`check` needs a finished run of a PDMP kernel of this package, got "
            f"{mcmc!r} with sampler {type(mcmc.sampler).__name__}; call `mcmc.run` "
            "first."
        )
    return report_run(
        mcmc.sampler,
        mcmc.last_state,
        mcmc.get_samples(group_by_chain=True),
        mcmc.get_extra_fields().get("diverging", 0),
        mcmc.thinning,
    )


def report_run(
    kernel: Any, state: Any, samples: Any, diverging: Any, thinning: int = 1
) -> Report:
    """As :func:`check`, for a run in chunks.

    :param kernel: the kernel.
    :param state: its last state, as of the last :class:`~numpyro_pdmp.Chunk`.
    :param samples: draws of some or all sites, ``(chains, draws, ...)``.
    :param diverging: whether each draw is, for all of them.
    :param thinning: steps of the chain between these draws.
    """
    latent = state.z if isinstance(samples, dict) else {"z": state.z}
    samples = samples if isinstance(samples, dict) else {"z": samples}
    ess: list[float] = []
    r_hat: list[float] = []
    for name, x in samples.items():
        if name not in latent:
            continue
        x = np.asarray(x, float).reshape(*x.shape[:2], -1)
        x = x[..., np.ptp(x, (0, 1)) > 0]  # some entries of a site may be constants
        if x.shape[1] >= 4:
            ess.extend(np.atleast_1d(effective_sample_size(x)))
            r_hat.extend(np.atleast_1d(split_gelman_rubin(x)))
    chains = jax.tree.map(
        lambda a: np.asarray(a).reshape(-1, a.shape[-1]), state.totals
    )
    total = jax.tree.map(lambda a: a.sum(0), chains)
    num_draws = next(iter(samples.values())).shape[:2]
    steps = np.sum(state.i - state.adapt_state.num_warmup)
    proposals = max(total.num_proposals, 1)
    min_ess = float(np.min(ess)) if ess else float("nan")
    # Only the draws of the last run are at hand, and all steps since warm-up counted.
    share = num_draws[0] * num_draws[1] * thinning / max(steps, 1)
    adapted, scheme = state.adapt_state, kernel._scheme
    target = kernel._target_violation if scheme.tunes_offset else float("nan")
    events = total.num_refreshments + total.num_bounces
    report = Report(
        num_draws=num_draws[0] * num_draws[1],
        num_chains=num_draws[0],
        num_grad=total.num_grad / max(steps, 1),
        violation_rate=total.num_violations / proposals,
        excess=total.sum_excess / max(total.num_violations, 1),
        acceptance=total.sum_ratio / proposals,
        nonfinite=int(total.num_nonfinite),
        diverging=int(np.sum(diverging)),
        max_r_hat=float(np.max(r_hat)) if r_hat else float("nan"),
        min_ess=min_ess,
        grad_per_ess=share * total.num_grad / min_ess,
        ratio_histogram=total.ratio_histogram,
        draw_time=float(np.mean(adapted.draw_time)),
        refresh_rate=float(np.mean(adapted.refresh_rate)),
        window=float(np.mean(adapted.tuning.window)),
        offset=float(np.mean(adapted.tuning.offset)),
        target_violation=target,
        refreshment_share=total.num_refreshments / max(events, 1),
    )
    # Fewer by two standard deviations, so that a handful of them is no reason.
    surely = total.num_violations - 2 * total.num_violations**0.5
    allowed = max(MISSED_LIMIT, MISSED_TARGET * kernel._target_violation)
    missed = scheme.tunes_offset and surely / proposals > allowed
    exact = isinstance(scheme, ExactBound)
    sticky = kernel._sticky is not None
    report.advice = _advice(report, exact, missed, kernel._max_grad, sticky)
    return report
