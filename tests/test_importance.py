# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of unequal influence."""

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, SGLD, Boomerang, Scale, ZigZag
from numpyro_pdmp.batch import draw_batch, num_words
from numpyro_pdmp.control_variates import control_variate, gradient
from numpyro_pdmp.importance import (
    RUNS,
    Importance,
    make_importance,
    plan_batches,
    row_spreads,
    weighted_plates,
    weighted_rows,
)
from numpyro_pdmp.subsample import SubsampledModel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

NUM_DATA, RARE = 2000, 20


def make_data():
    """A column that is zero but for a few rows."""
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(NUM_DATA), rng.normal(size=NUM_DATA), np.zeros(NUM_DATA)], 1)
    x[:RARE, 2] = 1
    logits = x @ np.array([-0.5, 0.7, 1.0])
    y = rng.random(NUM_DATA) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def logistic(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def nested(y, num_rows, num_columns):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    columns = numpyro.plate("columns", y.shape[1], subsample_size=num_columns, dim=-1)
    with numpyro.plate("rows", y.shape[0], subsample_size=num_rows, dim=-2) as rows:
        with columns as index:
            obs = y[rows[:, None], index]
            numpyro.sample("y", dist.Normal(mu, 1), obs=obs)


def grid_posterior():
    """Means and standard deviations by quadrature on a grid."""
    x, y = (np.asarray(a, float) for a in make_data())
    axes = [np.linspace(*ends, 61) for ends in ((-0.8, -0.2), (0.4, 1.0), (-2, 4))]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    log_prob = -0.5 * (grid**2).sum(1)
    for part in np.array_split(np.arange(NUM_DATA), 20):
        logits = grid @ x[part].T
        log_prob += (logits * y[part] - np.logaddexp(0, logits)).sum(1)
    weight = np.exp(log_prob - log_prob.max())
    weight /= weight.sum()
    mean = weight @ grid
    return mean, np.sqrt(weight @ (grid - mean) ** 2)


def test_table_holds_every_row_and_its_probability():
    spreads = jnp.asarray([0.0, 1.0, 0.0, 8.0, jnp.nan, 0.3, 1e-9])
    importance = make_importance(spreads)
    counts = np.bincount(importance.table, minlength=7)
    assert importance.table.shape == (14,) and counts.min() == 1
    assert counts.argmax() == 3
    # Weighed, each row counts as often as any other.
    np.testing.assert_allclose(counts * importance.weights, 2, rtol=1e-6)
    equal = make_importance(jnp.zeros(7))
    np.testing.assert_array_equal(np.bincount(equal.table), 2)
    np.testing.assert_allclose(equal.weights, 1)


def test_weighted_batches_estimate_the_potential_of_all_data():
    """The mean over all batches of one entry of the table is exact."""
    x, y = make_data()
    x, y = x[:50], y[:50]
    model = SubsampledModel(logistic, (x, y, 1))
    spreads = jnp.abs(random.normal(random.key(0), (50,)))
    importance = {"data": make_importance(spreads)}
    beta = jnp.asarray([0.3, -0.2, 0.5])

    def energy(entry):
        return model.potential_fn(beta, weighted_rows(importance, {"data": entry}))

    mean = jnp.mean(jax.vmap(energy)(jnp.arange(100)[:, None]))
    np.testing.assert_allclose(mean, model.full_potential_fn(beta), rtol=1e-5)


def test_weighted_batches_of_nested_plates():
    y = random.normal(random.key(1), (6, 5)) + 2
    model = SubsampledModel(nested, (y, 1, 1))
    importance = {
        "rows": make_importance(jnp.arange(6.0)),
        "columns": make_importance(jnp.arange(5.0)),
    }
    mu = jnp.asarray([0.7])

    def energy(row, column):
        entries = {"rows": row[None], "columns": column[None]}
        return model.potential_fn(mu, weighted_rows(importance, entries))

    pairs = jnp.meshgrid(jnp.arange(12), jnp.arange(10))
    mean = jnp.mean(jax.vmap(energy)(*(a.ravel() for a in pairs)))
    np.testing.assert_allclose(mean, model.full_potential_fn(mu), rtol=1e-5)


@pytest.mark.parametrize("order", [None, 1, 2])
@pytest.mark.parametrize("unequal", [False, True])
def test_noise_is_that_of_the_rate_over_batches(order, unequal):
    x, y = make_data()
    model = SubsampledModel(logistic, (x, y, 20))
    scale = Scale(jnp.asarray([-0.5, 0.7, 1.0]), jnp.asarray([0.05, 0.05, 0.5]))
    cv = None
    if order is not None:
        cv = jax.jit(lambda c: control_variate(model, c, order))(scale.center)
    batching = "importance" if unequal else "with_replacement"

    @jax.jit
    def planned():
        plan = plan_batches(model, scale, cv, (order or 0,), batching)
        return plan, row_spreads(model, "data", scale, [cv], chunk_size=300)

    plan, spreads = planned()
    importance = plan.importance
    if not unequal:
        ones = jnp.ones(NUM_DATA)
        importance = {"data": Importance(jnp.arange(2 * NUM_DATA) // 2, ones)}
    corners = np.random.default_rng(0).choice([-1.0, 1.0], (4, 2, 3))
    plates = weighted_plates(model.plates)
    num = num_words(plates, "with_replacement")

    @jax.jit
    @jax.vmap
    def rates(key):
        entries = draw_batch(
            random.bits(key, (num,), jnp.uint32), plates, "with_replacement"
        )
        batch = weighted_rows(importance, entries)
        return jnp.stack(
            [
                scale.gradient(gradient(model, scale.position(z), batch, cv)) @ v
                for z, v in jnp.asarray(corners, jnp.float32)
            ]
        )

    found = jnp.sqrt(jnp.mean(jnp.var(rates(random.split(random.key(0), 30_000)), 0)))
    np.testing.assert_allclose(plan.noise, found, rtol=0.07)
    whole = row_spreads(model, "data", scale, [cv])
    np.testing.assert_allclose(spreads[0], whole[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(spreads[1], whole[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "kernel, batching",
    [
        (Boomerang, "auto"),
        pytest.param(BPS, "importance", marks=pytest.mark.slow),
        pytest.param(ZigZag, "importance", marks=pytest.mark.slow),
    ],
)
def test_rare_categories(kernel, batching):
    """Few rows tell of one coefficient; batches of 50 seldom have one of them."""
    data = (*make_data(), 50)
    mcmc = MCMC(
        kernel(logistic, batching=batching, control_variates=1),
        num_warmup=500,
        num_samples=1500,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data, extra_fields=("num_grad",))
    assert mcmc.last_state.adapt_state.importance is not None
    mean, sd = grid_posterior()
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    mcse = sd / np.sqrt(effective_sample_size(x))
    assert np.all(np.abs(x.mean((0, 1)) - mean) < 5 * mcse + 0.03 * sd)
    square = (x - mean) ** 2
    ratio = np.sqrt(square.mean((0, 1))) / sd
    error = ratio * np.sqrt(0.5 / effective_sample_size(square))
    assert np.all(np.abs(ratio - 1) < 0.03 + 4 * error)


def test_rows_alike_are_drawn_alike():
    y = jnp.ones(100)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 100, subsample_size=10):
            numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))

    state = BPS(model).init(random.key(0), 100, model_args=(y,))
    assert state.adapt_state.importance is None


@pytest.mark.parametrize("shuffled", [True, False])
def test_consecutive_rows_if_they_are_in_random_order(shuffled):
    """Posterior of a mean from 2^16 rows, in the order they came or sorted."""
    num_data, subsample_size = 2**16, 64
    y = np.random.default_rng(0).normal(size=num_data)
    y = jnp.asarray(y if shuffled else np.sort(y), jnp.float32)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", num_data, subsample_size=subsample_size):
            obs = numpyro.subsample(y, 0)
            numpyro.sample("y", dist.StudentT(5.0, mu, 1), obs=obs)

    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(Boomerang(model), num_warmup=300, num_samples=500, **options)
    mcmc.run(random.key(0), y)
    importance = mcmc.last_state.adapt_state.importance
    assert importance == RUNS if shuffled else importance != RUNS
    grid = np.linspace(-0.05, 0.05, 401)
    log_prob = -0.5 * grid**2
    for part in np.array_split(np.asarray(y, float), 16):
        log_prob -= 3 * np.log1p((part - grid[:, None]) ** 2 / 5).sum(1)
    weight = np.exp(log_prob - log_prob.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = np.sqrt(weight @ (grid - mean) ** 2)
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    assert abs(x.mean() - mean) < 4 * sd / np.sqrt(effective_sample_size(x))
    square = (x - mean) ** 2
    ratio = np.sqrt(square.mean()) / sd
    assert abs(ratio - 1) < 0.02 + 4 * np.sqrt(0.5 / effective_sample_size(square))


def test_noise_of_consecutive_rows():
    """Against all of the runs that there are."""
    x, y = make_data()
    x, y = x[: NUM_DATA // 20 * 20], y[: NUM_DATA // 20 * 20]
    model = SubsampledModel(logistic, (x, y, 20))
    scale = Scale(jnp.asarray([-0.5, 0.7, 1.0]), jnp.asarray([0.05, 0.05, 0.5]))
    plan = plan_batches(model, scale, None, (0,), "contiguous")
    corners = np.random.default_rng(0).choice([-1.0, 1.0], (4, 2, 3))

    @jax.jit
    @jax.vmap
    def rates(start):
        batch = {"data": start + jnp.arange(20)}
        return jnp.stack(
            [
                scale.gradient(gradient(model, scale.position(z), batch)) @ v
                for z, v in jnp.asarray(corners, jnp.float32)
            ]
        )

    found = jnp.sqrt(jnp.mean(jnp.var(rates(jnp.arange(0, len(y), 20)), 0)))
    np.testing.assert_allclose(plan.noise, found, rtol=0.01)


def test_steps_of_a_large_model_are_for_typical_places():
    """Envelopes begin with the noise near the centre, but steps are never refined."""
    dim = 1100
    x = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)

    def model(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
        with numpyro.plate("data", 200, subsample_size=20):
            x = numpyro.subsample(x, event_dim=0)
            numpyro.factor("rows", -0.01 * x * jnp.sum(w**2))  # noise grows with w

    subsampled = SubsampledModel(model, (x,))
    scale = Scale(jnp.zeros(dim), jnp.ones(dim))
    plan = jax.jit(
        lambda: plan_batches(subsampled, scale, None, (0,), "without_replacement")
    )()
    np.testing.assert_allclose(plan.noise, 10 * plan.near, rtol=1e-4)
    kernel = SGLD(model, reference=scale, control_variates=None)
    state = kernel.init(random.key(0), 10, None, (x,), {})
    found = state.adapt_state
    np.testing.assert_allclose(found.gradient_variance, plan.noise**2 / dim, rtol=1e-4)
    np.testing.assert_allclose(
        found.step_size, 0.1 / (1 + found.gradient_variance), rtol=1e-5
    )
