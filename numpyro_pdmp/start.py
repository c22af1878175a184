# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""How a kernel's chains start: everything that ``init`` does."""

import copy
from functools import partial
import math
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.util import find_stack_level, identity, is_prng_key, not_jax_tracer
from numpyro_pdmp.control_variates import check_control, control_variate, of_order
from numpyro_pdmp.descent import (
    find_start,
    find_start_large,
    merge_modes,
    typical_start,
)
from numpyro_pdmp.find_map import MAP
from numpyro_pdmp.importance import RUNS, plan_batches
from numpyro_pdmp.initialize import (
    checked_energy,
    given_params,
    jit_arrays,
    no_collection,
    strategy_params,
    uniform_params,
    uniform_radius,
)
from numpyro_pdmp.metric import initial_scale
from numpyro_pdmp.moments import MAX_ROWS, AnyScale, zero_moments
from numpyro_pdmp.process.ahead import empty_queue
from numpyro_pdmp.process.batches import (
    start_batches,
)
from numpyro_pdmp.process.events import Tuning
from numpyro_pdmp.process.path import start_path
from numpyro_pdmp.process.randomness import Recipe, normal
from numpyro_pdmp.process.scale import LowRankScale
from numpyro_pdmp.process.sticky import start_stuck
from numpyro_pdmp.reference import laplace_reference, reference_scale
from numpyro_pdmp.shards import check_copies
from numpyro_pdmp.state import Energy, PDMPState
from numpyro_pdmp.subsample import SMALL_MODEL, as_jax_rows, is_small
from numpyro_pdmp.target import find_start_subsampled
from numpyro_pdmp.warmup import (
    DENSE_LIMIT,
    AdaptState,
    window_ends,
)

#: for programs that run once: without optimisation, and with the emitter that XLA is
#: about to give up, which needs a third of the time
FAST_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}

EVENT_BATCH = (
    "`batch='event'` keeps a mini-batch until the next event, as in the paper's code. "
    "The draws are not from the posterior: on the mean of a Gaussian without control "
    "variates the variance of BPS is 1.45 sqrt(N/m) times too large, for N rows in "
    "batches of m. Use `batch='proposal'`."
)


def first_chain(tree):
    """The first chain's part of a batch of states."""
    return jax.tree.map(lambda a: a[0], tree)


def _leaves_out(scale):
    """Whether a metric has less than all of the curvature."""
    return isinstance(scale, LowRankScale) or scale.factor.ndim < 2


class StartMixin:
    """The start of a kernel's chains, kept apart from it."""

    _reference: Any
    if TYPE_CHECKING:  # the options are the kernel's

        def __getattr__(self, name: str) -> Any: ...

    def init(
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        kwargs = {} if model_kwargs is None else model_kwargs
        if isinstance(self._reference, MAP):
            kernel = self._around_mode(model_args, kwargs)
            return kernel.init(rng_key, num_warmup, init_params, model_args, kwargs)
        prepare = partial(self._prepare, model_args=model_args, model_kwargs=kwargs)
        single = is_prng_key(rng_key)
        vmap = identity if single else jax.vmap
        functions = self._functions(model_args, kwargs)  # clear errors before all else
        if functions.subsampled is not None:
            plates = functions.subsampled.plates
            model_args, kwargs = as_jax_rows((model_args, kwargs), plates)
            if self._batch == "event":
                warnings.warn(EVENT_BATCH, stacklevel=find_stack_level())
        if functions.shapes is not None:
            self._kappa(functions.subsampled, functions.shapes, model_args, kwargs)
        z_energy = given_params(
            rng_key,
            functions,
            self._model,
            init_params,
            model_args,
            kwargs,
            self._start_evaluation(functions, model_args, kwargs, vmap),
        )

        def start_key(rng_key):  # of NumPyro's own search
            return vmap(partial(random.fold_in, data=1))(rng_key)

        def search(key, model_args, kwargs):
            return strategy_params(
                key,
                functions.model,
                self._init_strategy,
                self._forward_mode_differentiation,
                vmap,
                model_args,
                kwargs,
            )

        sites = functions.shapes
        if z_energy is not None:
            sites = z_energy[0] if single else first_chain(z_energy[0])
        leaves = [
            jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in jax.tree.leaves(sites)
        ]
        dim = sum(math.prod(leaf.shape) for leaf in leaves)
        dtype = jnp.result_type(*(leaf.dtype for leaf in leaves))
        source = self._target(functions, identity, None).source
        concrete = not_jax_tracer(rng_key)

        def init_chains(model_args, kwargs, rng_key, z_energy, guess):
            functions = self._functions(model_args, kwargs)
            # One run of the generator for all, since each takes a while to compile.
            num_words = 0 if source is None else 2 * source.num_words
            recipe = Recipe(3 * dim + 1, dtype, num_words)
            key, uniform, words = vmap(recipe.numbers)(rng_key)
            if z_energy is None:
                new_params = partial(search, start_key(rng_key))
                first = None
                if guess is not None:
                    place = partial(uniform_params, functions, guess)
                    first = vmap(place)(uniform[..., :dim])
                z_energy = self._first_params(
                    functions, first, concrete, new_params, vmap, model_args, kwargs
                )
            if source is not None:
                words = words.reshape(*words.shape[:-1], 2, source.num_words)
            random_numbers = uniform[..., dim:], words
            z, energy = z_energy
            if init_params is None and self._reference is not None:
                z, energy = self._reference_start(z, vmap, model_args, kwargs)
            init_state = partial(self._init_state, source, num_warmup)
            state = vmap(init_state)(key, random_numbers, z, energy)
            ahead = 0 if single else self._max_ahead(dim)
            if ahead:
                queue = vmap(partial(empty_queue, capacity=ahead))(state.path)
                state = state._replace(queue=queue)
            shared = not single and self._cross_chain_adapt
            one = z if single else first_chain(z)
            choice, same = None, None
            if functions.subsampled is not None:
                if functions.subsampled.shards is not None:
                    same = functions.subsampled.check_shards(one)
                state, choice = self._start_subsampled(
                    state, functions, single, num_warmup
                )
            elif self._descends(one, num_warmup):
                unravel = ravel_pytree(one)[1]
                potential_fn = self._target(functions, unravel, None).energy
                start = partial(self._start, potential_fn=potential_fn)
                if single:
                    state = start(state)[0]
                else:
                    state = self._start_all(start, state, shared)
            elif shared:
                state = state._replace(adapt_state=first_chain(state.adapt_state))
            return state, energy, choice, same

        # Compiled as one, since dispatching the many small operations takes longer; and
        # quickly, since it runs once; but not so that a network would take minutes.
        options, small = None, dim <= SMALL_MODEL
        if concrete and small and jax.default_backend() == "cpu":
            options = FAST_TO_COMPILE

        def meanwhile(shapes):
            state, *_, choice, _ = shapes
            if choice is None:  # else it decides what the state consists of
                prepare(state)

        guess = uniform_radius(self._init_strategy) if sites is not None else None
        for radius in (guess, None) if z_energy is None else (None,):
            compiled = jit_arrays(
                partial(init_chains, guess=radius),
                model_args,
                kwargs,
                compiler_options=options,
                meanwhile=meanwhile if concrete else None,
            )
            with no_collection():
                state, energy, choice, same = compiled(rng_key, z_energy)
            if radius is None or not concrete or np.all(np.isfinite(energy)):
                break  # else the first guess is not valid: search, as NumPyro does
        if concrete and same is not None:
            check_copies(float(same[0]), float(same[1]), functions.subsampled)
        if concrete and choice is not None:
            adapt_state = state.adapt_state
            check_control(adapt_state.control)
            control = of_order(adapt_state.control, int(choice[0]))
            importance = (None, adapt_state.importance, RUNS)[int(choice[1])]
            adapt_state = adapt_state._replace(control=control, importance=importance)
            state = state._replace(adapt_state=adapt_state)
        if concrete and not np.all(np.isfinite(energy)):
            if self._reference is not None:
                raise ValueError(
                    f"`reference`: the potential energy at its centre is {energy}; "
                    "start elsewhere with `init_params`, or give another reference."
                )
            # Not compiled, NumPyro explains which site is at fault.
            search(start_key(rng_key), model_args, kwargs)
        return self._with_energy(state, model_args, kwargs)

    def _around_mode(self, model_args, model_kwargs):
        """This kernel with the Gaussian at its mode in place of the mode alone."""
        if self._model is None:
            raise ValueError(
                "`reference` is a result of `find_map`, whose curvature takes a "
                "`model`, and this kernel has a `potential_fn`; give a `Scale`."
            )
        kernel = copy.copy(self)
        with jax.ensure_compile_time_eval():  # even if chains are mapped over
            kernel._reference = laplace_reference(
                self._model,
                self._reference,
                *model_args,
                kind="auto" if self._sticky is None else "diagonal",
                **model_kwargs,
            )
        return kernel

    def _start_evaluation(self, functions, model_args, kwargs, vmap):
        """From sites to energy and gradient, of all chains."""

        def evaluate(functions, z):
            fn = functions.potential_fn
            return vmap(fn)(z), vmap(self._gradient(fn))(z)

        sharded = functions.subsampled is not None and functions.subsampled.sharded
        if functions.shapes is None or is_small(functions.shapes) and not sharded:
            return partial(evaluate, functions)

        # A network has too many operations to compile them one by one, and JAX
        # differentiates what is on many devices only in compiled programs.
        def compiled(model_args, kwargs, z):
            return evaluate(self._functions(model_args, kwargs), z)

        return jit_arrays(compiled, model_args, kwargs)

    def _first_params(
        self, functions, first, concrete, new_params, vmap, model_args, kwargs
    ):
        """The first guess, whose energy is NaN if it is not valid; or a search."""
        if first is None:
            return new_params(model_args, kwargs)
        fn = functions.potential_fn
        energy = vmap(partial(checked_energy, fn, self._gradient(fn)))(first)
        if concrete:  # then it can be looked at
            return first, energy

        def choose(energy, first, searched):
            valid = jnp.isfinite(energy)
            return jax.tree.map(lambda a, b: jnp.where(valid, a, b), first, searched)

        return vmap(choose)(energy, (first, energy), new_params(model_args, kwargs))

    def _reference_start(self, z, vmap, model_args, kwargs):
        """All chains at the centre of the reference."""
        potential_fn = self._functions(model_args, kwargs).potential_fn

        def at_center(z):
            return ravel_pytree(z)[1](reference_scale(self._reference, z).center)

        z = vmap(at_center)(z)
        return z, vmap(potential_fn)(z)

    def _init_state(self, source, num_warmup, rng_key, random_numbers, z, energy):
        uniform, words = random_numbers
        sampler, scheme = self._sampler, self._scheme
        x = ravel_pytree(z)[0]
        dim, dtype = x.size, x.dtype
        scale = self._initial_scale(z)
        tuning = scheme.tuning(sampler.event_time(dim), sampler.rate_size(dim))
        ends = window_ends(num_warmup)
        rows = 0
        if isinstance(scale, LowRankScale):
            rows = min(MAX_ROWS, max(int(np.diff(ends).max()), 1))
        adapt_state = AdaptState(
            scale=scale,
            tuning=jax.tree.map(lambda a: a.astype(dtype), tuning),
            refresh_rate=jnp.asarray(sampler.refresh_rate, dtype),
            draw_time=jnp.asarray(self._draw_time, dtype),
            bounce_rate=jnp.asarray(1 / sampler.event_time(dim), dtype),
            moments=zero_moments(scale, rows, self._sticky is not None),
            averages=jnp.zeros(3, dtype),
            expected=jnp.zeros((), dtype),
            control=None,
            importance=None,
            window_ends=jnp.asarray(ends, int),
            num_warmup=jnp.asarray(num_warmup),
        )
        hold = self._batch == "event"
        path = start_path(
            rng_key,
            scale.whiten(x),
            sampler.velocity(normal(uniform[1 : dim + 1])),
            sampler,
            sampler.refresh_time(uniform[0], sampler.refresh_rate),
            self._draw_time,
            None if source is None else start_batches(source, words, hold),
            scheme,
            None if self._sticky is None else start_stuck(x),
        )
        return PDMPState(
            i=jnp.zeros((), int),
            z=z,
            diverging=jnp.zeros((), bool),
            energy=Energy(
                jnp.asarray(energy, dtype) if self._potential_energy else None
            ),
            stats=path.stats,
            adapt_state=adapt_state,
            path=path,
            whitened=normal(uniform[dim + 1 :]),  # until the first draw: noise
            totals=path.stats,
            queue=None,
            walls=jnp.zeros((), bool),
            rng_key=rng_key,
        )

    def _initial_scale(self, z):
        dense = self._dense(ravel_pytree(z)[0].size)
        if self._reference is not None:
            scale = reference_scale(self._reference, z)
            dense = isinstance(scale, LowRankScale) or scale.factor.ndim == 2
            if self._sticky is not None and dense:
                raise ValueError(
                    "`sticky` needs a diagonal metric, and `reference` has a dense or "
                    "low-rank one: give `Scale(center, factor)` with a vector as its "
                    "factor, or a guide such as AutoNormal."
                )
            return scale
        scale = initial_scale(z, self._inverse_mass_matrix, self._center, dense)
        if self._low_rank is None:
            return scale
        dim, dtype = scale.center.size, scale.center.dtype
        rank = min(self._low_rank, dim)
        vectors, stretch = jnp.zeros((dim, rank), dtype), jnp.ones(rank, dtype)
        return LowRankScale(scale.center, scale.factor, vectors, stretch)

    def _placed(self, state, z):
        """The state of a chain with whitened position ``z``."""
        raise NotImplementedError

    def _descends(self, z, num_warmup):
        """Whether warm-up begins with a descent."""
        options = (self._reference, self._inverse_mass_matrix, self._center)
        given = any(option is not None for option in options)
        # In many dimensions it is by reverse mode.
        small = ravel_pytree(z)[0].size <= DENSE_LIMIT
        possible = small or not self._forward_mode_differentiation
        adapts = num_warmup > 0 and self._adapt_mass_matrix
        return adapts and not given and possible

    def _start(self, state, potential_fn, num_chains=1):
        """Begin near a mode, with the curvature there as the first metric."""
        gaussian: AnyScale
        x, old = ravel_pytree(state.z)[0], state.adapt_state.scale
        if x.size <= DENSE_LIMIT:
            gradient = self._gradient(potential_fn)
            mask = self._mask(state.z)
            scale, gaussian, log_mass = find_start(
                potential_fn, x, old, mask, gradient, num_chains
            )
        else:
            scale, log_mass = find_start_large(potential_fn, x, old)
            gaussian = scale
        start = typical_start(potential_fn, gaussian, state.whitened)
        z = scale.whiten(start)
        adapt_state = state.adapt_state._replace(scale=scale)
        if _leaves_out(scale):
            gradient = scale.gradient(self._gradient(potential_fn)(start))
            adapt_state = self._with_rates(adapt_state, z, gradient)
        state = self._placed(state, z)
        return state._replace(adapt_state=adapt_state), (log_mass, start)

    def _with_rates(self, adapt_state, z, gradient):
        """With an envelope for rates as large as they are here, if that is larger.

        What curvature the metric leaves out makes rates large and paths short-lived,
        and a first envelope that does not know of it lets them run to where they
        should not be: on a Gaussian of condition 10^4 with a diagonal metric, the
        first five draws of Boomerang lost a quarter of the radius, which took hundreds
        to come back.
        """
        sampler, scheme = self._sampler, self._scheme
        expected = sampler.rate_size(z.size) * sampler.num_rates(z.size) ** 0.5
        size = jnp.linalg.norm(sampler.energy_gradient(z, gradient))
        times = jnp.maximum(1, jnp.nan_to_num(size / expected, nan=1, posinf=1))
        window, offset = adapt_state.tuning
        tuning = Tuning(
            window / times if scheme.tunes_window else window,
            offset * times if scheme.tunes_offset else offset,
        )
        return adapt_state._replace(
            tuning=tuning, bounce_rate=adapt_state.bounce_rate * times
        )

    def _start_subsampled(self, state, functions, single, num_warmup):
        """Start, metric, control variate and first envelope of a subsampled model.

        :return: the state, and what is best: the order of control variates, and the
            kind of rows.
        """
        chain = state if single else first_chain(state)
        x, unravel = ravel_pytree(chain.z)
        scale, control = chain.adapt_state.scale, None
        order, auto = self._control_variates, self._control_variates == "auto"
        fixed = (self._reference, self._center)
        given = any(option is not None for option in fixed)
        descends = self._descends(chain.z, num_warmup) and x.size <= DENSE_LIMIT
        if descends:
            mask = self._mask(chain.z)
            scale, gaussian, control = find_start_subsampled(
                functions, unravel, x, scale, mask
            )
        elif order is not None and (given or not auto):
            if not given:
                raise ValueError(
                    f"`control_variates={order}` needs a point to expand around: give "
                    "`reference` or `center` (see `find_map`), or leave the mode to "
                    "the kernel: up to 256 dimensions, no metric given."
                )
            num = 1 if auto else int(order)
            control = control_variate(functions.subsampled, scale.center, num)
        most = 0 if control is None else 1 + (control.hessian_full is not None)
        orders = tuple(range(most + 1)) if auto else (order or 0,)
        control = of_order(control, orders[-1])
        # A batch that is held has to be of one kind, known beforehand.
        held = self._batch == "event" and self._batching == "auto"
        batching = "without_replacement" if held else self._batching
        plan = plan_batches(functions.subsampled, scale, control, orders, batching)
        adapt_state = self._with_noise(chain, plan)._replace(
            scale=scale, control=control, importance=plan.importance
        )

        def start(state):
            def pilot(x):
                return functions.potential_fn(unravel(x))

            x = typical_start(pilot, gaussian, state.whitened)
            return self._placed(state, scale.whiten(x))

        if descends:  # else the scale is the one that the path is in already
            state = start(state) if single else lax.map(start, state)
        if not single and not self._cross_chain_adapt:
            num = state.i.size
            adapt_state = jax.tree.map(
                lambda a: jnp.broadcast_to(a, (num, *a.shape)), adapt_state
            )
        return state._replace(adapt_state=adapt_state), (plan.order, plan.kind)

    def _with_noise(self, chain, plan):
        """With an envelope above most of the noise, for warm-up to refine."""
        noise, adapt_state = jnp.nan_to_num(plan.near, posinf=0), chain.adapt_state
        if not self._scheme.tunes_offset:
            return adapt_state
        tuning = adapt_state.tuning
        # One rate takes all of the noise, or each coordinate's its share.
        noise = self._scheme.offset_per_noise * noise / chain.path.rate.size**0.5
        offset = jnp.maximum(tuning.offset, noise)
        tuning = tuning._replace(offset=offset.astype(tuning.offset.dtype))
        return adapt_state._replace(tuning=tuning)

    def _start_all(self, start, state, shared):
        """Begin near modes, in coordinates for all if chains share those."""
        # One after the other: XLA's CPU thread pool can deadlock on large batches of
        # the factorisations that some models contain.
        num_chains = state.i.size if shared else 1
        start = partial(start, num_chains=num_chains)
        state, (log_mass, starts) = lax.map(start, state)
        if not shared:
            return state
        scale, starts = merge_modes(state.adapt_state.scale, log_mass, starts)
        adapt_state = first_chain(state.adapt_state)._replace(scale=scale)
        if _leaves_out(scale):
            of_chains = state.adapt_state
            adapt_state = adapt_state._replace(
                tuning=jax.tree.map(jnp.mean, of_chains.tuning),
                bounce_rate=jnp.mean(of_chains.bounce_rate),
            )
        state = jax.vmap(self._placed)(
            state._replace(adapt_state=None), jax.vmap(scale.whiten)(starts)
        )
        return state._replace(adapt_state=adapt_state)
