# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Haiku networks in NumPyro models, and other libraries' networks with our kernels."""

import sys

import equinox as eqx
import numpy as np
import pytest

from flax import linen, nnx
import haiku as hk
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro
from numpyro.contrib.module import (
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from numpyro_pdmp import (
    Boomerang,
    haiku_init,
    haiku_module,
    random_haiku_module,
    to_inference_data,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

mlp = hk.transform(lambda x: hk.nets.MLP([4, 1], activation=jnp.tanh)(x))
X = random.normal(random.key(0), (60, 2))
Y = jnp.sin(X[:, 0])
NAMES = [f"net.mlp.linear_{i}.{k}" for i in (0, 1) for k in ("b", "w")]


def make_model(network, **options):
    def model(x, y=None, subsample_size=None):
        prior = options.get("prior", dist.Normal())
        rest = {k: v for k, v in options.items() if k != "prior"}
        net = random_haiku_module("net", network, prior, input_shape=(1, 2), **rest)
        with numpyro.plate("data", len(x), subsample_size=subsample_size):
            x = numpyro.subsample(x, event_dim=1)
            y = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)

    return model


model = make_model(mlp)


def sites_of(model, *args):
    return trace(seed(model, random.key(0))).get_trace(*args)


def latent(model):
    sites = sites_of(model, X)
    return [k for k in sites if k.startswith("net") and sites[k]["type"] == "sample"]


def test_network_is_haikus_own():
    sites = sites_of(model, X)
    params = {}
    for name in NAMES:
        module, entry = name.removeprefix("net.mlp.").split(".")
        params.setdefault(f"mlp/~/{module}", {})[entry] = sites[name]["value"]
    expected = mlp.apply(params, None, X)[:, 0]
    np.testing.assert_array_equal(sites["y"]["fn"].loc, expected)


def test_names():
    assert latent(model) == NAMES
    old = [f"net/mlp/~/linear_{i}.{k}" for i in (0, 1) for k in ("b", "w")]
    assert latent(make_model(mlp, scope_divider="/")) == old
    # The rng argument may be gone already.
    assert latent(make_model(hk.without_apply_rng(mlp))) == NAMES


class Twice(hk.Module):
    """A module with parameters ``twice/~/linear`` and ``twice/linear``."""

    def __init__(self):
        super().__init__()
        self.first = hk.Linear(1, name="linear")

    def __call__(self, x):
        return self.first(x) + hk.Linear(1, name="linear")(x)


def test_names_must_differ():
    twice = hk.transform(lambda x: Twice()(x))
    with pytest.raises(ValueError, match="two parameters for the site 'net.twice.lin"):
        latent(make_model(twice))
    assert len(latent(make_model(twice, scope_divider="/"))) == 4


@pytest.mark.parametrize("key", ["mlp/~/linear_0.w", "mlp.linear_0.w"])
def test_priors(key):
    assert latent(make_model(mlp, prior={key: dist.Normal()})) == [NAMES[1]]
    sites = sites_of(make_model(mlp, prior={key: dist.Normal()}), X)
    rest = sites["net$params"]["value"]
    assert {k: set(v) for k, v in rest.items()} == {
        "mlp/~/linear_0": {"b"},
        "mlp/~/linear_1": {"b", "w"},
    }

    seen = {}

    def prior(path, shape):
        seen[path] = shape
        return dist.Normal(0, 3.0 if path == "mlp/~/linear_0.w" else 1.0)

    sites = sites_of(make_model(mlp, prior=prior), X)
    assert seen["mlp/~/linear_0.w"] == (2, 4) and len(seen) == 4
    assert jnp.all(sites[NAMES[1]]["fn"].variance == 9)
    assert sites[NAMES[1]]["fn"].event_shape == (2, 4)


def test_bad_input(monkeypatch):
    with pytest.raises(ValueError, match=r"no parameters \['linear.w'\]"):
        latent(make_model(mlp, prior={"linear.w": dist.Normal()}))
    with pytest.raises(TypeError, match="`prior` must be a distribution, a dict"):
        latent(make_model(mlp, prior=1.0))
    with pytest.raises(TypeError, match="must be a distribution, got 2"):
        latent(make_model(mlp, prior=lambda path, shape: 2))
    with pytest.raises(TypeError, match="result of `hk.transform`"):
        latent(make_model(lambda x: x))
    with pytest.raises(ValueError, match="`input_shape` is missing"):
        seed(random_haiku_module, 0)("net", mlp, dist.Normal())
    with pytest.raises(ValueError, match="has no parameters"):
        latent(make_model(hk.transform(lambda x: x)))
    monkeypatch.setitem(sys.modules, "haiku", None)
    with pytest.raises(ImportError, match=r"numpyro-pdmp\[bnn\]"):
        latent(model)


def test_state_and_dropout_are_warned_of():
    def normalised(x):
        x = hk.Linear(3)(x)
        return hk.Linear(1)(hk.BatchNorm(True, True, 0.9)(x, is_training=True))

    with pytest.warns(UserWarning, match="FilterResponseNorm"):
        sites = sites_of(make_model(hk.transform_with_state(normalised)), X)
    assert sites["y"]["value"].shape == (60,)
    state = sites["net$state"]["value"]["state"]
    assert int(state["batch_norm/~/mean_ema"]["counter"]) == 1

    dropped = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, mlp_fn(x)))

    def model(x):
        prior = dist.Normal()
        net = random_haiku_module("net", dropped, prior, x, apply_rng=True)
        return net(numpyro.prng_key(), x)

    with pytest.warns(UserWarning, match="dropout"):
        out = seed(model, random.key(0))(X)
    assert 10 < jnp.sum(out == 0) < 50


def test_state_of_other_libraries_is_warned_of():
    """NumPyro's own functions are silent about it; our kernels are not."""

    class Normalised(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
            return linen.Dense(1)(x)

    def model(x, y):
        net = random_flax_module(
            "net",
            Normalised(),
            dist.Normal(),
            input_shape=(1, 2),
            mutable=["batch_stats"],
        )
        numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.5).to_event(1), obs=y)

    with pytest.warns(UserWarning, match="LayerNorm or.*FilterResponseNorm"):
        Boomerang(model).init(random.key(0), 0, None, (X, Y))


def mlp_fn(x):
    return hk.nets.MLP([4, 1])(x)


def test_haiku_module_is_optimised():
    def model(x, y):
        net = haiku_module("net", mlp, input_shape=(1, 2))
        numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.1).to_event(1), obs=y)

    svi = SVI(model, lambda x, y: None, Adam(0.03), Trace_ELBO())
    result = svi.run(random.key(0), 500, X, Y, progress_bar=False)
    assert result.losses[-1] < 0.05 * result.losses[0]
    assert set(result.params["net$params"]) == {"mlp/~/linear_0", "mlp/~/linear_1"}


def test_numpyro_inference():
    start = haiku_init("net", mlp, random.key(3), input_shape=(1, 2))
    assert sorted(start) == NAMES
    mcmc = MCMC(
        NUTS(model, max_tree_depth=5),
        num_warmup=100,
        num_samples=50,
        progress_bar=False,
    )
    mcmc.run(random.key(1), X, Y, init_params=start)
    draws = Predictive(model, mcmc.get_samples())(random.key(2), X)["y"]
    assert draws.shape == (50, 60)
    assert jnp.sqrt(jnp.mean((draws.mean(0) - Y) ** 2)) < 0.15
    assert "net.mlp.linear_0.w" in to_inference_data(mcmc)["posterior"]

    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam(0.02), Trace_ELBO())
    fit = svi.run(random.key(0), 1000, X, Y, progress_bar=False)
    draws = Predictive(model, guide=guide, params=fit.params, num_samples=50)(
        random.key(2), X
    )["y"]
    assert jnp.sqrt(jnp.mean((draws.mean(0) - Y) ** 2)) < 0.25


def linear_networks():
    """One linear network of every library, as functions of a batch."""
    prior = dist.Normal()
    flax = random_flax_module("flax", linen.Dense(1), prior, input_shape=(1, 2))
    linear = nnx.eval_shape(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    of_nnx = random_nnx_module("nnx", linear, prior, scope_divider=".")
    linear = eqx.nn.Linear(2, 1, key=random.key(0))
    of_eqx = random_eqx_module("eqx", linear, prior, scope_divider=".")
    network = hk.transform(lambda x: hk.Linear(1)(x))
    haiku = random_haiku_module("haiku", network, prior, input_shape=(1, 2))
    return {"flax": flax, "nnx": of_nnx, "eqx": jax.vmap(of_eqx), "haiku": haiku}


def linear_model(x, y, subsample_size):
    networks = linear_networks()
    with numpyro.plate("data", len(x), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        for name, net in networks.items():
            numpyro.sample(f"y_{name}", dist.Normal(net(x)[..., 0], 0.5), obs=y)


@pytest.mark.slow  # as `test_pipeline_on_digits`
def test_subsampled_boomerang():
    """Linear networks, whose posterior is known: the same for all libraries."""
    mcmc = MCMC(
        Boomerang(linear_model),
        num_warmup=150,
        num_samples=250,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), X, Y, 20)
    samples = mcmc.get_samples()
    design = jnp.concatenate([jnp.ones((60, 1)), X], axis=1)
    cov = jnp.linalg.inv(design.T @ design / 0.25 + jnp.eye(3))
    mean, sd = cov @ design.T @ Y / 0.25, jnp.sqrt(jnp.diagonal(cov))
    for name in ("flax", "nnx", "eqx", "haiku"):
        # In all of them the offset comes before the weights.
        own = {k: v for k, v in samples.items() if k.startswith(name)}
        flat = jax.vmap(lambda z: ravel_pytree(z)[0])(own)
        # About 300 effective draws: 5 standard errors.
        assert jnp.all(jnp.abs(flat.mean(0) - mean) < 5 * sd / 300**0.5)
        assert jnp.all(jnp.abs(flat.std(0) / sd - 1) < 5 / 600**0.5)
