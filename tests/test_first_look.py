# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What is looked at before anything runs."""

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro_pdmp.subsample import SubsampledModel

X = jnp.arange(6.0).reshape(3, 2)
RUNS = []


def watched(value):
    """Note whether the model computes this."""
    RUNS.append(not isinstance(value, jax.core.Tracer))
    return value


def regression(x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Normal(watched(x @ beta), 1), obs=jnp.zeros(3))


def by_value(x):
    if watched(x.sum()) > 0:  # which shapes do not tell
        regression(x)


def with_parameter(x):
    start = numpyro.param("start", lambda key: random.normal(key, (2,)))
    beta = numpyro.sample("beta", dist.Normal(start, 1))
    numpyro.sample("y", dist.Normal(watched(x @ beta), 1), obs=jnp.zeros(3))


def with_array_bounds(x):
    bounds = jnp.zeros(2), jnp.ones(2)
    beta = numpyro.sample("beta", dist.Uniform(*bounds))
    numpyro.sample("y", dist.Normal(watched(x @ beta), 1), obs=jnp.zeros(3))


@pytest.mark.parametrize(
    ("model", "computes"),
    [
        (regression, False),
        (by_value, True),
        (with_parameter, True),
        (with_array_bounds, True),
    ],
)
def test_computed_only_where_needed(model, computes):
    RUNS.clear()
    found = SubsampledModel(model, (X,))
    assert any(RUNS) == computes
    assert found.sites == ["beta"]
    assert found.shapes["beta"].shape == (2,)
    # Nothing of the look is left in what is used later.
    energy = found.potential_fn({"beta": jnp.full(2, 0.3)}, {})
    assert np.isfinite(energy)
    assert found.constrain_fn({"beta": jnp.zeros(2)})["beta"].shape == (2,)


def test_wrong_parameters_are_noticed():
    def model(scale):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, scale), obs=jnp.zeros(2))

    with pytest.raises(ValueError, match="Normal distribution got invalid scale"):
        SubsampledModel(model, (jnp.array([1.0, -1.0]),))
