# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a finished run to a verdict, to ArviZ and to plots."""

import arviz as az
import matplotlib
import numpy as np
import pytest

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import (
    ALL_STATS,
    BPS,
    Boomerang,
    ExactBound,
    Interpolation,
    ZigZag,
    check,
    to_inference_data,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

matplotlib.use("Agg")
STATS = {
    "acceptance_rate",
    "diverging",
    "excess",
    "lp",
    "num_bounces",
    "num_grad",
    "num_proposals",
    "num_refreshments",
    "num_violations",
}
Y = np.asarray([0.2, 1.1, -0.4, 0.8, 1.5, 0.1, 0.9, 0.3])


def model(y):
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    numpyro.deterministic("double", 2 * loc)
    with numpyro.plate("data", y.size):
        numpyro.sample("y", dist.Normal(loc, scale), obs=y)


@pytest.fixture(scope="module")
def mcmc():
    mcmc = MCMC(
        ZigZag(model),
        num_warmup=200,
        num_samples=1000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), Y, extra_fields=ALL_STATS)
    return mcmc


@pytest.fixture(scope="module")
def data(mcmc):
    return to_inference_data(mcmc)


# ArviZ


def test_groups(data):
    assert set(data.groups()) == {"posterior", "sample_stats", "observed_data"}
    assert set(data.posterior.data_vars) == {"loc", "scale", "double"}
    assert dict(data.posterior.sizes) == {"chain": 2, "draw": 1000}
    assert data.posterior.attrs["sampler"] == "ZigZag"
    assert data.posterior.attrs["event_time"].startswith("Interpolation(")
    assert data.posterior.attrs["window"] > 0 and data.posterior.attrs["offset"] > 0
    assert data.posterior.attrs["draw_time"] >= 1
    assert data.posterior.attrs["refresh_rate"] == 0
    assert data.posterior.attrs["target_violation"] == 0.005


def test_sample_stats(mcmc, data):
    stats, fields = data.sample_stats, mcmc.get_extra_fields(group_by_chain=True)
    assert set(stats.data_vars) == STATS
    np.testing.assert_array_equal(stats["lp"], -fields["potential_energy"])
    np.testing.assert_array_equal(stats["acceptance_rate"], fields["accept_prob"])
    for name in STATS - {"lp", "acceptance_rate"}:
        np.testing.assert_array_equal(stats[name], fields[name])
    assert stats["diverging"].dtype == bool


def test_summary(mcmc, data):
    summary = az.summary(data)
    assert list(summary.index) == ["double", "loc", "scale"]
    assert np.all(summary["r_hat"] < 1.05) and np.all(summary["ess_bulk"] > 100)
    mean = np.mean(mcmc.get_samples()["loc"])
    np.testing.assert_allclose(summary.loc["loc", "mean"], mean, atol=1e-3)


def test_plain_arviz(mcmc):
    data = az.from_numpyro(mcmc)
    assert set(data.log_likelihood.data_vars) == {"y"}
    assert data.log_likelihood["y"].shape == (2, 1000, 8)
    assert {"lp", "diverging"} <= set(data.sample_stats.data_vars)
    np.testing.assert_array_equal(
        data.sample_stats["lp"], -mcmc.get_extra_fields(True)["potential_energy"]
    )
    assert np.isfinite(az.loo(data).elpd_loo)


def test_log_likelihood_on_demand(mcmc):
    data = to_inference_data(mcmc, log_likelihood=True)
    assert data.log_likelihood["y"].dims == ("chain", "draw", "data")


# ArviZ 0.23 calls Matplotlib in a way that 3.11 deprecates.
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
def test_plot(data):
    axes = az.plot_trace(data, var_names=["loc", "scale"])
    assert axes.shape == (2, 2)
    matplotlib.pyplot.close("all")


def test_netcdf(data, tmp_path):
    path = str(tmp_path / "run.nc")
    data.to_netcdf(path)
    again = az.from_netcdf(path)
    np.testing.assert_array_equal(again.posterior["loc"], data.posterior["loc"])
    assert again.posterior.attrs["sampler"] == "ZigZag"


# Reports


def test_good_run(mcmc):
    report = check(mcmc)
    assert report.ok, str(report)
    assert report.num_draws == 2000 and report.num_chains == 2
    assert str(report).endswith("Nothing to complain about.")
    fields = mcmc.get_extra_fields()
    np.testing.assert_allclose(report.num_grad, np.mean(fields["num_grad"]), rtol=1e-6)
    proposals = np.sum(fields["num_proposals"])
    np.testing.assert_allclose(
        report.violation_rate, np.sum(fields["num_violations"]) / proposals, rtol=1e-6
    )
    assert 0.3 < report.acceptance <= 1
    assert report.nonfinite == 0 and report.diverging == 0
    assert report.max_r_hat < 1.05 and 100 < report.min_ess
    np.testing.assert_allclose(
        report.grad_per_ess, np.sum(fields["num_grad"]) / report.min_ess, rtol=1e-6
    )


def test_what_was_tuned(mcmc):
    report, adapted = check(mcmc), mcmc.last_state.adapt_state
    assert report.draw_time == adapted.draw_time and report.refresh_rate == 0
    assert report.window == adapted.tuning.window
    assert report.offset == adapted.tuning.offset
    assert report.target_violation == 0.005 and report.refreshment_share == 0
    text = str(report)
    assert "refreshment rate 0 (0 % of events)." in text
    assert "for a target of 0.5 % above it." in text


def test_ratio_histogram(mcmc):
    report = check(mcmc)
    proposals = np.sum(mcmc.get_extra_fields()["num_proposals"])
    assert report.ratio_histogram.shape == (21,)
    assert report.ratio_histogram.sum() == proposals
    # Ten bins reach up to 1; rounding may put a ratio of 1 in either of two.
    above = report.ratio_histogram[10:].sum()
    assert above >= round(report.violation_rate * proposals)


def gaussian(x):
    return 0.5 * jnp.sum(x**2)


def bounded_run(bound):
    kernel = BPS(
        potential_fn=gaussian,
        event_time=ExactBound(bound),
        center=np.zeros(2),
        adapt_mass_matrix=False,
    )
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), init_params=np.zeros(2))
    return mcmc


def test_a_bound_too_low_is_an_error():
    report = check(bounded_run(lambda x, v: (0.5, 0.0)))
    assert not report.ok and report.violation_rate > 0
    assert any(line.startswith("ERROR") for line in report.advice)
    assert "ExactBound" in str(report) and "ERROR" in str(report)


def test_a_true_bound_is_not():
    report = check(bounded_run(lambda x, v: (jnp.abs(x @ v) + 0.1, v @ v)))
    assert report.violation_rate == 0 and "ERROR" not in str(report)
    assert np.isnan(report.target_violation) and "target" not in str(report)
    assert 0 < report.refreshment_share < 1
    assert report.ok, str(report)


def log_cosh(x):
    return jnp.sum(jnp.logaddexp(x, -x))


def test_a_target_that_warmup_missed():
    # Without warm-up the offset stays at its first value, which is too low here.
    scheme = Interpolation(t_init=1.0)
    kernel = BPS(potential_fn=log_cosh, target_violation=0.001, event_time=scheme)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1000, progress_bar=False)
    mcmc.run(random.key(0), init_params=np.zeros(8))
    report = check(mcmc)
    assert 0.02 < report.violation_rate < 0.1
    advice = [line for line in report.advice if "`target_violation`" in line]
    assert len(advice) == 1 and "the target was 0.1 %" in advice[0]


def test_separated_modes():
    def two_modes(x):
        return -jnp.logaddexp(-0.5 * (x - 10) ** 2, -0.5 * (x + 10) ** 2)

    mcmc = MCMC(
        Boomerang(potential_fn=two_modes, cross_chain_adapt=False),
        num_warmup=100,
        num_samples=200,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=np.asarray([-10.0, 10.0]))
    means = np.mean(mcmc.get_samples(group_by_chain=True), 1)
    np.testing.assert_allclose(means, [-10, 10], atol=1)
    report = check(mcmc)
    assert report.max_r_hat > 2
    assert any("R-hat" in line for line in report.advice)


def constant_entries():
    numpyro.sample("corr", dist.LKJCholesky(2, 1.0))


def test_constant_entries_are_no_fault():
    kernel = BPS(constant_entries)
    mcmc = MCMC(kernel, num_warmup=1000, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0))
    report = check(mcmc)
    assert np.isfinite(report.max_r_hat) and np.isfinite(report.min_ess)
    assert report.ok, str(report)
