# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels on models with subsampled plates: the posterior of all data."""

import warnings

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import (
    BPS,
    SBPS,
    Boomerang,
    RegressionBound,
    Scale,
    ZigZag,
    check,
)

KERNELS = (BPS, Boomerang, ZigZag)
NUM_DATA = 100
Y = np.random.default_rng(0).normal(1, 1, NUM_DATA)
PRECISION = NUM_DATA + 0.01
MEAN, SD = Y.sum() / PRECISION, PRECISION**-0.5


def gaussian_mean(y, subsample_size):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, event_dim=0))


def run(kernel, *args, num_samples=2000, num_chains=8, seed=0, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *args, **kwargs)
    return mcmc


def variance_ratio(mcmc):
    """Variance of the draws over the posterior's, and its Monte-Carlo error."""
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    square = (x - MEAN) ** 2
    ratio = square.mean() / SD**2
    return ratio, ratio * np.sqrt(2 / effective_sample_size(square))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("control_variates", [None, "auto"])
@pytest.mark.parametrize("subsample_size", [1, 10, 50])
def test_fresh_batches_give_the_posterior(kernel, control_variates, subsample_size):
    kernel = kernel(gaussian_mean, control_variates=control_variates)
    mcmc = run(kernel, Y, subsample_size)
    ratio, error = variance_ratio(mcmc)
    assert abs(ratio - 1) < 0.04 + 3 * error
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    mcse = SD / np.sqrt(effective_sample_size(x))
    assert abs(x.mean() - MEAN) < 5 * mcse


@pytest.mark.parametrize("scheme", ["regression", RegressionBound(noise=1e-3)])
def test_regression_of_noisy_rates(scheme):
    """The posterior, unless the noise is denied."""
    kernel = SBPS(gaussian_mean, control_variates=None, event_time=scheme)
    mcmc = run(kernel, Y, 10, num_samples=1000)
    ratio, error = variance_ratio(mcmc)
    assert (abs(ratio - 1) < 0.04 + 3 * error) == (scheme == "regression"), ratio
    assert (check(mcmc).violation_rate < 0.015) == (scheme == "regression")


@pytest.mark.parametrize("kernel, low, high", [(BPS, 4, 5.2), (ZigZag, 6, 10)])
def test_one_batch_per_event_inflates(kernel, low, high):
    """The paper's code: about 1.45 sqrt(N/m) = 4.6 times the variance for BPS."""
    kernel = kernel(gaussian_mean, control_variates=None, batch="event")
    with pytest.warns(UserWarning, match="not from the posterior"):
        mcmc = run(kernel, Y, 10)
    assert low < variance_ratio(mcmc)[0] < high


@pytest.mark.parametrize("kernel", KERNELS)
def test_euler_is_near_with_control_variates(kernel):
    mcmc = run(kernel(gaussian_mean, batch="euler"), Y, 10, num_samples=1000)
    ratio, error = variance_ratio(mcmc)
    assert abs(ratio - 1) < 0.12 + 3 * error  # O(step)


@pytest.mark.parametrize("batching", ["with_replacement", "epoch", "contiguous"])
def test_batching(batching):
    mcmc = run(Boomerang(gaussian_mean, batching=batching), Y, 10, num_samples=1000)
    ratio, error = variance_ratio(mcmc)
    assert abs(ratio - 1) < 0.04 + 3 * error


def logistic(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def logistic_data(num_data=5000, dim=5):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num_data, dim))
    y = rng.random(num_data) < 1 / (1 + np.exp(-x @ np.linspace(-1, 1, dim)))
    beta = np.zeros(dim)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ beta))
        hessian = (x.T * (p * (1 - p))) @ x + np.eye(dim)
        beta -= np.linalg.solve(hessian, x.T @ (p - y) + beta)
    deviation = np.sqrt(np.diag(np.linalg.inv(hessian)))
    return jnp.asarray(x, "f4"), jnp.asarray(y, "f4"), beta, deviation


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("order", [1, 2])
def test_logistic_regression(kernel, order):
    """Against Laplace's approximation, which is good to a percent with 5,000 rows."""
    x, y, mode, deviation = logistic_data()
    mcmc = run(kernel(logistic, control_variates=order), x, y, 100, num_chains=4)
    draws = np.asarray(mcmc.get_samples()["beta"], float)
    assert np.abs((draws.mean(0) - mode) / deviation).max() < 0.15
    np.testing.assert_allclose(draws.std(0) / deviation, 1, atol=0.1)


def test_given_reference_is_the_point_to_expand_around():
    x, y, mode, deviation = logistic_data()
    reference = Scale(jnp.asarray(mode, "f4"), jnp.asarray(deviation, "f4"))
    mcmc = run(Boomerang(logistic, reference=reference), x, y, 100, num_chains=2)
    control = mcmc.last_state.adapt_state.control
    np.testing.assert_allclose(control.center, mode, rtol=1e-5)
    assert control.hessian_full is None
    draws = np.asarray(mcmc.get_samples()["beta"], float)
    assert np.abs((draws.mean(0) - mode) / deviation).max() < 0.15


@pytest.mark.parametrize("control_variates", [None, 1])
def test_chains_start_where_the_posterior_is(control_variates):
    """Not where the initialization strategy would: some 60 sd away."""
    x, y, *_ = logistic_data()
    kernel = Boomerang(logistic, control_variates=control_variates)
    keys = random.split(random.key(0), 4)
    state = kernel.init(keys, 500, None, (x, y, 100), {})
    assert np.abs(state.path.z).max() < 5


def test_control_variates_need_a_point():
    x, y, *_ = logistic_data()
    kernel = BPS(logistic, control_variates=1, adapt_mass_matrix=False)
    with pytest.raises(ValueError, match="point to expand around"):
        run(kernel, x, y, 100, num_chains=2)


def test_single_chain_and_fields():
    mcmc = MCMC(
        Boomerang(gaussian_mean), num_warmup=200, num_samples=300, progress_bar=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mcmc.run(random.key(0), Y, 10, extra_fields=("potential_energy", "num_grad"))
    assert set(mcmc.get_samples()) == {"mu"}  # and no indices
    # An estimate from one batch is not worth its cost.
    assert np.all(np.isnan(mcmc.get_extra_fields()["potential_energy"]))
    assert check(mcmc).violation_rate < 0.1


def test_nothing_of_the_size_of_the_data_in_the_loop():
    """Besides the data themselves, which are only gathered from."""
    num_data = 4321
    x, y = jnp.ones((num_data, 3)), jnp.zeros(num_data)
    kernel = Boomerang(logistic)
    state = jax.eval_shape(
        lambda x, y: kernel.init(random.key(0), 100, None, (x, y, 10), {}), x, y
    )
    jaxpr = jax.make_jaxpr(lambda s, x, y: kernel.sample(s, (x, y, 10), {}))(
        state, x, y
    )
    large = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [p for p in jax.tree.leaves(list(eqn.params.values()))]
            subs = [p for p in inner if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            for sub in subs:
                visit(getattr(sub, "jaxpr", sub))
            if not subs:
                shapes = [v.aval.shape for v in eqn.outvars]
                large.extend(eqn for s in shapes if num_data in s)

    visit(jaxpr.jaxpr)
    assert not large


@pytest.mark.parametrize(
    "cross_chain_adapt", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_control_variates_follow_the_mean(cross_chain_adapt):
    """The log of a scale has its mean elsewhere than its mode."""

    def log_scale(y):
        log_sd = numpyro.sample("log_sd", dist.Normal(0, 3))
        with numpyro.plate("data", len(y), subsample_size=2):
            y = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(0, jnp.exp(log_sd)), obs=y)

    y = Y[:8] - Y[:8].mean()
    grid = np.linspace(-3, 3, 2001)
    log_prob = -0.5 * (grid / 3) ** 2 - 8 * grid
    log_prob -= 0.5 * np.exp(-2 * grid) * np.sum(y**2)
    weight = np.exp(log_prob - log_prob.max()) / np.exp(log_prob - log_prob.max()).sum()
    mean = weight @ grid
    mode = grid[log_prob.argmax()]
    options = {"cross_chain_adapt": cross_chain_adapt, "control_variates": 1}
    centers = []
    for recenter in (False, True):
        mcmc = run(BPS(log_scale, recenter=recenter, **options), y)
        centers.append(np.mean(mcmc.last_state.adapt_state.control.center))
        x = np.asarray(mcmc.get_samples(group_by_chain=True)["log_sd"], float)
        sd = np.sqrt(weight @ (grid - mean) ** 2)
        assert abs(x.mean() - mean) < 5 * sd / np.sqrt(effective_sample_size(x))
    assert abs(centers[0] - mode) < 0.02 < abs(centers[1] - mode)
    assert abs(centers[1] - mean) < 0.05
