# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process import Skeleton

NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", old)


def flow(flow_name, center, x, v, t):
    if flow_name == "linear":
        return x + t * v
    return center + (x - center) * np.cos(t) + v * np.sin(t)


def random_skeleton(flow_name, dtype, n=40, d=3, shift=0.0):
    """A continuous path with short, long and empty segments, in NumPy."""
    rng = np.random.default_rng(1)
    durations = rng.exponential(size=n) * 10 ** rng.uniform(-4, 0.7, size=n)
    durations[[5, 6, n - 1]] = 0
    center = shift + rng.normal(size=d)
    velocities = rng.normal(size=(n + 1, d))
    positions = [shift + rng.normal(size=d)]
    for t, v in zip(durations, velocities[:-1], strict=True):
        positions.append(flow(flow_name, center, positions[-1], v, t))
    return Skeleton(
        *(jnp.asarray(a, dtype) for a in (durations, positions, velocities)),
        jnp.zeros(n + 1, int),
        jnp.asarray(center, dtype),
        flow_name,
    )


def quadrature(path):
    """Points along the path and their weights: Gauss-Legendre on each segment."""
    t, x, v, c = (
        np.asarray(a, float)
        for a in (path.durations, path.positions, path.velocities, path.center)
    )
    t = t[:, None, None]
    s = t * (NODES[:, None] + 1) / 2
    points = flow(path.flow_name, c, x[:-1, None], v[:-1, None], s)
    weights = np.broadcast_to(t * WEIGHTS[:, None] / 2, s.shape)[..., 0]
    return points.reshape(-1, x.shape[1]), weights.ravel() / t.sum()


FLOWS = ("linear", "elliptic")


@pytest.mark.parametrize("flow_name", FLOWS)
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_moments_against_quadrature(flow_name, shift, dtype):
    path = random_skeleton(flow_name, dtype, shift=shift)
    x, w = quadrature(path)
    mean = w @ x
    covariance = (x - mean).T @ (w[:, None] * (x - mean))
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    if dtype == "float32":
        tolerance = {"rtol": 1e-5, "atol": 1e-5 * (1 + shift)}
    moments = path.mean(), path.variance(), path.covariance()
    assert {m.dtype for m in moments} == {np.dtype(dtype)}
    expected = mean, np.diag(covariance), covariance
    for actual, value in zip(moments, expected, strict=True):
        np.testing.assert_allclose(actual, value, **tolerance)


@pytest.mark.parametrize("flow_name", FLOWS)
def test_short_segments_in_float32(flow_name):
    # Of a path of length 1e-3: nearly uniform, so the variance is (v t)^2 / 12.
    n, v = 10, jnp.full((11, 1), 2.0)
    x = jnp.full((11, 1), 3.0) + v * 1e-4 * jnp.arange(11)[:, None]
    path = Skeleton(
        jnp.full(n, 1e-4), x, v, jnp.zeros(11, int), jnp.full(1, 3.0), flow_name
    )
    np.testing.assert_allclose(path.variance(), (2e-3) ** 2 / 12, rtol=2e-3)


def test_mean_of_one_segment_is_its_middle():
    ones = jnp.ones((2, 1))
    x = jnp.array([[0.0], [1.0]])
    path = Skeleton(jnp.ones(1), x, ones, jnp.zeros(2, int), jnp.zeros(1))
    assert path.mean() == 0.5
    np.testing.assert_allclose(path.variance(), 1 / 12, rtol=1e-6)


@pytest.mark.parametrize("flow_name", FLOWS)
def test_position_at(flow_name, dtype):
    path = random_skeleton(flow_name, dtype)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"atol": 1e-12}
    np.testing.assert_allclose(path.position_at(path.times), path.positions, **close)
    # in the middle of segments
    times = np.asarray(path.times)
    middles = np.append((times[:-1] + times[1:]) / 2, 0)
    t, x, v, c = (
        np.asarray(a, float)
        for a in (path.durations, path.positions, path.velocities, path.center)
    )
    expected = flow(flow_name, c, x[:-1], v[:-1], t[:, None] / 2)
    np.testing.assert_allclose(path.position_at(middles)[:-1], expected, **close)
    # before and after the path
    outside = path.position_at(jnp.array([[-1.0], [1e6]]))
    assert outside.shape == (2, 1, 3)
    ends = np.asarray(path.positions)[[[0], [-1]]]
    np.testing.assert_allclose(outside, ends, **close)


@pytest.mark.parametrize("flow_name", FLOWS)
def test_discretize_and_standard_error(flow_name):
    path = random_skeleton(flow_name, "float32")
    x = np.asarray(path.discretize(70_000), float)
    assert x.shape == (70_000, 3)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(x[-1], path.positions[-1], **close)
    middle = path.position_at(path.times[-1:] / 2)[0]
    np.testing.assert_allclose(x[34_999], middle, **close)
    np.testing.assert_allclose(x.mean(0), path.mean(), atol=2e-3)
    # Batches, whose borders are in the midst of segments
    for power, values in ((1, x), (2, (x - x.mean(0)) ** 2)):
        batches = values.reshape(7, 10_000, 3).mean(1)
        expected = batches.std(0, ddof=1) / 7**0.5
        actual = path.standard_error(7, power)
        np.testing.assert_allclose(actual, expected, rtol=5e-3)


def test_ess_of_an_autoregression():
    # A path that rests at each state of an AR(1) process for one unit of time.
    n, phi = 20_000, 0.6

    def step(x, noise):
        x = phi * x + (1 - phi**2) ** 0.5 * noise
        return x, x

    noise = random.normal(random.PRNGKey(0), (n + 1, 4))
    x = jax.lax.scan(step, jnp.zeros(4), noise)[1]
    path = Skeleton(
        jnp.ones(n), x, jnp.zeros_like(x), jnp.zeros(n + 1, int), jnp.zeros(4)
    )
    expected = n * (1 - phi) / (1 + phi)
    np.testing.assert_allclose(path.ess(500), expected, rtol=5 * (2 / 500) ** 0.5)


def test_times_are_sorted_on_long_float32_paths():
    durations = random.exponential(random.PRNGKey(0), (100_000,)) ** 8
    zeros = jnp.zeros((100_001, 1))
    path = Skeleton(durations, zeros, zeros, jnp.zeros(100_001, int), jnp.zeros(1))
    assert (jnp.diff(path.times) >= 0).all()
    total = np.sum(np.asarray(durations, float))
    np.testing.assert_allclose(path.times[-1], total, rtol=1e-6)


def test_methods_under_jit_and_vmap():
    path = random_skeleton("elliptic", "float32")
    paths = jax.tree.map(lambda a: np.stack([a, a]), path)
    variance, ess = jax.jit(
        jax.vmap(lambda path: (path.variance(), path.ess(num_batches=7)))
    )(paths)
    expected = path.variance(), path.variance() / path.standard_error(7, 1) ** 2
    for i in range(2):
        np.testing.assert_allclose(variance[i], expected[0], rtol=1e-4)
        np.testing.assert_allclose(ess[i], expected[1], rtol=1e-3)


def test_errors_name_the_argument():
    path = random_skeleton("linear", "float32")
    with pytest.raises(ValueError, match="num_batches=1"):
        path.ess(1)
    with pytest.raises(ValueError, match="power=3"):
        path.standard_error(power=3)
