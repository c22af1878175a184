# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Properties that hold for all arguments, tried on many of them."""

from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from numpyro_pdmp.process.hazard import line_arrival
from numpyro_pdmp.process.motion import elliptic_flow, flip, linear_flow, reflect
from numpyro_pdmp.process.skeleton import Skeleton

# Functions are compiled for few shapes, so that an example costs no compilation.
COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}
DIM = 3


def floats(dtype, low, high):
    """Of either sign or zero, from ``10**low`` to ``10**high``."""
    positive = st.floats(low, high).map(lambda x: float(np.dtype(dtype).type(10**x)))
    return st.one_of(st.just(0.0), positive, positive.map(lambda x: -x))


def hazard(a, b, s):
    """Integral of the clamped line, in the longest type there is."""
    a, b, s = (np.longdouble(x) for x in (a, b, s))
    if b == 0:
        return max(a, 0) * s
    zero = min(max(-a / b, 0), s)  # where the line crosses it
    start, end = (zero, s) if b > 0 else (np.longdouble(0), zero)
    if b < 0 and a <= 0:
        return np.longdouble(0)
    middle = (start + end) / 2
    return (a + b * middle) * (end - start)


arrival = jax.jit(line_arrival)


def check_arrival(dtype, a, b, e):
    dtype = np.dtype(dtype)
    s = arrival(*(jnp.asarray(x, dtype) for x in (a, b, e)))
    assert s.dtype == dtype and s >= 0
    eps = 16 * np.finfo(dtype).eps
    if np.isinf(s):
        # Never, or later than the type can say.
        latest = -2 * a / b if b < 0 else np.finfo(dtype).max
        assert hazard(a, b, latest) <= e * (1 + eps)
        return
    # The right time for nearly the right mass, and nearly the right time for it.
    s = np.longdouble(s)
    assert hazard(a, b, s * (1 - eps)) <= e * (1 + eps)
    assert hazard(a, b, s * (1 + eps)) >= e * (1 - eps)


def arrival_arguments(dtype):
    wide = (-30, 30) if np.dtype(dtype) == np.float32 else (-250, 250)
    mass = st.floats(-6, 1.5).map(lambda x: float(np.dtype(dtype).type(10**x)))
    return floats(dtype, *wide), floats(dtype, *wide), mass


@settings(max_examples=300, **COMMON)
@given(*arrival_arguments("float32"))
def test_arrival_single(a, b, e):
    check_arrival("float32", a, b, e)


@pytest.mark.usefixtures("x64")
@settings(max_examples=300, **COMMON)
@given(*arrival_arguments("float64"))
def test_arrival_double(a, b, e):
    check_arrival("float64", a, b, e)


@pytest.mark.slow
@settings(max_examples=100_000, **COMMON)
@given(*arrival_arguments("float32"))
def test_many_arrivals_single(a, b, e):
    check_arrival("float32", a, b, e)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@settings(max_examples=100_000, **COMMON)
@given(*arrival_arguments("float64"))
def test_many_arrivals_double(a, b, e):
    check_arrival("float64", a, b, e)


# Motion

vectors = hnp.arrays(np.float32, DIM, elements=st.floats(-10, 10, width=32))
durations = st.floats(0, 5, width=32)


@jax.jit
def there_and_back(z, v, t):
    """Errors of a way back, and volumes of phase space, for both flows."""
    found = []
    for flow in (linear_flow, elliptic_flow):
        z1, v1 = flow(z, v, t)
        z0, v0 = flow(z1, -v1, t)

        def both(w, flow=flow):
            return jnp.concatenate(flow(w[:DIM], w[DIM:], t))

        jacobian = jax.jacfwd(both)(jnp.concatenate([z, v]))
        found.append((z0 - z, v0 + v, jnp.linalg.det(jacobian)))
    return found


@settings(max_examples=100, **COMMON)
@given(vectors, vectors, durations)
def test_flows_are_reversible_and_keep_volume(z, v, t):
    for dz, dv, volume in there_and_back(z, v, t):
        np.testing.assert_allclose(dz, 0, atol=1e-4)
        np.testing.assert_allclose(dv, 0, atol=1e-5)
        np.testing.assert_allclose(volume, 1, rtol=1e-5)


@jax.jit
def jumped(v, gradient, index):
    new = reflect(v, gradient)
    return new, reflect(new, gradient), flip(v, index)


@settings(max_examples=100, **COMMON)
@given(vectors, vectors, st.integers(0, DIM - 1))
def test_jumps_keep_the_speed(v, gradient, index):
    if 0 < np.abs(gradient).max() < 1e-15:
        return  # its square is zero in single precision
    new, twice, flipped = jumped(v, gradient, index)
    size = np.linalg.norm(v) + 1e-20
    assert abs(np.linalg.norm(new) - np.linalg.norm(v)) < 1e-5 * size
    np.testing.assert_allclose(twice, v, atol=2e-5 * size)
    np.testing.assert_array_equal(np.abs(flipped), np.abs(v))
    # The signed rate changes its sign.
    scale = size * np.linalg.norm(gradient) + 1e-20
    assert abs(new @ gradient + v @ gradient) < 2e-5 * scale


# Integrals along a path

entries = hnp.arrays(np.float32, (5, DIM), elements=st.floats(-3, 3, width=32))
times = hnp.arrays(np.float32, 4, elements=st.floats(0.125, 3, width=32))


@pytest.mark.parametrize("flow_name", ["linear", "elliptic"])
@settings(max_examples=30, **COMMON)
@given(entries, entries, times)
def test_integrals_against_quadrature(flow_name, x, v, t):
    center = np.full(DIM, 0.5, np.float32)
    path = Skeleton(t, x, v, np.zeros(5, int), center, flow_name)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    points, mass = [], []
    for x0, v0, duration in zip(x, v, t, strict=False):
        s = 0.5 * duration * (nodes + 1)[:, None]
        if flow_name == "linear":
            points.append(x0 + s * v0)
        else:
            points.append(center + (x0 - center) * np.cos(s) + v0 * np.sin(s))
        mass.append(0.5 * duration * weights)
    points, mass = np.concatenate(points).astype(float), np.concatenate(mass)
    mass = mass / mass.sum()
    mean = mass @ points
    np.testing.assert_allclose(path.mean(), mean, atol=1e-4)
    covariance = (points - mean).T @ ((points - mean) * mass[:, None])
    np.testing.assert_allclose(path.covariance(), covariance, atol=5e-4, rtol=1e-4)
