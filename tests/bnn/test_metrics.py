# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Metrics against values computed by hand and against scikit-learn."""

import numpy as np
from numpy.testing import assert_allclose
import pytest
from scipy.stats import norm
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve

import jax

from numpyro_pdmp.bnn import metrics

PROBS = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
LABELS = np.array([0, 1, 1, 1])


def random_probs(rng, *shape):
    return rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def test_by_hand():
    assert_allclose(metrics.accuracy(PROBS, LABELS), 0.75)
    squares = 2 * (0.1**2 + 0.8**2 + 0.3**2 + 0.45**2) / 4
    assert_allclose(metrics.brier(PROBS, LABELS), squares, rtol=1e-6)
    # Five bins: (.4, .6] has .55, (.6, .8] has .8 and .7, (.8, 1] has .9.
    bins = metrics.reliability(PROBS, LABELS, num_bins=5)
    assert bins.num_rows.tolist() == [0, 0, 1, 2, 1]
    assert_allclose(bins.confidence, [np.nan, np.nan, 0.55, 0.75, 0.9], rtol=1e-6)
    assert_allclose(bins.accuracy, [np.nan, np.nan, 1, 0.5, 1])
    expected = (0.45 + 2 * 0.25 + 0.1) / 4
    assert_allclose(metrics.ece(PROBS, LABELS, num_bins=5), expected, rtol=1e-5)
    # Two bins of equal mass: {.55, .7} are both right, {.8, .9} one of them.
    expected = (2 * (1 - 0.625) + 2 * (0.85 - 0.5)) / 4
    result = metrics.ece(PROBS, LABELS, num_bins=2, mass="mass")
    assert_allclose(result, expected, rtol=1e-5)
    assert_allclose(metrics.rmse([1.0, 2.0], [1.0, 4.0]), 2**0.5, rtol=1e-6)
    # Densities 0.5 and 0.1 of one row, 0.2 and 0.4 of the other.
    log_density = np.log([[0.5, 0.2], [0.1, 0.4]])
    assert_allclose(metrics.nll(log_density), -np.log(0.3), rtol=1e-6)
    assert_allclose(metrics.nll(np.log([0.3, 0.3])), -np.log(0.3), rtol=1e-6)
    # Far below what exp can represent.
    assert_allclose(metrics.nll(log_density - 1000), 1000 - np.log(0.3), rtol=1e-6)


def test_certain_predictions():
    probs = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert metrics.ece(probs, [0, 1]) == 0
    assert metrics.ece(probs, [1, 0]) == 1
    assert_allclose(metrics.entropy(probs), 0)
    # Draws that are certain and disagree: nothing but ignorance of the weights.
    parts = metrics.uncertainty(np.stack([probs, probs[::-1]]))
    assert_allclose(parts.total, np.log(2), rtol=1e-6)
    assert_allclose(parts.aleatoric, 0)
    assert_allclose(parts.epistemic, np.log(2), rtol=1e-6)


def test_against_sklearn():
    rng = np.random.default_rng(0)
    probs, labels = random_probs(rng, 500, 4), rng.integers(4, size=500)
    hits = sklearn_metrics.accuracy_score(labels, probs.argmax(-1))
    assert_allclose(metrics.accuracy(probs, labels), hits, rtol=1e-5)
    loss = sklearn_metrics.log_loss(labels, probs)
    log_density = np.log(probs[np.arange(500), labels])
    assert_allclose(metrics.nll(log_density), loss, rtol=1e-5)
    one = random_probs(rng, 500, 2)
    two = rng.integers(2, size=500)
    half = sklearn_metrics.brier_score_loss(two, one[:, 1])
    assert_allclose(metrics.brier(one, two), 2 * half, rtol=1e-5)
    error = sklearn_metrics.mean_squared_error(probs[:, 0], probs[:, 1])
    assert_allclose(metrics.rmse(probs[:, 0], probs[:, 1]) ** 2, error, rtol=1e-5)


@pytest.mark.parametrize("mass, strategy", [("width", "uniform"), ("mass", "quantile")])
def test_reliability_is_sklearns(mass, strategy):
    """Of two classes, with confidences spread over the upper half of the bins."""
    rng = np.random.default_rng(0)
    high = rng.uniform(0.5, 1, size=800)
    flip = rng.uniform(size=800) < 0.5
    first = np.where(flip, high, 1 - high)
    probs = np.stack([first, 1 - first], -1)
    labels = (rng.uniform(size=800) > first**1.5).astype(int)
    right = probs.argmax(-1) == labels
    bins = metrics.reliability(probs, labels, num_bins=10, mass=mass)
    hits, confidence = calibration_curve(right, high, n_bins=10, strategy=strategy)
    filled = bins.num_rows > 0
    assert_allclose(bins.accuracy[filled], hits, rtol=1e-5)
    assert_allclose(bins.confidence[filled], confidence, rtol=1e-5)
    share = bins.num_rows[filled] / 800
    expected = np.sum(share * np.abs(hits - confidence))
    result = metrics.ece(probs, labels, num_bins=10, mass=mass)
    assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("digits", [1, 8])  # with ties and without
def test_auroc(digits):
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(size=300), rng.normal(1, size=200)
    scores = np.round(np.concatenate([inside, outside]), digits).astype(np.float32)
    labels = np.repeat([0, 1], [300, 200])
    expected = sklearn_metrics.roc_auc_score(labels, scores)
    result = metrics.auroc(scores[:300], scores[300:])
    assert_allclose(result, expected, rtol=1e-5)
    assert abs(result - norm.cdf(2**-0.5)) < 0.06


def test_calibrated_predictions_have_no_ece():
    """Labels from the probabilities: only the bias of each bin's error is left."""
    rng = np.random.default_rng(0)
    probs = random_probs(rng, 20_000, 3)
    labels = (probs.cumsum(-1) < rng.uniform(size=(20_000, 1))).sum(-1)
    for mass in ("width", "mass"):
        assert metrics.ece(probs, labels, mass=mass) < 0.015
        sharp = probs**2 / (probs**2).sum(-1, keepdims=True)
        assert metrics.ece(sharp, labels, mass=mass) > 0.1
    bins = metrics.reliability(probs, labels, num_bins=16, mass="mass")
    assert set(bins.num_rows.tolist()) == {1250}


def test_ece_by_chance():
    """The mean over labels from the predictions; by hand for one bin of sure rows."""
    rng = np.random.default_rng(0)
    probs = random_probs(rng, 300, 3)
    found = []
    for _ in range(100):
        labels = (probs.cumsum(-1) < rng.uniform(size=(300, 1))).sum(-1)
        found.append(metrics.ece(probs, labels))
    error = np.std(found) * (1 / 100 + 1 / 200) ** 0.5
    assert abs(metrics.ece_by_chance(probs) - np.mean(found)) < 4 * error
    # Binomial: E|k/n - p| is about sqrt(2 p (1 - p) / (pi n)).
    probs = np.tile([0.9, 0.1], (400, 1))
    expected = (2 * 0.09 / (np.pi * 400)) ** 0.5
    result = metrics.ece_by_chance(probs, num_draws=2000)
    assert_allclose(result, expected, rtol=4 * 0.76 / 2000**0.5)
    assert metrics.ece_by_chance(np.eye(3)) == 0


def test_entropies_add_up():
    probs = random_probs(np.random.default_rng(0), 7, 11, 3)
    parts = metrics.uncertainty(probs)
    mean = probs.mean(0)
    total = -(mean * np.log(mean)).sum(-1)
    assert_allclose(parts.total, total, rtol=1e-5)
    assert_allclose(parts.aleatoric + parts.epistemic, total, rtol=1e-5)
    kl = (probs * np.log(probs / mean)).sum(-1).mean(0)
    assert_allclose(parts.epistemic, kl, rtol=1e-4)


def test_can_be_compiled():
    ece = jax.jit(metrics.ece, static_argnames=("num_bins", "mass"))
    assert_allclose(
        ece(PROBS, LABELS, mass="mass"), metrics.ece(PROBS, LABELS, mass="mass")
    )


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: metrics.accuracy(PROBS[0], LABELS), "`probs` must have shape"),
        (lambda: metrics.brier(PROBS, LABELS[:2]), "`labels` has shape"),
        (lambda: metrics.ece(PROBS, LABELS, mass="x"), "`mass` must be"),
        (lambda: metrics.ece(PROBS, LABELS, num_bins=0), "`num_bins` must be"),
        (lambda: metrics.uncertainty(PROBS), r"\(draws, rows, classes\)"),
        (lambda: metrics.auroc([], [1.0]), "both must have some"),
        (lambda: metrics.rmse([1.0], [1.0, 2.0]), "must agree"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()
