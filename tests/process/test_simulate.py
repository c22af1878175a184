# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import ast
from functools import cache
from pathlib import Path

import arviz as az
import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro_pdmp.process as process
from numpyro_pdmp.process import (
    BOUNCE,
    NO_EVENT,
    REFRESH,
    REVERSAL,
    BoomerangProcess,
    BouncyParticle,
    ExactBound,
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
    Interpolation,
    PublishedInterpolation,
    Scale,
    Skeleton,
    Tangent,
    Tuning,
    ZigZagProcess,
    event_time_scheme,
    identity_scale,
    make_tick,
    simulate,
    start_path,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MEAN = np.array([0.3, 0.0, -0.5], np.float32)
PRECISION = np.array([1.5, 1.0, 0.7], np.float32)
SAMPLERS = {
    "bps": BouncyParticle(),
    "boomerang": BoomerangProcess(),
    "zigzag": ZigZagProcess(),
    "generalised": GeneralisedBouncyParticle(),
    "forward": ForwardBouncyParticle(orthogonal_mix=0.0),
}


def gaussian(x):
    return 0.5 * jnp.sum(PRECISION * (x - MEAN) ** 2)


def standard(x):
    return 0.5 * x @ x


def bps_bound(x, v):
    return (PRECISION * (x - MEAN)) @ v + 0.05, (PRECISION * v) @ v


def zigzag_bound(x, v):
    return v * PRECISION * (x - MEAN) + 0.05, PRECISION


def boomerang_bound(x, v):
    # |x|^2 + |v|^2 is constant on the circles around the origin.
    size2 = x @ x + v @ v
    gap, pull = np.max(np.abs(PRECISION - 1)), np.linalg.norm(PRECISION * MEAN)
    return gap * size2 / 2 + pull * jnp.sqrt(size2), 0.0


# Rates of BPS and ZigZag are linear on a Gaussian, those of Boomerang are not.
SCHEMES = {
    ("bps", "interpolation"): "interpolation",
    ("bps", "tangent"): "tangent",
    ("bps", "exact"): ExactBound(bps_bound),
    ("zigzag", "interpolation"): "interpolation",
    ("zigzag", "tangent"): "tangent",
    ("zigzag", "exact"): ExactBound(zigzag_bound),
    ("boomerang", "interpolation"): Interpolation(t_init=0.3),
    ("boomerang", "tangent"): Tangent(window=0.3),
    ("boomerang", "exact"): ExactBound(boomerang_bound),
    ("generalised", "exact"): ExactBound(bps_bound),
    ("forward", "regression"): "regression",
    ("zigzag", "regression"): "regression",
}


# One of them in coordinates of its own.
SCALE = Scale(
    jnp.array([0.2, -0.4, 0.0]),
    jnp.array([[0.9, 0.0, 0.0], [0.3, 0.8, 0.0], [0.2, -0.3, 1.0]]),
)


@cache
def run(sampler, scheme):
    return simulate(
        gaussian,
        SAMPLERS[sampler],
        random.PRNGKey(7),
        position=jnp.zeros(3),
        num_events=8000,
        event_time=SCHEMES[sampler, scheme],
        scale=SCALE if (sampler, scheme) == ("boomerang", "tangent") else None,
    )


@jax.jit
def moments(path):
    errors = path.standard_error(30, 1), path.standard_error(30, 2)
    return (path.mean(), path.variance()), errors


def assert_moments(path, mean, variance):
    actual, errors = moments(path)
    for moment, expected, error in zip(actual, (mean, variance), errors, strict=True):
        assert np.all(np.abs(moment - expected) < 5 * error), (moment, error)


def recorded(path):
    return [int(np.sum(path.kinds == kind)) for kind in (BOUNCE, REFRESH, REVERSAL)]


# Results


@pytest.mark.parametrize(("sampler", "scheme"), SCHEMES)
def test_gaussian_moments(sampler, scheme):
    path, stats = run(sampler, scheme)
    assert_moments(path, MEAN, 1 / PRECISION)
    assert stats.num_nonfinite == 0
    if scheme == "regression":
        assert stats.num_violations < 0.02 * stats.num_proposals
    elif scheme == "exact" or sampler != "boomerang":
        assert stats.num_violations == 0


@pytest.mark.parametrize(("sampler", "scheme"), SCHEMES)
def test_counts_and_record_agree(sampler, scheme):
    path, stats = run(sampler, scheme)
    assert recorded(path) == [stats.num_bounces, stats.num_refreshments, 0]
    assert path.kinds[0] == NO_EVENT and (path.kinds[1:] != NO_EVENT).all()
    assert stats.num_proposals == stats.ratio_histogram.sum()
    assert stats.num_bounces <= stats.num_proposals <= stats.num_grad
    # Accepted with probability min(1, ratio): sum_ratio is the expected number.
    error = 5 * float(stats.num_proposals) ** 0.5
    assert abs(float(stats.num_bounces - stats.sum_ratio)) <= error


def assert_continuous(path):
    """Each segment, followed for its duration, ends where the next one starts."""
    t, x, v = map(np.asarray, (path.durations, path.positions, path.velocities))
    assert (t >= 0).all()
    t, start, v = t[:, None], x[:-1] - path.center, v[:-1]
    if path.flow_name == "elliptic":
        ends = path.center + start * np.cos(t) + v * np.sin(t)
    else:
        ends = x[:-1] + t * v
    np.testing.assert_allclose(ends, x[1:], atol=1e-4)


@pytest.mark.parametrize(("sampler", "scheme"), SCHEMES)
def test_path_is_continuous(sampler, scheme):
    path, _ = run(sampler, scheme)
    assert path.flow_name == SAMPLERS[sampler].flow_name
    assert_continuous(path)


def test_ess_against_arviz():
    # Not with ZigZag, whose negative correlations ArviZ truncates.
    path, _ = run("bps", "interpolation")
    draws = np.asarray(path.discretize(8000))
    expected = [az.ess(x[None], method="mean") for x in draws.T]
    np.testing.assert_allclose(path.ess().mean(), np.mean(expected), rtol=0.3)


# Transformations and dtypes


def test_under_vmap_and_jit():
    @jax.jit
    @jax.vmap
    def paths(rng_key):
        return simulate(
            standard,
            BouncyParticle(),
            rng_key,
            position=jnp.zeros(2),
            num_events=150,
        )

    path, stats = paths(random.split(random.PRNGKey(0), 3))
    assert path.positions.shape == (3, 151, 2)
    assert (path.kinds[:, 1:] != NO_EVENT).all()
    assert stats.num_grad.shape == (3,)
    mean = jax.vmap(Skeleton.mean)(path)
    assert mean.shape == (3, 2) and np.unique(mean).size == 6


def test_float64(x64):
    path, stats = simulate(
        gaussian,
        BouncyParticle(),
        random.PRNGKey(2),
        position=jnp.ones(3),
        num_events=8000,
    )
    arrays = path.durations, path.positions, path.velocities, stats.sums
    assert {a.dtype for a in arrays} == {np.dtype("float64")}
    assert_moments(path, MEAN, 1 / PRECISION)


@pytest.mark.parametrize(("sampler", "scheme"), SCHEMES)
def test_float32_while_float64_is_enabled(sampler, scheme, x64):
    path, stats = jax.eval_shape(
        lambda rng_key: simulate(
            gaussian,
            SAMPLERS[sampler],
            rng_key,
            position=jnp.ones(3, "float32"),
            event_time=SCHEMES[sampler, scheme],
        ),
        random.PRNGKey(0),
    )
    arrays = path.durations, path.positions, path.velocities, stats.sums
    assert {a.dtype for a in arrays} == {np.dtype("float32")}


def test_max_ticks_ends_the_path_early():
    velocity = jnp.array([1.0, -1.0, 1.0])
    path, stats = simulate(
        gaussian,
        ZigZagProcess(),
        random.PRNGKey(0),
        position=np.array([1, 0, 2]),
        velocity=velocity,
        num_events=8000,
        max_ticks=50,
    )
    np.testing.assert_array_equal(path.positions[0], [1, 0, 2])
    np.testing.assert_array_equal(path.velocities[0], velocity)
    count = int(stats.num_bounces)
    assert stats.num_grad == 50 and 0 < count < 50
    assert recorded(path) == [count, 0, 0]
    assert (path.durations[count + 1 :] == 0).all()
    assert (path.positions[count + 1 :] == path.positions[-1]).all()
    assert (path.kinds[count + 1 :] == NO_EVENT).all()
    (mean, variance), _ = moments(path)
    assert np.isfinite(mean).all() and (variance > 0).all()


# Hard targets


def walled(x):
    """A Gaussian in a ball; not a number outside it, gradient included."""
    return 0.5 * x @ x + 0 * jnp.sqrt(2 - x @ x)


@pytest.mark.parametrize(
    ("sampler", "scheme"),
    [
        ("bps", "interpolation"),
        ("zigzag", "tangent"),
        ("boomerang", "interpolation"),
        ("forward", "regression"),
    ],
)
def test_non_finite_potential_turns_the_path_back(sampler, scheme):
    path, stats = simulate(
        walled,
        SAMPLERS[sampler],
        random.PRNGKey(0),
        position=jnp.full(2, 0.1),
        num_events=500,
        event_time=scheme,
    )
    assert stats.num_nonfinite > 0
    assert recorded(path)[2] > 0
    assert sum(recorded(path)) == 500
    assert np.isfinite(path.positions).all() and np.isfinite(path.velocities).all()
    assert (jnp.sum(path.positions**2, 1) <= 2).all()
    assert (path.durations >= 0).all()


def test_bound_that_is_too_low_is_counted():
    path, stats = simulate(
        standard,
        BouncyParticle(),
        random.PRNGKey(0),
        position=jnp.ones(2),
        num_events=500,
        event_time=ExactBound(lambda x, v: (0.5 * x @ v, 0.5 * v @ v)),
    )
    assert stats.num_violations == stats.num_proposals == stats.num_bounces > 0
    np.testing.assert_allclose(stats.sum_excess / stats.num_violations, 1, rtol=1e-3)
    # A violation is an event like others: the segment is not restarted.
    assert (np.asarray(path.durations)[path.kinds[1:] == BOUNCE] > 0).all()
    assert_continuous(path)


# Defects that must not come back


def test_interpolating_clamped_rates_is_biased_and_signed_rates_are_not():
    def sample(scheme):
        return simulate(
            standard,
            BouncyParticle(),
            random.PRNGKey(0),
            position=jnp.zeros(10),
            num_events=10_000,
            event_time=scheme,
        )[0]

    (_, variance), _ = moments(sample(PublishedInterpolation()))
    assert np.sqrt(variance.mean()) > 1.5
    assert_moments(sample(Interpolation()), 0, 1)


FALLING = {
    "line": lambda x: 2 * x[0] - x[0] ** 2 / 2,  # rate 2 - t
    "cauchy": lambda x: jnp.log1p((1.8 + x[0]) ** 2),
}


@cache
def first_events(scheme):
    """A function of keys and a number: times of the first bounce from 0 with
    velocity 1 on that potential of FALLING; infinite after time 3."""
    zero, sampler = jnp.zeros(1), BouncyParticle()
    tuning = Tuning(jnp.array(0.5), jnp.array(0.2))
    grads = [jax.grad(potential) for potential in FALLING.values()]

    def first(rng_key, which):
        tick = make_tick(
            lambda x: jnp.stack([grad(x) for grad in grads])[which],
            sampler,
            event_time_scheme(scheme),
            identity_scale(zero),
            tuning,
        )

        def step(state):
            path, time = state
            path = tick(path)
            return path, time + path.t_from

        path = start_path(
            rng_key,
            zero,
            zero + 1,
            sampler,
            jnp.array(3.0),
            zero[0],
            scheme=event_time_scheme(scheme),
        )
        path, time = lax.while_loop(
            lambda state: state[0].event == NO_EVENT, step, (path, zero[0])
        )
        return jnp.where(path.event == BOUNCE, time, jnp.inf)

    return jax.jit(jax.vmap(first, (0, None)))


@pytest.mark.parametrize("scheme", ["interpolation", "tangent", "regression"])
@pytest.mark.parametrize(("name", "end"), [("line", 2.0), ("cauchy", 3.0)])
def test_first_event_of_a_falling_rate(name, end, scheme):
    keys = random.split(random.PRNGKey(0), 4000)
    times = np.sort(first_events(scheme)(keys, list(FALLING).index(name)))
    grid = np.linspace(0, end, 400)
    rate = np.asarray(jax.vmap(jax.grad(FALLING[name]))(jnp.asarray(grid)[:, None]))
    hazard = np.cumsum(np.diff(grid) * (rate[1:, 0] + rate[:-1, 0]) / 2)
    expected = -np.expm1(-np.append(0, hazard))
    actual = np.searchsorted(times, grid, side="right") / times.size
    # Kolmogorov-Smirnov, at a level of one in a thousand
    assert np.max(np.abs(actual - expected)) < 1.95 / times.size**0.5
    assert np.isinf(times).any()  # the refreshment came first
    assert np.max(times[np.isfinite(times)]) <= end


@pytest.mark.parametrize(
    ("sampler", "scheme"),
    [
        (BoomerangProcess, "interpolation"),
        (BouncyParticle, "tangent"),
    ],
)
def test_no_evaluation_beyond_the_refreshment(sampler, scheme):
    # The path stays near the origin; a window that is not cut reaches the wall.
    path, stats = simulate(
        walled,
        sampler(refresh_rate=100.0, refresh_law="regular"),
        random.PRNGKey(0),
        position=jnp.zeros(2),
        num_events=500,
        event_time=scheme,
    )
    assert stats.num_nonfinite == 0
    assert stats.num_refreshments > 480
    cost = 2 if scheme == "tangent" else 1
    assert stats.num_grad < 1.2 * cost * stats.num_refreshments
    assert abs(path.times[-1] - stats.num_refreshments / 100) < 0.01


def test_rejected_proposals_are_never_accepted_in_the_end():
    # A cap on the number of proposals per event would break a bound of 50 times.
    def bound(x, v):
        return 50 * (PRECISION * (x - MEAN)) @ v, 50 * (PRECISION * v) @ v

    path, stats = simulate(
        gaussian,
        BouncyParticle(),
        random.PRNGKey(0),
        position=jnp.zeros(3),
        num_events=8000,
        event_time=ExactBound(bound),
    )
    assert (path.kinds[1:] != NO_EVENT).all()
    assert_moments(path, MEAN, 1 / PRECISION)
    assert stats.num_violations == 0
    proposals = float(stats.num_proposals)
    error = (0.02 * 0.98 / proposals) ** 0.5
    assert abs(stats.num_bounces / proposals - 0.02) < 5 * error


@pytest.mark.parametrize("renew", [False, True])
def test_bound_up_to_a_horizon(renew):
    def bound(x, v):  # a constant, too low later on
        rate, slope = (PRECISION * (x - MEAN)) @ v, (PRECISION * v) @ v
        return rate + 0.3 * slope, 0.0, 0.3

    path, stats = simulate(
        gaussian,
        BouncyParticle(),
        random.PRNGKey(0),
        position=jnp.zeros(3),
        num_events=8000,
        event_time=ExactBound(bound, renew),
    )
    assert_moments(path, MEAN, 1 / PRECISION)
    assert stats.num_violations == 0


# Errors and imports


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": jnp.zeros((2, 2))}, r"position has shape \(2, 2\)"),
        ({"position": 1.0}, r"position has shape \(\)"),
        ({"position": jnp.full(3, 9.0)}, "potential_fn is nan .* at position"),
        ({"num_events": 0}, "num_events=0"),
        ({"max_ticks": 0}, "max_ticks=0"),
        ({"velocity": jnp.ones(2)}, r"velocity has shape \(2,\)"),
        (
            {"event_time": "exact"},
            '"interpolation", "published", "tangent"',
        ),
        ({"event_time": Tangent}, "not an event-time scheme"),
        ({"sampler": BouncyParticle(refresh_rate=0.0)}, "refresh_rate=0.0 .* > 0"),
        ({"sampler": BoomerangProcess(refresh_rate=-1.0)}, "refresh_rate=-1.0 .* > 0"),
        ({"sampler": ZigZagProcess(refresh_rate=-1.0)}, "refresh_rate=-1.0 .* >= 0"),
        ({"sampler": BouncyParticle(refresh_rate=float("nan"))}, "refresh_rate=nan"),
    ],
)
def test_errors_name_argument_and_remedy(changes, message):
    arguments = {
        "potential_fn": walled,
        "sampler": BouncyParticle(),
        "rng_key": random.PRNGKey(0),
        "position": jnp.zeros(3),
    }
    with pytest.raises(ValueError, match=message):
        simulate(**(arguments | changes))


def test_process_does_not_import_numpyro():
    for file in Path(process.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [node.module]
            for name in names:
                assert name.split(".")[0] != "numpyro", file
                if name.split(".")[0] == "numpyro_pdmp":
                    assert name.startswith("numpyro_pdmp.process"), file


def test_all_names_exist():
    assert all(hasattr(process, name) for name in process.__all__)
