# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import functools

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp
import optax

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_value
from numpyro_pdmp.batch import random_batch
from numpyro_pdmp.find_map import find_map
from numpyro_pdmp.initialize import jit_arrays
from numpyro_pdmp.subsample import SubsampledModel, batch_potential, model_layout

pytestmark = pytest.mark.usefixtures("quickly_compiled")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(200, 3)))
Y = X @ jnp.asarray([1.0, -2.0, 0.5]) + jnp.asarray(0.5 * RNG.normal(size=200))


def linear(x, y, subsample_size=None):
    """Linear regression with known noise: a Gaussian posterior."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as index:
        numpyro.sample("y", dist.Normal(x[index] @ w + b, 0.5), obs=y[index])


def linear_mode():
    design = np.column_stack([np.ones(len(X)), np.asarray(X)])  # b before w
    precision = design.T @ design / 0.25 + np.eye(4) / 4
    return np.linalg.solve(precision, design.T @ np.asarray(Y) / 0.25), precision


def noise_scale(y):
    """Constrained site: HalfNormal scale of normal data."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    numpyro.sample("y", dist.Normal(0, sigma), obs=y)


def find(model, *args, seed=0, **kwargs):
    return find_map(model, random.key(seed), *args, progress_bar=False, **kwargs)


@functools.cache
def linear_result():
    return find(linear, X, y=Y)


def errors(params):
    """Distance from the mode of the linear regression in standard deviations."""
    mode, precision = linear_mode()
    found = np.concatenate([[params["b"]], params["w"]])
    return np.abs(found - mode) * np.sqrt(np.diag(precision))


def test_lbfgs_finds_mode_of_linear_regression():
    result = linear_result()
    assert result.converged and result.num_steps < 40
    assert result.gradient_norm < 1e-3
    assert result.losses.shape == (result.num_steps,)
    assert np.all(np.diff(result.losses) <= 1e-3)
    assert np.max(errors(result.params)) < 0.01
    energy = SubsampledModel(linear, (X, Y)).potential_fn(result.params, {})
    np.testing.assert_allclose(result.potential_energy, energy, rtol=1e-5)


def test_mode_is_that_of_the_unconstrained_density():
    y = jnp.asarray([1.0, -2.0, 0.5, 3.0])
    result = find(noise_scale, y)
    # With s = sigma^2, d/d log sigma of n log sigma + |y|^2 / 2s + s / 8 - log sigma
    # is zero where s^2 / 4 + (n - 1) s = |y|^2.
    square = float(jnp.sum(y**2))
    s = 2 * (-3 + np.sqrt(9 + square))
    np.testing.assert_allclose(np.exp(2 * result.params["sigma"]), s, rtol=1e-3)


def test_badly_scaled_potential():
    scales = np.logspace(-3, 3, 8)

    def model():
        numpyro.sample("x", dist.Normal(scales, scales).to_event(1))

    result = find(model)
    assert result.converged and result.num_steps < 40
    np.testing.assert_allclose(result.params["x"] / scales, 1, atol=0.01)


@pytest.mark.parametrize("seed", [0, 3])  # without optimisations both end at x = 0
def test_unbounded_density_is_reported(seed):
    def model():
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        numpyro.sample("x", dist.Normal(0, tau).expand([3]).to_event(1))

    with pytest.warns(UserWarning, match="did not reach|not finite"):
        result = find(model, seed=seed)
    assert not result.converged
    assert np.isfinite(result.potential_energy)
    assert np.all(np.isfinite(result.params["x"]))


@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(0.05), optax.lbfgs(), numpyro.optim.Adam(0.05)],
    ids=["adam", "lbfgs", "numpyro"],
)
def test_optimizers(optimizer):
    result = find(linear, X, Y, optimizer=optimizer, num_steps=500)
    assert np.max(errors(result.params)) < 0.1
    assert result.converged is None
    assert result.num_steps == 500


def test_subsampled_mode_is_near_that_of_all_data():
    result = find(linear, X, Y, subsample_size=20, num_steps=3000)
    assert np.max(errors(result.params)) < 0.3
    full = linear_result().potential_energy
    np.testing.assert_allclose(result.potential_energy, full, rtol=0.1)
    # Fresh batches: the losses at the end still vary.
    assert np.std(result.losses[-100:]) > 1


def test_batch_overrides_subsample_size():
    same = find(linear, X, Y, subsample_size=20, batch=200)
    assert same.converged
    assert np.max(errors(same.params)) < 0.01
    _, plates = model_layout(linear, (X, Y), {"subsample_size": 20}, batch=50)
    assert plates == {"data": (200, 50)}


def test_batches_are_unbiased_and_fresh():
    kwargs = {"subsample_size": 20}
    _, plates = model_layout(linear, (X, Y), kwargs)
    potential_fn = batch_potential(linear, (X, Y), kwargs, plates)
    z = {"w": jnp.ones(3), "b": jnp.zeros(())}
    energies = jax.jit(jax.vmap(lambda key: potential_fn(z, key)))(
        random.split(random.key(0), 1000)
    )
    full = SubsampledModel(linear, (X, Y)).potential_fn(z, {})
    error = np.std(energies) / np.sqrt(1000)
    assert error > 0
    assert abs(np.mean(energies) - full) < 4 * error
    assert len(set(random_batch(random.key(0), plates)["data"].tolist())) == 20
    everything = random_batch(random.key(0), {"data": (200, 200)})
    np.testing.assert_array_equal(everything["data"], np.arange(200))


def test_init_params_of_chains():
    result = linear_result()
    assert result.init_params() == result.params
    many = result.init_params(3)
    assert many["w"].shape == (3, 3) and many["b"].shape == (3,)
    np.testing.assert_array_equal(many["w"][2], result.params["w"])


def test_data_used_for_control_flow():
    def fn(args, kwargs, x):
        return x * len(args[0]) if int(kwargs["sign"]) > 0 else -x

    for sign in (1, -1):
        call = jit_arrays(fn, (jnp.ones(3),), {"sign": jnp.asarray(sign)})
        assert call(2.0) == (6 if sign > 0 else -2)
        assert call(1.0) == (3 if sign > 0 else -1)


def test_unknown_compiler_options_are_left_out():
    options = {"xla_of_another_version": True}
    call = jit_arrays(lambda x, y: x + y, jnp.ones(3), compiler_options=options)
    np.testing.assert_array_equal(call(2.0), np.full(3, 3.0))


def test_bad_start():
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("wall", jnp.where(x > 0, -jnp.inf, 0.0))

    with pytest.raises(ValueError, match="`init_params`: the potential energy .inf"):
        find(model, init_params={"x": 1.0})

    def hopeless():
        numpyro.factor("never", numpyro.sample("x", dist.Normal(0, 1)) * jnp.nan)

    with pytest.raises(ValueError, match="`init_strategy`: the potential energy"):
        find(hopeless)


def test_wall_keeps_the_best_point():
    # The unconstrained mode is at 3, behind the wall.
    def model():
        x = numpyro.sample("x", dist.Normal(3, 1))
        numpyro.factor("wall", jnp.where(x > 1, jnp.nan, 0.0))

    with pytest.warns(UserWarning, match="not finite at step"):
        result = find(
            model, init_params={"x": 0.0}, optimizer=optax.sgd(0.1), num_steps=50
        )
    assert 0.8 < result.params["x"] <= 1
    assert np.isfinite(result.potential_energy)
    assert result.num_steps < 50


def test_too_few_steps_warn():
    with pytest.warns(UserWarning, match="did not reach `tol"):
        assert not find(linear, X, Y, num_steps=1).converged


def test_init_strategy():
    values = {"w": jnp.asarray([1.0, 2.0, 3.0]), "b": jnp.asarray(0.0)}
    result = find(
        linear,
        X,
        Y,
        init_strategy=init_to_value(values=values),
        optimizer=optax.sgd(0.0),
        num_steps=1,
    )
    np.testing.assert_allclose(result.params["w"], values["w"])


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"`init_params` has sites of shapes"):
        find(linear, X, Y, init_params={"w": jnp.zeros(3)})
    with pytest.raises(TypeError, match="`init_params` must be a dict"):
        find(linear, X, Y, init_params=jnp.zeros(4))
    with pytest.raises(TypeError, match="`optimizer` must be"):
        find(linear, X, Y, optimizer="adam")
    with pytest.raises(ValueError, match="`num_steps`"):
        find(linear, X, Y, num_steps=0)
    with pytest.raises(ValueError, match="`batch=5` replaces"):
        find(linear, X, Y, batch=5)
    with pytest.raises(ValueError, match="`batch` must be from 1 to 200"):
        find(linear, X, Y, subsample_size=20, batch=201)


def test_latent_sites_of_a_batch_are_refused():
    def model():
        with numpyro.plate("data", 10, subsample_size=5):
            numpyro.sample("x", dist.Normal(0, 1))

    with pytest.raises(ValueError, match="'x' is inside of plate 'data'.*drop"):
        find(model)


def test_progress_bar(capsys):
    find_map(linear, random.key(0), X, Y)
    assert "potential energy" in capsys.readouterr().err
