# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Descent to a mode, for the start of warm-up.

By Newton steps where a Hessian is affordable, else by L-BFGS.
"""

from collections.abc import Callable

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from numpyro_pdmp.hessian import fill_zeros, hessian_diagonal, hessian_low_rank
from numpyro_pdmp.moments import AnyScale, low_rank_scale
from numpyro_pdmp.process.scale import LowRankScale, Scale

#: a mode with less than exp(-10) of the mass of another is not worth a chain
NEGLIGIBLE_MODE = 10.0


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
        # Not the vectors themselves, whose signs are up to rounding errors.
        root = unit[:, None] * (vectors / jnp.sqrt(values)) @ vectors.T
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
    scale: AnyScale,
    mask: np.ndarray | None,
    grad_fn: Callable[[Array], Array] | None = None,
    num_chains: int = 1,
) -> tuple[AnyScale, Scale, Array]:
    """A mode to start from, and the curvature there as the first metric.

    In low dimension other starts are tried beside the given one; one of them is taken
    only if its mode has so much more mass that the given start's is negligible.

    :param potential_fn: flat potential energy.
    :param x: the given start.
    :param scale: decides what kind of metric is made: dense, diagonal or low-rank.
    :param mask: sparsity of a block metric, or None.
    :param grad_fn: gradient of the potential, if not by reverse mode.
    :param num_chains: chains that will be compared anyway, and so need fewer tries.
    :return: a scale with the mode as its centre, the mode's Gaussian, whose curvature
        is the whole one whatever the kind of metric, and the logarithm of its mass.
    """
    # Signed permutations of a start are as likely as the start itself under NumPyro's
    # default law; fixed ones cost no random numbers.
    dim = x.size
    rng = np.random.default_rng(0)
    starts = [x]
    num_starts = min(8, 160 // (dim * num_chains)) if dim <= 32 else 1
    for _ in range(num_starts - 1):
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
    gaussian = Scale(modes[best], roots[best])
    new = laplace_scale(gaussian, scale, mask)
    good = jnp.stack([jnp.all(jnp.isfinite(a)) for a in new]).all()
    old = scale._replace(center=x), Scale(x, jnp.eye(dim, dtype=x.dtype))
    new, gaussian = jax.tree.map(
        lambda a, b: jnp.where(good, a, b), (new, gaussian), old
    )
    return new, gaussian, log_mass[best]


def laplace_scale(
    gaussian: Scale, scale: AnyScale, mask: np.ndarray | None
) -> AnyScale:
    """Scale of the kind of ``scale`` for the Gaussian at a mode."""
    mode, covariance = gaussian.center, gaussian.covariance()
    variance = jnp.diagonal(covariance)
    if isinstance(scale, LowRankScale):
        deviation = jnp.sqrt(variance)
        values, vectors = jnp.linalg.eigh(covariance / deviation / deviation[:, None])
        return low_rank_scale(mode, variance, values, vectors, scale.stretch.size)
    if scale.factor.ndim == 2:
        covariance = covariance if mask is None else jnp.where(mask, covariance, 0)
        return Scale(mode, jnp.linalg.cholesky(covariance))
    return Scale(mode, jnp.sqrt(variance))


def descend(
    potential_fn: Callable[[Array], Array], x: Array, max_steps: int = 200
) -> tuple[Array, Array]:
    """Descend by L-BFGS until steps no longer gain anything in energy.

    :param potential_fn: flat potential energy.
    :param x: where to begin.
    :param max_steps: bound on the number of steps.
    :return: where it ended, and the energy there.
    """
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(potential_fn)

    def body(carry):
        x, state, value, step, _ = carry
        energy, grad = value_and_grad(x, state=state)
        update, state = optimizer.update(
            grad, state, x, value=energy, grad=grad, value_fn=potential_fn
        )
        new = optax.apply_updates(x, update)
        good = jnp.isfinite(energy) & jnp.all(jnp.isfinite(new))
        # Energies are in units of the posterior's own spread: 0.01 is next to nothing.
        done = ~good | (value - energy < 0.01) & (step > 0)
        return jnp.where(good, new, x), state, energy, step + 1, done

    start = (x, optimizer.init(x), jnp.full((), jnp.inf, x.dtype), 0, False)
    x = lax.while_loop(lambda carry: ~carry[-1] & (carry[-2] < max_steps), body, start)[
        0
    ]
    return x, potential_fn(x)


def find_start_large(
    potential_fn: Callable[[Array], Array], x: Array, scale: AnyScale
) -> tuple[AnyScale, Array]:
    """As :func:`find_start` in many dimensions: a descent without Hessians.

    The metric is the diagonal of the Hessian at its end, from random probes beyond
    1024 dimensions; for a low-rank scale also its most telling directions.
    """
    mode, energy = descend(potential_fn, x)
    curvature = hessian_diagonal(potential_fn, mode, num_probes=32)
    curvature = fill_zeros(jnp.abs(curvature))
    deviation = 1 / jnp.sqrt(curvature)
    # Where units differ much, L-BFGS ends some standard deviations off. A Newton step
    # by the diagonal arrives if the rest of the curvature is small; else it is refused.
    nearer = mode - jax.grad(potential_fn)(mode) / curvature
    nearer_energy = potential_fn(nearer)
    better = nearer_energy < energy
    mode = jnp.where(better, nearer, mode)
    energy = jnp.where(better, nearer_energy, energy)
    new: AnyScale
    if isinstance(scale, LowRankScale):
        rank = scale.stretch.size
        new = hessian_low_rank(potential_fn, mode, curvature, rank)
    elif scale.factor.ndim == 2:
        new = Scale(mode, jnp.diag(deviation))
    else:
        new = Scale(mode, deviation)
    good = jnp.stack([jnp.all(jnp.isfinite(a)) for a in new]).all()
    old = scale._replace(center=x)
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    log_mass = -energy - 0.5 * jnp.sum(jnp.log(curvature))
    return new, jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf)


def typical_start(
    potential_fn: Callable[[Array], Array], gaussian: AnyScale, noise: Array
) -> Array:
    """A draw of the Gaussian at a mode, or nearer to the mode where that fails.

    A mode is no typical point: in many dimensions a chain would take long to get away
    from it, and chains that start at one point look as if they agreed. Neither is a
    draw without the correlations, when a diagonal metric is all that is kept of them:
    nearly all of it would be too far out, and what is near is too close to the mode
    along the directions in which paths are slowest.

    :param potential_fn: flat potential energy.
    :param gaussian: the whole one, if it is known, or what is known of it.
    :param noise: (d,) standard normal.
    """
    shares = jnp.asarray([1, 0.5, 0.25, 0.125, 0], noise.dtype)
    tries = jax.vmap(lambda share: gaussian.position(share * noise))(shares)
    energies = lax.map(potential_fn, tries)
    expected = 0.5 * shares**2 * jnp.sum(noise**2)
    allowed = energies - energies[-1] < expected + 5 + 2 * noise.size**0.5
    allowed = allowed.at[-1].set(True)
    return tries[jnp.argmax(allowed)]


def merge_modes(
    scales: AnyScale, log_mass: Array, starts: Array
) -> tuple[AnyScale, Array]:
    """One scale for several chains, each near a mode of its own, and their starts.

    Centre and covariance are those of the mixture of all modes' Gaussians, weighted by
    their masses. A chain whose mode is negligible starts where the best one does.

    :param scales: of all chains, with a leading axis.
    :param log_mass: (chains,) logarithms of the modes' masses.
    :param starts: (chains, d) starts near those modes.
    :return: the scale, and the starts of all chains.
    """
    best = jnp.argmax(log_mass)
    one = jax.tree.map(lambda a: a[best], scales)
    centers = scales.center
    negligible = log_mass < log_mass[best] - NEGLIGIBLE_MODE
    starts = jnp.where(negligible[:, None], starts[best], starts)
    if isinstance(one, LowRankScale):
        return one, starts
    weights = jax.nn.softmax(log_mass)
    center = weights @ centers
    spread = centers - center
    factor = scales.factor
    if one.factor.ndim == 2:
        covariance = jnp.einsum("c,cij,ckj->ik", weights, factor, factor)
        covariance += (weights[:, None] * spread).T @ spread
        factor = jnp.linalg.cholesky(covariance)
    else:
        factor = jnp.sqrt(weights @ (factor**2 + spread**2))
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.isfinite(center))
    new = Scale(center, factor)
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, one), starts
