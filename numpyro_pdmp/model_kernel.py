# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What all kernels share: a model, its target, and the start of its chains."""

import copy
from typing import ClassVar

from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity
from numpyro_pdmp.metric import mass_mask
from numpyro_pdmp.potential import ModelFunctions, gradient_fn
from numpyro_pdmp.products import chains_first
from numpyro_pdmp.spike_slab import thaw_rates
from numpyro_pdmp.start import StartMixin
from numpyro_pdmp.subsample import as_jax_rows
from numpyro_pdmp.target import make_target, target_functions
from numpyro_pdmp.warmup import DENSE_LIMIT


class ModelKernel(StartMixin, MCMCKernel):
    """Base of all kernels, which hold options and nothing else.

    A subclass has the options as attributes, draws in ``sample``, and makes the state
    in ``_init_state`` and ``_placed``.
    """

    #: never None, so that resuming from a state does not initialise again
    _sample_fn: ClassVar[bool] = True
    #: prior inclusion probabilities by site
    _sticky: dict | None = None
    sample_field: ClassVar[str] = "z"  # type: ignore[assignment]

    @property
    def model(self):
        return self._model

    @property
    def default_fields(self):
        return ("z", "diverging")

    # The target

    def _functions(self, model_args, model_kwargs):
        if self._potential_fn is not None:
            return ModelFunctions(self._potential_fn, identity, identity, None, None)
        assert self._model is not None
        return target_functions(self._model, model_args, model_kwargs)

    def postprocess_fn(self, model_args, model_kwargs):
        return self._functions(model_args, model_kwargs).postprocess_fn

    def get_constrain_fn(self, model_args, model_kwargs):
        """Constrain by transforms alone, since other blocks' sites are not known."""
        return self._functions(model_args, model_kwargs).constrain_fn

    def _gradient(self, potential_fn):
        return gradient_fn(
            potential_fn, self._forward_mode_differentiation, self._hard_walls
        )

    def _target(self, functions, unravel, control, importance=None):
        chooses = self._batching in ("auto", "importance")
        return make_target(
            functions,
            unravel,
            control,
            importance,
            "without_replacement" if chooses else self._batching,
            self._forward_mode_differentiation,
            self._hard_walls,
        )

    def _prepare(self, state, model_args, model_kwargs):
        """What can be done while the start is compiled, for states of such shapes."""

    def _with_energy(self, state, model_args, model_kwargs):
        """The state, whose energy can be asked for while the data are at hand."""
        return state

    def _kappa(self, subsampled, z, model_args, model_kwargs):
        """Rates of thawing of a sticky path; None if it is not."""
        if self._sticky is None:
            return None
        if subsampled is not None:
            few = subsampled.few_arguments
            model_args, model_kwargs = as_jax_rows(few, subsampled.plates)
        return thaw_rates(self._sticky, self._model, z, model_args, model_kwargs)

    def _max_ahead(self, dim):
        """How many draws vectorised chains of that dimension may be ahead."""
        return 0

    def _energy(self, target, state, x):
        """Potential energy of a draw; an estimate from one batch if subsampled.

        :param state: has the key and the batches of a chain.
        """
        if target.source is None:
            return chains_first(target.energy)(x)
        key = random.fold_in(state.rng_key, 0)
        words = random.bits(key, (target.source.num_words,), jnp.uint32)
        return target.energy(x, target.source.next(state.batches.state, words)[1])

    def _dense(self, dim):
        """``dense_mass`` with its default filled in: True, False or blocks."""
        if self._dense_mass is None:
            return dim <= DENSE_LIMIT and self._low_rank is None
        return self._dense_mass

    def _mask(self, z):
        return mass_mask(z, self._dense(ravel_pytree(z)[0].size))

    def wrap_model(self, wrapper):
        """A copy of this kernel whose model is ``wrapper(self.model)``."""
        if self._model is None:
            raise ValueError(
                "`wrap_model` is not supported for kernels built from a potential "
                "function."
            )
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        return kernel
