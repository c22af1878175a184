# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process.motion import (
    elliptic_flow,
    flip,
    linear_flow,
    reflect,
    refresh,
)
from numpyro_pdmp.process.scale import Scale, identity_scale

FLOWS = (linear_flow, elliptic_flow)
TIMES = (0.0, 0.3, 2.0, 7.0)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def state():
    z, v, g = random.normal(random.PRNGKey(0), (3, 4))
    return z, v, g


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("t", TIMES)
def test_flow_is_reversible(flow, t, state):
    z, v, _ = state
    z1, v1 = flow(z, v, t)
    z2, v2 = flow(z1, -v1, t)
    np.testing.assert_allclose(z2, z, **CLOSE)
    np.testing.assert_allclose(v2, -v, **CLOSE)


@pytest.mark.parametrize("flow", FLOWS)
def test_flow_is_a_group(flow, state):
    z, v, _ = state
    for one, two in zip(flow(*flow(z, v, 0.4), 1.1), flow(z, v, 1.5), strict=True):
        np.testing.assert_allclose(one, two, **CLOSE)


@pytest.mark.parametrize("flow", FLOWS)
def test_velocity_is_the_derivative(flow, state):
    z, v, _ = state
    _, dz = jax.jvp(lambda t: flow(z, v, t)[0], (0.7,), (1.0,))
    np.testing.assert_allclose(dz, flow(z, v, 0.7)[1], **CLOSE)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("t", TIMES)
def test_flow_preserves_volume(flow, t, state):
    z, v, _ = state
    jacobian = jax.jacobian(lambda zv: jnp.concatenate(flow(zv[:4], zv[4:], t)))
    det = np.linalg.det(np.asarray(jacobian(jnp.concatenate([z, v])), float))
    np.testing.assert_allclose(det, 1, rtol=1e-4)


@pytest.mark.parametrize("t", TIMES)
def test_elliptic_flow_preserves_the_reference(t, state):
    z, v, _ = state
    z1, v1 = elliptic_flow(z, v, t)
    np.testing.assert_allclose(z1 @ z1 + v1 @ v1, z @ z + v @ v, rtol=1e-5)


def test_reflect(state):
    _, v, g = state
    w = reflect(v, g)
    np.testing.assert_allclose(w @ w, v @ v, rtol=1e-5)
    np.testing.assert_allclose(w @ g, -(v @ g), rtol=1e-5)
    np.testing.assert_allclose(reflect(w, g), v, **CLOSE)
    np.testing.assert_array_equal(reflect(v, jnp.zeros(4)), v)


def test_flip(state):
    _, v, _ = state
    np.testing.assert_array_equal(flip(v, 2) / v, [1, 1, -1, 1])


@pytest.mark.parametrize("mix", [0.0, 0.5, -0.8, 1.0])
def test_refresh_keeps_the_standard_normal(mix):
    v, noise = random.normal(random.PRNGKey(1), (2, 40_000))
    new = np.asarray(refresh(v, noise, mix))
    root_n = new.size**0.5
    assert abs(new.mean()) < 5 / root_n
    assert abs(new.var() - 1) < 5 * 2**0.5 / root_n
    assert abs(np.mean(new * np.asarray(v)) - mix) < 5 * 2**0.5 / root_n


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "dense"])
def test_scale_against_its_matrix(kind, state):
    z, v, center = state
    factor, matrix = {
        "scalar": (jnp.array(1.7), 1.7 * np.eye(4)),
        "diagonal": (
            jnp.array([0.5, 1.0, 2.0, 3.0]),
            np.diag([0.5, 1.0, 2.0, 3.0]),
        ),
        "dense": 2
        * (jnp.tril(random.normal(random.PRNGKey(2), (4, 4))) + 2 * jnp.eye(4),),
    }[kind]
    matrix = np.asarray(matrix)
    scale = Scale(center, factor)
    x = scale.position(z)
    np.testing.assert_allclose(x, np.asarray(center) + matrix @ z, **CLOSE)
    np.testing.assert_allclose(scale.direction(v), matrix @ v, **CLOSE)
    np.testing.assert_allclose(scale.whiten(x), z, **CLOSE)

    def potential(x):
        return jnp.sum(x**4) + jnp.prod(x)

    expected = jax.grad(lambda z: potential(scale.position(z)))(z)
    np.testing.assert_allclose(scale.gradient(jax.grad(potential)(x)), expected, 1e-3)
    covariance = matrix @ matrix.T
    np.testing.assert_allclose(
        scale.covariance(),
        covariance if kind == "dense" else np.diag(covariance),
        **CLOSE,
    )


def test_identity_scale(state):
    z, _, _ = state
    scale = identity_scale(z)
    np.testing.assert_array_equal(scale.position(z), z)
    np.testing.assert_array_equal(scale.covariance(), np.ones(4))
