# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The state of a kernel."""

from collections import namedtuple

PDMPState = namedtuple(
    "PDMPState",
    [
        "i",
        "z",
        "potential_energy",
        "num_grad",
        "num_bounces",
        "num_refreshments",
        "num_proposals",
        "num_violations",
        "accept_prob",
        "excess",
        "diverging",
        "adapt_state",
        "path",
        "whitened",
        "totals",
        "queue",
        "rng_key",
    ],
)
"""
State of a PDMP kernel. All counts are of one draw.

 - **i** - number of draws so far, warm-up included.
 - **z** - the draw: unconstrained values of the latent sites.
 - **potential_energy** - potential energy of the draw (NaN when not asked for); of a
   sticky one with the mass of the atoms at zero.
 - **num_grad** - gradient evaluations.
 - **num_bounces** - events of the process that are not refreshments.
 - **num_refreshments** - refreshments of the velocity.
 - **num_proposals** - proposed event times.
 - **num_violations** - proposals at which the rate exceeded its envelope.
 - **accept_prob** - mean acceptance probability of the proposals (1 without any).
 - **excess** - mean of rate over envelope minus one, over the violations.
 - **diverging** - a rate or the draw's energy was not finite, or the draw was cut off
   at ``max_grad``.
 - **adapt_state** - scale, envelope and what warm-up needs to tune them; of all
   chains together if they share it, and else with a leading axis like all the rest.
 - **path** - state of the simulated path, see :class:`~numpyro_pdmp.process.Path`.
 - **whitened** - the draw in whitened coordinates.
 - **totals** - the path's statistics, summed since the end of warm-up.
 - **queue** - of vectorised chains: draws that a chain has made before the others, see
   :mod:`numpyro_pdmp.process.ahead`; else None.
 - **rng_key** - random number generator key.
"""
