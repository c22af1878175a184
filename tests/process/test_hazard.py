# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import itertools

import numpy as np
import pytest
from scipy.optimize import brentq

import jax
import jax.numpy as jnp

from numpyro_pdmp.process.hazard import clamped_line, line_arrival
from numpyro_pdmp.process.randomness import exponential, threefry_words

VALUES = (-1e3, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e3)
MASSES = (1e-3, 0.4, 5.0)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield np.dtype(request.param)
    jax.config.update("jax_enable_x64", old)


def integral(a, b, s):
    """Trapezoidal rule on a grid that has the line's zero crossing among its points."""
    grid = np.linspace(0, s, 101)
    if b != 0 and 0 < -a / b < s:
        grid = np.union1d(grid, [-a / b])
    return np.trapezoid(np.maximum(a + b * grid, 0), grid)


def arrival(a, b, e):
    """Root of the integral; the line changes its sign at most once."""
    if b > 0:
        upper = max(-a / b, 0) + 2 * (2 * e / b) ** 0.5 + 1e-9
    elif b == 0:
        upper = 2 * e / a if a > 0 else 0.0
    else:
        upper = max(-a / b, 0)
    if integral(a, b, upper) < e:
        return np.inf
    return brentq(lambda s: integral(a, b, s) - e, 0, upper, xtol=1e-300, rtol=1e-14)


def test_line_arrival_against_quadrature(dtype):
    a, b, e = np.array(list(itertools.product(VALUES, VALUES, MASSES))).T
    expected = np.array([arrival(*args) for args in zip(a, b, e, strict=True)])
    actual = line_arrival(*(jnp.asarray(x, dtype) for x in (a, b, e)))
    assert actual.dtype == dtype
    assert np.isinf(expected).any() and np.isfinite(expected).any()
    np.testing.assert_allclose(actual, expected, rtol=2e-5 if dtype == "f4" else 1e-10)


def test_line_arrival_extremes(dtype):
    inf = jnp.asarray(jnp.inf, dtype)
    one = jnp.ones((), dtype)
    assert line_arrival(-one, 0 * one, one) == jnp.inf  # never positive
    assert line_arrival(-one, -one, one) == jnp.inf
    assert line_arrival(0 * one, 0 * one, one) == jnp.inf
    assert line_arrival(one, -one, 0.6 * one) == jnp.inf  # total hazard is 1/2
    assert line_arrival(-inf, one, one) == jnp.inf  # never gets there
    assert line_arrival(inf, 0 * one, one) == 0
    assert line_arrival(one, 0 * one, 3 * one) == 3


def test_line_arrival_broadcasts_and_jits():
    times = jax.jit(line_arrival)(jnp.zeros((3, 1)), 2.0, jnp.ones(4))
    np.testing.assert_array_equal(times, np.ones((3, 4)))


def test_clamped_line():
    np.testing.assert_array_equal(
        clamped_line(jnp.array([1.0, -1.0, 1.0]), jnp.array([1.0, 1.0, -1.0]), 3.0),
        [4, 2, 0],
    )


def test_exponential(dtype):
    uniform = jnp.asarray([0.0, 0.5, 0.9], dtype)
    expected = -np.log1p(-np.asarray(uniform, float)) / 3
    np.testing.assert_allclose(exponential(uniform, 3.0), expected, rtol=1e-6)
    assert (exponential(uniform, 0.0) == jnp.inf).all()
    assert exponential(uniform).dtype == dtype


@pytest.mark.parametrize("num", [1, 2, 37])
def test_words_are_those_of_jax(num):
    key = jax.random.PRNGKey(num)
    expected = jax.random.bits(key, (num,), jnp.uint32)
    np.testing.assert_array_equal(threefry_words(key, num), expected)
