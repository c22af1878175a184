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

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from numpyro.infer.hmc_util import build_adaptation_schedule
from numpyro_pdmp.process.events import EventTime, Tuning
from numpyro_pdmp.process.loop import Stats
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale

#: largest dimension with a dense metric, and with Hessians at the start, by default
DENSE_LIMIT = 256


class Moments(NamedTuple):
    """Welford sums of whitened positions at equally spaced process times."""

    num: Array  # of positions
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
    count = moments.num + 1
    delta = z - moments.mean
    mean = moments.mean + delta / count
    rest = z - mean
    product = jnp.outer(delta, rest) if moments.m2.ndim == 2 else delta * rest
    return Moments(count, mean, moments.m2 + product)


def renew_scale(scale: Scale, moments: Moments, mask: np.ndarray | None) -> Scale:
    r"""Centre and scale from the moments of a window, shrunk to those in force.

    In whitened coordinates the metric in force is the identity, whatever the units
    of the model, and a window tells :math:`d(d+1)/2` numbers about another one. Where
    that is mostly noise the old metric is better: as in Ledoit and Wolf (2004), the
    estimate is :math:`(1-\rho) S + \rho I`, with :math:`\rho` the expected squared
    error of :math:`S` on a Gaussian over :math:`\|S - I\|^2`; likewise the mean.
    """
    # Draws are correlated, and so count for less.
    n, dim = jnp.maximum(moments.num / 3, 1), moments.mean.size
    noise = dim / n
    shift = jnp.sum(moments.mean**2)
    mean = moments.mean * jnp.maximum(0, 1 - noise / jnp.maximum(shift, noise))
    center = scale.position(mean)
    cov = moments.m2 / moments.num
    if moments.m2.ndim == 2:
        identity = jnp.eye(dim, dtype=cov.dtype)
        error = (jnp.sum(cov**2) + jnp.trace(cov) ** 2) / n
        rho = error / jnp.maximum(jnp.sum((cov - identity) ** 2), error)
        # A floor, since fewer draws than dimensions leave S singular.
        rho = jnp.maximum(rho, 1 / (1 + moments.num))
        cov = (1 - rho) * cov + rho * identity
        factor = scale.factor @ jnp.linalg.cholesky(cov)
        if mask is not None:
            factor = jnp.linalg.cholesky(jnp.where(mask, factor @ factor.T, 0))
    else:
        weight = n / (n + 2)
        factor = scale.factor * jnp.sqrt(weight * cov + (1 - weight))
    new = Scale(center, factor)
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.isfinite(center))
    good &= moments.num > 1
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
    """Window and offset from the statistics of one draw.

    The offset climbs on violations and sinks slowly, so that a share
    ``sampler.target_violation`` of proposals exceeds the envelope. The window
    balances the evaluations at its ends against the rejections that its offset
    causes, and is not much longer than the time between events, beyond which it
    would gain nothing.
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
        window = window * jnp.exp(jnp.clip(0.03 * (0.5 * ends - rejections), -0.5, 0.5))
        limit = jnp.minimum(
            scheme.window_per_event / bounce_rate, sampler.longest_window(dim)
        )
        window = jnp.minimum(window, limit).astype(tuning.window.dtype)
    if scheme.tunes_offset:
        surplus = stats.num_violations - sampler.target_violation * stats.num_proposals
        factor = jnp.exp(jnp.clip(0.2 * surplus, -1, 1)) * (window / tuning.window) ** 2
        offset = (offset * factor).astype(offset.dtype)
    return Tuning(window, offset), bounce_rate
