# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Networks, models and presets of Bayesian neural networks."""

from functools import partial
from pathlib import Path
import re

import numpy as np
import pytest

import haiku as hk
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC
from numpyro.infer.util import log_density, log_likelihood
from numpyro_pdmp import (
    BPS,
    MAP,
    Boomerang,
    Scale,
    SigmaBPS,
    ZigZag,
    bnn,
    find_map,
    laplace_reference,
)
from numpyro_pdmp.convolutions import fast_in_loops
from numpyro_pdmp.importance import row_spreads, row_variance
from numpyro_pdmp.subsample import SubsampledModel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

DOCS = Path(__file__).parents[1] / "docs" / "haiku.md"


def test_table_of_networks():
    """Every network of the package is in the table of the docs, with its size."""
    rows = re.findall(
        r"\| `(\w+)\(\)` \|.*\| `\(([\d, ]+)\)` \| ([\d,]+) \|", DOCS.read_text()
    )
    networks = [n for n in bnn.__all__ if re.search("mlp|lenet|resnet|cnn", n)]
    assert sorted(name for name, *_ in rows) == sorted(networks)
    for name, shape, num in rows:
        shape = (1, *(int(n) for n in shape.split(",") if n.strip()))
        assert bnn.num_params(getattr(bnn, name)(), shape) == int(num.replace(",", ""))


def test_networks_refuse_other_shapes():
    images = jnp.zeros((3, 28, 28))
    key = random.key(0)
    with pytest.raises(ValueError, match=r"`x\[..., None\]`"):
        bnn.lenet5().init(key, images)
    with pytest.raises(ValueError, match=r"reshape\(-1, 28, 28, 1\)"):
        bnn.resnet20().init(key, images.reshape(3, -1))
    with pytest.raises(ValueError, match="at least 16"):
        bnn.lenet5().init(key, jnp.zeros((3, 8, 8, 1)))
    with pytest.raises(ValueError, match=r"`x\[:, None\]`"):
        bnn.regression_mlp().init(key, jnp.zeros(3))
    with pytest.raises(ValueError, match="`num_classes` must be a positive integer"):
        bnn.lenet5(0)


def test_max_pool():
    x = random.normal(random.key(0), (2, 5, 6, 3))
    y = bnn.networks.max_pool(x)
    assert y.shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(y[1, 1, 2], x[1, 2:4, 4:6].max((0, 1)))


def test_filter_response_norm():
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    layer = hk.without_apply_rng(hk.transform(lambda x: bnn.FilterResponseNorm()(x)))
    beta, tau = np.array([0.5, 0.0, 0.0]), np.array([-9.0, -9.0, 0.2])
    gamma = np.array([2.0, 1.0, 1.0])
    params = {"frn": {"beta": beta, "gamma": gamma, "tau": tau}}
    # Every image by itself, without regard to the others.
    power = np.mean(x**2, axis=(1, 2), keepdims=True)
    expected = np.maximum(gamma * x / np.sqrt(power + 1e-6) + beta, tau)
    np.testing.assert_allclose(layer.apply(params, x), expected, rtol=1e-5, atol=1e-5)


def test_logits_of_resnet20_are_plain():
    network, x = bnn.resnet20(3), jnp.ones((2, 8, 8, 1))
    shapes = jax.eval_shape(network.init, random.key(0), x)
    params = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    params["linear"]["b"] = np.array([-5.0, 0.0, 5.0], np.float32)
    # Swish would have no values below -0.28.
    logits = jax.jit(network.apply)(params, x)
    np.testing.assert_array_equal(logits, [[-5, 0, 5], [-5, 0, 5]])


X = random.normal(random.key(0), (30, 1))


@pytest.mark.parametrize(
    "make, num_outputs, y",
    [
        (bnn.regression, 1, jnp.sin(X[:, 0])),
        (bnn.regression, 2, jnp.concatenate([X, X], 1)),
        (bnn.binary, 1, (X[:, 0] > 0).astype(int)),
        (bnn.categorical, 3, jnp.arange(30) % 3),
    ],
)
def test_models(make, num_outputs, y):
    network = linear(num_outputs)
    model = make(network, prior="fan_in")
    params = {"net.linear.w": jnp.ones((1, num_outputs))}
    params["net.linear.b"] = jnp.arange(1.0, num_outputs + 1)
    sites = trace(seed(model, random.key(2))).get_trace(X, y, subsample_size=10)
    assert set(params) < set(sites)
    assert sites["data"]["args"] == (30, 10)
    assert sites["y"]["fn"].batch_shape == (10,)
    # Over the 3 batches of a pass, the estimates have the right mean: N/m once.
    subsampled = SubsampledModel(model, (X, y, 10))

    @jax.jit
    def energies(params):
        batches = jnp.arange(30).reshape(3, 10)
        parts = jax.vmap(lambda b: subsampled.potential_fn(params, {"data": b}))
        return parts(batches), -log_density(model, (X, y), {}, params)[0]

    parts, whole = energies(params)
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-4)
    assert trace(seed(model, 0)).get_trace(X)["y"]["value"].shape == y.shape


def linear(num_outputs):
    return hk.transform(lambda x: hk.Linear(num_outputs)(x))


def test_temperature():
    """Of the likelihood alone: once, beside N/m, and in no prediction or score."""
    network, y = linear(3), jnp.arange(30) % 3
    params = bnn.initial_params(network, X, random.key(1))
    cold = bnn.categorical(network, "fan_in", temperature=0.1)
    warm = bnn.categorical(network, "fan_in")
    batch = {"data": jnp.arange(5, 15)}

    def energy(model, prior="fan_in", **options):
        make = model(network, prior, **options)
        return SubsampledModel(make, (X, y, 10)).potential_fn(params, batch)

    likelihood = energy(bnn.categorical, "flat")
    prior = energy(bnn.categorical) - likelihood
    found = energy(bnn.categorical, temperature=0.1)
    np.testing.assert_allclose(found, 10 * likelihood + prior, rtol=1e-5)
    draws = {name: value[None] for name, value in params.items()}
    densities = [log_likelihood(model, draws, X, y)["y"] for model in (cold, warm)]
    np.testing.assert_array_equal(*densities)
    predictions = [bnn.predict(model, draws, X, y) for model in (cold, warm)]
    jax.tree.map(np.testing.assert_array_equal, *predictions)
    # So is the curvature, and the noise of batches.
    flat = [bnn.categorical(network, "flat", temperature=t) for t in (0.1, 1.0)]
    for kind in ("diagonal", "fisher"):
        factors = [
            laplace_reference(model, params, X, y, kind=kind).factor for model in flat
        ]
        np.testing.assert_allclose(factors[0], factors[1] / 10**0.5, rtol=1e-3)
    unit = Scale(ravel_pytree(params)[0], jnp.ones(6))
    rates = [
        row_spreads(SubsampledModel(model, (X, y, 10)), "data", unit, [None])[0]
        for model in flat
    ]
    np.testing.assert_allclose(rates[0], 10 * rates[1], rtol=1e-3)
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        bnn.binary(network, temperature=0)


def test_priors():
    network, y = hk.transform(lambda x: hk.Linear(1)(x)), X[:, 0]
    wide = jnp.concatenate([X] * 4, axis=1)

    def variance(prior, site="net.linear.w"):
        model = bnn.regression(network, prior=prior, noise=dist.HalfNormal())
        sites = trace(seed(model, 0)).get_trace(wide, y)
        assert "noise" in sites
        return float(sites[site]["fn"].variance.max())

    assert variance(None) == 1
    assert variance(0.5) == 0.25
    assert variance(bnn.fan_in_prior(2.0)) == 1
    assert variance("fan_in", "net.linear.b") == 1
    params = bnn.initial_params(network, X, random.key(1))
    assert sorted(params) == ["net.linear.b", "net.linear.w"]

    def density(prior):
        return log_density(bnn.regression(network, prior), (X, y), {}, params)[0]

    own = sum(dist.Normal().log_prob(value).sum() for value in params.values())
    np.testing.assert_allclose(density("flat"), density("normal") - own, rtol=1e-4)


def test_bad_models():
    network = linear(1)
    with pytest.raises(ValueError, match="`prior` must be one of"):
        bnn.regression(network, prior="gaussian")
    with pytest.raises(ValueError, match="`noise` must be positive"):
        bnn.regression(network, noise=0)
    with pytest.raises(ValueError, match=r"`y\[:, 0\]`"):
        seed(bnn.regression(network), 0)(X, X)
    with pytest.raises(ValueError, match="30 rows"):
        seed(bnn.regression(network), 0)(X, X[:20, 0])
    with pytest.raises(ValueError, match=r"`x\[:, None\]`"):
        seed(bnn.regression(network), 0)(X[:, 0])
    with pytest.raises(ValueError, match="argmax"):
        seed(bnn.categorical(linear(2)), 0)(X, jnp.ones((30, 2)))
    with pytest.raises(ValueError, match="use `categorical`"):
        seed(bnn.binary(linear(2)), 0)(X, jnp.ones(30))


def test_presets_are_arguments():
    """The table of the paper, in arguments that kernels take."""
    assert set(bnn.presets) == {"mnist", "fashion_mnist", "svhn", "cifar10", "cifar100"}
    model = bnn.categorical(bnn.digits_cnn(), prior="flat")
    center = jnp.zeros(3)
    for preset in bnn.presets.values():
        assert callable(getattr(bnn, preset["network"]))
        BPS(model, **preset["bps"])
        SigmaBPS(model, **preset["sigma_bps"])
        Boomerang(model, reference=Scale(center, center + 1), **preset["boomerang"])
    fashion = bnn.presets["fashion_mnist"]
    assert fashion["sigma_bps"]["refresh_rate"] == 0.1
    assert fashion["sigma_bps"]["inverse_mass_matrix"] == pytest.approx(1e-6)
    assert bnn.presets["cifar10"]["reference"]["gamma"] == 0.01
    assert bnn.presets["cifar100"]["boomerang"]["refresh_rate"] == 2.0


def test_noise_of_a_large_model_is_that_of_all_rows():
    network = bnn.binary_mlp()
    x = random.normal(random.key(0), (400, 2))
    y = (x[:, 0] > 0).astype(int)
    model = SubsampledModel(bnn.binary(network), (x, y, 200))
    assert not model.is_small and model.chunk_size == 1024
    params, _ = ravel_pytree(bnn.initial_params(network, x, random.key(1)))
    scale = Scale(params, jnp.full(params.shape, 0.05))
    spreads, total, _ = jax.jit(lambda: row_spreads(model, "data", scale, [None]))()
    expected = jnp.mean(spreads**2) - (total[0] / 400) ** 2
    found = jax.jit(lambda: row_variance(model, "data", scale, [None]))()
    # Half of the rows: the standard error of a variance is about sqrt(3 / 200).
    assert abs(float(found[0, 0] / expected) - 1) < 0.4


@pytest.fixture(scope="module")
def digits():
    """Data, network and MAP estimate of a convolutional network."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = jnp.asarray(x.reshape(-1, 8, 8, 1) / 16, jnp.float32), jnp.asarray(y), 128
    network = bnn.digits_cnn()
    mode = find_map(
        bnn.categorical(network),
        random.key(1),
        *data,
        init_params=bnn.initial_params(network, data[0], random.key(0)),
        num_steps=200,
        progress_bar=False,
    )
    return data, network, mode


#: short of their draw time, most draws: it is the way that is tested
SHORT = {"max_grad": 10, "control_variates": None}


def run_on_digits(kernel, digits):
    """Two vectorised chains on mini-batches; they move, and classify well."""
    (x, y, _), network, mode = digits
    mcmc = MCMC(
        kernel,
        num_warmup=10,
        num_samples=10,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(2), *digits[0], init_params=mode.init_params(2))
    samples = mcmc.get_samples()
    moved = samples["net.linear.w"] - mode.params["net.linear.w"]
    assert jnp.all(jnp.any(moved != 0, axis=(1, 2)))

    @jax.jit
    def probabilities(draw):
        model = substitute(bnn.categorical(network), data=draw)
        logits = trace(seed(model, 0)).get_trace(x)["y"]["fn"].logits
        return jax.nn.softmax(logits)

    mean = sum(probabilities({k: v[i] for k, v in samples.items()}) for i in range(20))
    assert jnp.mean(jnp.argmax(mean, -1) == y) > 0.9


def test_pipeline_on_digits(digits, tmp_path):
    """The paper's way: MAP, kept in a file, its curvature as reference, Boomerang."""
    data, network, mode = digits
    mode.save(tmp_path / "map.npz")
    again = MAP.load(tmp_path / "map.npz")
    jax.tree.map(np.testing.assert_array_equal, again, mode)
    assert again.converged is None and again.num_steps == 200
    flat = bnn.categorical(network, prior="flat")
    reference = laplace_reference(flat, again, *data, gamma=0.1, num_probes=16)
    assert reference.factor.shape == (1898,)
    preset = bnn.presets["mnist"]["boomerang"]
    run_on_digits(Boomerang(flat, reference=reference, **preset, **SHORT), digits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [BPS, *(pytest.param(k, marks=pytest.mark.slow) for k in (SigmaBPS, ZigZag))],
)
def test_other_kernels_on_digits(kernel, digits):
    model = bnn.categorical(digits[1])
    options = {"inverse_mass_matrix": 1e-4, "center": digits[2].params, **SHORT}
    run_on_digits(kernel(model, **options), digits)


def test_file_that_is_no_map(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(ValueError, match="that `MAP.save` has written"):
        MAP.load(tmp_path / "other.npz")


def test_convolutions_are_fast_in_loops():
    """All of them in the layout for which XLA has a routine, and the same numbers."""
    network = bnn.digits_cnn(3)
    x = random.normal(random.key(0), (4, 8, 8, 2))
    params = network.init(random.key(1), x)

    def loss(params):
        return jnp.sum(jnp.square(network.apply(params, x)))

    def product(params):
        return jax.jvp(jax.grad(loss), (params,), (params,))[1]

    for fn in (jax.grad(loss), product):
        fast = fast_in_loops(fn)
        jax.tree.map(np.testing.assert_array_equal, fast(params), fn(params))
        jaxpr = str(jax.make_jaxpr(fast)(params))
        layouts = re.findall(r"lhs_spec=([^)]*\)).*?rhs_spec=([^)]*\))", jaxpr, re.S)
        assert len(layouts) > 4
        assert set(layouts) == {("(0, 3, 1, 2)", "(3, 2, 0, 1)")}
    # As schemes that use slopes do.
    slope = jax.jvp(fast_in_loops(jax.grad(loss)), (params,), (params,))[1]
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, slope, product(params))
    shape = jax.eval_shape(fast_in_loops(lambda x: {"a": x + 1}), 1.0)
    assert shape["a"].shape == ()
