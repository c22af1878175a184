# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a finished run to ArviZ."""

from collections.abc import Callable
import copy
from functools import partial
from typing import Any
import warnings

import numpy as np

import jax.numpy as jnp

import numpyro
from numpyro.handlers import block
from numpyro.infer import MCMC
from numpyro_pdmp.all_data import full_data, pointwise_log_likelihood
from numpyro_pdmp.batch import Plates
from numpyro_pdmp.inclusion import SUFFIX
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.rows import with_batch
from numpyro_pdmp.sgmcmc import SGMCMCKernel
from numpyro_pdmp.subsample import SubsampledModel

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


def _log_likelihood(mcmc: MCMC, observed: Any) -> Any:
    """Pointwise log likelihood of a subsampled run, as a dataset."""
    import arviz as az

    samples = mcmc.get_samples()
    values = pointwise_log_likelihood(
        mcmc.sampler.model, samples, mcmc._args, mcmc._kwargs
    )
    # Names of dimensions as those of the observations, without their event dimensions.
    dims = {name: list(observed[name].dims[: v.ndim - 1]) for name, v in values.items()}
    coords = {name: coord.values for name, coord in observed.coords.items()}
    chains = {
        name: v.reshape(mcmc.num_chains, -1, *v.shape[1:]) for name, v in values.items()
    }
    return az.dict_to_dataset(chains, library=numpyro, coords=coords, dims=dims)


def _unobserved(plates: Plates, model: Callable) -> Callable:
    """A model on one row of each of these plates, without its observations."""
    few = with_batch(model, {name: jnp.zeros(1, jnp.int32) for name in plates})
    return block(few, hide_fn=lambda site: site.get("is_observed", False))


def to_inference_data(mcmc: MCMC, log_likelihood: bool = False, **kwargs: Any) -> Any:
    """Convert a finished run to :class:`arviz.InferenceData`.

    On top of :func:`arviz.from_numpyro`: every collected statistic of the kernel is in
    ``sample_stats``, under ArviZ's name where it has one (``acceptance_rate``,
    ``lp``, ``diverging``), and the kernel's settings, with what warm-up tuned, are in
    the attributes of ``posterior``. To collect all statistics, run with
    ``extra_fields=ALL_STATS``.

    With subsampled plates, ``observed_data`` and ``log_likelihood`` are those of all
    rows, in order, while ``lp`` is missing, or an estimate from one mini-batch for each
    draw if it was asked for (see :func:`~numpyro_pdmp.full_potential`). If
    :class:`~numpyro_pdmp.HostRows` fetches the data, the first two are left out, as too
    large for memory.

    A site ``beta`` of ``sticky`` has an indicator ``beta_included`` beside it in
    ``posterior``, 1 where it is not zero: its mean in :func:`arviz.summary` is the
    posterior inclusion probability. Log likelihoods and ``lp`` are those of the draws,
    zeros included.

    :param mcmc: an ``MCMC`` object that has run.
    :param log_likelihood: add the log likelihood of each observation at each draw,
        which takes an evaluation of the likelihood a draw, and memory for the number of
        observations times the number of draws.
    :param kwargs: passed on to :func:`arviz.from_numpyro`.
    :return: the inference data.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import BPS, to_inference_data
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(BPS(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> sorted(to_inference_data(mcmc).posterior.data_vars)
    ['x']
    """
    import arviz as az

    sampler, run = mcmc.sampler, mcmc
    if mcmc.last_state is None:
        raise ValueError(
            f"`mcmc` with sampler {type(sampler).__name__} has not run; call "
            "`mcmc.run` first."
        )
    is_pdmp, state = isinstance(sampler, PDMPKernel), mcmc.last_state
    batches = getattr(state.path if is_pdmp else state, "batches", None)
    subsampled = batches is not None
    if subsampled:
        run = copy.copy(mcmc)
        run.sampler = sampler.wrap_model(full_data)
        whole = SubsampledModel(sampler.model, mcmc._args, mcmc._kwargs)
        if any(whole.host_rows.values()):
            run.sampler = sampler.wrap_model(partial(_unobserved, whole.plates))
            if log_likelihood:
                raise ValueError(
                    f"`log_likelihood={log_likelihood}` of a model with `HostRows`: "
                    "its data are taken to be too large for a number for each row and "
                    "draw. Leave it out; `full_potential` gives one for each draw."
                )
            warnings.warn(
                "`observed_data` is left out: the model has `HostRows`, whose data are "
                "taken to be too large for memory. Add them with `add_groups` if they "
                "are not.",
                stacklevel=2,
            )
    data = az.from_numpyro(
        run, log_likelihood=log_likelihood and not subsampled, **kwargs
    )
    if subsampled and log_likelihood and "observed_data" in data:
        groups = {"log_likelihood": _log_likelihood(mcmc, data["observed_data"])}
        data.add_groups(groups)
    if "sample_stats" in data:
        stats = data["sample_stats"]
        names = {k: v for k, v in SAMPLE_STATS.items() if k in stats and k != v}
        stats = stats.rename(names)
        if "lp" in stats and bool(stats["lp"].isnull().all()):
            stats = stats.drop_vars("lp")  # not asked for
        data.sample_stats = stats
    if isinstance(sampler, SGMCMCKernel):
        data["posterior"].attrs.update(
            sampler=type(sampler).__name__,
            step_size=np.mean(mcmc.last_state.step_size).item(),
            num_steps=sampler._num_steps,
        )
    if not is_pdmp:
        return data
    adapted = mcmc.last_state.adapt_state
    for name in sampler._sticky or ():
        included = (data["posterior"][name] != 0).astype(int)
        data["posterior"][name + SUFFIX] = included
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
