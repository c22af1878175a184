# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Warm-up: where to start, in which coordinates, with which envelopes.

=========== ============================== ====================================
draws       phase                          what it sets
=========== ============================== ====================================
before 1    damped Newton descent          start, first centre and scale
all         every draw                     window and offset of the envelope
slow        NumPyro's windows, doubling    centre and scale from time averages
after       nothing                        everything is frozen
=========== ============================== ====================================
"""

from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro.infer.hmc_util import build_adaptation_schedule
from numpyro_pdmp.process.events import EventTime, Tuning
from numpyro_pdmp.process.loop import Stats
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale

#: share of proposals that warm-up lets exceed the envelope
TARGET_VIOLATION = 0.03
#: largest dimension with a dense metric, and with Hessians at the start, by default
DENSE_LIMIT = 256


class Moments(NamedTuple):
    """Welford sums of whitened positions at equally spaced process times."""

    count: Array
    mean: Array  # (d,)
    m2: Array  # (d,) or (d, d)


class AdaptState(NamedTuple):
    """What warm-up tunes, and what it needs to do so."""

    scale: Scale
    tuning: Tuning
    bounce_rate: Array  # smoothed, per unit of process time
    moments: Moments
    window_ends: Array  # draws after which the scale is renewed
    num_warmup: Array


def window_ends(num_warmup: int) -> Array:
    """Draws that end the first buffer and each slow window of NumPyro's schedule."""
    windows = build_adaptation_schedule(num_warmup) if num_warmup > 0 else []
    if len(windows) < 3:  # a short warm-up is one window without buffers
        return jnp.asarray([0, num_warmup], int)
    return jnp.asarray([w.end + 1 for w in windows[:-1]], int)


def zero_moments(factor: Array, dim: int) -> Moments:
    """Empty sums, dense or diagonal as ``factor`` is."""
    shape = (dim, dim) if factor.ndim == 2 else (dim,)
    zero = jnp.zeros((), factor.dtype)
    return Moments(zero, jnp.zeros(dim, factor.dtype), jnp.zeros(shape, factor.dtype))


def update_moments(moments: Moments, z: Array) -> Moments:
    """One more position."""
    count = moments.count + 1
    delta = z - moments.mean
    mean = moments.mean + delta / count
    rest = z - mean
    product = jnp.outer(delta, rest) if moments.m2.ndim == 2 else delta * rest
    return Moments(count, mean, moments.m2 + product)


def renew_scale(scale: Scale, moments: Moments, mask: Array | None) -> Scale:
    r"""Centre and scale from the moments of a window, shrunk to those in force.

    In whitened coordinates the metric in force is the identity, whatever the units
    of the model, and a window tells :math:`d(d+1)/2` numbers about another one. Where
    that is mostly noise the old metric is better: as in Ledoit and Wolf (2004), the
    estimate is :math:`(1-\rho) S + \rho I`, with :math:`\rho` the expected squared
    error of :math:`S` on a Gaussian over :math:`\|S - I\|^2`; likewise the mean.
    """
    # Draws are correlated, and so count for less.
    n, dim = jnp.maximum(moments.count / 3, 1), moments.mean.size
    noise = dim / n
    shift = jnp.sum(moments.mean**2)
    mean = moments.mean * jnp.maximum(0, 1 - noise / jnp.maximum(shift, noise))
    center = scale.position(mean)
    cov = moments.m2 / moments.count
    if moments.m2.ndim == 2:
        identity = jnp.eye(dim, dtype=cov.dtype)
        error = (jnp.sum(cov**2) + jnp.trace(cov) ** 2) / n
        rho = error / jnp.maximum(jnp.sum((cov - identity) ** 2), error)
        # A floor, since fewer draws than dimensions leave S singular.
        rho = jnp.maximum(rho, 1 / (1 + moments.count))
        cov = (1 - rho) * cov + rho * identity
        factor = scale.factor @ jnp.linalg.cholesky(cov)
        if mask is not None:
            factor = jnp.linalg.cholesky(jnp.where(mask, factor @ factor.T, 0))
    else:
        weight = n / (n + 2)
        factor = scale.factor * jnp.sqrt(weight * cov + (1 - weight))
    new = Scale(center, factor)
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.isfinite(center))
    good &= moments.count > 1
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, scale)


def tune_envelope(
    sampler: Sampler,
    scheme: EventTime,
    tuning: Tuning,
    bounce_rate: Array,
    stats: Stats,
    elapsed: Array,
    dim: int,
) -> tuple[Tuning, Array]:
    """Window from the rate of events, offset from the violations of one draw.

    A window much longer than the time between events only loses accuracy, a shorter
    one costs evaluations at its ends. The offset climbs on violations and sinks
    slowly, so that a share ``TARGET_VIOLATION`` of proposals exceeds the envelope.
    """
    seen = elapsed > 0
    rate = stats.num_bounces / jnp.where(seen, elapsed, 1)
    bounce_rate = jnp.where(seen, 0.95 * bounce_rate + 0.05 * rate, bounce_rate)
    window, offset = tuning
    if scheme.tunes_window:
        window = scheme.window_per_event / bounce_rate
        window = jnp.minimum(window, sampler.longest_window(dim))
        window = window.astype(tuning.window.dtype)
    if scheme.tunes_offset:
        surplus = stats.num_violations - TARGET_VIOLATION * stats.num_proposals
        offset = offset * jnp.exp(jnp.clip(0.2 * surplus, -1, 1)).astype(offset.dtype)
    return Tuning(window, offset), bounce_rate


def find_start(potential_fn, rng_key, x, factor, mask, active, max_steps=50):
    r"""Descend to a mode and take the curvature there as the first metric.

    Damped Newton steps with the absolute eigenvalues of the Hessian, after scaling
    it to unit diagonal, so that units do not matter. The chain then starts at a draw
    from the Gaussian found, pulled towards the mode until its energy is plausible.

    :param potential_fn: flat potential energy.
    :param rng_key: for the draw.
    :param x: where to begin.
    :param factor: decides whether the metric is dense or diagonal.
    :param mask: sparsity of a block metric, or None.
    :param active: boolean; nothing happens where it is false.
    :param max_steps: bound on the number of Newton steps.
    :return: start, centre, factor.
    """
    dim, dtype = x.size, x.dtype
    grad_fn = jax.grad(potential_fn)

    def model(x):
        grad, hvp = jax.linearize(grad_fn, x)
        hessian = jax.vmap(hvp)(jnp.eye(dim, dtype=dtype))
        hessian = 0.5 * (hessian + hessian.T)
        finite = jnp.all(jnp.isfinite(hessian)) & jnp.all(jnp.isfinite(grad))
        hessian = jnp.where(finite, hessian, jnp.eye(dim, dtype=dtype))
        unit = jnp.abs(jnp.diagonal(hessian))
        unit = 1 / jnp.sqrt(jnp.where(unit > 0, unit, 1))
        values, vectors = jnp.linalg.eigh(hessian * unit[:, None] * unit)
        return jnp.where(finite, grad, 0), unit, jnp.abs(values), vectors

    def cond(carry):
        return active & ~carry[-1] & (carry[-2] < max_steps)

    def body(carry):
        x, u, (grad, unit, values, vectors), damping, step, _ = carry
        slope = vectors.T @ (unit * grad)
        move = -unit * (vectors @ (slope / (values + damping)))
        new_x = x + move
        new_u = potential_fn(new_x)
        better = new_u < u
        x, u = jnp.where(better, new_x, x), jnp.where(better, new_u, u)
        curvature = lax.cond(better, model, lambda _: (grad, unit, values, vectors), x)
        damping = jnp.where(better, damping / 5, damping * 5)
        damping = jnp.clip(damping, jnp.finfo(dtype).eps, 1e10)
        grad, unit, values, vectors = curvature
        slope = vectors.T @ (unit * grad)
        decrement = 0.5 * jnp.sum(slope**2 / jnp.maximum(values, 1e-8))
        done = (decrement < 0.01) | (damping > 1e9)
        return x, u, curvature, damping, step + 1, done

    zero = jnp.zeros((), dtype)
    unknown = (jnp.zeros(dim, dtype), jnp.ones(dim, dtype), jnp.ones(dim, dtype))
    unknown += (jnp.eye(dim, dtype=dtype),)
    curvature = lax.cond(active, model, lambda _: unknown, x)
    carry = (x, potential_fn(x), curvature, zero + 1e-3, 0, jnp.zeros((), bool))
    mode, u, (_, unit, values, vectors), *_ = lax.while_loop(cond, body, carry)

    sqrt = unit[:, None] * vectors / jnp.sqrt(jnp.maximum(values, 1e-6))
    covariance = sqrt @ sqrt.T
    if factor.ndim == 2:
        covariance = covariance if mask is None else jnp.where(mask, covariance, 0)
        new_factor = jnp.linalg.cholesky(covariance)
    else:
        new_factor = jnp.sqrt(jnp.diagonal(covariance))
    draw = sqrt @ random.normal(rng_key, (dim,), dtype)
    pulls = mode + draw * (0.5 ** jnp.arange(12, dtype=dtype))[:, None]
    plausible = jax.vmap(potential_fn)(pulls) - u < 0.5 * dim + 2 * dim**0.5 + 2
    start = jnp.where(plausible.any(), pulls[jnp.argmax(plausible)], mode)
    good = active & jnp.all(jnp.isfinite(new_factor)) & jnp.all(jnp.isfinite(start))

    def pick(a, b):
        return jnp.where(good, a, b)

    return pick(start, x), pick(mode, jnp.zeros_like(x)), pick(new_factor, factor)
