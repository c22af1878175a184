# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A path from a potential alone: no model, no warm-up."""

from collections.abc import Callable
from functools import partial
import math

import numpy as np

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_pdmp.process.events import EventTime, event_time_scheme
from numpyro_pdmp.process.loop import (
    make_tick,
)
from numpyro_pdmp.process.path import (
    NO_EVENT,
    Stats,
    start_path,
)
from numpyro_pdmp.process.samplers import BoomerangProcess, BouncyParticle, Sampler
from numpyro_pdmp.process.scale import Scale, identity_scale
from numpyro_pdmp.process.skeleton import Skeleton
from numpyro_pdmp.process.sticky import start_stuck

PotentialFn = Callable[[Array], Array]

BLOCK = 100  # ticks between two looks at whether the path is complete


def simulate(
    potential_fn: PotentialFn,
    sampler: Sampler,
    rng_key: Array,
    *,
    position: ArrayLike,
    num_events: int = 1000,
    event_time: str | EventTime = "interpolation",
    scale: Scale | None = None,
    velocity: ArrayLike | None = None,
    max_ticks: int | None = None,
    kappa: ArrayLike | None = None,
) -> tuple[Skeleton, Stats]:
    """Simulate a path and record its events.

    Window and offset of the scheme keep their starting values, which suit a target
    of about unit scale in whitened coordinates; where ``num_violations`` is more than
    a few percent of ``num_proposals``, give the scheme a shorter window or a larger
    offset. May be called under ``jit`` and under ``vmap`` over ``rng_key``.

    :param potential_fn: minus the log density, up to a constant, of a position of
        shape ``(d,)``.
    :param sampler: the process, such as ``BouncyParticle(refresh_rate=1.0)``.
    :param rng_key: random key.
    :param position: start, of shape ``(d,)``; its dtype is that of the simulation.
    :param num_events: number of events (bounces, refreshments, reversals, freezings
        and thawings) to record.
    :param event_time: event-time scheme or its name: ``"interpolation"``,
        ``"published"``, ``"regression"`` or ``"tangent"``.
    :param scale: whitening map; default the identity.
    :param velocity: time derivative of the position at the start; default a draw
        from its law.
    :param max_ticks: stop after this many evaluations, with fewer events; default
        ``50 * num_events + 1000``.
    :param kappa: of a sticky path: the density of ``x`` has an atom at zero of mass
        ``1 / kappa`` relative to it, for each coordinate; infinity for none. Scalar or
        ``(d,)``. See :mod:`numpyro_pdmp.process.sticky`.
    :return: the path and the counts of the run.

    **Example**

    >>> path, stats = simulate(
    ...     lambda x: 0.5 * x @ x,
    ...     BouncyParticle(),
    ...     random.PRNGKey(0),
    ...     position=jnp.zeros(2),
    ...     num_events=500,
    ... )
    >>> path.positions.shape
    (501, 2)
    >>> bool((abs(path.mean()) < 5 * path.standard_error()).all())
    True
    """
    x = jnp.asarray(position)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(
            f"position has shape {x.shape}, but must be a vector (d,) with d >= 1; "
            "use jnp.atleast_1d or jax.flatten_util.ravel_pytree."
        )
    if num_events < 1:
        raise ValueError(f"num_events={num_events}: use at least 1.")
    if max_ticks is None:
        max_ticks = 50 * num_events + 1000
    if max_ticks < 1:
        raise ValueError(f"max_ticks={max_ticks}: use at least 1, or None.")
    _check_refresh_rate(sampler)
    scheme = event_time_scheme(event_time)
    _check_start(potential_fn, x)
    key_velocity, key_run = random.split(rng_key)
    if scale is None:
        scale = identity_scale(x)
    scale = Scale(*(jnp.asarray(a, x.dtype) for a in scale))
    if velocity is None:
        v = sampler.velocity(random.normal(key_velocity, x.shape, x.dtype))
    else:
        v = jnp.asarray(velocity, x.dtype)
        if v.shape != x.shape:
            raise ValueError(
                f"velocity has shape {v.shape}, but position has {x.shape}; "
                "make them equal, or leave velocity out."
            )
        v = scale._replace(center=jnp.zeros_like(x)).whiten(v)
    if kappa is not None:
        kappa = _checked_kappa(kappa, x, scale)
    z = scale.whiten(x)
    fixed = potential_fn, sampler, scheme, num_events
    return _run(*fixed, key_run, z, v, scale, max_ticks, kappa)


def _checked_kappa(kappa, x, scale):
    if np.ndim(scale.factor) == 2:
        raise ValueError(
            f"scale has a factor of shape {scale.factor.shape}, but coordinates that "
            "stick to zero need a diagonal one: give shape () or (d,)."
        )
    if np.shape(kappa) not in ((), x.shape):
        raise ValueError(
            f"kappa has shape {np.shape(kappa)}, but position has {x.shape}; make them "
            "equal, or give a number."
        )
    if not isinstance(kappa, jax.core.Tracer) and not np.all(np.asarray(kappa) > 0):
        raise ValueError(f"kappa must be positive, got {kappa}.")
    return jnp.broadcast_to(jnp.asarray(kappa, x.dtype), x.shape)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    potential_fn, sampler, scheme, num_events, rng_key, z, v, scale, max_ticks, kappa
):
    d, dtype = z.size, z.dtype
    tuning = scheme.tuning(sampler.event_time(d), sampler.rate_size(d))
    tuning = jax.tree.map(lambda a: jnp.asarray(a, dtype), tuning)
    grad_fn = jax.grad(potential_fn)
    tick = make_tick(grad_fn, sampler, scheme, scale, tuning, kappa=kappa)
    key_refresh, key_path = random.split(rng_key)
    uniform = random.uniform(key_refresh, (), dtype)
    t_refresh = sampler.refresh_time(uniform, sampler.refresh_rate)
    zero = jnp.zeros((), dtype)
    stuck = None if kappa is None else start_stuck(z)
    path = start_path(
        key_path, z, v, sampler, t_refresh, zero, scheme=scheme, stuck=stuck
    )
    size = num_events + 1
    entries: tuple[Array, ...] = (
        jnp.zeros(size, dtype),
        jnp.tile(z, (size, 1)),
        jnp.tile(v, (size, 1)),
        jnp.full(size, NO_EVENT),
    )
    if stuck is not None:
        entries = *entries, jnp.tile(stuck.frozen, (size, 1))

    def unfinished(state):
        _, ticks, count, _, _ = state
        return (count < num_events) & (ticks < max_ticks)

    def step(_, state):
        path, ticks, count, elapsed, entries = state
        new = tick(path)
        elapsed = elapsed + new.t_from
        # Every tick writes the entry after the last event; an event completes it. A
        # finished path stays as it is and writes beyond the arrays, which is dropped.
        going = unfinished(state)
        place = jnp.where(going, count + 1, size)
        values: tuple[Array, ...] = (elapsed, new.z, new.v, new.event)
        if new.stuck is not None:
            values = *values, new.stuck.frozen
        entries = tuple(
            entry.at[place].set(value, mode="drop")
            for entry, value in zip(entries, values, strict=True)
        )
        event = new.event != NO_EVENT
        new_state = (new, ticks + 1, count + event, jnp.where(event, 0, elapsed))
        state = jax.tree.map(partial(jnp.where, going), new_state, state[:-1])
        return *state, entries

    # In blocks: under vmap, a while_loop copies all of its state at each step.
    state = (path, jnp.zeros((), int), jnp.zeros((), int), zero, entries)
    path, _, count, _, entries = lax.while_loop(
        unfinished, lambda state: lax.fori_loop(0, BLOCK, step, state), state
    )
    elapsed, zs, vs, kinds = entries[:4]
    # A path that ran out of ticks ends at its anchor, which the other entries repeat.
    last = jnp.minimum(jnp.arange(size), count + 1)
    positions, frozen = jax.vmap(scale.position)(zs[last]), None
    if stuck is not None:
        frozen = entries[4][last]
        positions = jnp.where(frozen, 0, positions)
    skeleton = Skeleton(
        durations=elapsed[1:],
        positions=positions,
        velocities=jax.vmap(scale.direction)(vs[last]),
        kinds=kinds,
        center=scale.center,
        flow_name=sampler.flow_name,
        frozen=frozen,
    )
    return skeleton, path.stats


def _check_refresh_rate(sampler: Sampler) -> None:
    needed = isinstance(sampler, (BouncyParticle, BoomerangProcess))
    rate = sampler.refresh_rate
    if not math.isfinite(rate) or rate < 0 or (needed and rate == 0):
        name = type(sampler).__name__
        why = f"{name} is not ergodic without refreshment" if needed else "it is a rate"
        raise ValueError(
            f"refresh_rate={rate!r} of {name} must be finite and "
            f"{'> 0' if needed else '>= 0'}, for {why}; "
            f"use for instance {name}(refresh_rate={type(sampler).refresh_rate})."
        )


def _check_start(potential_fn: PotentialFn, x: Array) -> None:
    value, gradient = jax.value_and_grad(potential_fn)(x)
    try:
        fine = bool(jnp.isfinite(value) & jnp.isfinite(gradient).all())
    except jax.errors.ConcretizationTypeError:
        return  # under a transformation of JAX: nothing to look at yet
    if not fine:
        raise ValueError(
            f"potential_fn is {value} with gradient {gradient} at position {x}; both "
            "must be finite. Start where the density is positive and smooth."
        )
