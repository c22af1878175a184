# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""After a run on mini-batches: draws, ArviZ and predictions, of all data."""

from functools import cache, partial

import arviz as az
import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive, log_likelihood
from numpyro.infer.util import potential_energy, unconstrain_fn
from numpyro_pdmp import (
    ALL_STATS,
    BPS,
    Boomerang,
    all_data,
    check,
    full_data,
    full_potential,
    to_inference_data,
)
from numpyro_pdmp.all_data import pointwise_log_likelihood

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SIZE, COLUMNS, NUM = 103, 4, 10
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZE, COLUMNS)).astype(np.float32)
Y = (X[:, 0] + RNG.normal(size=SIZE)).astype(np.float32)


def take(data):
    return None if data is None else numpyro.subsample(data, event_dim=0)


def by_primitive(x, y=None, num=NUM):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x), subsample_size=num):
        mean = numpyro.subsample(x, event_dim=1) @ b
        numpyro.sample("y", dist.Normal(mean, s), obs=take(y))


def by_index(x, y=None, num=NUM):
    """With NumPy data, which tracers cannot index."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.deterministic("norm", jnp.sum(b**2))
    with numpyro.plate("data", len(x), subsample_size=num) as i:
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(x[i] @ b, s), obs=obs)


def several(x, y=None, num=NUM):
    """Nested plates, plates of their own, a whole one, and event dimensions."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    with numpyro.plate("whole", COLUMNS):
        numpyro.sample("c", dist.Normal(b, 1), obs=x[0])
    with numpyro.plate("one", len(x), subsample_size=num):
        row = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", dist.Normal(b, 1).to_event(1), obs=row)
    columns = numpyro.plate("columns", COLUMNS, subsample_size=num and 3, dim=-1)
    with numpyro.plate("rows", len(x), subsample_size=num, dim=-2), columns:
        numpyro.sample("entries", dist.StudentT(5, b[0], 1), obs=take(x))
    with numpyro.plate("two", len(x) // 2, subsample_size=num and num // 2) as rows:
        numpyro.sample("y", dist.Normal(b[0], 1), obs=None if y is None else y[rows])


MODELS = [by_primitive, by_index, several]
RUNS = [by_index, several]
DIMS = {
    by_index: {"y": ("data",)},
    several: {
        "c": ("whole",),
        "x": ("one", "x_dim_1"),
        "entries": ("rows", "columns"),
        "y": ("two",),
    },
}
OBSERVED = {
    by_index: {"y": Y},
    several: {"c": X[0], "x": X, "entries": X, "y": Y[: SIZE // 2]},
}


@cache
def run(model):
    # Options that compile fast: no mode to find, and simple batches.
    mcmc = MCMC(
        BPS(
            model,
            adapt_mass_matrix=False,
            control_variates=None,
            batching="contiguous",
        ),
        num_warmup=200,
        num_samples=100,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), X, Y, extra_fields=ALL_STATS)
    return mcmc


def draws(model, num=7):
    rng = np.random.default_rng(1)
    values = {"b": rng.normal(size=(num, COLUMNS))}
    if model is not several:
        values["s"] = rng.gamma(2.0, size=num)
    return {k: v.astype(np.float32) for k, v in values.items()}


def expected_log_likelihood(model, samples):
    """By NumPyro; without subsampling it also indexes by tracers."""
    x, y = jnp.asarray(X), jnp.asarray(Y)
    return log_likelihood(partial(model, num=None), samples, x, y)


# Draws


def test_no_indices_among_the_draws():
    assert set(run(by_index).get_samples()) == {"b", "s", "norm"}
    assert set(run(several).get_samples()) == {"b"}


@pytest.mark.parametrize("model", RUNS)
def test_reports(model, capsys):
    mcmc = run(model)
    mcmc.print_summary()
    assert "n_eff" in capsys.readouterr().out
    report = check(mcmc)
    assert report.num_draws == 200 and "effective sample size" in str(report)
    summary = az.summary(to_inference_data(mcmc))
    assert {name.split("[")[0] for name in summary.index} == set(mcmc.get_samples())
    assert np.all(np.isfinite(summary["mean"]))


def test_postprocessing_sees_one_row():
    seen = set()

    def model(x, y):
        b = numpyro.sample("b", dist.HalfNormal(1))
        numpyro.deterministic("double", 2 * b)
        with numpyro.plate("data", len(x), subsample_size=NUM):
            batch = numpyro.subsample(x[:, 0], event_dim=0)
            seen.add(batch.shape)
            numpyro.sample("y", dist.Normal(b * batch, 1), obs=take(y))

    fn = Boomerang(model).postprocess_fn((X, Y), {})
    assert set(fn({"b": jnp.zeros(())})) == {"b", "double"}
    assert seen == {(1,), (NUM,)}  # and a batch, to find out about the plates


def test_deterministic_site_in_a_plate_has_all_rows():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("data", len(x), subsample_size=NUM):
            mean = numpyro.deterministic("mean", b * take(x[:, 0]))
            numpyro.sample("y", dist.Normal(mean, 1), obs=take(y))

    kernel = BPS(model, adapt_mass_matrix=False, control_variates=None)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=20, progress_bar=False)
    with pytest.warns(UserWarning, match="'mean' is inside .* on all 103 rows"):
        mcmc.run(random.key(0), X, Y)
    data = to_inference_data(mcmc, log_likelihood=True)
    assert data.posterior["mean"].dims == ("chain", "draw", "data")
    expected = data.posterior["b"].values[..., None] * X[:, 0]
    np.testing.assert_allclose(data.posterior["mean"], expected, rtol=1e-5)
    expected = dist.Normal(expected).log_prob(Y)
    np.testing.assert_allclose(data.log_likelihood["y"], expected, rtol=1e-4)


# ArviZ


@pytest.mark.parametrize("model", RUNS)
def test_inference_data(model):
    mcmc = run(model)
    data = to_inference_data(mcmc)
    assert set(data.groups()) == {"posterior", "sample_stats", "observed_data"}
    assert set(data.posterior.data_vars) == set(mcmc.get_samples())
    assert data.posterior.attrs["sampler"] == "BPS"
    # One of a single batch would be an estimate, and is not there unless asked for.
    assert "lp" not in data.sample_stats
    assert {"num_grad", "diverging"} <= set(data.sample_stats.data_vars)
    assert set(data.observed_data.data_vars) == set(OBSERVED[model])
    for name, values in OBSERVED[model].items():
        assert data.observed_data[name].dims == DIMS[model][name]
        np.testing.assert_array_equal(data.observed_data[name], values)
        for dim in DIMS[model][name]:
            size = data.observed_data.sizes[dim]
            np.testing.assert_array_equal(
                data.observed_data.coords[dim], np.arange(size)
            )


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
@pytest.mark.parametrize("model", RUNS)
def test_log_likelihood_of_all_data(model):
    mcmc = run(model)
    data = to_inference_data(mcmc, log_likelihood=True)
    expected = expected_log_likelihood(model, mcmc.get_samples())
    assert set(data.log_likelihood.data_vars) == set(expected)
    for name, values in expected.items():
        group = data.log_likelihood[name]
        dims = DIMS[model][name][: values.ndim - 1]  # without event dimensions
        assert group.dims == ("chain", "draw", *dims)
        values = np.reshape(values, group.shape)
        np.testing.assert_allclose(group, values, rtol=1e-4, atol=1e-5)
    assert np.isfinite(az.loo(data, var_name="y").elpd_loo)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk_size", [1, 20])
def test_log_likelihood_from_blocks(model, chunk_size, monkeypatch):
    monkeypatch.setattr(all_data, "BLOCK_ENTRIES", 60)  # blocks of draws, too
    samples = draws(model)
    values = pointwise_log_likelihood(model, samples, (X, Y), {}, chunk_size)
    expected = expected_log_likelihood(model, samples)
    assert set(values) == set(expected)
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-4, atol=1e-5)


def test_rows_of_a_block_bound_the_memory():
    seen = set()

    def model(x, y):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("data", len(x), subsample_size=NUM):
            batch = numpyro.subsample(x[:, 0], event_dim=0)
            if isinstance(batch + b, jax.core.Tracer):
                seen.add(batch.shape)
            numpyro.sample("y", dist.Normal(b * batch, 1), obs=take(y))

    pointwise_log_likelihood(model, {"b": np.zeros(5)}, (X, Y), {}, chunk_size=20)
    assert seen == {(20,), (SIZE,), (NUM,)}  # the second for its shape alone


def test_large_log_likelihood_is_warned_of(monkeypatch):
    monkeypatch.setattr(all_data, "LARGE", 1000)
    match = "200 draws at 103 observations takes .* GiB. Keep fewer draws"
    with pytest.warns(UserWarning, match=match):
        to_inference_data(run(by_index), log_likelihood=True)


def test_names_of_the_user():
    coords = {"row": 10 * np.arange(SIZE)}
    data = to_inference_data(
        run(by_index),
        log_likelihood=True,
        dims={"y": ["row"]},
        coords=coords,
        constant_data={"x": X},
    )
    assert data.log_likelihood["y"].dims == ("chain", "draw", "row")
    np.testing.assert_array_equal(data.log_likelihood["row"], coords["row"])
    np.testing.assert_array_equal(data.constant_data["x"], X)


def test_posterior_predictive_and_netcdf(tmp_path):
    mcmc = run(by_index)
    predictive = Predictive(full_data(by_index), mcmc.get_samples())
    data = to_inference_data(
        mcmc,
        log_likelihood=True,
        posterior_predictive={"y": predictive(random.key(1), X)["y"]},
    )
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "data")
    path = str(tmp_path / "run.nc")
    data.to_netcdf(path)
    again = az.from_netcdf(path)
    assert {*again.groups()} == {*data.groups()}


def test_inference_data_of_a_run_to_come():
    with pytest.raises(ValueError, match="`mcmc` with sampler BPS has not run"):
        to_inference_data(MCMC(BPS(by_index), num_warmup=1, num_samples=1))


# Other tools of NumPyro


@pytest.mark.parametrize("model", MODELS)
def test_full_data_is_the_model_without_subsampling(model):
    samples = draws(model)
    values = log_likelihood(full_data(model), samples, X, Y)
    expected = expected_log_likelihood(model, samples)
    assert set(values) == set(expected)
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("model", [by_primitive, by_index])
def test_predictions(model, parallel):
    samples, key = draws(model), random.key(3)
    few = X[:5]  # less than a batch
    for x in (X, few):
        predictive = Predictive(full_data(model), samples, parallel=parallel)
        whole = Predictive(partial(model, num=None), samples, parallel=parallel)
        y = predictive(key, x)["y"]
        assert y.shape == (7, len(x))
        np.testing.assert_allclose(y, whole(key, jnp.asarray(x))["y"], rtol=1e-4)


def test_plain_predictions_are_of_rows_at_random():
    """As the documentation says, so that it will be told when that changes."""
    predictive = Predictive(by_primitive, draws(by_primitive), return_sites=["data"])
    rows = predictive(random.key(3), X)["data"]
    assert rows.shape == (7, NUM)
    assert len({tuple(row) for row in np.asarray(rows).tolist()}) == 7
    assert "data" not in Predictive(by_primitive, draws(by_primitive))(random.key(3), X)


def test_nuts_refuses_mini_batches_and_takes_all_data():
    with pytest.raises(ValueError, match="HMC/NUTS do not support subsampling"):
        MCMC(NUTS(by_primitive), num_warmup=1, num_samples=1).run(random.key(0), X, Y)
    state = NUTS(full_data(by_primitive)).init(random.key(0), 10, None, (X, Y), {})
    whole = partial(by_primitive, num=None)
    expected = potential_energy(whole, (X, Y), {}, state.z)
    np.testing.assert_allclose(state.potential_energy, expected, rtol=1e-5)


# Potential energy


@pytest.mark.parametrize("model", MODELS)
def test_full_potential(model):
    samples, whole = draws(model), partial(model, num=None)
    x, y = jnp.asarray(X), jnp.asarray(Y)
    energies = full_potential(model, samples, X, y=Y)
    for i, energy in enumerate(energies):
        values = {k: v[i] for k, v in samples.items()}
        z = unconstrain_fn(whole, (x, y), {}, values)
        expected = potential_energy(whole, (x, y), {}, z)
        np.testing.assert_allclose(energy, expected, rtol=1e-5)
    np.testing.assert_allclose(full_potential(whole, samples, x, y), energies, 1e-5)


def test_full_potential_where_a_support_depends_on_a_draw():
    def model(y):
        a = numpyro.sample("a", dist.HalfNormal(1))
        b = numpyro.sample("b", dist.Uniform(0, a))
        with numpyro.plate("data", len(y), subsample_size=NUM):
            numpyro.sample("y", dist.Normal(b, 1), obs=take(y))

    samples = {"a": np.array([1.0, 2.0]), "b": np.array([0.4, 1.8])}
    whole = full_data(model)
    for energy, a, b in zip(
        full_potential(model, samples, Y), *samples.values(), strict=True
    ):
        z = unconstrain_fn(whole, (Y,), {}, {"a": a, "b": b})
        expected = potential_energy(whole, (Y,), {}, z)
        np.testing.assert_allclose(energy, expected, rtol=1e-5)


def test_bad_samples():
    with pytest.raises(ValueError, match=r"no draws of the sites \['s'\]"):
        full_potential(by_index, {"b": np.zeros((3, COLUMNS))}, X, Y)
    samples = {"b": np.zeros((3, COLUMNS)), "s": np.ones(2)}
    with pytest.raises(ValueError, match="the first dimension must be the draws"):
        full_potential(by_index, samples, X, Y)
