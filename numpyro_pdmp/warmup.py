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

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro.infer.hmc_util import build_adaptation_schedule
from numpyro_pdmp.process.events import EventTime, Tuning
from numpyro_pdmp.process.loop import Stats
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.scale import Scale

#: largest dimension with a dense metric, and with Hessians at the start, by default
DENSE_LIMIT = 256
#: a mode with less than exp(-10) of the mass of another is not worth a chain
NEGLIGIBLE_MODE = 10.0


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


def find_mode(
    potential_fn: Callable[[Array], Array],
    x: Array,
    max_steps: int = 50,
    grad_fn: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array, Array]:
    r"""Descend to a mode by Newton steps; also the curvature there.

    The Hessian is scaled to unit diagonal, so that units do not matter, and its
    eigenvalues are replaced by their absolute values, so that every step goes down.
    Each step tries several dampings and lengths at once and takes the best: short ones
    for regions where the quadratic model is wrong, long ones for potentials that
    grow like a high power.

    :param potential_fn: flat potential energy.
    :param x: where to begin.
    :param max_steps: bound on the number of steps.
    :param grad_fn: gradient of the potential, if not by reverse mode.
    :return: the mode, a square root of the inverse Hessian there (d, d), and the
        logarithm of the mass of the mode's Gaussian (Laplace's approximation).
    """
    dim, dtype = x.size, x.dtype
    grad_fn = jax.grad(potential_fn) if grad_fn is None else grad_fn
    eps = jnp.finfo(dtype).eps * dim
    damping = jnp.asarray([0, 0, 0, 0, 1e-3, 0.1, 10, 1e3], dtype)
    length = jnp.asarray([1, 4, 16, 64, 1, 1, 1, 1], dtype)

    def body(carry):
        x, _, _, step, _ = carry
        grad, hvp = jax.linearize(grad_fn, x)
        hessian = jax.vmap(hvp)(jnp.eye(dim, dtype=dtype))
        finite = jnp.all(jnp.isfinite(hessian)) & jnp.all(jnp.isfinite(grad))
        hessian = jnp.where(finite, 0.5 * (hessian + hessian.T), jnp.eye(dim))
        unit = jnp.abs(jnp.diagonal(hessian))
        unit = 1 / jnp.sqrt(jnp.where(unit > 0, unit, 1))
        values, vectors = jnp.linalg.eigh(hessian * unit[:, None] * unit)
        values = jnp.maximum(jnp.abs(values), eps)
        slope = vectors.T @ (unit * jnp.where(finite, grad, 0))
        moves = length[:, None] * slope / (values + damping[:, None])
        tries = jnp.concatenate([x[None], x - (moves @ vectors.T) * unit])
        energies = jax.vmap(potential_fn)(tries)
        best = jnp.argmin(jnp.where(jnp.isfinite(energies), energies, jnp.inf))
        root = unit[:, None] * vectors / jnp.sqrt(values)
        log_mass = jnp.sum(jnp.log(unit)) - 0.5 * jnp.sum(jnp.log(values)) - energies[0]
        done = (best == 0) | ~finite | (0.5 * jnp.sum(slope**2 / values) < 0.01)
        return jnp.where(done, x, tries[best]), root, log_mass, step + 1, done

    root, log_mass = jnp.eye(dim, dtype=dtype), jnp.full((), -jnp.inf, dtype)
    start = (x, root, log_mass, 0, jnp.zeros((), bool))
    mode, root, log_mass, *_ = lax.while_loop(
        lambda carry: ~carry[-1] & (carry[-2] < max_steps), body, start
    )
    return mode, root, log_mass


def find_start(
    potential_fn: Callable[[Array], Array],
    x: Array,
    factor: Array,
    mask: np.ndarray | None,
    grad_fn: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """A mode to start from, and the curvature there as the first metric.

    In low dimension other starts are tried beside the given one; one of them is taken
    only if its mode has so much more mass that the given start's is negligible.

    :param potential_fn: flat potential energy.
    :param x: the given start.
    :param factor: decides whether the metric is dense or diagonal.
    :param mask: sparsity of a block metric, or None.
    :param grad_fn: gradient of the potential, if not by reverse mode.
    :return: mode and factor.
    """
    # Signed permutations of a start are as likely as the start itself under NumPyro's
    # default law; fixed ones cost no random numbers.
    dim = x.size
    rng = np.random.default_rng(0)
    starts = [x]
    for _ in range(min(8, 128 // dim) - 1 if dim <= 32 else 0):
        signs = jnp.asarray(rng.choice(np.array([-1.0, 1.0]), dim), x.dtype)
        starts.append(signs * x[rng.permutation(dim)])
    # One after the other: XLA's CPU thread pool can deadlock on large batches of
    # the factorisations that some models contain.
    modes, roots, log_mass = lax.map(
        lambda x: find_mode(potential_fn, x, grad_fn=grad_fn),
        jnp.stack(starts),
    )
    log_mass = jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf)
    best = jnp.argmax(log_mass)
    best = jnp.where(log_mass[best] > log_mass[0] + NEGLIGIBLE_MODE, best, 0)
    mode, root = modes[best], roots[best]
    covariance = root @ root.T
    if factor.ndim == 2:
        covariance = covariance if mask is None else jnp.where(mask, covariance, 0)
        new = jnp.linalg.cholesky(covariance)
    else:
        new = jnp.sqrt(jnp.diagonal(covariance))
    good = jnp.all(jnp.isfinite(new))
    return jnp.where(good, mode, x), jnp.where(good, new, factor)
