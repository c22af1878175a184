# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Data that stay on the host: the same draws as with data on the device."""

from functools import cache
import threading

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
    ALL_STATS,
    BPS,
    Boomerang,
    HostRows,
    Scale,
    ZigZag,
    full_potential,
    to_inference_data,
)
from numpyro_pdmp.control_variates import control_variate, gradient, value
from numpyro_pdmp.subsample import SubsampledModel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SIZE, DIM, NUM = 1003, 3, 50
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZE, DIM))
Y = (RNG.random(SIZE) < 1 / (1 + np.exp(-X @ np.linspace(-1, 1, DIM)))).astype(float)


class Fetch:
    """Rows of the data, and a record of the calls."""

    def __init__(self, fails_after=None):
        self.calls, self.fails_after = [], fails_after

    def __call__(self, indices):
        assert isinstance(indices, np.ndarray)
        self.calls.append((len(indices), threading.current_thread().name))
        if self.fails_after is not None and len(self.calls) > self.fails_after:
            raise OSError("disk on fire")
        return {"x": X[indices], "y": Y[indices]}


def on_host(rows):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("data", SIZE, subsample_size=NUM) as indices:
        row = rows(indices)
        numpyro.sample("y", dist.Bernoulli(logits=row["x"] @ beta), obs=row["y"])


def on_device(x, y):
    return on_host(lambda indices: {"x": x[indices], "y": y[indices]})


def run(kernel, *args, num_chains=2, num_warmup=40, num_samples=40, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, **kwargs)
    return mcmc


# Rows in programs


def test_rows_compiled_mapped_and_concrete():
    fetch = Fetch()
    rows = HostRows(fetch)
    indices = RNG.integers(0, SIZE, (4, 7)).astype(np.int32)
    for result in (rows(indices[0]), rows(jnp.asarray(indices[0]))):
        assert isinstance(result["x"], jax.Array)
        np.testing.assert_array_equal(result["x"], X[indices[0]].astype("f4"))
    result = jax.jit(jax.vmap(rows))(indices)
    assert result["x"].dtype == jnp.float32
    np.testing.assert_array_equal(result["x"], X[indices].astype("f4"))
    np.testing.assert_array_equal(result["y"], Y[indices])
    # One row for the shapes, the first seven, and the others in one call.
    assert [num for num, _ in fetch.calls] == [1, 7, 21]
    nested = jax.jit(jax.vmap(jax.vmap(rows)))(indices[:, None])
    np.testing.assert_array_equal(nested["x"], X[indices][:, None].astype("f4"))


def test_double_precision(x64):
    rows = HostRows(Fetch())
    result = jax.jit(rows)(jnp.arange(3))
    assert result["x"].dtype == jnp.float64
    np.testing.assert_array_equal(result["x"], X[:3])


def test_memory_that_is_used_again():
    buffer = np.empty((5, DIM), np.float32)

    def fetch(indices):
        buffer[: len(indices)] = X[indices]
        return buffer[: len(indices)]

    rows = HostRows(fetch)
    first, second = np.arange(5), np.arange(5, 10)
    for _ in range(2):
        for indices in (first, second):
            result = jax.jit(rows)(indices)
            np.testing.assert_array_equal(result, X[indices].astype("f4"))


def test_derivatives_and_passes_over_all_data():
    """All orders and modes, from a few rows at a time, each fetched once a pass."""
    fetch, chunk_size = Fetch(), 100
    host = SubsampledModel(on_host, (HostRows(fetch),))
    device = SubsampledModel(on_device, (jnp.asarray(X), jnp.asarray(Y)))
    x, center = jnp.asarray([0.5, 0.1, -0.2]), jnp.asarray([0.3, 0.0, 0.2])
    batch = {"data": jnp.arange(0, SIZE, 20, dtype=jnp.int32)}
    del fetch.calls[:]

    def everything(model):
        def fn(x, batch):
            cv = control_variate(model, center, 2, chunk_size)
            grads = [gradient(model, x, batch, cv, g) for g in (jax.grad, jax.jacfwd)]
            slope = jax.linearize(lambda x: gradient(model, x, batch, cv), x)[1](x)
            return cv, grads, slope, value(model, x, batch, cv)

        return jax.jit(fn)(x, batch)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
        everything(host),
        everything(device),
    )
    assert max(num for num, _ in fetch.calls) <= chunk_size
    passes = 2  # one of the gradient and one of the curvature
    num_rows = sum(num for num, _ in fetch.calls)
    assert num_rows <= passes * SIZE + len(batch["data"])


# Kernels


def num_ahead(fetch):
    return sum(name.startswith("HostRows") for _, name in fetch.calls)


REFERENCE = Scale(jnp.linspace(-1, 1, DIM), jnp.full(DIM, 0.08))
# Quick to compile.
SIMPLE = {
    "reference": REFERENCE,
    "batching": "contiguous",
    "control_variates": None,
    "potential_energy": False,
}


@pytest.mark.parametrize(
    "kernel, options",
    [
        (Boomerang, {}),
        (ZigZag, {**SIMPLE, "batch": "euler", "control_variates": 1}),
        (BPS, {**SIMPLE, "batch": "event"}),
    ],
)
@pytest.mark.filterwarnings("ignore:`batch='event'`")
def test_draws_are_those_of_data_on_the_device(kernel, options):
    fetch = Fetch()
    rows = HostRows(fetch, prefetch=2)
    host = run(kernel(on_host, **options), rows).get_samples()["beta"]
    device = run(kernel(on_device, **options), jnp.asarray(X), jnp.asarray(Y))
    device = device.get_samples(group_by_chain=True)["beta"]
    host = np.reshape(host, device.shape)
    # Compiled otherwise, sums may be rounded otherwise, and paths part in the end.
    np.testing.assert_allclose(host[:, :5], device[:, :5], rtol=1e-3, atol=1e-3)
    if options.get("batch") == "event":
        assert num_ahead(fetch) == 0
    else:  # all but the first batches and those of the potential energy
        assert num_ahead(fetch) > 0.8 * (len(fetch.calls) - 80)


EPOCH = BPS(on_host, reference=REFERENCE, batching="epoch", control_variates=1)


@cache
def ahead():
    fetch = Fetch()
    return fetch, run(EPOCH, HostRows(fetch, prefetch=3), extra_fields=ALL_STATS)


def test_draws_do_not_depend_on_prefetching():
    plain, (fetch, mcmc) = Fetch(), ahead()
    draws = run(EPOCH, HostRows(plain)).get_samples()["beta"]
    np.testing.assert_array_equal(draws, mcmc.get_samples()["beta"])
    num_grad = mcmc.last_state.totals.num_grad.max()
    assert num_ahead(fetch) > num_grad and num_ahead(plain) == 0


def test_posterior():
    """Of a conjugate mean, as in the tests of subsampled kernels."""
    data = np.random.default_rng(0).normal(1, 1, 100)
    rows = HostRows(lambda indices: data[indices], prefetch=1)
    precision = len(data) + 0.01
    mean, sd = data.sum() / precision, precision**-0.5

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("data", len(data), subsample_size=50) as indices:
            numpyro.sample("y", dist.Normal(mu, 1), obs=rows(indices))

    kernel = Boomerang(
        model,
        reference=Scale(jnp.asarray([mean]), jnp.asarray([sd])),
        control_variates=None,  # which would leave no noise
        potential_energy=False,
    )
    mcmc = run(kernel, num_chains=8, num_warmup=200, num_samples=300)
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    square = (x - mean) ** 2
    ratio = square.mean() / sd**2
    error = ratio * np.sqrt(2 / effective_sample_size(square))
    assert abs(ratio - 1) < 0.04 + 3 * error
    assert abs(x.mean() - mean) < 5 * sd / np.sqrt(effective_sample_size(x))


def test_single_chain_with_two_plates():
    """Rows of two functions in one plate, and of one in another."""
    fetches = [Fetch() for _ in range(3)]
    first, second, third = map(HostRows, fetches, (0, 1, 3))

    def model():
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("one", SIZE, subsample_size=NUM) as i:
            x, obs = first(i)["x"], second(i)["y"]
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=obs)
        with numpyro.plate("two", SIZE, subsample_size=NUM // 2) as i:
            numpyro.sample("z", dist.Normal(beta[0], 1), obs=third(i)["y"])

    mcmc = MCMC(BPS(model, **SIMPLE), num_warmup=30, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0))
    assert np.all(np.isfinite(mcmc.get_samples()["beta"]))
    assert [num_ahead(fetch) > 0 for fetch in fetches] == [False, True, True]


# Afterwards


def test_analysis_does_not_load_all_data():
    fetch, mcmc = ahead()
    del fetch.calls[:]
    with pytest.warns(UserWarning, match="`observed_data` is left out"):
        data = to_inference_data(mcmc)
    assert "observed_data" not in data
    assert data.posterior["beta"].shape == (2, 40, DIM)
    assert "num_grad" in data.sample_stats
    mcmc.print_summary()
    assert max(num for num, _ in fetch.calls) <= NUM
    with pytest.raises(ValueError, match="`log_likelihood=True` of a model with"):
        to_inference_data(mcmc, log_likelihood=True)
    few = {"beta": mcmc.get_samples()["beta"][:2]}
    np.testing.assert_allclose(
        full_potential(on_host, few, HostRows(fetch)),
        full_potential(on_device, few, jnp.asarray(X), jnp.asarray(Y)),
        rtol=1e-5,
    )


# Errors


def test_failing_fetch_raises():
    fetch = Fetch(fails_after=30)
    with pytest.raises(RuntimeError, match="`fetch` failed on .* disk on fire") as info:
        run(BPS(on_host, **SIMPLE), HostRows(fetch, prefetch=2))
    assert "Fetch" in str(info.value)  # the function


def test_error_does_not_stay():
    fetch = Fetch()
    rows = HostRows(fetch)
    rows(np.arange(2))
    fetch.fails_after = 0
    with pytest.raises(RuntimeError, match="OSError: disk on fire"):
        rows(np.arange(3))
    fetch.fails_after = None
    assert rows(np.arange(3))["y"].shape == (3,)


@pytest.mark.parametrize(
    "fetch, message",
    [
        (lambda i: X, r"shapes \[\(1003, 3\)\] for 1 indices; the first axis"),
        (lambda i: (), r"shapes \[\] for 1 indices"),
        (lambda i: X[i, len(i) :], r"shapes \[\(3, 0\)\] .* but rows .*\(2,\)"),
        (lambda i: X[i] if len(i) > 1 else X[i].astype(int), "Cannot cast"),
        (lambda i: X[i].astype(str), "array of type <U32, no numbers"),
        (lambda i: X[i + SIZE], "IndexError"),
    ],
)
def test_fetch_of_the_wrong_kind(fetch, message):
    with pytest.raises(RuntimeError, match="(?s)<lambda>.*`fetch` failed.*" + message):
        HostRows(fetch)(np.arange(3))


def test_bad_arguments():
    with pytest.raises(TypeError, match="`fetch` must be a function from row indices"):
        HostRows(X)
    with pytest.raises(ValueError, match="`prefetch` must be an integer .* got -1"):
        HostRows(Fetch(), prefetch=-1)
    rows = HostRows(Fetch())
    with pytest.raises(ValueError, match=r"integer `indices` of shape \(n,\), got"):
        rows(np.zeros((2, 2), int))
    with pytest.raises(ValueError, match="got float32"):
        rows(jnp.ones(2))
