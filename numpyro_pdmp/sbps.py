# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic bouncy particle sampler."""

from numpyro_pdmp.bps import BPS
from numpyro_pdmp.process.regression import RegressionBound


class SBPS(BPS):
    r"""Stochastic bouncy particle sampler.

    :class:`~numpyro_pdmp.BPS` with a fresh mini-batch for every evaluation, and event
    times from :class:`~numpyro_pdmp.RegressionBound`.
    """

    def __init__(self, model=None, potential_fn=None, **kwargs):
        kwargs.setdefault("event_time", RegressionBound())
        super().__init__(model, potential_fn, **kwargs)
