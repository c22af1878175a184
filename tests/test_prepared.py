# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What is traced while the start is compiled."""

import copy
from functools import partial
import pickle

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import Boomerang, run_chunks
from numpyro_pdmp.prepared import Prepared


def model(y):
    a = numpyro.sample("a", dist.Normal(0, 100))
    numpyro.sample("y", dist.Normal(a, 1), obs=y)


@pytest.fixture
def traced(monkeypatch):
    """Grows by one whenever a draw is traced."""
    calls, draw = [], Boomerang._draw
    monkeypatch.setattr(
        Boomerang,
        "_draw",
        lambda self, *args, **kwargs: calls.append(0) or draw(self, *args, **kwargs),
    )
    return calls


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_draw_is_traced_once_a_run(traced, num_chains):
    mcmc = MCMC(
        Boomerang(model),
        num_warmup=100,
        num_samples=500,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    for i, mean in enumerate((0.0, 5.0)):  # with the data of this run
        mcmc.run(random.key(0), jnp.full(20, mean))
        assert len(traced) == i + 1
        draws = np.asarray(mcmc.get_samples()["a"])
        assert abs(draws.mean() - mean) < 0.2  # a posterior sd of 0.22


def test_chunks_are_of_traced_data(traced):
    chunks = run_chunks(
        Boomerang(model),
        random.key(0),
        jnp.zeros(20),
        num_warmup=10,
        num_samples=10,
        progress_bar=False,
    )
    assert len(list(chunks)) > 0
    num_programs = 2  # of warm-up and of draws
    assert len(traced) <= num_programs


def test_a_wrapped_model_is_another():
    def shifted(model):
        def wrapped(y):
            model(y)
            numpyro.factor("shift", 1e3)

        return wrapped

    kernel, data = Boomerang(model), (jnp.zeros(20),)
    state = kernel.init(random.key(0), 10, model_args=data)
    draw = partial(kernel.wrap_model(shifted).sample, model_args=data, model_kwargs={})
    wrapped = jax.make_jaxpr(draw)(state)
    assert "1000.0" in str(wrapped)


def test_found_again_by_the_same_objects_once():
    prepared, data = Prepared(), ({"x": jnp.zeros(2)}, np.ones(3))
    shapes = jax.ShapeDtypeStruct((2,), jnp.float32)

    def put():
        prepared.put(lambda x: x + data[0]["x"] + 1, shapes, data)

    put()
    assert prepared.take(({"x": jnp.zeros(2)}, data[1])) is None  # equal is not enough
    put()
    fn = prepared.take(data)
    np.testing.assert_array_equal(fn(jnp.zeros(2)), 1)
    assert prepared.take(data) is None
    put()
    assert prepared.take(data, data) is None


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_hold_nothing(make):
    prepared = Prepared()
    prepared.put(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32), 1)
    assert make(prepared).take(1) is None
    assert prepared.take(1) is not None
