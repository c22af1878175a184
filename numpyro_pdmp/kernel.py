# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The NumPyro face of the PDMP samplers: one base class for all of them."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.infer import init_to_uniform
from numpyro.util import is_prng_key
from numpyro_pdmp.control_variates import control_variate
from numpyro_pdmp.energies import EnergyMixin
from numpyro_pdmp.model_kernel import ModelKernel
from numpyro_pdmp.options import (
    check_metric,
    check_refreshment,
    check_simulation,
    check_subsampling,
    check_target,
    require_positive,
)
from numpyro_pdmp.prepared import Prepared
from numpyro_pdmp.process.ahead import take_first, tick_ahead
from numpyro_pdmp.process.events import EventTime, event_time_scheme
from numpyro_pdmp.process.loop import (
    make_tick,
)
from numpyro_pdmp.process.packing import Packing
from numpyro_pdmp.process.path import (
    NO_EVENT,
    continue_from_output,
    has_output,
    read_output,
    reset_stats,
    restart_path,
)
from numpyro_pdmp.process.pieces import in_pieces
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.spike_slab import check_sticky
from numpyro_pdmp.start import first_chain
from numpyro_pdmp.state import Energy
from numpyro_pdmp.warmup import (
    draw_moments,
    renew,
    stretch_sums,
    tune,
)

#: how many draws a vectorised chain may be ahead, of how many dimensions
AHEAD, AHEAD_LIMIT = 8, 1024
#: bound on the gradients of one draw while the scale may still be wrong
WARMUP_MAX_GRAD = 100


class PDMPKernel(EnergyMixin, ModelKernel):
    """Base of the kernels; a subclass says which process it simulates.

    See :class:`~numpyro_pdmp.Boomerang` for the arguments. Options are all a kernel
    holds: nothing is bound to data or changed by a run, so one object serves any
    number of runs, data sets and chain methods.
    """

    #: the process that a subclass simulates
    process: ClassVar[type[Sampler]] = Sampler
    #: what goes wrong without refreshment; None if nothing does
    needs_refreshment: ClassVar[str | None] = None
    #: process time between draws to begin with
    first_draw_time: ClassVar[float] = 1.0
    #: whether moments are integrals along the path rather than sums over draws
    exact_moments: ClassVar[bool] = False

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        refresh_rate: float | str = "auto",
        refresh_mix: float = 0.0,
        refresh_law: str | None = None,
        event_time: str | EventTime = "interpolation",
        target_violation: float | None = None,
        draw_time: float | str = "auto",
        record: str = "time",
        reference: Any = None,
        inverse_mass_matrix: Any = None,
        center: Any = None,
        adapt_mass_matrix: bool | None = None,
        dense_mass: bool | list | None = None,
        low_rank: int | None = None,
        cross_chain_adapt: bool = True,
        init_strategy: Callable = init_to_uniform,
        forward_mode_differentiation: bool = False,
        potential_energy: bool | None = None,
        hard_walls: bool = False,
        max_grad: int = 1000,
        batch: str = "proposal",
        batching: str = "auto",
        control_variates: int | str | None = "auto",
        recenter: bool = False,
        run_ahead: bool = True,
        sticky: dict[str, Any] | None = None,
        **process_options: Any,
    ):
        check_target(model, potential_fn)
        options = {"refresh_mix": refresh_mix, **process_options}
        if refresh_rate != "auto":
            options["refresh_rate"] = refresh_rate
        if refresh_law is not None:
            options["refresh_law"] = refresh_law
        try:
            self._sampler = self.process(**options)
        except TypeError as error:
            known = {field.name for field in fields(self.process)}
            unknown = ", ".join(f"`{k}`" for k in process_options if k not in known)
            raise TypeError(
                f"{type(self).__name__} got unknown arguments: {unknown}."
            ) from error
        check_refreshment(self._sampler, self.needs_refreshment)
        check_metric(dense_mass, low_rank, reference, inverse_mass_matrix, center)
        check_simulation(record, max_grad, target_violation)
        check_subsampling(batch, batching, control_variates)
        if draw_time != "auto":
            require_positive("draw_time", draw_time)
        if target_violation is None:
            target_violation = self._sampler.target_violation
        self._model = model
        self._potential_fn = potential_fn
        if batch == "euler" and event_time == "interpolation":
            event_time = "euler"
        self._scheme = event_time_scheme(event_time)
        if sticky is not None:
            check_sticky(
                sticky,
                model,
                self._scheme,
                dense_mass=dense_mass,
                low_rank=low_rank,
                inverse_mass_matrix=inverse_mass_matrix,
            )
            dense_mass = None if reference is not None else False
        self._sticky = sticky
        self._target_violation = target_violation
        self._tunes_draw_time = draw_time == "auto" and record == "time"
        self._draw_time = float(
            self.first_draw_time if draw_time == "auto" else draw_time
        )
        self._record = record
        self._reference = reference
        self._inverse_mass_matrix = inverse_mass_matrix
        self._center = center
        # A reference is what the user wants: it is kept unless asked otherwise.
        given = reference is not None
        self._adapt_mass_matrix = (
            not given if adapt_mass_matrix is None else adapt_mass_matrix
        )
        self._dense_mass = dense_mass
        self._low_rank = low_rank
        self._cross_chain_adapt = cross_chain_adapt
        self._init_strategy = init_strategy
        self._forward_mode_differentiation = forward_mode_differentiation
        self._potential_energy = potential_energy
        self._hard_walls = hard_walls
        self._max_grad = max_grad
        self._batch = batch
        self._batching = batching
        self._control_variates = control_variates
        self._recenter = recenter
        self._run_ahead = run_ahead
        self._prepared = Prepared()

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

    def _max_ahead(self, dim):
        """How many draws vectorised chains of that dimension may be ahead."""
        simple = self._record == "time" and self._sticky is None
        return AHEAD if self._run_ahead and simple and dim <= AHEAD_LIMIT else 0

    # A draw

    def sample(self, state, model_args, model_kwargs):
        """Continue the path by ``draw_time`` (or to the next event) and read it off.

        :param PDMPState state: the current state, of one chain or of a batch.
        :param model_args: arguments provided to the model.
        :param model_kwargs: keyword arguments provided to the model.
        :return: the next state.
        """
        draw = self._prepared.take(self._model, model_args, model_kwargs)
        if draw is None:
            return self._draw(state, model_args, model_kwargs)
        return self._with_energy(draw(state), model_args, model_kwargs)

    def _prepare(self, state, model_args, model_kwargs):
        draw = partial(self._draw, model_args=model_args, model_kwargs=model_kwargs)
        self._prepared.put(draw, state, self._model, model_args, model_kwargs)

    def _draw(self, state, model_args, model_kwargs):
        single = is_prng_key(state.rng_key)
        one = state.z if single else first_chain(state.z)
        functions = self._functions(model_args, model_kwargs)
        unravel = ravel_pytree(one)[1]
        kappa = self._kappa(functions.subsampled, one, model_args, model_kwargs)
        last, adapt_state = state.whitened, state.adapt_state
        state = state._replace(
            path=state.path._replace(rng_key=state.rng_key), adapt_state=None
        )
        context: dict[str, Any] = {
            "functions": functions,
            "unravel": unravel,
            "kappa": kappa,
        }
        if state.queue is not None:
            state, draw = self._advance_all(state, adapt_state, context)
        else:
            advance: Any = partial(self._advance, **context, alone=single)
            if not single:
                advance = jax.vmap(advance, in_axes=(0, self._adapt_axis))
            state, draw = advance(state, adapt_state)
        # Not through the branches of warm-up, which might copy what is large.
        importance = adapt_state.importance
        adapt_state = adapt_state._replace(importance=None)
        adapt_state, path = self._adapt(
            state, adapt_state, draw, last, single, functions.subsampled
        )
        adapt_state = adapt_state._replace(importance=importance)
        state = state._replace(
            i=state.i + 1, adapt_state=adapt_state, path=path, rng_key=path.rng_key
        )
        state = self._with_energy(state, model_args, model_kwargs)
        if state.energy.of is not None:
            outside = self._outside(state)
            state = state._replace(
                diverging=state.diverging | outside, walls=state.walls | outside
            )
        return state

    @property
    def _adapt_axis(self):
        """Of the adaptation of vectorised chains, under ``vmap``."""
        return None if self._cross_chain_adapt else 0

    def _parts(self, adapt_state, functions, unravel, kappa):
        """Process, target and loop's body, as tuned so far."""
        sampler = self._sampler.tuned(adapt_state.bounce_rate)
        target = self._target(
            functions, unravel, adapt_state.control, adapt_state.importance
        )
        tick = make_tick(
            target.gradient,
            sampler,
            self._scheme,
            adapt_state.scale,
            adapt_state.tuning,
            adapt_state.refresh_rate,
            target.source,
            kappa,
        )
        return sampler, target, tick

    def _bound(self, warmup):
        """On the gradients of a draw."""
        # If nothing is tuned, warm-up has no cheaper draws to wait for.
        if self._adapt_mass_matrix or self._scheme.tunes_window:
            cheap = min(WARMUP_MAX_GRAD, self._max_grad)
            return jnp.where(warmup, cheap, self._max_grad)
        return self._max_grad

    def _zero_sums(self, path):
        """Of the integrals that exact moments are made of."""
        return jnp.zeros((3, path.z.size), path.z.dtype) if self.exact_moments else None

    def _advance(self, state, adapt_state, functions, unravel, kappa, alone):
        """The next draw, and what it tells warm-up."""
        sampler, target, tick = self._parts(adapt_state, functions, unravel, kappa)
        max_grad = self._bound(state.i < adapt_state.num_warmup)
        path = reset_stats(state.path)._replace(event=jnp.full_like(state.i, NO_EVENT))
        t_start = path.t_output

        def waits(p):
            if self._record == "events":
                return p.event == NO_EVENT
            return ~has_output(p)

        def unfinished(path):
            return waits(path) & (path.stats.num_grad < max_grad)

        def body(packed):
            path, sums = packing.unpack(packed)
            path = tick(path)
            sums = None if sums is None else sums + stretch_sums(path)
            return packing.pack((path, sums))

        start = path, self._zero_sums(path)
        packing = Packing(start, wanted=alone)
        packed = lax.while_loop(
            lambda packed: unfinished(packing.unpack(packed)[0]),
            in_pieces(body),
            in_pieces(packing.pack)(start),
        )
        path, sums = packing.unpack(packed)
        path = path._replace(stats=path.stats.with_cut_off(waits(path)))
        elapsed = t_start - path.t_output
        if self._record == "events":
            z = path.z
        else:
            path, z = read_output(path, sampler, adapt_state.draw_time)
        frozen = None
        if path.stuck is not None:
            events = self._record == "events"
            frozen = path.stuck.frozen if events else path.stuck.frozen_from
        state = self._recorded(
            state._replace(path=path),
            adapt_state,
            z,
            path.stats,
            frozen,
            target,
            unravel,
            kappa,
        )
        return state, draw_moments(z, sums, elapsed, path.stats, frozen)

    def _advance_all(self, state, adapt_state, context):
        """The next draw of all chains, of which the fast ones run ahead."""
        axis = self._adapt_axis
        number = state.i[0]  # all chains are at the same draw

        def one(path, queue, elapsed, sums, adapt_state):
            sampler, _, tick = self._parts(adapt_state, **context)
            # What warm-up learns of a draw is to serve the next one.
            warmup = number < adapt_state.num_warmup
            path, queue, ticks, time = tick_ahead(
                tick,
                sampler,
                adapt_state.draw_time,
                self._bound(warmup),
                jnp.where(warmup, 1, len(queue.z)),
                number,
                path,
                queue,
            )
            if sums is not None:
                sums = sums + jnp.where(ticks, stretch_sums(path), 0)
            return path, queue, elapsed + time, sums

        def finish(path, queue, elapsed, sums, state, adapt_state):
            queue, z, stats = take_first(queue, number)
            state = state._replace(path=path, queue=queue)
            _, target, _ = self._parts(adapt_state, **context)
            state = self._recorded(
                state,
                adapt_state,
                z,
                stats,
                None,
                target,
                context["unravel"],
                context["kappa"],
            )
            return state, draw_moments(z, sums, elapsed, stats)

        elapsed = jnp.zeros_like(state.path.t_output)
        sums = jax.vmap(self._zero_sums)(state.path)
        start = state.path, state.queue, elapsed, sums
        packing = Packing(start)

        def all_tick(packed, adapt_state):
            all_of_it: Any = jax.vmap(one, in_axes=(0, 0, 0, 0, axis))
            return packing.pack(all_of_it(*packing.unpack(packed), adapt_state))

        def all_finish(packed, state, adapt_state):
            all_of_it: Any = jax.vmap(finish, in_axes=(0, 0, 0, 0, 0, axis))
            return all_of_it(*packing.unpack(packed), state, adapt_state)

        body = in_pieces(all_tick)
        packed = lax.while_loop(
            lambda packed: jnp.any(packing.unpack(packed)[1].num == 0),
            lambda packed: body(packed, adapt_state),
            in_pieces(packing.pack)(start),
        )
        state = state._replace(path=None, queue=None)
        return in_pieces(all_finish)(packed, state, adapt_state)

    def _recorded(
        self,
        state,
        adapt_state,
        z,
        stats,
        frozen,
        target,
        unravel,
        kappa,
    ):
        """The state with a draw at whitened ``z``."""
        x = adapt_state.scale.position(z)
        if frozen is not None:
            x = jnp.where(frozen, 0, x)
        diverging = stats.num_nonfinite + stats.num_cut_off > 0
        energy = None
        if self._potential_energy:
            energy = self._draw_energy(target, state.path, kappa, x)
            diverging = diverging | ~jnp.isfinite(energy)
        first = state.i == adapt_state.num_warmup
        totals = jax.tree.map(
            lambda old, new: jnp.where(first, new, old + new), state.totals, stats
        )
        return state._replace(
            z=unravel(x),
            diverging=diverging,
            energy=Energy(energy),
            stats=stats,
            whitened=z if frozen is None else jnp.where(frozen, 0, z),
            totals=totals,
        )

    # Warm-up

    def _placed(self, state, z):
        return state._replace(path=restart_path(state.path, z))

    def _adapt(self, state, adapt_state, draw, last, single, subsampled):
        """What warm-up changes after a draw: the adaptation, and the path with it."""
        # All chains are at the same draw: warm-up work is skipped for all at once.
        i = jnp.ravel(state.i)[0]
        path, shared = state.path, not single and self._cross_chain_adapt
        one = adapt_state if single or shared else first_chain(adapt_state)
        num_warmup, ends = one.num_warmup, one.window_ends
        renews = self._adapt_mass_matrix or self._tunes_draw_time
        tuned = self._for_groups(
            partial(
                tune,
                i=i,
                sampler=self._sampler,
                scheme=self._scheme,
                target_violation=self._target_violation,
                moments=renews,
                noisy=path.batches is not None,
            ),
            single,
        )
        adapt_state = lax.cond(
            i < num_warmup, in_pieces(tuned), lambda s, *_: s, adapt_state, draw, last
        )
        if not renews:
            return adapt_state, path

        def renewed(old, path):
            new = self._for_groups(
                partial(
                    renew,
                    i=i,
                    base_draw_time=self._draw_time,
                    adapt_scale=self._adapt_mass_matrix,
                    adapt_draw_time=self._tunes_draw_time,
                    mask=self._mask(state.z if single else first_chain(state.z)),
                    refreshes=self._sampler.refresh_rate > 0,
                ),
                single,
            )(old)
            if self._recenter and new.control is not None:

                def control(scale):
                    order = 1 + (new.control.hessian_full is not None)
                    return control_variate(subsampled, scale.center, order)

                of_all = control if single or shared else partial(lax.map, control)
                new = new._replace(control=of_all(new.scale))
            if self._adapt_mass_matrix:

                def move(path, old, new):
                    return restart_path(path, new.whiten(old.position(path.z)))

                if not single:
                    axis = None if shared else 0
                    move = jax.vmap(move, in_axes=(0, axis, axis))
                path = move(path, old.scale, new.scale)
            return new, path

        # The last window may end with warm-up, and so the condition on both.
        at_end = jnp.any(ends == i + 1) & (i < num_warmup)
        return lax.cond(
            at_end, in_pieces(renewed), lambda *args: args, adapt_state, path
        )

    def _for_groups(self, fn, single):
        """Lift ``fn(adapt_state, *chains)`` to chains that share their adaptation."""
        if not single and self._cross_chain_adapt:
            return fn

        def alone(adapt_state, *chains):
            return fn(adapt_state, *jax.tree.map(lambda a: a[None], chains))

        return alone if single else jax.vmap(alone)

    # As a block of a composite kernel

    def refresh(self, state, model_args, model_kwargs):
        """Forget what is known of the rates: the conditioning has changed."""
        draw_time = state.adapt_state.draw_time
        path = continue_from_output(state.path, self._sampler, draw_time)
        state = state._replace(path=path)
        if self._potential_energy:
            functions = self._functions(model_args, model_kwargs)
            energy = functions.potential_fn(state.z)
            energy = jnp.asarray(energy, state.potential_energy.dtype)
            return state._replace(energy=Energy(energy))
        return self._with_energy(state, model_args, model_kwargs)
