# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process import (
    BoomerangProcess,
    BouncyParticle,
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
    ZigZagProcess,
)

SAMPLERS = (
    BouncyParticle(),
    BoomerangProcess(),
    BoomerangProcess(residual=False),
    ZigZagProcess(),
)


def potential(z):
    return jnp.sum(jnp.cosh(z)) + z[0] * z[1] ** 2


def energy_gradient(sampler, z):
    return sampler.energy_gradient(z, jax.grad(potential)(z))


@pytest.fixture
def state():
    return random.normal(random.PRNGKey(0), (2, 4))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_energy_gradient(sampler, state):
    z, _ = state
    expected = jax.grad(potential)(z)
    if isinstance(sampler, BoomerangProcess) and sampler.residual:
        expected = jax.grad(lambda z: potential(z) - 0.5 * z @ z)(z)
    np.testing.assert_allclose(energy_gradient(sampler, z), expected, rtol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rates_are_the_derivative_of_the_energy(sampler, state):
    z, noise = state
    v = sampler.velocity(noise)
    g = energy_gradient(sampler, z)
    rates = sampler.rates(z, v, g)
    assert rates.shape == (sampler.num_rates(z.size),)
    np.testing.assert_allclose(jnp.sum(rates), v @ g, rtol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_slopes_are_the_derivative_of_the_rates(sampler, state):
    z, noise = state
    v = sampler.velocity(noise)

    def rates(t):
        z1, v1 = sampler.flow(z, v, t)
        return sampler.rates(z1, v1, energy_gradient(sampler, z1))

    _, expected = jax.jvp(rates, (0.0,), (1.0,))
    gradient, curvature = jax.jvp(lambda z: energy_gradient(sampler, z), (z,), (v,))
    actual = sampler.slopes(z, v, gradient, curvature)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_jump_changes_the_sign_of_its_rate(sampler, state):
    z, noise = state
    v = sampler.velocity(noise)
    g = energy_gradient(sampler, z)
    old = np.asarray(sampler.rates(z, v, g))
    for index in range(sampler.num_rates(z.size)):
        w = sampler.jump(z, v, g, index, noise)
        expected = old * np.where(np.arange(old.size) == index, -1, 1)
        np.testing.assert_allclose(sampler.rates(z, w, g), expected, rtol=1e-4)
        np.testing.assert_allclose(w @ w, v @ v, rtol=1e-5)


def test_zigzag_velocity_has_unit_speed():
    v = ZigZagProcess().velocity(random.normal(random.PRNGKey(1), (10_000,)))
    assert set(np.unique(v)) == {-1, 1}
    assert abs(v.mean()) < 5 / 100
    assert ZigZagProcess().speed(0 * v, v) == 1


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.9, 1.0])
def test_zigzag_partial_refreshment(mix):
    # A sign that is drawn anew, with probability 1 - mix, changes half of the time.
    sampler, n = ZigZagProcess(refresh_rate=1.0, refresh_mix=mix), 40_000
    v = np.where(np.arange(n) < n // 4, 1.0, -1.0).astype("float32")
    noise = random.normal(random.PRNGKey(2), (n,))
    new = np.asarray(jax.jit(sampler.refresh)(v, noise))
    assert set(np.unique(new)) == {-1, 1}
    p = (1 - mix) / 2
    for group in (v > 0, v < 0):
        changed = np.mean((new != v)[group])
        assert abs(changed - p) <= 5 * (p * (1 - p) / group.sum()) ** 0.5


@pytest.mark.parametrize("sampler", SAMPLERS[:2])
def test_gaussian_refreshment(sampler):
    noise = random.normal(random.PRNGKey(3), (5,))
    np.testing.assert_array_equal(sampler.refresh(jnp.ones(5), noise), noise)


def test_exponential_refresh_time():
    uniform = random.uniform(random.PRNGKey(4), (5000,))
    times = BouncyParticle().refresh_time(uniform, 2.5)
    assert stats.kstest(np.asarray(times), stats.expon(scale=0.4).cdf).pvalue > 1e-3


def test_regular_refresh_time():
    uniform = random.uniform(random.PRNGKey(5), (10,))
    sampler = BouncyParticle(refresh_law="regular")
    np.testing.assert_allclose(sampler.refresh_time(uniform, 2.5), 0.4, rtol=1e-6)


@pytest.mark.parametrize("law", ["exponential", "regular"])
def test_no_refreshment_at_rate_zero(law):
    sampler = ZigZagProcess(refresh_law=law)
    assert sampler.refresh_time(jnp.array(0.5), 0.0) == jnp.inf


class HalfNormal(ForwardBouncyParticle):
    """The part along the gradient that a fresh velocity would have."""

    def parallel(self, u, noise):
        return -abs(noise)


class Unscaled(GeneralisedBouncyParticle):
    """Noise that is added to the part across the gradient, not mixed with it."""

    def jump(self, z, v, gradient, index, noise):
        new = super().jump(z, v, gradient, index, noise)
        return new + 0.3 * (noise - noise @ gradient / (gradient @ gradient) * gradient)


@pytest.mark.parametrize("mix", [0.0, 0.8, None])
@pytest.mark.parametrize(
    ("sampler", "invariant"),
    [
        (GeneralisedBouncyParticle, True),
        (ForwardBouncyParticle, True),
        (HalfNormal, False),
        (Unscaled, False),
    ],
)
def test_random_bounces_mirror_the_law_at_events(sampler, invariant, mix):
    """At events the velocity is Rayleigh along the gradient and normal across it."""
    sampler, num = sampler(orthogonal_mix=mix), 20_000
    gradient = jnp.array([1.0, -2.0, 0.5, 1.0])
    basis = np.linalg.qr(np.c_[gradient, np.eye(4)[:, :3]])[0]
    basis[:, 0] = gradient / np.linalg.norm(gradient)
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(num, 4))
    parts[:, 0] = rng.rayleigh(size=num)
    noise = random.normal(random.PRNGKey(6), (num, 4))

    def jump(v, noise):
        return sampler.jump(None, v, gradient, 0, noise)

    new = np.asarray(jax.vmap(jump)(jnp.asarray(parts @ basis.T), noise)) @ basis
    tests = [stats.kstest(-new[:, 0], stats.rayleigh.cdf)]
    tests += [stats.kstest(x, stats.norm.cdf) for x in new[:, 1:].T]
    assert (min(test.pvalue for test in tests) > 1e-4) == invariant
    if invariant:
        expected = math.exp(-2.5 / 2) if mix is None else mix
        both = np.c_[new, new[:, 1:] ** 2, parts[:, 1:], parts[:, 0]]
        correlation = np.corrcoef(both.T)
        np.testing.assert_allclose(correlation[:7, :7], np.eye(7), atol=0.04)
        np.testing.assert_allclose(
            correlation[1:4, 7:10], expected * np.eye(3), atol=0.04
        )
        reversed_ = sampler.__class__ is GeneralisedBouncyParticle
        assert abs(correlation[0, 10] + reversed_) < 0.04


def test_orthogonal_mix_out_of_range():
    with pytest.raises(ValueError, match="`orthogonal_mix` must be in .* got 1.0"):
        GeneralisedBouncyParticle(orthogonal_mix=1.0)


def test_orthogonal_part_is_renewed_at_rate_one():
    sampler = ForwardBouncyParticle().tuned(jnp.array(4.0))
    np.testing.assert_allclose(sampler.orthogonal_mix**4, math.exp(-1), rtol=1e-5)
    given = ForwardBouncyParticle(orthogonal_mix=0.3)
    assert given.tuned(jnp.array(4.0)) is given
    assert BouncyParticle().tuned(jnp.array(4.0)) == BouncyParticle()
