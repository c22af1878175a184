# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic-gradient kernels: the posterior as steps go to zero, and the contract."""

import math
import pickle

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp
import optax

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import PSGLD, SGHMC, SGLD, Scale, check, sgld, to_inference_data

KERNELS = (SGLD, SGHMC, PSGLD)
NUM_DATA, NUM_ROWS, NUM_CHAINS = 100, 10, 512
Y = np.random.default_rng(0).normal(1, 1, NUM_DATA)
PRECISION = NUM_DATA + 0.01
MEAN, SD = Y.sum() / PRECISION, PRECISION**-0.5
#: variance over batches of the whitened gradient, without control variates
NOISE = NUM_DATA**2 / NUM_ROWS * Y.var(ddof=1) * (1 - NUM_ROWS / NUM_DATA) / PRECISION


def gaussian():
    loc, scale = jnp.asarray([0.0, 5.0, -1.0]), jnp.asarray([1.0, 10.0, 0.1])
    numpyro.sample("x", dist.Normal(loc, scale).to_event(1))


def gaussian_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", len(y), subsample_size=NUM_ROWS):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, event_dim=0))


# Stationarity


def variance_ratios(kernel, step_sizes, args=(), num_draws=150):
    """Mean square of whitened positions for every step size, with standard errors.

    Both models' whitened coordinates are exact, so that 1 is the posterior's.
    """
    keys = random.split(random.key(0), NUM_CHAINS)
    first = kernel.init(keys, 0, None, args, {})

    def body(_, carry):
        state, total = carry
        state = kernel.sample(state, args, {})
        return state, total + jnp.mean(state.last**2, axis=1)

    @jax.jit
    def run(state, num):
        zero = jnp.zeros(NUM_CHAINS)
        return lax.fori_loop(0, num, body, (state, zero))

    ratios = []
    for size in step_sizes:
        size = jnp.asarray(size, first.adapt_state.step_size.dtype)
        found = first.adapt_state._replace(step_size=size)
        state, _ = run(first._replace(adapt_state=found), num_draws // 3)
        squares = np.asarray(run(state, num_draws)[1], float) / num_draws
        ratios.append((squares.mean(), squares.std() / NUM_CHAINS**0.5))
    return np.asarray(ratios).T


def at_zero(steps, ratios, errors):
    """Intercept of a weighted line, and its standard error."""
    design = np.stack([np.ones_like(steps), steps], 1) / errors[:, None]
    covariance = np.linalg.inv(design.T @ design)
    return covariance[0] @ design.T @ (ratios / errors), covariance[0, 0] ** 0.5


def assert_extrapolates_to_the_posterior(steps, ratios, errors):
    value, error = at_zero(steps, ratios, errors)
    assert error < 0.03
    assert abs(value - 1) < 4 * error


def sgld_ratio(steps, noise):
    return (1 + steps * noise / 4) / (1 - steps / 4)


@pytest.mark.parametrize(
    "model, options, noise",
    [
        (gaussian, {}, 0),
        (gaussian_mean, {"control_variates": None}, NOISE),
        (gaussian_mean, {}, 0),
    ],
    ids=["full data", "batches", "control variates"],
)
def test_sgld(model, options, noise):
    args = (Y,) if model is gaussian_mean else ()
    steps = np.asarray([0.05, 0.2]) if noise == 0 else np.asarray([0.03, 0.12])
    ratios, errors = variance_ratios(SGLD(model, **options), steps, args)
    assert np.all(np.abs(ratios - sgld_ratio(steps, noise)) < 4 * errors)
    assert_extrapolates_to_the_posterior(steps, ratios, errors)


@pytest.mark.parametrize("factor", [0.5**0.5, 2**0.5])
def test_wrong_noise_is_noticed(monkeypatch, factor):
    right = sgld.langevin_step
    monkeypatch.setattr(
        sgld, "langevin_step", lambda z, g, noise, eps: right(z, g, factor * noise, eps)
    )
    steps = np.asarray([0.05, 0.2])
    ratios, errors = variance_ratios(SGLD(gaussian), steps)
    with pytest.raises(AssertionError):
        assert_extrapolates_to_the_posterior(steps, ratios, errors)


def sghmc_ratio(steps, noise, friction=1.0):
    noisy = 1 + steps * noise / (2 * friction)
    return noisy / (1 - steps**2 / (4 - 2 * steps * friction))


@pytest.mark.parametrize(
    "model, options, noise",
    [
        (gaussian, {}, 0),
        (gaussian, {"refresh_momentum": True}, 0),
        (gaussian_mean, {"control_variates": None}, NOISE),
        (gaussian_mean, {"control_variates": None, "noise_estimate": NOISE}, 0),
    ],
    ids=["full data", "refreshed", "batches", "known noise"],
)
def test_sghmc(model, options, noise):
    args = (Y,) if model is gaussian_mean else ()
    steps = np.asarray([0.1, 0.2, 0.4]) if not args else np.asarray([0.02, 0.08])
    ratios, errors = variance_ratios(SGHMC(model, **options), steps, args)
    assert np.all(np.abs(ratios - sghmc_ratio(steps, noise)) < 4 * errors)
    # The bias of the integrator is of second order, that of the batches of first.
    powers = steps if args else steps**2
    assert_extrapolates_to_the_posterior(powers, ratios, errors)


def test_psgld_with_a_preconditioner_held_after_warmup():
    """Steps of 0.04 G, with G about 1 / sqrt(variance): as SGLD with those."""
    kernel = PSGLD(gaussian, step_size=0.04, find_mode=False)
    mcmc = run(kernel, num_warmup=200, num_samples=1500, num_chains=32)
    squares = np.asarray(mcmc.last_state.memory)
    x = np.asarray(mcmc.get_samples()["x"], float)
    np.testing.assert_allclose(np.sqrt(squares).mean(0), [1, 0.1, 10], rtol=0.4)
    # Steps in units of each variance: 0.04, 0.004 (hardly moves), and 0.4.
    expected = 1 / (1 - 0.04 * np.asarray([1, 10]) / 4)
    np.testing.assert_allclose(x.var(0)[[0, 2]] / [1, 0.01], expected, rtol=0.1)


def test_auto_step_size():
    """By the noise of batches, for a bias of 2.5 %."""
    keys = random.split(random.key(0), 2)
    for options, noise in [({"control_variates": None}, NOISE), ({}, 0)]:
        state = SGLD(gaussian_mean, **options).init(keys, 0, None, (Y,), {})
        size = float(state.adapt_state.step_size)
        np.testing.assert_allclose(size * (1 + noise), 0.1, rtol=1e-3)
        size = SGHMC(gaussian_mean, friction=2.0)._auto_step_size(noise)
        np.testing.assert_allclose(size**2 / 4 + size * noise / 4, 0.025)


# Options


def run(kernel, *args, num_warmup=10, num_samples=30, num_chains=1, **kwargs):
    options = {"chain_method": "vectorized", "progress_bar": False, **kwargs}
    fields = options.pop("extra_fields", ())
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        **options,
    )
    mcmc.run(random.key(0), *args, extra_fields=fields)
    return mcmc


def cyclical(step):
    return 1e-3 * (1 + jnp.cos(math.pi * (step % 50) / 50))


@pytest.mark.parametrize(
    "schedule",
    [
        optax.constant_schedule(2e-3),
        optax.linear_schedule(1e-3, 0.0, 50),
        optax.polynomial_schedule(1e-3, 1e-5, 0.55, 60),
        optax.cosine_decay_schedule(1e-3, 60),
        cyclical,
    ],
    ids=["constant", "linear", "polynomial", "cosine", "cyclical"],
)
def test_schedules(schedule):
    """Of all steps since the start, warm-up included."""
    kernel = SGLD(gaussian_mean, step_size=schedule, num_steps=2, find_mode=False)
    fields = ("step_size", "num_grad")
    mcmc = run(kernel, Y, num_warmup=10, num_samples=20, extra_fields=fields)
    fields = mcmc.get_extra_fields()
    expected = [float(schedule(2 * i + 1)) for i in range(10, 30)]
    np.testing.assert_allclose(fields["step_size"], expected, rtol=1e-4, atol=1e-9)
    assert np.all(fields["num_grad"] == 2)
    if expected[-1] == 0:  # then it stands still
        assert np.ptp(mcmc.get_samples()["mu"][-3:]) < 1e-4
    assert not np.any(fields["diverging"])


def test_units_of_the_step_size():
    """The model's own, unless there is a metric."""
    key = random.key(0)

    def scale_of(**options):
        state = SGLD(gaussian_mean, **options).init(key, 0, None, (Y,), {})
        return state.adapt_state.scale

    own = scale_of(step_size=1e-4)
    assert own.factor == 1
    np.testing.assert_allclose(own.center, MEAN, rtol=1e-4)
    for options in ({}, {"step_size": 0.1, "precondition": True}):
        np.testing.assert_allclose(scale_of(**options).factor, SD, rtol=1e-3)
    given = scale_of(step_size=0.1, inverse_mass_matrix=np.asarray([0.04]))
    np.testing.assert_allclose(given.factor, 0.2, rtol=1e-5)


def test_own_units_and_whitened_ones_are_the_same_chain():
    """A metric 0.04 with step 0.1 is a step of 0.004; from one start."""
    start, metric = {"mu": jnp.asarray(1.2)}, np.asarray([0.04])
    options = {"control_variates": None, "find_mode": False}
    draws = []
    for more in (
        {"step_size": 0.1, "inverse_mass_matrix": metric},
        {"step_size": 0.004},
    ):
        kernel = SGLD(gaussian_mean, **options, **more)
        state = kernel.init(random.key(0), 0, start, (Y,), {})
        step = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (Y,), {}))
        for _ in range(3):
            state = step(state)
        draws.append(state.z["mu"])
    np.testing.assert_allclose(*draws, rtol=1e-5)


def test_reference_is_start_and_point_to_expand_around():
    reference = Scale(jnp.asarray([MEAN], "f4"), jnp.asarray([SD], "f4"))
    kernel = SGHMC(gaussian_mean, reference=reference)
    state = kernel.init(random.key(0), 0, None, (Y,), {})
    np.testing.assert_allclose(state.adapt_state.control.center, MEAN, rtol=1e-5)
    assert state.whitened == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "name, value",
    [
        ("step_size", 0),
        ("step_size", -1e-3),
        ("step_size", math.nan),
        ("step_size", "large"),
        ("step_size", None),
        ("num_steps", 0),
        ("num_steps", 2.5),
        ("batching", "all"),
        ("control_variates", 3),
    ],
)
def test_wrong_option(kernel, name, value):
    with pytest.raises(ValueError) as error:
        kernel(gaussian, **{name: value})
    assert name in str(error.value) and str(value) in str(error.value)


@pytest.mark.parametrize(
    "kernel, options, words",
    [
        (SGHMC, {"friction": 0}, ["`friction`", "0"]),
        (SGHMC, {"friction": 5.0, "step_size": 0.3}, ["friction=5.0", "below 1"]),
        (SGHMC, {"noise_estimate": -1}, ["`noise_estimate`", "-1"]),
        (SGHMC, {"noise_estimate": "big"}, ["`noise_estimate`", "'big'"]),
        (
            SGHMC,
            {"noise_estimate": 100, "step_size": 0.1},
            ["noise_estimate=100", "reduce `step_size`"],
        ),
        (
            SGHMC,
            {"noise_estimate": "auto", "step_size": 0.1},
            ["noise_estimate='auto'", "`precondition=True`"],
        ),
        (PSGLD, {"decay": 1}, ["`decay`", "1"]),
        (PSGLD, {"damping": 0}, ["`damping`", "0"]),
        (SGLD, {"step_size": lambda t: -1.0}, ["`step_size`", "-1.0"]),
        (SGLD, {"step_size": lambda t: jnp.ones(2)}, ["`step_size`", "1., 1."]),
        (
            SGLD,
            {"precondition": False, "inverse_mass_matrix": np.ones(3)},
            ["`precondition=False`", "give `center`"],
        ),
    ],
)
def test_wrong_options(kernel, options, words):
    with pytest.raises(ValueError) as error:
        kernel(gaussian, **options)
    assert all(word in str(error.value) for word in words)


def many_weights(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([300]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=NUM_ROWS):
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(w.sum(), 1), obs=y)


@pytest.mark.parametrize("options", [{}, {"step_size": 0.1, "precondition": True}])
def test_many_dimensions_need_a_step_or_a_metric(options):
    name = "precondition=True" if options else "step_size='auto'"
    with pytest.raises(ValueError, match=f"`{name}` needs a metric.*has 300"):
        SGLD(many_weights, **options).init(random.key(0), 0, None, (Y,), {})
    kernel, start = SGLD(many_weights, step_size=1e-6), {"w": jnp.full(300, 0.01)}
    state = kernel.init(random.key(0), 0, start, (Y,), {})
    np.testing.assert_allclose(state.last, 0.01, rtol=1e-6)
    state = jax.jit(lambda state: kernel.sample(state, (Y,), {}))(state)
    np.testing.assert_allclose(state.z["w"], 0.01, atol=0.05)
    assert not state.diverging


def test_control_variates_need_a_point():
    kernel = SGLD(gaussian_mean, step_size=1e-3, control_variates=1, find_mode=False)
    with pytest.raises(ValueError, match="point to expand around"):
        kernel.init(random.key(0), 0, None, (Y,), {})


# Steps that cannot be made


@pytest.mark.parametrize("kernel", KERNELS)
def test_divergent_steps_are_flagged_and_not_made(kernel):
    def half_line(x):
        """With a gradient that is NaN above 1, where chains go all the time."""
        return 0.5 * jnp.sum(x**2) + 1e-3 * jnp.sqrt(1 - x[0])

    kernel = kernel(potential_fn=half_line, step_size=0.2, find_mode=False)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=300, progress_bar=False)
    fields = ("num_rejected",)
    mcmc.run(random.key(0), init_params=jnp.zeros(2), extra_fields=fields)
    x, flags = np.asarray(mcmc.get_samples()), mcmc.get_extra_fields()
    assert np.all(np.isfinite(x)) and np.all(x[:, 0] < 1)
    assert 0.02 < flags["diverging"].mean() < 0.95
    np.testing.assert_array_equal(flags["diverging"], flags["num_rejected"] > 0)
    assert x.std() > 0.3  # and the chain goes on


def test_steps_that_are_too_large_are_flagged():
    mcmc = run(SGLD(gaussian, step_size=1e3), num_samples=50)
    assert np.all(np.isfinite(mcmc.get_samples()["x"]))
    assert mcmc.get_extra_fields()["diverging"][-1]


# The contract


@pytest.mark.parametrize("kernel", KERNELS)
def test_resume_and_pickle(kernel):
    kernel = kernel(gaussian_mean, step_size=1e-4, find_mode=False)
    long = run(kernel, Y, num_warmup=5, num_samples=20)
    half = run(kernel, Y, num_warmup=5, num_samples=10)
    again = pickle.loads(pickle.dumps(half))
    again.post_warmup_state = again.last_state
    again.run(again.last_state.rng_key, Y)
    both = [m.get_samples()["mu"] for m in (half, again)]
    np.testing.assert_allclose(
        np.concatenate(both), long.get_samples()["mu"], rtol=1e-6
    )
    assert int(again.last_state.i) == 25


def test_chain_methods_agree():
    # Given a metric, the starts are those of the strategy, whatever the method.
    kernel = SGHMC(gaussian_mean, step_size=0.1, inverse_mass_matrix=[SD**2])
    draws = []
    for method in ("vectorized", "sequential"):
        mcmc = run(kernel, Y, num_chains=2, chain_method=method)
        draws.append(np.asarray(mcmc.get_samples(group_by_chain=True)["mu"]))
    assert draws[0].shape == (2, 30) and np.all(draws[0][0] != draws[0][1])
    np.testing.assert_allclose(*draws, rtol=1e-4)


def test_summary_fields_and_arviz(capsys):
    kernel = SGLD(gaussian_mean, potential_energy=True)
    fields = ("potential_energy", "num_grad", "step_size")
    mcmc = run(kernel, Y, num_chains=2, extra_fields=fields)
    mcmc.print_summary()
    assert "mu" in capsys.readouterr().out
    assert set(mcmc.get_samples()) == {"mu"}  # and no indices
    data = to_inference_data(mcmc)
    assert data["posterior"].attrs["sampler"] == "SGLD"
    np.testing.assert_allclose(data["posterior"].attrs["step_size"], 0.1, rtol=1e-3)
    assert set(data["sample_stats"]) == {"lp", "diverging", "num_grad", "step_size"}
    assert np.all(np.isfinite(data["sample_stats"]["lp"]))
    with pytest.raises(ValueError, match="PDMP kernel"):
        check(mcmc)


def test_energy_is_left_out_unless_asked_for():
    mcmc = run(SGLD(gaussian), extra_fields=("potential_energy",))
    assert np.all(np.isnan(mcmc.get_extra_fields()["potential_energy"]))
    assert "step size 1.00e-01" in mcmc.sampler.get_diagnostics_str(mcmc.last_state)


def test_new_data_are_not_those_of_the_last_run():
    kernel = SGLD(gaussian_mean, step_size=1e-3, find_mode=False)
    for shift in (0, 5):
        mu = run(kernel, Y + shift).get_samples()["mu"]
        assert abs(mu.mean() - MEAN - shift) < 0.5
