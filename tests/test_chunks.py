# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Runs in chunks are the runs of ``MCMC``, and can be taken up again."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import BPS, SGLD, run_chunks

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CALLS = [0]


def model(x, y):
    CALLS[0] += 1
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(x), subsample_size=20):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


X = random.normal(random.key(1), (100, 2))
Y = X @ jnp.array([1.0, -1.0]) + 0.3 * random.normal(random.key(2), (100,))


def joined(chunks):
    return jax.tree.map(
        lambda *a: np.concatenate(a, axis=1),
        *[(c.samples, c.extra_fields) for c in chunks],
    )


def test_chunks_are_the_run():
    num_chains = 2
    mcmc = MCMC(
        BPS(model),
        num_warmup=30,
        num_samples=23,
        thinning=2,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("num_grad", "adapt_state.draw_time")
    CALLS[0] = 0
    chunks, calls = [], []
    for chunk in run_chunks(
        mcmc, random.key(0), X, Y, chunk=4, extra_fields=fields, yield_warmup=True
    ):
        chunks.append(chunk)
        calls.append(CALLS[0])
    assert [c.step for c in chunks] == [8, 16, 24, 31, 39, 47, 53]
    assert [c.samples["w"].shape[1] for c in chunks] == [0, 0, 0, 0, 4, 4, 3]
    assert calls[0] == calls[-1]  # compiled once
    samples, extra = joined(chunks)
    mcmc.run(random.key(0), X, Y, extra_fields=("num_grad",))
    jax.tree.map(assert_array_equal, samples, mcmc.get_samples(group_by_chain=True))
    expected = mcmc.get_extra_fields(group_by_chain=True)
    assert_array_equal(extra["num_grad"], expected["num_grad"])
    assert extra["adapt_state.draw_time"].shape == (num_chains, 11)

    # Going on from a state is the same as not stopping, from warm-up as well.
    for k in (1, 4):
        rest = run_chunks(
            mcmc,
            random.key(5),  # not used
            X,
            Y,
            chunk=4,
            extra_fields=fields,
            state=chunks[k].state,
            step=chunks[k].step,
        )
        rest = list(rest)
        assert len(rest) == {1: 3, 4: 2}[k]
        again, _ = joined(rest)
        for name, value in again.items():
            assert_array_equal(value, samples[name][:, -value.shape[1] :])
        keys = [random.key_data(c[-1].state.rng_key) for c in (rest, chunks)]
        assert_array_equal(*keys)


def test_transform_keeps_less():
    def first(sites):
        return {"first": sites["w"][0]}

    kernel = SGLD(model, step_size=1e-4, num_steps=1, find_mode=False)
    settings = dict(num_warmup=3, num_samples=5, chunk=2)
    whole, _ = joined(run_chunks(kernel, random.key(0), X, Y, **settings))
    part, _ = joined(
        run_chunks(kernel, random.key(0), X, Y, transform=first, **settings)
    )
    assert set(part) == {"first"}
    assert_array_equal(part["first"], whole["w"][..., 0])
    mcmc = MCMC(kernel, num_warmup=3, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), X, Y)
    assert_array_equal(whole["w"], mcmc.get_samples(group_by_chain=True)["w"])
    # A state that is sent replaces the generator's own.
    runs = run_chunks(kernel, random.key(0), X, Y, **settings)
    state = next(runs).state
    moved = state._replace(rng_key=random.key(7))
    assert not np.array_equal(runs.send(moved).samples["w"], whole["w"][:, 2:4])


def test_kernels_of_numpyro():
    def simple():
        numpyro.sample("x", dist.Normal(3, 2))

    kernel = NUTS(simple)
    settings = dict(num_warmup=20, num_samples=10, chunk=5)
    chunks = list(run_chunks(kernel, random.key(2), **settings))
    mcmc = MCMC(kernel, num_warmup=20, num_samples=10, progress_bar=False)
    mcmc.run(random.key(2))
    expected = mcmc.get_samples(group_by_chain=True)["x"]
    # Another program than a run's, hence another rounding.
    assert_allclose(joined(chunks)[0]["x"], expected, rtol=1e-3)
    # A new object is not ready for a state.
    rest = run_chunks(
        NUTS(simple), random.key(2), state=chunks[0].state, step=25, **settings
    )
    assert_array_equal(next(rest).samples["x"], chunks[1].samples["x"])


@pytest.mark.parametrize(
    "change, error",
    [
        ({"num_samples": None}, "`num_samples` is missing"),
        ({"chunk": 0}, "`chunk` must be a positive integer"),
        ({"thinning": 11}, "`thinning=11` keeps none"),
        ({"step": 3}, "`state` and `step` belong together"),
        ({"num_warmup": -1}, "`num_warmup` must be"),
    ],
)
def test_errors(change, error):
    settings = {"num_warmup": 3, "num_samples": 10} | change
    with pytest.raises(ValueError, match=error):
        run_chunks(BPS(model), random.key(0), X, Y, **settings)


def test_sampler_is_needed():
    with pytest.raises(TypeError, match="`sampler` must be"):
        run_chunks(model, random.key(0), num_samples=2)
