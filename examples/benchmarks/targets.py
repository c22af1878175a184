# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Targets of the benchmarks: potentials of a flat vector, for any sampler and any JAX.

They need JAX and NumPy alone, since peers run in environments of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rows:
    """A potential that is a sum over rows of data."""

    data: tuple
    log_prior: Callable  # of the vector
    log_likelihood: Callable  # of the vector and one row
    subsample_size: int


@dataclass(frozen=True)
class Target:
    name: str
    dim: int
    potential: Callable  # of a vector (dim,)
    quantities: Callable = staticmethod(lambda x: x)  # of draws (..., dim)
    truth: tuple | None = None  # mean and covariance, or variances; None: by a long run
    rows: Rows | None = None


def gaussian(dim, condition=1.0):
    """Standard deviations from 1 to ``condition``, in axes that are not coordinates."""
    sd = jnp.geomspace(1.0, condition, dim)
    # A reflection turns the axes at the cost of a few vectors.
    u = np.random.default_rng(dim).normal(size=dim)
    u = jnp.asarray(u / np.linalg.norm(u), jnp.float32)

    def potential(x):
        y = x - 2 * u * (u @ x) if condition > 1 else x
        return 0.5 * jnp.sum(jnp.square(y / sd))

    reflection = np.eye(dim) - 2 * np.outer(u, u) if condition > 1 else np.eye(dim)
    covariance = reflection * np.asarray(sd, float) ** 2 @ reflection
    name = f"gaussian-{dim}" if condition == 1 else f"ill-{dim}"
    return Target(name, dim, potential, truth=(np.zeros(dim), covariance))


def banana(dim=50):
    """The example of pdmp-jax: x_1 given x_0 is N(x_0^2 - 1, 1), all else N(0, 1)."""

    def potential(x):
        return 0.5 * (x[0] ** 2 + (x[1] - x[0] ** 2 + 1) ** 2 + jnp.sum(x[2:] ** 2))

    variance = np.ones(dim)
    variance[1] = 3
    return Target(f"banana-{dim}", dim, potential, truth=(np.zeros(dim), variance))


def funnel(dim=10):
    """Neal's funnel: v of sd 3, all others of sd exp(v / 2)."""

    def potential(x):
        v, rest = x[0], x[1:]
        scaled = 0.5 * jnp.sum(rest**2) * jnp.exp(-v)
        return v**2 / 18 + scaled + 0.5 * (dim - 1) * v

    variance = np.full(dim, np.exp(4.5))
    variance[0] = 9
    return Target("funnel", dim, potential, truth=(np.zeros(dim), variance))


def eight_schools():
    """Non-centred: mean, logarithm of the spread, and eight standardised effects."""
    y = jnp.asarray([28.0, 8, -3, 7, -1, 1, 18, 12])
    sigma = jnp.asarray([15.0, 10, 16, 11, 9, 11, 10, 18])

    def potential(x):
        mu, log_tau, effects = x[0], x[1], x[2:]
        tau = jnp.exp(log_tau)
        residual = (y - mu - tau * effects) / sigma
        prior = 0.5 * (mu / 5) ** 2 + jnp.log1p((tau / 5) ** 2) - log_tau
        return prior + 0.5 * jnp.sum(effects**2) + 0.5 * jnp.sum(residual**2)

    return Target("eight_schools", 10, potential)


def make_data(num_data, dim, seed=0):
    """Correlated standard normal covariates with an intercept, and binary outcomes."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(dim) + 0.3 * rng.normal(size=(dim, dim)) / dim**0.5
    x = rng.normal(size=(num_data, dim)) @ mixing
    x[:, 0] = 1
    logits = x @ (0.5 * rng.normal(size=dim))
    y = rng.random(num_data) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def logistic(num_data, dim=25, subsample_size=500):
    """Logistic regression with a standard normal prior."""
    x, y = make_data(num_data, dim)

    def log_likelihood(beta, row):
        logit = row[0] @ beta
        return row[1] * logit - jax.nn.softplus(logit)

    def potential(beta):
        logits = x @ beta
        fit = jnp.sum(jax.nn.softplus(logits) - y * logits)
        return fit + 0.5 * jnp.sum(beta**2)

    def log_prior(beta):
        return -0.5 * jnp.sum(beta**2)

    rows = Rows((x, y), log_prior, log_likelihood, subsample_size)
    return Target(f"logistic-{num_data}", dim, potential, rows=rows)


def network(num_data=100, width=10):
    """Regression by a network 1-width-1, judged by its function values."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.uniform(-2, 2, num_data), jnp.float32)
    y = jnp.sin(2 * x) + 0.1 * jnp.asarray(rng.normal(size=num_data), jnp.float32)
    grid = jnp.linspace(-2, 2, 9)

    def function(w, x):
        w1, b1, w2 = (w[..., i * width : (i + 1) * width, None] for i in range(3))
        hidden = jnp.tanh(w1 * x + b1)
        return jnp.sum(w2 * hidden, -2) + w[..., -1:]

    def potential(w):
        return 50 * jnp.sum((y - function(w, x)) ** 2) + 0.5 * jnp.sum(w**2)

    return Target(
        "network", 3 * width + 1, potential, quantities=lambda w: function(w, grid)
    )


TARGETS: dict[str, Any] = {
    **{f"gaussian-{d}": partial(gaussian, d) for d in (10, 100, 1000)},
    **{f"ill-{d}": partial(gaussian, d, 100.0) for d in (10, 100, 1000)},
    "banana-50": banana,
    "eight_schools": eight_schools,
    "funnel": funnel,
    "network": network,
    **{f"logistic-{n}": partial(logistic, n) for n in (1000, 100_000, 1_000_000)},
}
