# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""How draws mix: against NumPyro, scikit-learn and series with a known answer."""

import numpy as np
from numpy.testing import assert_allclose
import pytest
from sklearn.decomposition import PCA

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro_pdmp.bnn import autocorrelation, mixing, principal_components

RNG = np.random.default_rng(0)


def autoregression(shape, pull, rng=RNG):
    steps, values = rng.normal(size=shape), np.zeros(shape)
    for i in range(1, shape[1]):
        noise = np.sqrt(1 - pull**2) * steps[:, i]
        values[:, i] = pull * values[:, i - 1] + noise
    return values


def test_mixing_is_numpyros():
    values = RNG.normal(size=(2, 100, 3, 2))
    values[..., 0, 0] = 1.0  # constant
    result = mixing(values)
    assert result.ess.shape == (3, 2)
    assert np.isnan(result.ess[0, 0]) and np.isnan(result.r_hat[0, 0])
    one = values[..., 1, 1]
    assert_allclose(result.ess[1, 1], effective_sample_size(one))
    assert_allclose(result.r_hat[1, 1], split_gelman_rubin(one))


def test_series_that_swing():
    """Antithetic draws, of which the estimator makes a negative number at times."""
    noise = RNG.normal(size=(1, 60, 50))
    swings = noise * (-1.0) ** np.arange(60)[:, None] + (-1.0) ** np.arange(60)[:, None]
    ess = mixing(swings).ess
    assert np.min(effective_sample_size(swings)) < 0
    assert np.all((ess > 0) & (ess <= 60 * np.log10(60)))


@pytest.mark.parametrize("dim", [5, 300])  # by the weights, and by the draws
def test_components_are_those_of_pca(dim):
    scale = np.geomspace(10, 0.1, dim)
    draws = {
        "a": (scale * RNG.normal(size=(2, 40, dim)))[..., : dim // 2] + 3,
        "b": (scale * RNG.normal(size=(2, 40, dim)))[..., dim // 2 :, None] - 7,
    }
    flat = np.concatenate([draws["a"], draws["b"][..., 0]], -1).reshape(80, dim)
    num = min(80 - 1, dim)
    pca = PCA(num, svd_solver="full").fit(flat)
    result = principal_components(draws, components=(0, 1, -1))
    assert result.which == (0, 1, num - 1)
    assert_allclose(result.variances, pca.explained_variance_[[0, 1, -1]], rtol=1e-6)
    expected = pca.transform(flat)[:, [0, 1, num - 1]]
    scores = result.scores.reshape(80, 3)
    signs = np.sign((scores * expected).sum(0))
    assert_allclose(signs * scores, expected, rtol=1e-5, atol=1e-6)
    assert not result.drifts


def test_single_precision_and_large_means():
    """Rounding of the mean must not show up as a component."""
    draws = (1000 + RNG.normal(size=(1, 30, 500))).astype(np.float32)
    result = principal_components(draws)
    centred = draws[0].astype(float) - draws[0].mean(0, dtype=float)
    sizes = np.linalg.svd(centred, compute_uv=False)
    assert_allclose(result.variances, sizes[[0, 1, 28]] ** 2 / 29, rtol=1e-6)


def test_drift_is_noticed():
    """A trend, and a random walk in many dimensions, have no more than the floor."""
    time = np.linspace(0, 1, 200)
    trend = time[:, None] + 0.02 * RNG.normal(size=(1, 200, 50))
    walk = RNG.normal(size=(1, 200, 1000)).cumsum(1)
    for draws in (trend, walk):
        with pytest.warns(UserWarning, match="the chain drifts"):
            result = principal_components(draws)
        assert result.drifts and result.mixing.ess[0] < 3.1
    walk_ess = result.mixing.ess[0]
    assert abs(walk_ess - 2.7) < 0.15
    # One chain of two is enough.
    still = RNG.normal(size=(1, 200, 50))
    with pytest.warns(UserWarning, match="the chain drifts"):
        principal_components(np.concatenate([3 * trend, still]))
    result = principal_components(autoregression((2, 500, 50), 0.7))
    assert not result.drifts


def test_autocorrelation():
    values = autoregression((4, 4000, 2), np.array([0.9, 0.0]))
    result = autocorrelation(values, max_lag=5)
    assert result.shape == (6, 2)
    assert_allclose(result[0], 1)
    # Bartlett: the error of a correlation at 0.9 is about sqrt(2 tau / n).
    assert_allclose(result[:, 0], 0.9 ** np.arange(6), atol=4 * (20 / 16_000) ** 0.5)
    assert np.all(np.abs(result[1:, 1]) < 4 / 16_000**0.5)
    assert autocorrelation(values).shape == (1334, 2)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: mixing(np.zeros(10)), "`values` must have shape"),
        (lambda: mixing(np.zeros((4, 3))), "at least 4 draws"),
        (lambda: principal_components(np.zeros((1, 5, 9)), (0, 4)), "have no more"),
        (lambda: autocorrelation(np.zeros((1, 5)), 5), "`max_lag=5` must be"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()
