# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Spike-and-slab priors: inclusion probabilities against sums over all models."""

from functools import cache
import itertools
import pickle

import arviz as az
import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam
from numpyro_pdmp import (
    BPS,
    Boomerang,
    LowRankScale,
    Scale,
    SigmaBPS,
    ZigZag,
    find_map,
    inclusion_probabilities,
    to_inference_data,
)
from numpyro_pdmp.spike_slab import thaw_rates

ROWS, DIM, NOISE, SLAB = 60, 10, 1.0, 1.5
WEIGHT = np.full(DIM, 0.3)
WEIGHT[2] = 0.6
CHAINS, DRAWS = 16, 200


@cache
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, DIM))
    x[:, 1] = 0.7 * x[:, 0] + 0.7 * x[:, 1]
    x[:, 4] = 0.6 * x[:, 3] + 0.8 * x[:, 4]
    beta = np.zeros(DIM)
    beta[[0, 3, 5, 7]] = [0.8, -0.5, 0.3, 0.25]
    y = x @ beta + NOISE * rng.normal(size=ROWS)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


@cache
def enumerated():
    """Inclusion probabilities from the evidence of all 1024 models."""
    x, y = (np.asarray(a, float) for a in data())
    logs, models = [], []
    for model in itertools.product([False, True], repeat=DIM):
        model = np.array(model)
        design = x[:, model]
        cov = NOISE**2 * np.eye(ROWS) + SLAB**2 * design @ design.T
        log = -0.5 * (np.linalg.slogdet(cov)[1] + y @ np.linalg.solve(cov, y))
        log += np.log(WEIGHT[model]).sum() + np.log(1 - WEIGHT[~model]).sum()
        logs.append(log)
        models.append(model)
    weights = np.exp(np.array(logs) - max(logs))
    return weights @ np.array(models) / weights.sum()


def regression(x, y, size=None):
    slab = dist.Normal(0, SLAB).expand([DIM]).to_event(1)
    beta = numpyro.sample("beta", slab)
    with numpyro.plate("rows", ROWS, subsample_size=size):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


@pytest.mark.parametrize(
    ("kernel", "size"), [(ZigZag, None), (BPS, None), (Boomerang, None), (ZigZag, 20)]
)
def test_regression_against_all_models(kernel, size):
    mcmc = MCMC(
        kernel(regression, sticky={"beta": WEIGHT}, potential_energy=False),
        num_warmup=200,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.PRNGKey(1), *data(), size=size)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    shares = (draws != 0).mean(1)
    found = inclusion_probabilities(mcmc)["beta"]
    np.testing.assert_allclose(found.probability, shares.mean(0), rtol=1e-5)
    # Two estimates of the error, both of few rare visits: the larger, four times.
    error = np.maximum(found.mcse, shares.std(0) / CHAINS**0.5)
    assert (error < 0.05).all()
    np.testing.assert_array_less(np.abs(found.probability - enumerated()), 4 * error)
    # Zeros have not ruined the scale: it is that of coefficients that are not zero.
    scale = np.asarray(mcmc.last_state.adapt_state.scale.factor)
    sd = [draws[..., i][draws[..., i] != 0].std() for i in range(DIM)]
    np.testing.assert_array_less(np.abs(np.log(scale / sd)), np.log(2))


def one(scale=1.0):
    beta = numpyro.sample("beta", dist.Normal(0, scale))
    numpyro.sample("y", dist.Normal(beta, 0.5), obs=1.0)


@cache
def run_of_one():
    mcmc = MCMC(
        SigmaBPS(one, sticky={"beta": 0.3}),
        num_warmup=200,
        num_samples=1000,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.PRNGKey(0), extra_fields=("potential_energy",))
    return mcmc


def test_one_coefficient_and_analysis():
    mcmc = run_of_one()
    found = inclusion_probabilities(mcmc)["beta"]
    # N(1 | 0, 1.25) against N(1 | 0, 0.25), at odds of 3 to 7.
    assert abs(found.probability - 0.487) < 4 * found.mcse < 0.2
    draws = mcmc.get_samples()["beta"]
    energy = mcmc.get_extra_fields()["potential_energy"]
    kappa = 0.3 / 0.7 / np.sqrt(2 * np.pi)
    expected = 0.5 * draws**2 + 2 * (draws - 1) ** 2 + np.log(2 * np.pi / 2)
    expected = jnp.where(draws == 0, expected + np.log(kappa), expected)
    np.testing.assert_allclose(energy, expected, atol=1e-4)
    inference = to_inference_data(mcmc)
    assert inclusion_probabilities(inference)["beta"].ess == found.ess
    summary = az.summary(inference, round_to="none")
    np.testing.assert_allclose(
        summary.loc["beta_included", "mean"], found.probability, rtol=1e-5
    )


def test_resuming_and_pickling():
    mcmc = pickle.loads(pickle.dumps(run_of_one()))
    frozen = np.asarray(mcmc.last_state.path.stuck.frozen)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.PRNGKey(1))
    assert frozen.shape == (2, 1)
    found = inclusion_probabilities(mcmc, "beta")["beta"]
    assert abs(found.probability - 0.487) < 4 * found.mcse


def hierarchy():
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    beta = numpyro.sample("beta", dist.Normal(0, tau).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(beta.sum(), 1), obs=1.0)


def test_rates_of_thawing():
    z = {"beta": jnp.zeros(()), "other": jnp.zeros(2)}
    kappa = thaw_rates({"beta": 0.2}, one, z, (2.0,), {})
    expected = [0.25 / np.sqrt(8 * np.pi), np.inf, np.inf]
    np.testing.assert_allclose(kappa, expected, rtol=1e-5)
    # A global scale is fine if the slab does not depend on it.
    model = numpyro.handlers.reparam(hierarchy, {"beta": LocScaleReparam(0)})
    z = {"beta_decentered": jnp.zeros(3), "tau": jnp.zeros(())}
    sticky = {"beta_decentered": np.array([0.5, 0.2, 0.5])}
    kappa = jax.jit(lambda: thaw_rates(sticky, model, z, (), {}))()
    expected = np.array([1, 0.25, 1, np.inf]) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(kappa, expected, rtol=1e-5)


def correlated():
    numpyro.sample("beta", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))


def positive():
    numpyro.sample("beta", dist.HalfNormal(1).expand([2]).to_event(1))


def scaled():
    with numpyro.handlers.scale(scale=2.0):
        numpyro.sample("beta", dist.Normal(0, 1))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (one, {"sticky": 0.3}, "must be a dict"),
        (one, {"sticky": {}}, "must be a dict"),
        (one, {"sticky": {"beta": 1.0}}, "between 0 and 1"),
        (one, {"sticky": {"beta": "half"}}, "between 0 and 1"),
        (one, {"sticky": {"gamma": 0.5}}, "which the model does not sample"),
        (one, {"sticky": {"beta": np.full(2, 0.5)}}, "one for each entry"),
        (one, {"dense_mass": True}, "diagonal metric"),
        (one, {"low_rank": 1}, "diagonal metric"),
        (one, {"inverse_mass_matrix": np.eye(1)}, "diagonal metric"),
        (one, {"reference": Scale(jnp.zeros(1), jnp.eye(1))}, "diagonal metric"),
        (one, {"event_time": "euler"}, "no path to zero"),
        (correlated, {}, "not one for each entry"),
        (positive, {}, "on all real numbers"),
        (scaled, {}, "masked or scaled"),
        (hierarchy, {}, "depends on .'tau'"),
    ],
)
def test_errors(model, options, message):
    options = {"sticky": {"beta": 0.3}, **options}
    with pytest.raises(ValueError, match=message):
        ZigZag(model, **options).init(random.PRNGKey(0), 10)


def test_mode_as_reference_has_a_diagonal_metric():
    mode = find_map(one, random.PRNGKey(0), progress_bar=False)
    kernel = Boomerang(one, sticky={"beta": 0.3}, reference=mode)
    scale = kernel.init(random.PRNGKey(0), 10).adapt_state.scale
    np.testing.assert_allclose(scale.center, mode.params["beta"])
    np.testing.assert_allclose(scale.factor, 5**-0.5, rtol=1e-4)  # 1 / 1 + 1 / 0.25


def test_more_errors():
    with pytest.raises(ValueError, match="needs a `model`"):
        ZigZag(potential_fn=lambda z: z**2, sticky={"beta": 0.3})
    zeros, ones = jnp.zeros(1), jnp.ones(1)
    reference = LowRankScale(zeros, ones, zeros[:, None], ones)
    kernel = Boomerang(one, sticky={"beta": 0.3}, reference=reference)
    with pytest.raises(ValueError, match="diagonal metric"):
        kernel.init(random.PRNGKey(0), 10)
    with pytest.raises(TypeError, match="MCMC object or InferenceData"):
        inclusion_probabilities({"beta": 0.5})
    with pytest.raises(ValueError, match="the draws have .'beta'"):
        inclusion_probabilities(run_of_one(), "gamma")
