# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Wrong arguments get an exception that names them, bad models a finite run."""

from functools import partial
import math

import numpy as np
import pytest

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import ALL_STATS, BPS, Boomerang, ZigZag, check, to_inference_data

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KERNELS = (BPS, Boomerang, ZigZag)


def model():
    numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))


def potential(z):
    return 0.5 * (z["a"] ** 2 + jnp.sum(z["mu"] ** 2))


Z = {"a": 0.5, "mu": np.zeros(2)}


# Arguments of the constructors


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_target(kernel):
    message = "Only one of `model` or `potential_fn`"
    with pytest.raises(ValueError, match=message):
        kernel()
    with pytest.raises(ValueError, match=message):
        kernel(model, potential)
    with pytest.raises(TypeError, match="`model` must be callable, got 3"):
        kernel(3)
    with pytest.raises(TypeError, match="`potential_fn` must be callable, got 'x'"):
        kernel(potential_fn="x")


@pytest.mark.parametrize(
    "name, value",
    [
        ("refresh_rate", -1.0),
        ("refresh_rate", math.nan),
        ("refresh_rate", math.inf),
        ("draw_time", 0),
        ("draw_time", -2.0),
        ("draw_time", math.nan),
        ("draw_time", math.inf),
        ("max_grad", 0),
        ("max_grad", -3),
        ("max_grad", 2.5),
        ("refresh_mix", 1.0),
        ("refresh_mix", -0.1),
        ("refresh_law", "poisson"),
        ("record", "all"),
        ("event_time", "exact"),
        ("event_time", 3),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_option(kernel, name, value):
    with pytest.raises(ValueError) as error:
        kernel(model, **{name: value})
    assert name in str(error.value) and str(value) in str(error.value)


@pytest.mark.parametrize("kernel", [BPS, Boomerang])
def test_refreshment_is_needed(kernel):
    with pytest.raises(ValueError, match="`refresh_rate` must be positive, got 0"):
        kernel(model, refresh_rate=0)
    ZigZag(model, refresh_rate=0)


def test_target():
    with pytest.raises(ValueError, match="`target` must be .* got 'prior'"):
        Boomerang(model, target="prior")
    options = {"inverse_mass_matrix": np.ones(3), "center": np.zeros(3)}
    for name in options:
        rest = {k: v for k, v in options.items() if k != name}
        with pytest.raises(ValueError, match="reference_prior.*`inverse_mass_matrix`"):
            Boomerang(model, target="reference_prior", adapt_mass_matrix=False, **rest)
    with pytest.raises(ValueError, match="`adapt_mass_matrix=False`"):
        Boomerang(model, target="reference_prior", **options)
    Boomerang(
        model, target="reference_prior", adapt_mass_matrix=False, **options
    )  # and this is right


def test_integer_of_numpy():
    BPS(model, max_grad=np.int64(5))


# Arguments that need the dimension


NAN = np.asarray([1.0, math.nan, 1.0])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"inverse_mass_matrix": np.ones(2)}, ["shape (2,)", "(3,) or (3, 3)"]),
        ({"inverse_mass_matrix": np.ones((3, 2))}, ["shape (3, 2)", "(3, 3)"]),
        ({"inverse_mass_matrix": -np.eye(3)}, ["positive definite", "-1.0"]),
        ({"inverse_mass_matrix": [1.0, 0, 1]}, ["positive definite", "0.0"]),
        (
            {"inverse_mass_matrix": np.eye(3) + 2 * np.eye(3)[::-1]},
            ["positive definite", "-1.0"],
        ),
        (
            {"inverse_mass_matrix": {("mu",): -np.eye(2)}},
            ["positive definite", "-1.0"],
        ),
        (
            {"inverse_mass_matrix": np.eye(3), "dense_mass": False},
            ["matrix", "`dense_mass=False`"],
        ),
        ({"center": np.ones(2)}, ["2 entries", "(3,)"]),
        ({"center": {"a": 1.0}}, ["'mu': (2,)"]),
        pytest.param({"inverse_mass_matrix": NAN}, ["nan"]),
        pytest.param(
            {"inverse_mass_matrix": NAN, "dense_mass": False},
            ["finite", "nan"],
        ),
        pytest.param({"inverse_mass_matrix": np.triu(np.ones((3, 3)))}, ["symmetric"]),
        pytest.param({"center": NAN}, ["nan"]),
        pytest.param({"center": {"a": np.zeros(2), "mu": 0.0}}, ["(2,)"]),
        pytest.param({"center": {"a": 0.0, "nu": np.zeros(2)}}, ["nu"]),
        pytest.param({"inverse_mass_matrix": {("mu",): np.ones(3)}}, ["(3,)"]),
        pytest.param({"inverse_mass_matrix": {("nu",): np.ones(2)}}, ["nu"]),
        pytest.param({"inverse_mass_matrix": {"mu": np.ones(2)}}, ["mu"]),
        pytest.param({"dense_mass": [("a", "nu")]}, ["nu"]),
        pytest.param({"dense_mass": ["mu"]}, ["mu"]),
        pytest.param({"dense_mass": "yes"}, ["yes"]),
    ],
    ids=str,
)
def test_wrong_metric(options, words):
    with pytest.raises(ValueError) as error:
        kernel = BPS(potential_fn=potential, **options)
        kernel.init(random.key(0), 5, Z)
    message = str(error.value)
    assert next(iter(options)) in message
    assert all(word in message for word in words), message


def test_unknown_site_in_a_block():
    """Today only the run notices."""
    kernel = BPS(model, dense_mass=[("a", "nu")])
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(ValueError, match=r"\['nu'\]; the sites are \['a', 'mu'\]"):
        mcmc.run(random.key(0))


# Starts


@pytest.mark.parametrize(
    "init_params, given",
    [
        ({"a": 0.0}, r"\['a'\]"),
        ({"a": 0.0, "mu": np.zeros(2), "nu": 0.0}, r"\['a', 'mu', 'nu'\]"),
        (np.zeros(3), r"\[0\. 0\. 0\.\]"),
    ],
)
def test_wrong_sites(init_params, given):
    message = rf"`init_params` must be .* sites \['a', 'mu'\], got {given}"
    with pytest.raises(ValueError, match=message):
        BPS(model).init(random.key(0), 5, init_params)


def test_wrong_shape_of_a_site():
    with pytest.raises(ValueError, match=r"'mu': \(2,\) vs \(3,\)"):
        BPS(model).init(random.key(0), 5, {"a": 0.0, "mu": np.zeros(3)})


def test_start_is_required():
    with pytest.raises(ValueError, match="`init_params` must be provided"):
        BPS(potential_fn=potential).init(random.key(0), 5)


@pytest.mark.parametrize(
    "potential_fn, x",
    [
        (jnp.log, -1.0),  # the energy is NaN
        (lambda x: -jnp.log(x), 0.0),  # it is infinite
        (jnp.sqrt, 0.0),  # only the gradient is
    ],
    ids=["nan", "inf", "gradient"],
)
def test_start_not_finite(potential_fn, x):
    kernel = BPS(potential_fn=potential_fn)
    with pytest.raises(ValueError, match=r"`init_params`.*\(.*\).*not finite"):
        kernel.init(random.key(0), 5, x)
    keys = random.split(random.key(0))
    with pytest.raises(ValueError, match=r"`init_params`.*\(.*\).*not finite"):
        kernel.init(keys, 5, np.asarray([1.0, x]))


def test_no_start_found():
    def impossible():
        numpyro.factor("never", jnp.nan * numpyro.sample("x", dist.Normal(0, 1)))

    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        BPS(impossible).init(random.key(0), 5)


def test_nothing_to_sample_from_a_potential():
    with pytest.raises(ValueError, match="init_params"):
        BPS(potential_fn=jnp.sum).init(random.key(0), 5, np.zeros(0))


# Models


def observed_only():
    numpyro.sample("y", dist.Normal(0, 1), obs=1.0)


def discrete_only():
    numpyro.sample("y", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})


def delta():
    numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Delta(1.0))


def latent_in_subsampled_plate():
    with numpyro.plate("data", 10, subsample_size=3):
        numpyro.sample("a", dist.Normal(0, 1))


@pytest.mark.parametrize(
    "model, error, message",
    [
        (observed_only, ValueError, r"no continuous latent sites .*\['y'\]"),
        (discrete_only, ValueError, r"no continuous latent sites .*\['y'\]"),
        (delta, ValueError, "'y' has a delta distribution"),
        (latent_in_subsampled_plate, ValueError, "'a' is inside of plate 'data'"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_model(kernel, model, error, message):
    with pytest.raises(error, match=message):
        kernel(model).init(random.key(0), 5)
    # Before the start is looked at, which would fail for another reason.
    with pytest.raises(error, match=message):
        kernel(model).init(random.key(0), 5, {"a": 0.0})


# Runs


@pytest.mark.parametrize("num_samples", [0, -1])
def test_number_of_draws(num_samples):
    with pytest.raises(ValueError, match="num_samples"):
        MCMC(BPS(model), num_warmup=5, num_samples=num_samples, progress_bar=False)


def test_reports_need_a_run_of_ours():
    options = {"num_warmup": 2, "num_samples": 4, "progress_bar": False}
    with pytest.raises(ValueError, match="sampler BPS; call `mcmc.run` first"):
        check(MCMC(BPS(model), **options))
    nuts = MCMC(NUTS(model), **options)
    nuts.run(random.key(0))
    with pytest.raises(ValueError, match="kernel of this package.* sampler NUTS"):
        check(nuts)


def test_conversion_of_another_kernel():
    nuts = MCMC(NUTS(model), num_warmup=2, num_samples=4, progress_bar=False)
    nuts.run(random.key(0))
    assert set(to_inference_data(nuts)["posterior"]) == {"a", "mu"}


def test_check_of_few_draws():
    mcmc = MCMC(BPS(model), num_warmup=2, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0))
    assert "Too few" in str(check(mcmc))


# Targets with walls


def ball(x):
    """A Gaussian in a disc of radius 2; outside, energy and gradient are NaN."""
    square = jnp.sum(x**2)
    return 0.5 * square + 0 * jnp.sqrt(4 - square)


def box(x):
    """The same, but the energy is infinite and the gradient zero."""
    return jnp.where(jnp.all(jnp.abs(x) < 1), 0.5 * jnp.sum(x**2), jnp.inf)


def walled_run(kernel, potential_fn, num_warmup=200, **options):
    # With a given metric there is no descent, which compiles in half the time.
    kernel = kernel(
        potential_fn=potential_fn, inverse_mass_matrix=np.ones(2), **options
    )
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(0), init_params=np.full(2, 0.1), extra_fields=ALL_STATS)
    return mcmc


def assert_moments(draws, variance):
    """Mean 0 and this variance, within five standard errors and a tenth of it.

    A wall is met only where the path is looked at, so moments are approximate.
    """
    for values, expected in ((draws, 0), (draws**2, variance)):
        error = values.std(0) / np.sqrt(effective_sample_size(values[None]))
        distance = np.abs(values.mean(0) - expected)
        assert np.all(distance < 5 * error + 0.1 * variance), (values.mean(0), error)


# On N(0, I) the squared radius is exponential with mean 2, here cut off at 4.
BALL_VARIANCE = 1 - 2 * math.exp(-2) / (1 - math.exp(-2))
BOX_VARIANCE = 1 - 2 * math.exp(-0.5) / math.sqrt(2 * math.pi) / math.erf(0.5**0.5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_energy_that_becomes_nan(kernel):
    mcmc = walled_run(kernel, ball)
    draws, fields = np.asarray(mcmc.get_samples()), mcmc.get_extra_fields()
    assert np.all(np.isfinite(draws))
    assert np.any(fields["diverging"])
    report = check(mcmc)
    assert report.nonfinite > 0 and not report.ok
    assert "not finite" in str(report) and "diverging" in str(report)
    assert_moments(draws, BALL_VARIANCE)
    if kernel is not Boomerang:  # whose arcs may pass behind it
        assert np.all(np.isfinite(fields["potential_energy"]))
        assert np.sum(draws**2, 1).max() < 4.001


@pytest.mark.parametrize("num_warmup, looks", ((200, None), (0, None), (200, True)))
def test_draws_behind_an_unseen_wall_are_flagged(num_warmup, looks):
    mcmc = walled_run(BPS, box, num_warmup, potential_energy=looks)
    fields = mcmc.get_extra_fields()
    outside = ~np.isfinite(fields["potential_energy"])
    assert not np.any(fields["diverging"][~outside])
    flagged = np.asarray(fields["diverging"][outside])
    # Without a warm-up one draw in 16 is looked at, until the first that is outside.
    first = 0 if num_warmup else np.argmax(flagged)
    assert first < 100 and len(flagged) > 1000
    assert np.all(flagged[first:])
    assert "hard_walls" in str(check(mcmc))


@pytest.mark.parametrize("kernel", KERNELS)
def test_energy_that_becomes_infinite(kernel):
    mcmc = walled_run(partial(kernel, hard_walls=True), box)
    draws, fields = np.asarray(mcmc.get_samples()), mcmc.get_extra_fields()
    assert np.all(np.isfinite(draws))
    assert np.any(fields["diverging"])
    assert "not finite" in str(check(mcmc))
    assert_moments(draws, BOX_VARIANCE)


def test_cut_off_draws_are_flagged():
    kernel = BPS(potential_fn=lambda x: 0.5 * jnp.sum(x**2), max_grad=1, draw_time=10.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=50, progress_bar=False)
    mcmc.run(random.key(0), init_params=np.ones(2), extra_fields=("num_grad",))
    fields = mcmc.get_extra_fields()
    assert np.all(fields["num_grad"] <= 1) and np.mean(fields["diverging"]) > 0.5
    assert np.all(np.isfinite(mcmc.get_samples()))
    assert "max_grad=1" in str(check(mcmc))
