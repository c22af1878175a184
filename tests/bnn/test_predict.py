# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions of draws, streamed and stored, against NumPy and NumPyro."""

import numpy as np
from numpy.testing import assert_allclose
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
from numpyro_pdmp.bnn import (
    StreamingPrediction,
    function_values,
    metrics,
    predict,
    score,
)

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(23, 2)).astype(np.float32), RNG.normal(size=23)
LABELS = RNG.integers(3, size=23)


def regression(x, y=None, shift=0.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(x), subsample_size=min(5, len(x))):
        x = numpyro.subsample(jnp.asarray(x), event_dim=1)
        mean = numpyro.deterministic("mean", x @ w + shift)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def classes(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


def binary(x):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w).to_event(0))


DRAWS = {
    "w": RNG.normal(size=(11, 2)).astype(np.float32),
    "sigma": RNG.uniform(0.5, 2, size=11).astype(np.float32),
    "mean": np.zeros((11, 23)),  # a deterministic site of other rows: not used
}
CLASS_DRAWS = {"w": RNG.normal(size=(11, 2, 3)).astype(np.float32)}


def softmax(logits):
    p = np.exp(logits)
    return p / p.sum(-1, keepdims=True)


def test_regression():
    levels = (0.1, 0.5, 0.9)
    result = predict(
        regression, DRAWS, X, Y, batch_size=4, quantiles=levels, shift=100.0
    )
    mean = np.einsum("nk,dk->dn", X, DRAWS["w"]) + 100
    assert_allclose(result.mean, mean.mean(0), rtol=1e-5)
    # Sums of squares would lose this to the shift.
    assert_allclose(result.variance, mean.var(0), rtol=2e-3)
    assert_allclose(result.noise, np.mean(DRAWS["sigma"] ** 2), rtol=1e-5)
    assert_allclose(result.sd**2, result.variance + result.noise, rtol=1e-5)
    density = stats.norm(mean, DRAWS["sigma"][:, None]).pdf(Y + 100).mean(0)
    shifted = predict(regression, DRAWS, X, Y + 100, batch_size=4, shift=100.0)
    assert_allclose(shifted.log_density, np.log(density), rtol=1e-3)
    quantiles = np.quantile(mean, levels, axis=0)
    assert_allclose(result.mean_quantiles, quantiles, rtol=1e-5)
    assert result.y_quantiles.shape == (3, 23)
    assert result.entropy is None
    scores = score(shifted, Y + 100)
    assert_allclose(scores["nll"], -np.log(density).mean(), rtol=1e-4)
    error = np.sqrt(np.mean((mean.mean(0) - Y - 100) ** 2))
    assert_allclose(scores["rmse"], error, rtol=1e-4)


def test_intervals_of_observations():
    """Many draws of one weight: quantiles of the mixture that is drawn from."""
    draws = {"w": np.ones((4000, 2)), "sigma": np.full(4000, 0.5)}
    result = predict(regression, draws, X[:3], quantiles=(0.05, 0.95))
    expected = X[:3].sum(-1) + 0.5 * stats.norm.ppf([[0.05], [0.95]])
    # Standard error of such a quantile: sqrt(p (1 - p) / n) / density.
    error = 0.5 * np.sqrt(0.05 * 0.95 / 4000) / stats.norm.pdf(1.645)
    assert np.all(np.abs(result.y_quantiles - expected) < 4 * error)
    assert_allclose(np.ptp(result.mean_quantiles, axis=0), 0, atol=1e-6)


def test_classes():
    result = predict(classes, CLASS_DRAWS, X, LABELS, batch_size=5, quantiles=(0.5,))
    probs = softmax(np.einsum("nk,dkc->dnc", X, CLASS_DRAWS["w"]))
    assert_allclose(result.mean, probs.mean(0), rtol=1e-5)
    assert_allclose(result.variance, probs.var(0), rtol=1e-3, atol=1e-7)
    assert_allclose(result.noise, (probs * (1 - probs)).mean(0), rtol=1e-4)
    parts = metrics.uncertainty(probs)
    for ours, expected in zip(result.entropy, parts, strict=True):
        assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
    density = probs[:, np.arange(23), LABELS].mean(0)
    assert_allclose(result.log_density, np.log(density), rtol=1e-4)
    assert_allclose(result.mean_quantiles[0], np.median(probs, 0), rtol=1e-5)
    assert result.y_quantiles is None
    values = function_values(classes, CLASS_DRAWS, X)
    assert_allclose(values, np.log(probs), rtol=1e-4, atol=1e-5)
    scores = score(result, LABELS)
    assert_allclose(scores["accuracy"], np.mean(probs.mean(0).argmax(-1) == LABELS))
    assert set(scores) >= {"nll", "ece", "ece_mass", "brier", "entropy_epistemic"}


def test_binary_has_two_classes():
    draws = {"w": DRAWS["w"]}
    result = predict(binary, draws, X)
    one = 1 / (1 + np.exp(-np.einsum("nk,dk->dn", X, draws["w"])))
    assert_allclose(result.mean, np.stack([1 - one, one], -1).mean(0), rtol=1e-5)


def test_streams_are_the_whole():
    """In chunks of unequal lengths, of two chains, weighted, and continued."""
    draws = {"w": RNG.normal(size=(2, 7, 2, 3)).astype(np.float32)}
    weights = RNG.uniform(0.5, 2, size=(2, 7))
    streaming = StreamingPrediction(classes, X, LABELS, batch_size=6)
    for part in (slice(0, 3), slice(3, 3), slice(3, 7)):
        some = jax.tree.map(lambda a, part=part: a[:, part], draws)
        streaming.update(some, weights[:, part], batch_ndims=2)
        # Sums may be saved and set.
        sums, streaming = (
            streaming.sums,
            StreamingPrediction(classes, X, LABELS, batch_size=6),
        )
        streaming.sums = sums
    result = streaming.result()
    whole = predict(classes, draws, X, LABELS, weights=weights.ravel(), batch_ndims=2)
    jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, whole
    )
    probs = softmax(np.einsum("nk,cdkl->cdnl", X, draws["w"]))
    mean = np.average(probs.reshape(14, 23, 3), axis=0, weights=weights.ravel())
    assert_allclose(result.mean, mean, rtol=1e-5)


def test_streams_are_compiled_once():
    calls = []

    def counted(x):
        calls.append(len(x))
        classes(x)

    streaming = StreamingPrediction(counted, X)
    streaming.update({"w": CLASS_DRAWS["w"][:4]})
    traced = len(calls)
    streaming.update({"w": CLASS_DRAWS["w"][4:]})  # seven: in two parts
    assert len(calls) == traced


def test_predictive_still_works():
    samples = Predictive(classes, CLASS_DRAWS)(random.key(0), X)["y"]
    assert samples.shape == (11, 23)
    many = {"w": np.repeat(CLASS_DRAWS["w"], 300, axis=0)}
    samples = np.asarray(Predictive(classes, many)(random.key(0), X)["y"])
    probs = np.asarray(predict(classes, CLASS_DRAWS, X).mean)
    error = np.sqrt(probs[:, 0] * (1 - probs[:, 0]) / len(samples))
    assert np.all(np.abs((samples == 0).mean(0) - probs[:, 0]) < 4 * error + 1e-6)


def two_sites(x):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("a", dist.Normal(x @ w, 1))
    numpyro.sample("b", dist.Normal(x @ w, 1))


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: predict(regression, {"w": DRAWS["w"]}, X), "`site` is missing"),
        (
            lambda: predict(regression, {"w": DRAWS["w"]}, X, site="y"),
            r"no draws of the sites \['sigma'\]",
        ),
        (lambda: predict(regression, DRAWS, X, site="z"), "`site='z'` is not one"),
        (lambda: predict(two_sites, {"w": DRAWS["w"]}, X), "`site` is missing"),
        (lambda: predict(regression, DRAWS, X, Y[:3]), "`y` has shape"),
        (lambda: predict(regression, DRAWS, X, quantiles=(5,)), "`quantiles` must"),
        (lambda: predict(regression, DRAWS, X[0, 0]), "`x` must be arrays of rows"),
        (lambda: predict(classes, CLASS_DRAWS, X, weights=[1.0]), "`weights` has"),
        (lambda: StreamingPrediction(classes, X).result(), "no draws to predict"),
        (lambda: StreamingPrediction(classes, X, batch_size=0), "`batch_size` must"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()


def test_rows_come_first():
    def turned(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.sum(x @ w), 1))

    with pytest.raises(ValueError, match="its first dimension must be the rows"):
        predict(turned, {"w": DRAWS["w"]}, X)
    with pytest.raises(TypeError, match="`samples` must be a dict"):
        predict(turned, DRAWS["w"], X)
