# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The NumPyro face of the samplers: one base class for all kernels."""

from collections.abc import Callable
import copy
from functools import partial
import math
from typing import Any, ClassVar

import numpy as np

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key, not_jax_tracer
from numpyro_pdmp.descent import find_start
from numpyro_pdmp.initialize import given_params, jit_arrays, strategy_params
from numpyro_pdmp.metric import initial_scale, mass_mask
from numpyro_pdmp.potential import ModelFunctions, gradient_fn, model_functions
from numpyro_pdmp.process.events import EventTime, event_time_scheme
from numpyro_pdmp.process.loop import (
    NO_EVENT,
    continue_from_output,
    has_output,
    make_tick,
    read_output,
    reset_stats,
    restart_path,
    start_path,
)
from numpyro_pdmp.process.randomness import draw_uniform, normal
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.state import PDMPState
from numpyro_pdmp.warmup import (
    DENSE_LIMIT,
    AdaptState,
    renew_scale,
    tune_envelope,
    update_moments,
    window_ends,
    zero_moments,
)

#: bound on the gradients of one draw while the scale may still be wrong
WARMUP_MAX_GRAD = 100

class PDMPKernel(MCMCKernel):
    """Base of the kernels; a subclass says which process it simulates.

    See :class:`~numpyro_pdmp.Boomerang` for the arguments. Options are all a kernel
    holds: nothing is bound to data or changed by a run, so one object serves any
    number of runs, data sets and chain methods.
    """

    #: never None, so that resuming from a state does not initialise again
    _sample_fn: ClassVar[bool] = True
    sample_field: ClassVar[str] = "z"  # type: ignore[assignment]

    def __init__(
        self,
        sampler: Sampler,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        event_time: str | EventTime = "interpolation",
        draw_time: float = 1.0,
        record: str = "time",
        inverse_mass_matrix: Any = None,
        center: Any = None,
        adapt_mass_matrix: bool = True,
        dense_mass: bool | list | None = None,
        init_strategy: Callable = init_to_uniform,
        forward_mode_differentiation: bool = False,
        potential_energy: bool = True,
        hard_walls: bool = False,
        max_grad: int = 1000,
    ):
        if not (model is None) ^ (potential_fn is None):
            raise ValueError("Only one of `model` or `potential_fn` must be specified.")
        for name, fn in (("model", model), ("potential_fn", potential_fn)):
            if fn is not None and not callable(fn):
                raise TypeError(f"`{name}` must be callable, got {fn!r}.")
        _require_positive("draw_time", draw_time)
        if not 0 <= sampler.refresh_rate < math.inf:
            raise ValueError(
                f"`refresh_rate` must be finite and not negative, got "
                f"{sampler.refresh_rate}; it is the rate of refreshments per unit of "
                "process time."
            )
        if not 0 <= sampler.refresh_mix < 1:
            raise ValueError(
                f"`refresh_mix` must be in [0, 1), got {sampler.refresh_mix}; 0 is "
                "full refreshment."
            )
        if sampler.refresh_law not in ("exponential", "regular"):
            raise ValueError(
                f"`refresh_law` must be 'exponential' or 'regular', got "
                f"{sampler.refresh_law!r}."
            )
        if record not in ("time", "events"):
            raise ValueError(f"`record` must be 'time' or 'events', got {record!r}.")
        if not (isinstance(max_grad, (int, np.integer)) and 0 < max_grad < 2**31):
            raise ValueError(f"`max_grad` must be a positive integer, got {max_grad}.")
        if not (dense_mass is None or isinstance(dense_mass, (bool, list))):
            raise ValueError(
                f"`dense_mass` must be a bool or a list of tuples of site names, got "
                f"{dense_mass!r}."
            )
        self._sampler = sampler
        self._model = model
        self._potential_fn = potential_fn
        self._scheme = event_time_scheme(event_time)
        self._draw_time = float(draw_time)
        self._record = record
        self._inverse_mass_matrix = inverse_mass_matrix
        self._center = center
        self._adapt_mass_matrix = adapt_mass_matrix
        self._dense_mass = dense_mass
        self._init_strategy = init_strategy
        self._forward_mode_differentiation = forward_mode_differentiation
        self._potential_energy = potential_energy
        self._hard_walls = hard_walls
        self._max_grad = max_grad

    @property
    def model(self):
        return self._model

    @property
    def default_fields(self):
        return ("z", "diverging")

    def get_diagnostics_str(self, state):
        totals, draws = state.totals, jnp.maximum(state.i, 1)
        after = state.i - state.adapt_state.num_warmup
        draws = jnp.where(after > 0, after, draws)
        violations = totals.num_violations / jnp.maximum(totals.num_proposals, 1)
        return (
            f"{totals.num_grad / draws:.1f} gradients a draw, "
            f"{100 * violations:.1f}% violations"
        )

    def __repr__(self):
        target = self._model if self._model is not None else self._potential_fn
        name = getattr(target, "__name__", repr(target))
        return f"{type(self).__name__}({name}, event_time={self._scheme})"

    # The target

    def _functions(self, model_args, model_kwargs):
        if self._potential_fn is not None:
            return ModelFunctions(self._potential_fn, identity, identity, None)
        assert self._model is not None
        return model_functions(self._model, model_args, model_kwargs)

    def postprocess_fn(self, model_args, model_kwargs):
        return self._functions(model_args, model_kwargs).postprocess_fn

    def get_constrain_fn(self, model_args, model_kwargs):
        """Constrain by transforms alone, since other blocks' sites are not known."""
        return self._functions(model_args, model_kwargs).constrain_fn

    def _gradient(self, potential_fn):
        return gradient_fn(
            potential_fn, self._forward_mode_differentiation, self._hard_walls
        )

    def _flat_potential(self, z, model_args, model_kwargs):
        """Potential of a flat vector, and the function that restores sites."""
        potential_fn = self._functions(model_args, model_kwargs).potential_fn
        unravel = ravel_pytree(z)[1]
        return lambda x: potential_fn(unravel(x)), unravel

    # Start

    def init(
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        kwargs = {} if model_kwargs is None else model_kwargs
        single = is_prng_key(rng_key)
        vmap = identity if single else jax.vmap
        keys = vmap(lambda key: tuple(random.split(key, 2)))(rng_key)
        functions = self._functions(model_args, kwargs)  # clear errors before all else
        z_energy = given_params(
            keys[1],
            functions,
            self._model,
            init_params,
            model_args,
            kwargs,
            vmap,
            self._gradient(functions.potential_fn),
        )
        new_params = partial(
            strategy_params,
            keys[1],
            self._model,
            self._init_strategy,
            self._forward_mode_differentiation,
            vmap,
        )

        def init_chains(keys, z_energy, model_args, kwargs):
            if z_energy is None:
                z_energy = new_params(model_args, kwargs)
            z, energy = z_energy
            init_state = partial(self._init_state, num_warmup=num_warmup)
            state = vmap(init_state)(keys[0], z, energy)
            one = z if single else jax.tree.map(lambda x: x[0], z)
            if num_warmup > 0 and self._descends(one):
                potential_fn, _ = self._flat_potential(one, model_args, kwargs)
                start = partial(self._start, potential_fn=potential_fn)
                state = start(state) if single else lax.map(start, state)
            return state, energy

        # Compiled as one, since dispatching the many small operations takes longer; and
        # quickly, since it runs once.
        options = None
        if not_jax_tracer(keys[0]) and jax.default_backend() == "cpu":
            options = {"xla_backend_optimization_level": 0}
        state, energy = jit_arrays(init_chains, options)(
            keys, z_energy, model_args, kwargs
        )
        if not_jax_tracer(energy) and not jnp.all(jnp.isfinite(energy)):
            # Not compiled, NumPyro explains which site is at fault.
            new_params(model_args, kwargs)
        return state

    def _init_state(self, rng_key, z, energy, num_warmup):
        sampler, scheme = self._sampler, self._scheme
        x = ravel_pytree(z)[0]
        dim, dtype = x.size, x.dtype
        rng_key, uniform = draw_uniform(rng_key, dim + 1, dtype)
        scale = initial_scale(
            z, self._inverse_mass_matrix, self._center, self._dense(dim)
        )
        tuning = scheme.tuning(sampler.event_time(dim), sampler.rate_size(dim))
        adapt_state = AdaptState(
            scale=scale,
            tuning=jax.tree.map(lambda a: a.astype(dtype), tuning),
            bounce_rate=jnp.asarray(1 / sampler.event_time(dim), dtype),
            moments=zero_moments(scale.factor, dim),
            window_ends=window_ends(num_warmup),
            num_warmup=jnp.asarray(num_warmup),
        )
        path = start_path(
            rng_key,
            scale.whiten(x),
            sampler.velocity(normal(uniform[1:])),
            sampler,
            sampler.refresh_time(uniform[0], sampler.refresh_rate),
            self._draw_time,
        )
        zero, count = jnp.zeros((), dtype), jnp.zeros((), int)
        energy = energy if self._potential_energy else jnp.nan
        return PDMPState(
            i=count,
            z=z,
            potential_energy=jnp.asarray(energy, dtype),
            num_grad=count,
            num_bounces=count,
            num_refreshments=count,
            num_proposals=count,
            num_violations=count,
            accept_prob=zero + 1,
            excess=zero,
            diverging=jnp.zeros((), bool),
            adapt_state=adapt_state,
            path=path,
            totals=path.stats,
            rng_key=rng_key,
        )

    def _dense(self, dim):
        """``dense_mass`` with its default filled in: True, False or blocks."""
        return dim <= DENSE_LIMIT if self._dense_mass is None else self._dense_mass

    # A draw

    def sample(self, state, model_args, model_kwargs):
        """Continue the path by ``draw_time`` (or to the next event) and read it off.

        :param PDMPState state: the current state, of one chain or of a batch.
        :param model_args: arguments provided to the model.
        :param model_kwargs: keyword arguments provided to the model.
        :return: the next state.
        """
        single = is_prng_key(state.rng_key)
        one = state.z if single else jax.tree.map(lambda x: x[0], state.z)
        potential_fn, unravel = self._flat_potential(one, model_args, model_kwargs)
        vmap = identity if single else jax.vmap
        # All chains are at the same draw: warm-up work is skipped for all at once.
        i = jnp.ravel(state.i)[0]
        adapt_state = state.adapt_state
        num_warmup = jnp.ravel(adapt_state.num_warmup)[0]
        ends = adapt_state.window_ends if single else adapt_state.window_ends[0]

        state = state._replace(path=state.path._replace(rng_key=state.rng_key))
        state, draw = vmap(lambda s: self._advance(s, potential_fn, unravel))(state)

        def adapt(state, draw):
            state = vmap(self._tune)(state, *draw)
            if self._adapt_mass_matrix:
                renew = vmap(lambda s: self._renew(s, ends[0] == i + 1))
                state = lax.cond(jnp.any(ends == i + 1), renew, identity, state)
            return state.adapt_state, state.path

        adapt_state, path = lax.cond(
            i < num_warmup,
            adapt,
            lambda state, _: (state.adapt_state, state.path),
            state,
            draw,
        )
        return state._replace(
            i=state.i + 1, adapt_state=adapt_state, path=path, rng_key=path.rng_key
        )

    def _advance(self, state, potential_fn, unravel):
        """The next draw; also its whitened position and the time that it took."""
        sampler, adapt_state = self._sampler, state.adapt_state
        scale = adapt_state.scale
        gradient = self._gradient(potential_fn)
        tick = make_tick(gradient, sampler, self._scheme, scale, adapt_state.tuning)
        warmup = state.i < adapt_state.num_warmup
        max_grad = jnp.where(
            warmup, min(WARMUP_MAX_GRAD, self._max_grad), self._max_grad
        )
        path = reset_stats(state.path)._replace(event=jnp.full_like(state.i, NO_EVENT))
        t_start = path.t_output

        def waits(p):
            if self._record == "events":
                return p.event == NO_EVENT
            return ~has_output(p)

        path = lax.while_loop(
            lambda p: waits(p) & (p.stats.num_grad < max_grad), tick, path
        )
        cut_off = waits(path)
        elapsed = t_start - path.t_output
        if self._record == "events":
            z = path.z
        else:
            path, z = read_output(path, sampler, self._draw_time)
        x, stats = scale.position(z), path.stats
        energy = potential_fn(x) if self._potential_energy else jnp.nan
        outside = ~jnp.isfinite(energy) & self._potential_energy
        first = state.i == adapt_state.num_warmup
        totals = jax.tree.map(
            lambda old, new: jnp.where(first, new, old + new), state.totals, stats
        )
        proposals = jnp.maximum(stats.num_proposals, 1)
        state = state._replace(
            z=unravel(x),
            potential_energy=jnp.asarray(energy, x.dtype),
            num_grad=stats.num_grad,
            num_bounces=stats.num_bounces,
            num_refreshments=stats.num_refreshments,
            num_proposals=stats.num_proposals,
            num_violations=stats.num_violations,
            accept_prob=jnp.where(
                stats.num_proposals > 0, stats.sum_ratio / proposals, 1
            ),
            excess=stats.sum_excess / jnp.maximum(stats.num_violations, 1),
            diverging=(stats.num_nonfinite > 0) | cut_off | outside,
            path=path,
            totals=totals,
        )
        return state, (z, elapsed)

    # Warm-up

    def _descends(self, z):
        """Whether warm-up begins with a descent: it needs a Hessian."""
        dim = ravel_pytree(z)[0].size
        given = self._inverse_mass_matrix is not None or self._center is not None
        return self._adapt_mass_matrix and not given and dim <= DENSE_LIMIT

    def _start(self, state, potential_fn):
        path, adapt_state = state.path, state.adapt_state
        x, factor = find_start(
            potential_fn,
            ravel_pytree(state.z)[0],
            adapt_state.scale.factor,
            mass_mask(state.z, self._dense(path.z.size)),
            self._gradient(potential_fn),
        )
        scale = Scale(x, factor)
        path = restart_path(path, jnp.zeros_like(x))  # the start is the centre
        return state._replace(path=path, adapt_state=adapt_state._replace(scale=scale))

    def _tune(self, state, z, elapsed):
        adapt_state, path = state.adapt_state, state.path
        tuning, bounce_rate = tune_envelope(
            self._sampler,
            self._scheme,
            adapt_state.tuning,
            adapt_state.bounce_rate,
            path.stats,
            elapsed,
            path.z.size,
        )
        moments = adapt_state.moments
        if self._adapt_mass_matrix:
            moments = update_moments(moments, z)
        return state._replace(
            adapt_state=adapt_state._replace(
                tuning=tuning, bounce_rate=bounce_rate, moments=moments
            )
        )

    def _renew(self, state, forget):
        """New coordinates at the end of a window, or only an end to the first."""
        adapt_state, path = state.adapt_state, state.path
        old = adapt_state.scale
        mask = mass_mask(state.z, self._dense(path.z.size))
        new = renew_scale(old, adapt_state.moments, mask)
        new = jax.tree.map(lambda a, b: jnp.where(forget, a, b), old, new)
        path = restart_path(path, new.whiten(old.position(path.z)))
        adapt_state = adapt_state._replace(
            scale=new, moments=zero_moments(old.factor, path.z.size)
        )
        return state._replace(adapt_state=adapt_state, path=path)

    # As a block of a composite kernel

    def refresh(self, state, model_args, model_kwargs):
        """Forget what is known of the rates: the conditioning has changed."""
        potential_fn, _ = self._flat_potential(state.z, model_args, model_kwargs)
        path = continue_from_output(state.path, self._sampler, self._draw_time)
        energy = potential_fn(ravel_pytree(state.z)[0])
        energy = energy if self._potential_energy else jnp.nan
        energy = jnp.asarray(energy, state.potential_energy.dtype)
        return state._replace(path=path, potential_energy=energy)

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


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {value}.")
