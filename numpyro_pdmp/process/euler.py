# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Frozen rates: a path without envelopes, biased by its step."""

from collections.abc import Callable

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.batches import BatchSource, batch_arguments
from numpyro_pdmp.process.path import (
    BOUNCE,
    NO_EVENT,
    REFRESH,
    REVERSAL,
    Path,
    Stats,
)
from numpyro_pdmp.process.randomness import Recipe, exponential, normal
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale


def make_euler_tick(
    grad_fn: Callable[..., Array],
    sampler: Sampler,
    scale: Scale,
    step: Array,
    refresh_rate: float | Array,
    source: BatchSource | None = None,
) -> Callable[[Path], Path]:
    r"""The loop's body with rates that stay as they are for a step.

    Stochastic-gradient PDMP (Fearnhead, Grazzi, Nemeth, Roberts 2024): one gradient at
    the start of each step of length :math:`\epsilon`; an event happens within the step
    with the rate found there, and jumps in that gradient. There is no bound to exceed
    and every evaluation moves the path on, but the law that it leaves invariant is off
    by :math:`O(\epsilon)`, more so with noisy gradients.

    :param grad_fn: as for :func:`~numpyro_pdmp.process.loop.make_tick`.
    :param sampler: flow, rates and jumps.
    :param scale: whitening map.
    :param step: length of a step in process time.
    :param refresh_rate: refreshments per unit of process time.
    :param source: of mini-batches; a step has a batch of its own.
    :return: one gradient evaluation.
    """
    num_words = 0 if source is None else source.num_words

    def tick(path: Path) -> Path:
        k = path.rate.size
        recipe = Recipe(1 + k + path.z.size, path.z.dtype, num_words)
        rng_key, uniform, words = recipe.numbers(path.rng_key)
        batches, batch = batch_arguments(
            source, path.batches, words, rng_key, recipe.numbers
        )
        gradient = grad_fn(scale.position(path.z), *batch)
        gradient = sampler.energy_gradient(path.z, scale.gradient(gradient))
        rate = sampler.rates(path.z, path.v, gradient)
        finite = jnp.isfinite(jnp.sum(rate) + jnp.sum(gradient))

        arrivals = exponential(uniform[1 : 1 + k], jnp.maximum(rate, 0))
        index = jnp.argmin(arrivals)
        limit = jnp.minimum(step.astype(path.z.dtype), path.t_refresh)
        bounces = finite & (arrivals[index] < limit)
        refreshes = finite & ~bounces & (path.t_refresh <= limit)
        dt = jnp.where(finite, jnp.where(bounces, arrivals[index], limit), 0)
        z, v = sampler.flow(path.z, path.v, dt)
        noise = normal(uniform[1 + k :])
        v = jnp.where(bounces, sampler.jump(z, v, gradient, index, noise), v)
        v = jnp.where(refreshes, sampler.refresh(v, noise), v)
        v = jnp.where(finite, v, -v)
        new_refresh = sampler.refresh_time(uniform[0], refresh_rate)
        t_refresh = jnp.where(refreshes, new_refresh, path.t_refresh - dt)

        counted = [1, bounces, refreshes, bounces, 0, finite & ~bounces, ~finite]
        counts = jnp.stack([jnp.asarray(c).astype(int) for c in counted])
        counts = jnp.pad(counts, (0, path.stats.counts.size - counts.size))
        sums = jnp.stack([bounces, jnp.zeros((), bool)]).astype(path.z.dtype)
        event = jnp.where(refreshes, REFRESH, NO_EVENT)
        event = jnp.where(bounces, BOUNCE, event)
        event = jnp.where(finite, event, REVERSAL)
        if batches is not None:
            batches = batches._replace(used=event != NO_EVENT)
        stats = jax.tree.map(jnp.add, path.stats, Stats(counts, sums))
        return path._replace(
            rng_key=rng_key,
            z=z,
            v=v,
            rate=rate,
            which=index.astype(path.which.dtype),
            t_refresh=jnp.maximum(t_refresh, 0),
            z_from=path.z,
            v_from=path.v,
            t_from=dt,
            t_output=path.t_output - path.t_from,
            event=event,
            batches=batches,
            stats=stats,
        )

    return tick
