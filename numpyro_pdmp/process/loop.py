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
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_pdmp.process.euler import make_euler_tick
from numpyro_pdmp.process.events import Envelope, EventTime, Known, Tuning
from numpyro_pdmp.process.hazard import clamped_line, line_arrival
from numpyro_pdmp.process.randomness import draw_uniform, exponential, normal
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale

START, AHEAD, PROPOSAL, END, KNOWN_END, WALL = range(6)
NO_EVENT, BOUNCE, REFRESH, REVERSAL = range(4)

#: bins of the acceptance ratio: twenty over 0..2 and one above
RATIO_BINS = 21

GradFn = Callable[..., Array]


class BatchSource(NamedTuple):
    """Where mini-batches of data come from; a batch is any pytree of arrays."""

    num_words: int  # random words of 32 bits that a batch takes
    start: Callable[[Array], Any]  # words -> state
    next: Callable[[Any, Array], tuple[Any, Any]]  # state, words -> state, batch


class Batches(NamedTuple):
    """State of the batches of a path."""

    state: Any
    held: Any  # the batch in use until the next event, if it is held (else None)
    used: Array  # () whether that one has had its event


class Stats(NamedTuple):
    """Counts since the last :func:`reset_stats`.

    Kept in two arrays, since on CPU every array of the loop's state costs time.
    """

    counts: Array  # (7 + RATIO_BINS,)
    sums: Array  # (2,)

    @property
    def num_grad(self) -> Array:
        """Gradient evaluations; a Hessian-vector product counts as one more."""
        return self.counts[..., 0]

    @property
    def num_bounces(self) -> Array:
        """Accepted proposals."""
        return self.counts[..., 1]

    @property
    def num_refreshments(self) -> Array:
        """Refreshments of the velocity."""
        return self.counts[..., 2]

    @property
    def num_proposals(self) -> Array:
        """Proposed event times."""
        return self.counts[..., 3]

    @property
    def num_violations(self) -> Array:
        """Proposals with a rate above the envelope."""
        return self.counts[..., 4]

    @property
    def num_horizons(self) -> Array:
        """Envelopes that ended without a proposal."""
        return self.counts[..., 5]

    @property
    def num_nonfinite(self) -> Array:
        """Evaluations that were not finite."""
        return self.counts[..., 6]

    @property
    def ratio_histogram(self) -> Array:
        """Counts of rate / envelope in ``RATIO_BINS`` bins."""
        return self.counts[..., 7:]

    @property
    def sum_ratio(self) -> Array:
        """Sum of min(1, rate / envelope) over proposals."""
        return self.sums[..., 0]

    @property
    def sum_excess(self) -> Array:
        """Sum of rate / envelope - 1 over violations."""
        return self.sums[..., 1]


class Path(NamedTuple):
    """State of a simulated path; times are measured from the anchor.

    Except for ``t_output``: that is measured from the start of the last stretch.
    """

    rng_key: Array
    z: Array  # (d,) anchor
    v: Array  # (d,) velocity there
    rate: Array  # (k,) signed rates there
    envelope: Envelope
    ahead_rate: Array  # (k,) signed rates at the look-ahead point
    ahead_grad: Array  # (d,) gradient there
    kind: Array  # () what waits at t_next
    t_next: Array  # ()
    which: Array  # () index of the rate that proposes
    t_refresh: Array  # () next refreshment
    z_from: Array  # (d,) start of the last stretch, which ended at the anchor
    v_from: Array  # (d,) velocity there
    t_from: Array  # () its duration
    t_output: Array  # () next draw
    t_wall: Array  # () where the gradient was not finite; negative: just turned back
    event: Array  # () what the last tick did to the velocity
    batches: Batches | None  # None on full data
    stats: Stats


def reset_stats(path: Path) -> Path:
    """Set all counts to zero."""
    return path._replace(stats=jax.tree.map(jnp.zeros_like, path.stats))


def has_output(path: Path) -> Array:
    """Whether the next draw lies on the last stretch."""
    return path.t_output <= path.t_from


def read_output(
    path: Path, sampler: Sampler, draw_time: ArrayLike
) -> tuple[Path, Array]:
    """The next draw, or the anchor where that is not settled; and wait for another."""
    time = jnp.minimum(path.t_output, path.t_from)
    z, _ = sampler.flow(path.z_from, path.v_from, time)
    return path._replace(t_output=time + jnp.asarray(draw_time, time.dtype)), z


def start_path(
    rng_key: Array,
    z: Array,
    v: Array,
    sampler: Sampler,
    t_refresh: ArrayLike,
    t_output: ArrayLike,
    batches: Batches | None = None,
) -> Path:
    """A path at ``(z, v)`` about which nothing is known yet; no evaluation."""
    dtype, k = z.dtype, sampler.num_rates(z.size)
    zero, zeros, count = jnp.zeros((), dtype), jnp.zeros(k, dtype), jnp.zeros((), int)
    stats = Stats(jnp.zeros(7 + RATIO_BINS, int), jnp.zeros(2, dtype))
    return Path(
        rng_key=rng_key,
        z=z,
        v=v,
        rate=zeros,
        envelope=Envelope(zeros, zeros, zero, zero),
        ahead_rate=zeros,
        ahead_grad=jnp.zeros_like(z),
        kind=jnp.full((), START),
        t_next=zero,
        which=count,
        t_refresh=jnp.asarray(t_refresh, dtype),
        z_from=z,
        v_from=v,
        t_from=zero,
        t_output=jnp.asarray(t_output, dtype),
        t_wall=zero,
        event=jnp.full((), NO_EVENT),
        batches=batches,
        stats=stats,
    )


def start_batches(source: BatchSource, words: Array, hold: bool) -> Batches:
    """Before the first tick.

    :param source: where batches come from.
    :param words: (2, ``source.num_words``) random words.
    :param hold: whether a batch stays in use until the next event.
    """
    state, held = source.start(words[0]), None
    if hold:
        state, held = source.next(state, words[1])
    return Batches(state, held, jnp.zeros((), bool))


def next_batch(
    source: BatchSource, batches: Batches, words: Array
) -> tuple[Batches, Any]:
    """The batch of a tick: a fresh one, or the one that is held until its event."""
    state, batch = source.next(batches.state, words)
    if batches.held is not None:
        state, batch = jax.tree.map(
            lambda new, old: jnp.where(batches.used, new, old),
            (state, batch),
            (batches.state, batches.held),
        )
        return Batches(state, batch, jnp.zeros((), bool)), batch
    return batches._replace(state=state), batch


def batch_arguments(
    source: BatchSource | None, batches: Batches | None, words: Array
) -> tuple[Batches | None, tuple]:
    """The batch of a tick as arguments of the gradient: none on full data."""
    if source is None or batches is None:
        return None, ()
    batches, batch = next_batch(source, batches, words)
    return batches, (batch,)


def restart_path(path: Path, z: Array) -> Path:
    """Go on from ``z``, in new coordinates or for a new target: nothing is known."""
    zero = jnp.zeros_like(path.t_next)
    return path._replace(
        z=z,
        kind=jnp.full_like(path.kind, START),
        t_next=zero,
        z_from=z,
        v_from=path.v,
        t_from=zero,
        t_output=jnp.maximum(path.t_output - path.t_from, 0),
    )


def continue_from_output(path: Path, sampler: Sampler, draw_time: ArrayLike) -> Path:
    """Go on from the last draw, for a new target: forget all that came after it."""
    time = path.t_output - jnp.asarray(draw_time, path.t_output.dtype)
    z, v = sampler.flow(path.z_from, path.v_from, time)
    rest = path.t_from - time  # to the anchor, which is where a refreshment would be
    t_refresh = jnp.where(path.event == REFRESH, rest, path.t_refresh + rest)
    path = restart_path(path._replace(v=v, t_refresh=t_refresh), z)
    return path._replace(t_output=jnp.full_like(time, draw_time))


def make_tick(
    grad_fn: GradFn,
    sampler: Sampler,
    scheme: EventTime,
    scale: Scale,
    tuning: Tuning,
    refresh_rate: float | Array | None = None,
    source: BatchSource | None = None,
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
    :return: a function from :class:`Path` to :class:`Path`, one gradient evaluation.
    """
    refresh_rate = sampler.refresh_rate if refresh_rate is None else refresh_rate
    if scheme.frozen:
        return make_euler_tick(
            grad_fn, sampler, scale, tuning.window, refresh_rate, source
        )

    num_words = 0 if source is None else source.num_words

    def tick(path: Path) -> Path:
        d, k = path.z.size, path.rate.size
        # `noise` serves the jump or the refreshment: a tick has at most one of them.
        rng_key, uniform, words = draw_uniform(
            path.rng_key, 4 + k + d, path.z.dtype, num_words
        )
        batches, batch = batch_arguments(source, path.batches, words)

        def energy_gradient(z):
            gradient = grad_fn(scale.position(z), *batch)
            return sampler.energy_gradient(z, scale.gradient(gradient))

        u_accept, u_refresh, u_which, u_offset = uniform[:4]
        e_arrival, noise = exponential(uniform[4 : 4 + k]), normal(uniform[4 + k :])
        new_refresh = sampler.refresh_time(u_refresh, refresh_rate)

        # A. Move to an end whose gradient is known already.
        known_end = path.kind == KNOWN_END
        dt = jnp.where(known_end, path.t_next, 0)
        z, v = sampler.flow(path.z, path.v, dt)
        refreshed = known_end & (path.t_refresh <= dt)
        v = jnp.where(refreshed, sampler.refresh(v, noise), v)
        rate = jnp.where(known_end, sampler.rates(z, v, path.ahead_grad), path.rate)
        t_refresh = jnp.where(refreshed, new_refresh, path.t_refresh - dt)
        t_from = dt
        kind, t_next = path.kind, path.t_next
        if scheme.look_ahead:
            kind = jnp.where(known_end, AHEAD, kind)
            speed = sampler.speed(z, v)
            t_next = jnp.where(known_end, scheme.look(tuning, speed, t_refresh), t_next)

        # B. The gradient, at the place that was asked for.
        z1, v1 = sampler.flow(z, v, t_next)
        if scheme.uses_slope:
            grad, hessian_vector = jax.linearize(energy_gradient, z1)
        else:
            grad = energy_gradient(z1)
        rate1 = sampler.rates(z1, v1, grad)
        # A sum is finite only if all terms are (or overflow, which is as bad).
        finite = jnp.isfinite(jnp.sum(rate1) + jnp.sum(grad))

        # C. What it means.
        ahead = kind == AHEAD
        moved = finite & ~ahead
        proposal = finite & (kind == PROPOSAL)
        end = finite & (kind == END)
        bound = clamped_line(path.envelope.value, path.envelope.slope, t_next)
        bound = bound[path.which] + path.envelope.offset
        true = jnp.maximum(rate1[path.which], 0)
        ratio = true / jnp.where(bound > 0, bound, 1)
        accepted = proposal & (u_accept * bound < true) & (ratio <= scheme.max_ratio)
        refreshed_here = end & (t_refresh <= t_next)

        v2 = jnp.where(accepted, sampler.jump(z1, v1, grad, path.which, noise), v1)
        v2 = jnp.where(refreshed_here, sampler.refresh(v2, noise), v2)
        rate2 = sampler.rates(z1, v2, grad)

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

        # D. The next envelope and proposal.
        rejected = proposal & ~accepted
        speed = sampler.speed(z2, v2)
        if scheme.uses_slope:
            slope = sampler.slopes(z2, v2, grad, hessian_vector(v2))
        else:
            slope = jnp.zeros_like(rate2)
        ahead_rate = jnp.where(ahead, rate1, path.ahead_rate)
        ahead_grad = path.ahead_grad
        if scheme.ends_ahead:
            ahead_grad = jnp.where(ahead, grad, ahead_grad)
        known = Known(
            position=scale.position(z2),
            direction=scale.direction(v2),
            speed=speed,
            rate=rate2,
            slope=slope,
            ahead=ahead_rate,
            ahead_time=jnp.where(ahead, t_next, path.envelope.horizon - t_next),
            last_rate=rate,
            last_time=t_next,
            envelope=path.envelope,
        )
        envelope = jax.tree.map(
            lambda new, old: jnp.where(rejected, new, old),
            scheme.reject(tuning, known),
            scheme.open(tuning, known),
        )
        arrivals = line_arrival(envelope.value, envelope.slope, e_arrival)
        index = jnp.argmin(arrivals)
        arrival = arrivals[index]
        # The constant part of the envelope is a process of its own.
        other = exponential(u_offset, k * envelope.offset)
        uniform_index = jnp.minimum((u_which * k).astype(index.dtype), k - 1)
        index = jnp.where(other < arrival, uniform_index, index)
        arrival = jnp.minimum(other, arrival)
        limit = jnp.minimum(envelope.horizon, t_refresh)
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
                scheme.look(tuning, speed, t_refresh),
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
        in_bin = proposal & (jnp.arange(RATIO_BINS) == bins)
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
            stats=stats,
        )

    return tick
