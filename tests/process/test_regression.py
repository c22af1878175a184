# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax.numpy as jnp

from numpyro_pdmp.process import Known, RegressionBound, Step, Tuning

TIMES = np.array([0.0, 0.3, 0.4, 1.1])
RATES = np.array([[0.5, 1.2, 0.9, 3.0], [-1.0, 0.0, 0.3, 0.1]])  # two of them
SPEED, NOISE = 1.3, 0.2


def known_at(i, memory, turned=False):
    """What the loop would say at the reading number ``i``."""
    elapsed = TIMES[i] - TIMES[i - 1] if i else 0.0
    speed, rate = jnp.asarray(SPEED), jnp.asarray(RATES[:, i])
    known = Known(**dict.fromkeys(Known._fields))
    known = known._replace(speed=speed, rate=rate, memory=memory)
    return known, Step(jnp.asarray(elapsed), rate, speed, jnp.asarray(turned or i == 0))


def readings(scheme, num):
    tuning = Tuning(jnp.asarray(0.5), jnp.asarray(NOISE))
    memory = scheme.memory(2, 1.0, 0.8, float)
    for i in range(num):
        known, step = known_at(i, memory)
        memory = scheme.remember(tuning, known, step)
    return tuning, known._replace(memory=memory)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num", [1, 2, 4])
def test_envelope_is_the_upper_line_of_the_regression(num):
    """By the formulas for any design matrix, with the slope's prior as a reading."""
    scheme = RegressionBound(width=2.5)
    tuning, known = readings(scheme, num)
    prior_mean, prior_variance = np.asarray(known.memory.slopes)
    envelope = scheme.open(tuning, known)
    window, noise = 0.5 / SPEED, NOISE * SPEED
    s = TIMES[:num] - TIMES[num - 1]
    design = np.c_[np.ones(num), s]
    ends = np.array([[1, 0], [1, window]])
    for i in range(2):
        prior = np.diag([0, 1 / (prior_variance[i] * SPEED**4)])
        covariance = np.linalg.inv(design.T @ design / noise**2 + prior)
        pull = prior @ [0, prior_mean[i] * SPEED**2]
        beta = covariance @ (design.T @ RATES[i, :num] / noise**2 + pull)
        variance = noise**2 + np.einsum("ij,jk,ik->i", ends, covariance, ends)
        upper = ends @ beta + 2.5 * np.sqrt(variance)
        value, slope = envelope.value[i], envelope.slope[i]
        np.testing.assert_allclose([value, value + slope * window], upper, rtol=1e-6)
    np.testing.assert_allclose(envelope.horizon, window)


@pytest.mark.usefixtures("x64")
def test_a_turn_forgets_the_readings_and_learns_the_slope():
    scheme = RegressionBound()
    tuning, known = readings(scheme, 3)
    before = known.memory
    after = scheme.remember(tuning, *known_at(3, before, turned=True))
    np.testing.assert_array_equal(after.times, [1, 0, 0])
    np.testing.assert_array_equal(after.rates, [RATES[:, 3], [0, 0]])
    np.testing.assert_array_equal(before.slopes[0], 0)
    # Of its own slope of about 2 and 1, in units of the squared speed, a twentieth.
    slopes = [np.polyfit(TIMES, rates, 1)[0] / SPEED**2 for rates in RATES]
    np.testing.assert_allclose(after.slopes[0], 0.05 * np.array(slopes), rtol=0.1)
    assert np.all(after.slopes[1] < before.slopes[1])
    # A path that is put elsewhere teaches nothing.
    placed = scheme.remember(tuning, *known_at(0, before))
    np.testing.assert_array_equal(placed.slopes, before.slopes)


def test_parameters_out_of_range():
    for name in ("width", "window", "noise"):
        with pytest.raises(ValueError, match=f"`{name}` must be .* got -1"):
            RegressionBound(**{name: -1.0})
