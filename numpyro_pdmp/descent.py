# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Descent to a mode by Newton steps, for the start of warm-up."""

from collections.abc import Callable

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

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
