# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Exact event times of subsampled generalised linear models."""

from functools import cache, partial

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, LowRankScale, Scale, ZigZag, check, glm_bound
from numpyro_pdmp.control_variates import control_variate, gradient
import numpyro_pdmp.glm as glm
from numpyro_pdmp.process import BouncyParticle, ZigZagProcess
from numpyro_pdmp.subsample import SubsampledModel

DIM, NUM_DATA = 3, 1000
LOGISTIC, THIRD = 0.25, 0.09623


def logistic(x, y, subsample_size, prior=None):
    """With an intercept, which comes first in the flat vector."""
    prior = dist.Normal(0, 2) if prior is None else prior
    alpha = numpyro.sample("alpha", prior)
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=alpha + x @ beta), obs=y)


def energies(points, features, y):
    eta = points @ features.T
    prior = np.r_[0.25, np.ones(DIM - 1)]
    rows = np.logaddexp(0, eta) - y * eta
    return rows.sum(-1) + 0.5 * points**2 @ prior


@cache
def data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_DATA, DIM - 1)) @ [[1.0, 0.6], [0.0, 0.8]]
    features = np.c_[np.ones(NUM_DATA), x]
    y = rng.random(NUM_DATA) < 1 / (1 + np.exp(-features @ [-1, 1, 0.5]))
    mode, prior = np.zeros(DIM), np.r_[0.25, np.ones(DIM - 1)]
    for _ in range(20):
        p = 1 / (1 + np.exp(-features @ mode))
        hessian = (features.T * (p * (1 - p))) @ features + np.diag(prior)
        mode = mode - np.linalg.solve(hessian, features.T @ (p - y) + prior * mode)
    factor = np.linalg.cholesky(np.linalg.inv(hessian))
    args = jnp.asarray(x, "f4"), jnp.asarray(y, "f4")
    return args, features, np.asarray(y, float), mode, factor


@cache
def truth():
    """Posterior mean and sd, by importance sampling, to a third of a percent."""
    _, features, y, mode, factor = data()
    noise = 1.1 * np.random.default_rng(0).normal(size=(50_000, DIM))
    draws = np.concatenate([mode + noise @ factor.T, mode - noise @ factor.T])
    energy = np.concatenate([energies(d, features, y) for d in np.split(draws, 20)])
    log_weights = np.tile(np.sum(noise**2, 1) / (2 * 1.1**2), 2) - energy
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    assert 1 / np.sum(weights**2) > 50_000
    mean = weights @ draws
    return mean, np.sqrt(weights @ (draws - mean) ** 2)


def reference(kind="dense"):
    """A little off the mode, as a found one is."""
    *_, mode, factor = data()
    center, sd = mode + 0.3 * factor @ np.ones(DIM), np.sqrt(np.sum(factor**2, 1))
    if kind == "dense":
        return Scale(jnp.asarray(center, "f4"), jnp.asarray(factor, "f4"))
    scale = Scale(jnp.asarray(center, "f4"), jnp.asarray(sd, "f4"))
    if kind == "diagonal":
        return scale
    vector = jnp.ones((DIM, 1)) / DIM**0.5
    return LowRankScale(*scale, vector, jnp.array([1.3]))


def sites(features):
    return {"alpha": features[:, 0], "beta": features[:, 1:]}


def options(subsample_size=10, kind="dense", scale=None, **kwargs):
    args, features, *_ = data()
    scale = reference(kind) if scale is None else scale
    kwargs = {"features": sites(features), "curvature": LOGISTIC, **kwargs}
    return glm_bound(logistic, scale, *args, subsample_size, **kwargs)


# The bound


def largest_ratio(settings, sampler, subsample_size, prior=None):
    """The largest rate over its bound, over paths, times and batches."""
    args, scale = data()[0], settings["reference"]
    model = SubsampledModel(logistic, (*args, subsample_size, prior))
    control = control_variate(model, scale.center, settings["control_variates"])
    rng = np.random.default_rng(2)
    # Each single row is a batch; of the larger ones, some.
    batches = np.arange(NUM_DATA)[:, None]
    if subsample_size > 1:
        rows = [rng.permutation(NUM_DATA)[:subsample_size] for _ in range(200)]
        batches = np.stack(rows)
    batches = jnp.asarray(batches, jnp.int32)

    def ratio(z, v, share):
        x, direction = scale.position(z), scale.position(v) - scale.center
        a, b, horizon = settings["event_time"].bound(x, direction)
        z1 = z + share * horizon * v

        def rates(rows):
            g = gradient(model, scale.position(z1), {"data": rows}, control)
            return sampler.rates(z1, v, scale.gradient(g))

        most = jnp.max(jax.vmap(rates)(batches), 0)
        line = a + b * share * horizon
        return jnp.max(jnp.where(most > 0, most / line, 0)), jnp.min(line - most)

    # Far out, typical, and near the centre.
    sizes = np.repeat([10.0, 2.0, 1.0, 0.01], 10)[:, None]
    z = sizes * rng.normal(size=(40, DIM))
    v = jax.vmap(sampler.velocity)(jnp.asarray(rng.normal(size=(40, DIM)), "f4"))
    share = np.tile([0, 0.25, 0.5, 0.75, 1], 8)
    found, gap = jax.jit(jax.vmap(ratio))(jnp.asarray(z, "f4"), v, share)
    return float(found.max()), float(gap.min())


SAMPLERS = {ZigZag: ZigZagProcess(), BPS: BouncyParticle()}


@pytest.mark.parametrize(
    ("kernel", "third", "kind", "subsample_size"),
    [
        (ZigZag, None, "dense", 1),
        (ZigZag, None, "diagonal", 10),
        (ZigZag, THIRD, "diagonal", 1),
        (ZigZag, THIRD, "dense", 10),
        (BPS, None, "low rank", 1),
        (BPS, THIRD, "dense", 1),
    ],
)
def test_rates_are_below_their_bound(kernel, third, kind, subsample_size):
    settings = options(subsample_size, kind, third_derivative=third, kernel=kernel)
    ratio, gap = largest_ratio(settings, SAMPLERS[kernel], subsample_size)
    assert ratio < 1.001 and gap > -1e-3
    if subsample_size == 1:  # and it is no bound for nothing
        assert ratio > 0.3


def test_smaller_constants_are_no_bound(monkeypatch):
    constants = glm._constants

    def smaller(*args):
        return glm.Constants(*(a / 10 for a in constants(*args)))

    monkeypatch.setattr(glm, "_constants", smaller)
    settings = options(1)
    assert largest_ratio(settings, SAMPLERS[ZigZag], 1)[0] > 2


@pytest.mark.parametrize(("kernel", "third"), [(ZigZag, None), (BPS, THIRD)])
def test_prior_that_is_not_gaussian(kernel, third):
    args, features, *_ = data()
    prior = dist.StudentT(3, 0, 0.01)  # precise, so that it matters
    limit = 4 / 3 / 0.01**2
    settings = glm_bound(
        logistic,
        reference(),
        *args,
        1,
        features=features,
        curvature=LOGISTIC,
        third_derivative=third,
        prior_curvature=[limit, 1, 1],
        kernel=kernel,
        prior=prior,
    )
    ratio, gap = largest_ratio(settings, SAMPLERS[kernel], 1, prior)
    assert ratio < 1.001 and gap > -1e-3 * limit**0.5


def test_centre_at_zero():
    """Where automatic differentiation of the Bernoulli distribution is wrong."""
    scale = reference()._replace(center=jnp.zeros(DIM))
    settings = options(1, scale=scale)
    assert np.all(np.abs(scale.whiten(settings["reference"].center)) < 0.01)
    ratio, gap = largest_ratio(settings, SAMPLERS[ZigZag], 1)
    assert ratio < 1.001 and gap > -1e-3


# The posterior


@pytest.mark.parametrize(
    ("kernel", "third", "kind", "subsample_size"),
    [
        (ZigZag, None, "dense", 1),
        pytest.param(ZigZag, None, "diagonal", 10, marks=pytest.mark.slow),
        (ZigZag, THIRD, "dense", 1),
        (BPS, THIRD, "dense", 10),
    ],
)
def test_posterior(kernel, third, kind, subsample_size):
    settings = options(subsample_size, kind, third_derivative=third, kernel=kernel)
    mcmc = MCMC(
        kernel(logistic, **settings),
        num_warmup=50,
        num_samples=500,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data()[0], subsample_size)
    report = check(mcmc)
    assert report.ok, str(report)
    assert report.violation_rate == 0
    adapted = mcmc.last_state.adapt_state
    np.testing.assert_array_equal(adapted.scale.factor, settings["reference"].factor)
    draws = mcmc.get_samples(group_by_chain=True)
    draws = np.concatenate([draws["alpha"][..., None], draws["beta"]], -1, dtype=float)
    mean, sd = truth()
    error = sd / np.sqrt(effective_sample_size(draws))
    assert np.all(np.abs(draws.mean((0, 1)) - mean) < 5 * np.hypot(error, 0.003 * sd))
    square = (draws - mean) ** 2
    ratio = np.sqrt(square.mean((0, 1))) / sd
    error = square.std((0, 1)) / np.sqrt(effective_sample_size(square)) / sd**2 / 2
    assert np.all(np.abs(ratio - 1) < 5 * np.hypot(error, 0.003))


# Errors


def probit(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        p = jax.scipy.stats.norm.cdf(x @ beta)
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=y)


def test_probit_and_one_site():
    args, features, *_ = data()
    scale = Scale(jnp.zeros(2), jnp.full(2, 0.05))
    found = partial(glm_bound, probit, scale, *args, 10, features=features[:, 1:])
    assert found(curvature=1.0, third_derivative=0.2958)["control_variates"] == 2
    assert found(curvature=(-1.0, 1.0))["control_variates"] == 1
    with pytest.raises(ValueError, match="`curvature` says .* some of the model's"):
        found(curvature=0.25)


def absolute(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Laplace(x @ beta), obs=y)


def test_likelihood_with_kinks():
    args, features, *_ = data()
    scale = Scale(jnp.zeros(2), jnp.full(2, 0.1))
    with pytest.raises(ValueError, match="first derivatives change by more"):
        glm_bound(absolute, scale, *args, 10, features=features[:, 1:], curvature=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curvature": -0.25}, "`curvature` must not be negative, got -0.25"),
        ({"curvature": np.nan}, "`curvature` must be a finite number"),
        ({"curvature": np.ones(7)}, "one for each of 1000 rows"),
        ({"curvature": (0, 1, 2)}, "pair"),
        ({"curvature": 0.2}, "`curvature` says .* 0 to 0.2, but some"),
        ({"third_derivative": -1}, "`third_derivative` must not be negative"),
        ({"third_derivative": 0.05}, "`third_derivative` is 0.05 at most"),
        ({"features": np.ones((10, DIM))}, r"must be \(1000, 3\), or a dict"),
        ({"features": {"beta": np.ones((NUM_DATA, 2))}}, "`features` has shapes"),
        ({"features": np.full((NUM_DATA, DIM), np.inf)}, "`features` must be finite"),
        ({"features": data()[1][:, ::-1]}, "not along its features"),
        ({"prior_curvature": -1.0}, "`prior_curvature` must be a number"),
        ({"prior_curvature": 0.1}, "`prior_curvature` is .* but the model's"),
        ({"kernel": Boomerang}, "`kernel` must be ZigZag, BPS"),
        ({"prior": dist.StudentT(3, 0, 0.01)}, "prior is not Gaussian"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_errors_of_reference_and_model():
    args, features, *_ = data()
    found = partial(glm_bound, logistic, features=features, curvature=0.25)
    with pytest.raises(ValueError, match="`reference` is missing"):
        found(None, *args, 10)
    with pytest.raises(TypeError, match="`reference` must be a `Scale`"):
        found(1.0, *args, 10)
    with pytest.raises(ValueError, match="`reference.center` has shape"):
        found(Scale(jnp.zeros(2), jnp.ones(2)), *args, 10)
    with pytest.raises(ValueError, match="one subsampled plate; .* none"):
        found(reference(), *args, None)


def test_bound_of_another_kernel():
    mcmc = MCMC(ZigZag(logistic, **options(kernel=BPS)), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match="`bound` gave an array of shape"):
        mcmc.run(random.key(0), *data()[0], 10)
    with pytest.raises(TypeError, match="multiple values"):
        ZigZag(logistic, **options(), control_variates=2)
