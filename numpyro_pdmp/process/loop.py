# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""The simulation loop: one flat loop, one gradient a tick.

A path is followed from an *anchor*, the last point at which everything is settled.
Each tick evaluates one gradient, at the place ``t_next`` that ``kind`` asks for:

========== ============================================================
START      the anchor itself (first tick, or new coordinates)
AHEAD      the far end of the next window; the anchor stays
PROPOSAL   a proposed event: accepted or rejected there
END        the end of the envelope or the refreshment, gradient needed
KNOWN_END  as END, but the look-ahead has already been there
WALL       halfway to a point at which the gradient was not finite
========== ============================================================

Draws are read off the stretch that the last tick settled, by the flow alone and at
points between two evaluated ones, so a draw costs no gradient of its own. Nothing is
nested: under ``vmap`` every chain does useful work in every tick.

On a sticky path (:mod:`~numpyro_pdmp.process.sticky`) the time of the next freezing or
thawing is known, like that of a refreshment: windows end there, and a gradient of the
look-ahead serves both sides of it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.batches import BatchSource, batch_arguments
from numpyro_pdmp.process.euler import make_euler_tick
from numpyro_pdmp.process.events import EventTime, Known, Step, Tuning
from numpyro_pdmp.process.hazard import clamped_line, line_arrival
from numpyro_pdmp.process.path import (
    AHEAD,
    BOUNCE,
    END,
    KNOWN_END,
    NO_EVENT,
    PROPOSAL,
    RATIO_BINS,
    REFRESH,
    REVERSAL,
    START,
    STICKY,
    WALL,
    Path,
    Stats,
)
from numpyro_pdmp.process.randomness import Recipe, exponential, normal
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.process.sticky import Sticky, Stuck, later

GradFn = Callable[..., Array]


def pick(array: Array, index: Array) -> Array:
    """An entry; of a single one without a gather, which would take time to compile."""
    return array[0] if array.size == 1 else array[index]


def make_tick(
    grad_fn: GradFn,
    sampler: Sampler,
    scheme: EventTime,
    scale: Scale,
    tuning: Tuning,
    refresh_rate: float | Array | None = None,
    source: BatchSource | None = None,
    kappa: Array | None = None,
) -> Callable[[Path], Path]:
    """The loop's body.

    :param grad_fn: gradient of the potential in the sampled (unwhitened) variable;
        with a ``source``, an unbiased estimate of it, from the variable and a batch.
    :param sampler: flow, rates and jumps.
    :param scheme: event-time scheme.
    :param scale: whitening map.
    :param tuning: window and offset of the scheme.
    :param refresh_rate: overrides the sampler's.
    :param source: of mini-batches: the batch that decides a proposal does its jump.
    :param kappa: (d,) rates of thawing over the speed in the sampled variable, of a
        sticky path; infinite for coordinates that never freeze.
    :return: one gradient evaluation.
    """
    refresh_rate = sampler.refresh_rate if refresh_rate is None else refresh_rate
    if scheme.frozen:
        if kappa is not None:
            raise ValueError(
                f"event_time={scheme} follows no path to zero: use Interpolation(), "
                "Tangent() or ExactBound(...) for sticky ones."
            )
        return make_euler_tick(
            grad_fn, sampler, scale, tuning.window, refresh_rate, source
        )

    num_words = 0 if source is None else source.num_words
    sticky = None if kappa is None else Sticky(kappa, sampler, scale)

    def tick(path: Path) -> Path:
        d, k = path.z.size, path.rate.size
        # `noise` serves the jump or the refreshment: a tick has at most one of them.
        num = 4 + k + d + (0 if sticky is None else 2)
        recipe = Recipe(num, path.z.dtype, num_words)
        rng_key, uniform, words = recipe.numbers(path.rng_key)
        batches, batch = batch_arguments(
            source, path.batches, words, rng_key, recipe.numbers
        )

        def energy_gradient(z):
            gradient = grad_fn(scale.position(z), *batch)
            return sampler.energy_gradient(z, scale.gradient(gradient))

        u_accept, u_refresh, u_which, u_offset = uniform[:4]
        e_arrival = exponential(uniform[4 : 4 + k])
        noise = normal(uniform[4 + k : 4 + k + d])
        new_refresh = sampler.refresh_time(u_refresh, refresh_rate)

        # The process, or what moves of it.
        stuck: Any = path.stuck
        part: Any = sampler
        if sticky is not None:
            part = sticky.part(stuck.frozen)

        # A. Move to an end whose gradient is known already.
        known_end = path.kind == KNOWN_END
        dt = jnp.where(known_end, path.t_next, 0)
        z, v = part.flow(path.z, path.v, dt)
        refreshed = known_end & (path.t_refresh <= dt)
        if sticky is not None:
            switched = known_end & (stuck.time <= dt)
            z, frozen = sticky.switch(switched, stuck.which, stuck.frozen, z)
            v = jnp.where(refreshed, part.refresh(v, noise), v)
            part = sticky.part(frozen)
        else:
            v = jnp.where(refreshed, part.refresh(v, noise), v)
        rate = jnp.where(known_end, part.rates(z, v, path.ahead_grad), path.rate)
        t_refresh = jnp.where(refreshed, new_refresh, path.t_refresh - dt)
        t_stop = t_refresh
        if sticky is not None:
            fresh = sticky.next(z, v, frozen, uniform[-2:])
            renews = switched | refreshed
            t_sticky = jnp.where(renews, fresh[0], later(stuck.time - dt))
            which_sticky = jnp.where(renews, fresh[1], stuck.which)
            t_stop = jnp.minimum(t_refresh, t_sticky)
        t_from = dt
        kind, t_next = path.kind, path.t_next
        if scheme.look_ahead:
            kind = jnp.where(known_end, AHEAD, kind)
            speed = part.speed(z, v)
            t_next = jnp.where(known_end, scheme.look(tuning, speed, t_stop), t_next)

        # B. The gradient, at the place that was asked for.
        z1, v1 = part.flow(z, v, t_next)
        if scheme.uses_slope:
            grad, hessian_vector = jax.linearize(energy_gradient, z1)
        else:
            grad = energy_gradient(z1)
        rate1 = part.rates(z1, v1, grad)
        # A sum is finite only if all terms are (or overflow, which is as bad).
        finite = jnp.isfinite(jnp.sum(rate1) + jnp.sum(grad))

        # C. What it means.
        ahead = kind == AHEAD
        moved = finite & ~ahead
        proposal = finite & (kind == PROPOSAL)
        end = finite & (kind == END)
        bound = clamped_line(path.envelope.value, path.envelope.slope, t_next)
        bound = pick(bound, path.which) + path.envelope.offset
        true = jnp.maximum(pick(rate1, path.which), 0)
        ratio = true / jnp.where(bound > 0, bound, 1)
        accepted = proposal & (u_accept * bound < true) & (ratio <= scheme.max_ratio)
        refreshed_here = end & (t_refresh <= t_next)

        v2 = jnp.where(accepted, part.jump(z1, v1, grad, path.which, noise), v1)
        v2 = jnp.where(refreshed_here, part.refresh(v2, noise), v2)
        if sticky is not None:
            switched_here = end & (t_sticky <= t_next)
            z1, frozen = sticky.switch(switched_here, which_sticky, frozen, z1)
            part = sticky.part(frozen)
        rate2 = part.rates(z1, v2, grad)

        # A non-finite look-ahead is tried again nearer by. A non-finite point on the
        # path means a wall before it: halve the way there, then go back.
        wall = kind == WALL
        t_wall = jnp.where(wall & finite, jnp.abs(path.t_wall) - t_next, t_next)
        near = t_wall < 0.01 * tuning.window
        give_up = (ahead & near) | (kind == START)
        reverse = (wall & near) | (~finite & give_up)
        probe = (wall | (~finite & ~ahead)) & ~reverse
        dt = jnp.where(moved, t_next, 0)
        z2, v2, rate2 = (
            jnp.where(moved, new, old) for new, old in ((z1, z), (v2, v), (rate2, rate))
        )
        v2, rate2 = (jnp.where(reverse, -x, x) for x in (v2, rate2))
        # In a corner both ways are blocked: only another direction leads out of it.
        # The sign of t_wall tells that the path has not moved since it turned back.
        blocked = path.t_wall < 0
        v2 = jnp.where(reverse & blocked, sampler.velocity(noise), v2)
        turned = reverse | (blocked & ~moved)
        t_refresh = jnp.where(refreshed_here, new_refresh, t_refresh - dt)
        t_refresh = jnp.maximum(t_refresh, 0)
        t_from = t_from + dt
        t_stop = t_refresh
        if sticky is not None:
            # Hits and clocks stay as they are while velocities do.
            fresh = sticky.next(z2, v2, frozen, uniform[-2:])
            renews = accepted | refreshed_here | switched_here | reverse
            renews = renews | (kind == START)
            t_sticky = jnp.where(renews, fresh[0], later(t_sticky - dt))
            which_sticky = jnp.where(renews, fresh[1], which_sticky)
            t_stop = jnp.minimum(t_refresh, t_sticky)

        # D. The next envelope and proposal.
        rejected = proposal & ~accepted
        speed = part.speed(z2, v2)
        moving = v2 if sticky is None else part.moving(v2)
        if scheme.uses_slope:
            slope = part.slopes(z2, v2, grad, hessian_vector(moving))
        else:
            slope = jnp.zeros_like(rate2)
        ahead_rate = jnp.where(ahead, rate1, path.ahead_rate)
        ahead_grad = path.ahead_grad
        if scheme.ends_ahead:
            ahead_grad = jnp.where(ahead, grad, ahead_grad)
        known = Known(
            position=scale.position(z2),
            direction=scale.direction(moving),
            speed=speed,
            rate=rate2,
            slope=slope,
            ahead=ahead_rate,
            ahead_time=jnp.where(ahead, t_next, path.envelope.horizon - t_next),
            last_rate=rate,
            last_time=t_next,
            envelope=path.envelope,
            memory=path.memory,
        )
        if path.memory is not None:
            turned_here = accepted | refreshed_here | reverse | (kind == START)
            step = Step(dt, rate1, sampler.speed(z1, v1), turned_here)
            known = known._replace(memory=scheme.remember(tuning, known, step))
        envelope = jax.tree.map(
            lambda new, old: jnp.where(rejected, new, old),
            scheme.reject(tuning, known),
            scheme.open(tuning, known),
        )
        num_rates: Array | int = k
        if sticky is not None:
            # No proposals for rates that are zero as long as they are frozen.
            possible = part.rate_mask(k)
            num_rates = jnp.sum(possible)
            envelope = envelope._replace(
                value=jnp.where(possible, envelope.value, 0),
                slope=jnp.where(possible, envelope.slope, 0),
            )
        arrivals = line_arrival(envelope.value, envelope.slope, e_arrival)
        index = jnp.argmin(arrivals)
        arrival = pick(arrivals, index)
        # The constant part of the envelope is a process of its own.
        other = exponential(u_offset, num_rates * envelope.offset)
        if sticky is None:
            uniform_index = jnp.minimum((u_which * k).astype(index.dtype), k - 1)
        else:
            uniform_index = jnp.argmax(jnp.cumsum(possible) > u_which * num_rates)
        index = jnp.where(other < arrival, uniform_index, index)
        arrival = jnp.minimum(other, arrival)
        limit = jnp.minimum(envelope.horizon, t_stop)
        proposes = arrival < limit
        # Without an end the path still has to be looked at now and then.
        limit = jnp.where(jnp.isfinite(limit), limit, 100 * tuning.window)
        next_time = jnp.where(proposes, arrival, limit)
        at_end = KNOWN_END if scheme.ends_ahead else END
        next_kind = jnp.where(proposes, PROPOSAL, at_end)
        if scheme.look_ahead:
            # An envelope is only had from a look-ahead or from what is left of one.
            look = jnp.where(
                ahead & ~finite & ~reverse,
                0.25 * t_next,
                scheme.look(tuning, speed, t_stop),
            )
            opens = (ahead & finite) | rejected
            next_kind = jnp.where(opens, next_kind, AHEAD)
            next_time = jnp.where(opens, next_time, look)
        else:
            next_kind = jnp.where(finite & ~reverse, next_kind, START)
            next_time = jnp.where(finite & ~reverse, next_time, 0)
        next_kind = jnp.where(probe, WALL, next_kind)
        next_time = jnp.where(probe, 0.5 * t_wall, next_time)

        tiny = jnp.finfo(path.z.dtype).tiny
        # Beyond rounding: an exact bound may be met with equality.
        tolerance = 1 + jnp.finfo(path.z.dtype).eps ** 0.5
        violated = proposal & (true > tolerance * bound)
        at_horizon, refreshes = known_end | end, refreshed | refreshed_here
        bins = jnp.minimum((10 * ratio).astype(int), RATIO_BINS - 1)
        # The first one is no bin, but the count of draws that were cut off.
        in_bin = proposal & (jnp.arange(-1, RATIO_BINS) == bins)
        counts = jnp.stack(
            [
                jnp.ones((), bool),
                accepted,
                refreshes,
                proposal,
                violated,
                at_horizon & ~refreshes,
                ~finite,
            ]
        )
        counts = jnp.concatenate([counts, in_bin]).astype(int)
        if scheme.uses_slope:
            counts = counts.at[0].set(2)
        sums = jnp.stack(
            [
                jnp.where(proposal, jnp.minimum(ratio, 1), 0),
                jnp.where(violated, ratio - 1, 0),
            ]
        )
        stats = Stats(path.stats.counts + counts, path.stats.sums + sums)
        event = jnp.where(refreshes, REFRESH, NO_EVENT)
        if sticky is not None:
            switches = (switched | switched_here) & ~refreshes
            event = jnp.where(switches, STICKY, event)
            stuck = Stuck(frozen, stuck.frozen, t_sticky, which_sticky)
        event = jnp.where(accepted, BOUNCE, jnp.where(reverse, REVERSAL, event))
        if batches is not None:
            batches = batches._replace(used=event != NO_EVENT)
        return Path(
            rng_key=rng_key,
            z=z2,
            v=v2,
            rate=rate2,
            envelope=envelope,
            ahead_rate=ahead_rate,
            ahead_grad=ahead_grad,
            kind=next_kind,
            t_next=next_time,
            which=index,
            t_refresh=t_refresh,
            z_from=path.z,
            v_from=path.v,
            t_from=t_from,
            t_output=path.t_output - path.t_from,
            t_wall=jnp.where(turned, -t_wall - tiny, t_wall),
            event=event,
            batches=batches,
            stuck=stuck,
            stats=stats,
            memory=known.memory,
        )

    return tick
