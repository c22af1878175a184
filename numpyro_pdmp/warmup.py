# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Warm-up: where to start, in which coordinates, with which envelopes.

========== ======== ==================== =========================================
phase      share    when it acts         what it sets
========== ======== ==================== =========================================
descent    before   once                 start, first centre and scale
settle     5 %      every draw           window and offset of the envelope
slow       75 %     every draw           the same
..         ..       ends of windows that centre and scale, from the window's
..         ..       double in length     moments; draw time, from its autocorrelation
final      20 %     every draw           window and offset
freeze     after    once                 window and offset: averages over the final
..         ..       ..                   phase
========== ======== ==================== =========================================
"""

from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.control_variates import ControlVariate
from numpyro_pdmp.importance import Importance
from numpyro_pdmp.moments import (
    AnyScale,
    Moments,
    autocorrelations,
    renew_scale,
    update_moments,
)
from numpyro_pdmp.process.events import EventTime, Tuning
from numpyro_pdmp.process.path import (
    Path,
    Stats,
)
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import LowRankScale

#: largest dimension with a dense metric, and with Hessians at the start, by default
DENSE_LIMIT = 256
#: shares of warm-up before the first slow window, and after the last
SETTLE, FINAL = 0.05, 0.2
#: length of the first slow window, in draws
FIRST_WINDOW = 50
#: how far one violation raises the logarithm of the offset when a window begins, before
#: the final phase and in it, and how this falls with the violations expected since then
GAIN, FINAL_GAIN, GAIN_DECAY = 0.3, 0.1, 0.7
#: how far one evaluation or rejection moves the logarithm of the window, over that
WINDOW_GAIN = 0.1
#: how much a draw counts that was cut off: it is at a place where gradients were needed
#: and not at a given time, so it only matters where there is nothing else
INCOMPLETE = 1 / 32
#: a tuned draw time makes successive draws of the slowest coordinate this correlated
DRAW_CORRELATION = 0.5
#: but no longer than this many gradients take, unless the first draw time does
DRAW_GRAD = 50


class AdaptState(NamedTuple):
    """What warm-up tunes, and what it needs to do so."""

    scale: AnyScale
    tuning: Tuning
    refresh_rate: Array  # refreshments per unit of process time
    draw_time: Array  # process time between draws
    bounce_rate: Array  # smoothed, per unit of process time
    moments: Moments
    control: ControlVariate | None  # of a subsampled model
    importance: dict[str, Importance] | None  # of its rows; None: equal
    averages: Array  # (3,) count, and sums of the logarithms of window and offset
    expected: Array  # violations of the envelope since this window of warm-up began
    window_ends: Array  # draws after which the scale is renewed
    num_warmup: Array


class Draw(NamedTuple):
    """What one draw tells warm-up."""

    z: Array  # (d,) whitened position
    mean: Array  # (d,) position that counts for the moments
    within: Array  # (d,) variance about it
    weight: Array  # () how much it counts
    complete: Array  # () whether it was not cut off
    elapsed: Array  # () process time
    stats: Stats
    num_moving: Array | None = None  # () coordinates that are not frozen, if sticky


def window_ends(num_warmup: int) -> np.ndarray:
    """Draws that end the settling and each slow window.

    A window is twice as long as the one before, but for the last, which takes what
    would not suffice for another.
    """
    if num_warmup < 20:  # a short warm-up is one window without buffers
        return np.asarray([0, num_warmup])
    settle, last = round(SETTLE * num_warmup), round((1 - FINAL) * num_warmup)
    ends, length = [settle], FIRST_WINDOW
    while ends[-1] + 3 * length <= last:
        ends.append(ends[-1] + length)
        length *= 2
    return np.asarray([*ends, last])


def stretch_sums(path: Path) -> Array:
    """Integrals of 1, z and z^2 over the stretch that a tick settled: straight lines.

    :return: (3, d).
    """
    t = path.t_from
    middle, spread = path.z_from + 0.5 * t * path.v_from, t * path.v_from
    one, square = jnp.ones_like(middle), middle**2 + spread**2 / 12
    if path.stuck is not None:  # as in draw_moments
        middle = jnp.where(path.stuck.frozen_from, 0, middle)
        square = jnp.where(path.stuck.frozen_from, 1, square)
    return t * jnp.stack([one, middle, square])


def draw_moments(
    z: Array,
    sums: Array | None,
    elapsed: Array,
    stats: Stats,
    frozen: Array | None = None,
) -> Draw:
    """What a draw tells: of the draw alone, or of the path that led to it.

    Coordinates that are ``frozen`` tell nothing of the scale that they will have when
    they move: they count as what the scale in force expects, mean 0 and variance 1. So
    scales settle where they fit the time in which a coordinate moves, and those of one
    that never does stay as they are.
    """
    complete, within = stats.num_cut_off == 0, jnp.zeros_like(z)
    num_moving = None
    if frozen is not None:
        z, within = jnp.where(frozen, 0, z), frozen.astype(z.dtype)
        num_moving = jnp.sum(~frozen, dtype=z.dtype)
    if sums is None:
        weight = jnp.where(complete, 1, INCOMPLETE).astype(z.dtype)
        return Draw(z, z, within, weight, complete, elapsed, stats, num_moving)
    time, mean, square = sums
    moved = time > 0
    mean, square = (x / jnp.where(moved, time, 1) for x in (mean, square))
    within = jnp.maximum(square - mean**2, 0)
    mean, within = jnp.where(moved, mean, z), jnp.where(moved, within, 0)
    return Draw(z, mean, within, time[0], complete, elapsed, stats, num_moving)


def in_moment_units(scale: AnyScale, z: Array) -> Array:
    """Whitened coordinates, or units of the diagonal for a low-rank scale."""
    if isinstance(scale, LowRankScale):
        return scale.direction(z) / scale.factor
    return z


def tune(
    state: AdaptState,
    draws: Draw,
    last: Array,
    i: Array,
    sampler: Sampler,
    scheme: EventTime,
    target_violation: float,
    moments: bool,
    noisy: bool = False,
) -> AdaptState:
    """After every draw of warm-up.

    :param state: of all chains in ``draws``, which share it.
    :param draws: one draw of each chain, with a leading axis.
    :param last: (chains, d) whitened positions of the draws before.
    :param i: number of this draw, from 0.
    :param sampler: the process.
    :param scheme: event-time scheme.
    :param target_violation: share of proposals that may exceed the envelope.
    :param moments: whether the scale or the draw time are tuned.
    :param noisy: whether rates are estimates.
    """
    stats = jax.tree.map(lambda a: jnp.sum(a, 0), draws.stats)
    dim: Any = state.scale.center.size
    if draws.num_moving is not None:
        dim = jnp.maximum(jnp.mean(draws.num_moving), 1)
    begins = jnp.any(state.window_ends == i)  # another window
    expected = jnp.where(begins, 0, state.expected)
    expected = expected + target_violation * stats.num_proposals
    gain = jnp.where(i >= state.window_ends[-1], FINAL_GAIN, GAIN)
    tuning, bounce_rate = tune_envelope(
        sampler,
        scheme,
        state.tuning,
        state.bounce_rate,
        stats,
        jnp.sum(draws.elapsed),
        target_violation,
        dim,
        noisy,
        gain / (1 + gain * expected) ** GAIN_DECAY,
    )
    logs = jnp.log(jnp.stack([jnp.e + 0 * tuning.window, *tuning]))
    averages = jnp.where(begins, 0, state.averages)
    averages = averages + jnp.where(jnp.isfinite(logs), logs, 0)
    _, window, offset = jnp.exp(averages / averages[0])
    frozen = Tuning(
        window if scheme.tunes_window else tuning.window,
        offset if scheme.tunes_offset else tuning.offset,
    )
    done = i + 1 == state.num_warmup
    tuning = jax.tree.map(lambda a, b: jnp.where(done, a, b), frozen, tuning)
    state = state._replace(
        tuning=tuning,
        bounce_rate=bounce_rate,
        averages=averages,
        expected=expected,
    )
    if not moments:
        return state
    units = jax.vmap(lambda z: in_moment_units(state.scale, z))
    moments_so_far = jax.tree.map(
        lambda a: jnp.where(begins, jnp.zeros_like(a), a), state.moments
    )
    new = update_moments(
        moments_so_far,
        units(draws.z),
        units(last),
        units(draws.mean),
        draws.within,
        draws.weight,
        draws.complete,
        stats.num_refreshments,
        stats.num_grad,
    )
    return state._replace(moments=new)


def renew(
    state: AdaptState,
    i: Array,
    base_draw_time: float,
    adapt_scale: bool,
    adapt_draw_time: bool,
    mask: np.ndarray | None,
    refreshes: bool,
) -> AdaptState:
    """At the end of a window: new coordinates and draw time.

    The first window only settles: its moments are forgotten.
    """
    ends = state.window_ends
    forget = (i + 1 == ends[0]) & (ends[0] > 0)
    if adapt_scale:
        new = renew_scale(state.scale, state.moments, mask, refreshes)
        scale = jax.tree.map(lambda a, b: jnp.where(forget, a, b), state.scale, new)
        state = state._replace(scale=scale)
    if adapt_draw_time:
        # Were the correlation exp(-t / tau), this time would give the wanted one.
        rho = jnp.clip(jnp.max(autocorrelations(state.moments)), 0.01, 0.99)
        factor = jnp.log(DRAW_CORRELATION) / jnp.log(rho)
        num_grad = state.moments.num_grad / jnp.maximum(state.moments.pairs, 1)
        affordable = DRAW_GRAD / jnp.maximum(num_grad, 1)
        factor = jnp.clip(jnp.minimum(factor, affordable), 0.25, 4)
        # In later windows draws may be closer than those of the sampling, lest they be
        # cut off: else chains where gradients are dear would tell less than others.
        closest = jnp.minimum(base_draw_time, state.draw_time * affordable)
        closest = jnp.where(i + 1 == ends[-1], base_draw_time, closest)
        draw_time = jnp.maximum(state.draw_time * factor, closest)
        enough = ~forget & (state.moments.pairs > 20)
        draw_time = jnp.where(enough, draw_time, state.draw_time)
        state = state._replace(draw_time=draw_time.astype(state.draw_time.dtype))
    return state


def tune_envelope(
    sampler: Sampler,
    scheme: EventTime,
    tuning: Tuning,
    bounce_rate: Array,
    stats: Stats,
    elapsed: Array,
    target_violation: float,
    dim: Any,
    noisy: bool = False,
    gain: float | Array = GAIN,
) -> tuple[Tuning, Array]:
    """Window and offset from the statistics of one draw.

    The offset climbs on violations and sinks slowly, so that a share
    ``target_violation`` of proposals exceeds the envelope. (The approximation of
    Robbins and Monro, which settles if ``gain`` falls with time.) The window balances
    the evaluations at its ends against the rejections that its offset causes, and is
    not much longer than the time between events, beyond which it would gain nothing.
    With noisy rates most rejections are due to the noise, whatever the window: then it
    is as long as that.
    """
    seen = elapsed > 0
    rate = stats.num_bounces / jnp.where(seen, elapsed, 1)
    bounce_rate = jnp.where(seen, 0.95 * bounce_rate + 0.05 * rate, bounce_rate)
    window, offset = tuning
    rejections = stats.num_proposals - stats.num_bounces
    if scheme.tunes_window:
        # Windows cost 1/w evaluations a unit of time and rejections, through the
        # curvature of the rate, about w^2: at the optimum half a rejection a window.
        ends = stats.num_grad - stats.num_proposals
        surplus = 0.5 * ends - (0 if noisy else rejections)
        window = window * jnp.exp(jnp.clip(WINDOW_GAIN * gain * surplus, -0.5, 0.5))
        limit = jnp.minimum(
            scheme.window_per_event / bounce_rate, sampler.longest_window(dim)
        )
        window = jnp.minimum(window, limit).astype(tuning.window.dtype)
    if scheme.tunes_offset:
        surplus = stats.num_violations - target_violation * stats.num_proposals
        # In units of what is expected, for long draws must not be more violent.
        step = gain * surplus / (1 + target_violation * stats.num_proposals)
        factor = jnp.exp(jnp.clip(step, -1, 2))
        if not noisy:  # curvature is all that lifts the rate above its line
            factor = factor * (window / tuning.window) ** 2
        # Where lines are exact it sinks for ever, but not so far that it is lost.
        offset = jnp.maximum(offset * factor, 1e-8).astype(offset.dtype)
    return Tuning(window, offset), bounce_rate
