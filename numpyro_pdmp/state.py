# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The state of a kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.path import Path, Stats


@jax.tree_util.register_pytree_node_class
class Energy:
    """The potential energy of a draw: its value, or how to have it.

    :param value: the number, which is all that the tree consists of; or None.
    :param of: a function of the state. It knows the data, maybe as what a program under
        construction calls them, and so it stays behind when the state leaves that
        program, is mapped over or is stored.
    """

    def __init__(self, value: Any = None, of: Callable | None = None):
        self.value, self.of = value, of

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def __reduce__(self):
        return Energy, (self.value,)


class PDMPState(NamedTuple):
    """State of a PDMP kernel. All counts are of one draw.

    - **i** - number of draws so far, warm-up included.
    - **z** - the draw: unconstrained values of the latent sites.
    - **potential_energy** - potential energy of the draw; of a sticky one with the mass
      of the atoms at zero. Evaluated when it is looked at, which ``MCMC`` does for
      ``extra_fields``. Unless the kernel has ``potential_energy=True``, it is NaN with
      mini-batches, and of a state that has left the loop such as ``last_state``.
    - **num_grad** - gradient evaluations.
    - **num_bounces** - events of the process that are not refreshments.
    - **num_refreshments** - refreshments of the velocity.
    - **num_proposals** - proposed event times.
    - **num_violations** - proposals at which the rate exceeded its envelope.
    - **accept_prob** - mean acceptance probability of the proposals (1 without any).
    - **excess** - mean of rate over envelope minus one, over the violations.
    - **diverging** - a rate or the draw's energy was not finite, or the draw was cut
      off at ``max_grad``.
    - **energy** - what ``potential_energy`` is read off, and
    - **stats** - what the counts are: computed only if they are asked for.
    - **adapt_state** - scale, envelope and what warm-up needs to tune them; of all
      chains together if they share it, and else with a leading axis like all the rest.
    - **path** - state of the simulated path, see :class:`~numpyro_pdmp.process.Path`.
    - **whitened** - the draw in whitened coordinates.
    - **totals** - the path's statistics, summed since the end of warm-up.
    - **queue** - of vectorised chains: draws that a chain has made before the others,
      see :mod:`numpyro_pdmp.process.ahead`; else None.
    - **walls** - whether the energy of any draw that was looked at was not finite.
    - **rng_key** - random number generator key.
    """

    i: Array
    z: Any
    diverging: Array
    energy: Energy
    stats: Stats
    adapt_state: Any
    path: Path
    whitened: Array
    totals: Stats
    queue: Any
    walls: Array
    rng_key: Array

    @property
    def potential_energy(self) -> Array:
        """Potential energy of the draw."""
        if self.energy.value is not None:
            return self.energy.value
        if self.energy.of is not None:
            return self.energy.of(self)
        return jnp.full_like(self.whitened[..., 0], jnp.nan)

    @property
    def num_grad(self) -> Array:
        """Gradient evaluations."""
        return self.stats.num_grad

    @property
    def num_bounces(self) -> Array:
        """Events of the process that are not refreshments."""
        return self.stats.num_bounces

    @property
    def num_refreshments(self) -> Array:
        """Refreshments of the velocity."""
        return self.stats.num_refreshments

    @property
    def num_proposals(self) -> Array:
        """Proposed event times."""
        return self.stats.num_proposals

    @property
    def num_violations(self) -> Array:
        """Proposals at which the rate exceeded its envelope."""
        return self.stats.num_violations

    @property
    def accept_prob(self) -> Array:
        """Mean acceptance probability of the proposals (1 without any)."""
        num = self.stats.num_proposals
        return jnp.where(num > 0, self.stats.sum_ratio / jnp.maximum(num, 1), 1)

    @property
    def excess(self) -> Array:
        """Mean of rate over envelope minus one, over the violations."""
        return self.stats.sum_excess / jnp.maximum(self.stats.num_violations, 1)
