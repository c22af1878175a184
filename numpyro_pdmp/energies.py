# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Potential energies of draws: evaluated where they are looked at."""

from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.util import is_prng_key
from numpyro_pdmp.start import first_chain
from numpyro_pdmp.state import Energy

#: one draw in so many is looked at for an energy that is not finite, if none has been
LOOK = 16


class EnergyMixin:
    """What a kernel knows of its draws' energies, kept apart from it."""

    if TYPE_CHECKING:  # the target is the kernel's

        def __getattr__(self, name: str) -> Any: ...

    def _with_energy(self, state, model_args, model_kwargs):
        if self._potential_energy is not None or state.path.batches is not None:
            return state

        def energy(state):
            single = is_prng_key(state.rng_key)
            one = state.z if single else first_chain(state.z)
            functions = self._functions(model_args, model_kwargs)
            unravel = ravel_pytree(one)[1]
            target = self._target(functions, unravel, None)
            kappa = self._kappa(None, one, model_args, model_kwargs)

            def of_draw(z):
                return self._draw_energy(target, None, kappa, ravel_pytree(z)[0])

            return of_draw(state.z) if single else jax.vmap(of_draw)(state.z)

        return state._replace(energy=Energy(of=energy))

    def _draw_energy(self, target, path, kappa, x):
        """Potential energy of a draw, with the mass of the atoms if it is sticky."""
        energy = self._energy(target, path, x)
        if kappa is not None:
            frozen = (x == 0) & jnp.isfinite(kappa)
            energy = energy + jnp.sum(jnp.where(frozen, jnp.log(kappa), 0))
        return jnp.asarray(energy, x.dtype)

    def _outside(self, state):
        """Whether a draw's energy is not finite.

        Where the density is zero but its gradient is finite nothing else tells. All
        draws of warm-up are looked at, and all after one that was outside; else a few.
        """
        number = jnp.ravel(state.i)[0]  # all chains are at the same draw
        # Multiples of the golden ratio, of which no thinning leaves out the small ones.
        turned = number.astype(jnp.uint32) * jnp.uint32(2654435769)
        in_warmup = number <= jnp.ravel(state.adapt_state.num_warmup)[0]
        return lax.cond(
            in_warmup | jnp.any(state.walls) | (turned < 2**32 // LOOK),
            lambda: ~jnp.isfinite(state.potential_energy),
            lambda: jnp.zeros_like(state.diverging),
        )
