# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Which variables a sparse posterior includes, and how surely."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from numpyro.diagnostics import effective_sample_size
from numpyro_pdmp.pages import explained

#: what the name of a site's indicators ends with, in ``InferenceData``
SUFFIX = "_included"


class Inclusion(NamedTuple):
    """Posterior inclusion probabilities of the entries of a site."""

    probability: np.ndarray  # of being other than zero
    mcse: np.ndarray  # its Monte-Carlo standard error
    ess: np.ndarray  # effective draws of the indicator


def _inclusion(draws: np.ndarray) -> Inclusion:
    included = (draws != 0).astype(float)
    probability = included.mean((0, 1))
    varies = (probability > 0) & (probability < 1)
    ess = np.full(probability.shape, np.nan)
    if included.shape[1] >= 4 and varies.any():
        ess[varies] = effective_sample_size(included[..., varies])
    mcse = np.sqrt(probability * (1 - probability) / ess)
    return Inclusion(probability, mcse, ess)


@explained("sticky")
def inclusion_probabilities(
    data: Any, sites: str | Iterable[str] | None = None
) -> dict[str, Inclusion]:
    """Posterior probabilities that coefficients are other than zero.

    :param data: an ``MCMC`` object that has run with ``sticky``, or the
        ``InferenceData`` of :func:`~numpyro_pdmp.to_inference_data`.
    :param sites: names; default all sticky sites.
    :return: for each site an :class:`~numpyro_pdmp.inclusion.Inclusion` with arrays of
        its shape: ``probability``, ``mcse`` and ``ess``. The latter two are NaN where
        all draws agree: then the data say that the probability is near 0 or 1, but not
        how near.

    **Example**

    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import ZigZag, inclusion_probabilities
    >>> x = random.normal(random.key(0), (100, 3))
    >>> def model(x, y):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)
    >>> mcmc = MCMC(ZigZag(model, sticky={"beta": 0.2}), num_warmup=200,
    ...             num_samples=500, progress_bar=False)
    >>> mcmc.run(random.key(1), x, x[:, 0] + random.normal(random.key(2), (100,)))
    >>> inclusion = inclusion_probabilities(mcmc)["beta"]
    >>> (inclusion.probability > 0.5).tolist()
    [True, False, False]
    """
    posterior = getattr(data, "posterior", None)
    if posterior is not None:
        draws = {name: posterior[name].values for name in posterior.data_vars}
        known = [n for n in draws if n + SUFFIX in draws]
    elif hasattr(data, "get_samples"):
        if data.last_state is None:
            raise ValueError("`data` has not run; call `mcmc.run` first.")
        draws = data.get_samples(group_by_chain=True)
        known = sorted(getattr(data.sampler, "_sticky", None) or ())
    else:
        raise TypeError(
            "`data` must be an MCMC object or InferenceData, got "
            f"{type(data).__name__}."
        )
    names = known if sites is None else [sites] if isinstance(sites, str) else sites
    names = list(names)
    if not names:
        raise ValueError(
            "`data` has no sticky sites: run a kernel with `sticky={...}`, or name the "
            "`sites` whose zeros count."
        )
    unknown = sorted(set(names) - set(draws))
    if unknown:
        raise ValueError(f"`sites` has {unknown}; the draws have {sorted(draws)}.")
    return {name: _inclusion(np.asarray(draws[name])) for name in names}
