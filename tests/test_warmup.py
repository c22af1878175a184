# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, ZigZag
from numpyro_pdmp.descent import find_mode, find_start
from numpyro_pdmp.moments import renew_scale, update_moments, zero_moments
from numpyro_pdmp.process.events import event_time_scheme
from numpyro_pdmp.process.path import read_output, start_path
from numpyro_pdmp.process.samplers import BouncyParticle
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.warmup import draw_moments, tune, window_ends

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KERNELS = (BPS, Boomerang, ZigZag)


def gaussian(dim=6, low=-3, high=3, rho=0.8):
    """Mean, covariance and potential of a Gaussian, scales ``10**low..10**high``."""
    scales = np.logspace(low, high, dim)
    lag = np.abs(np.subtract.outer(np.arange(dim), np.arange(dim)))
    covariance = rho**lag * np.outer(scales, scales)
    mean = scales * np.linspace(-1, 1, dim)
    # Factored in NumPy: the precision matrix has no digits left in single precision.
    factor = np.linalg.inv(np.linalg.cholesky(rho**lag))

    def potential_fn(x):
        return 0.5 * jnp.sum(jnp.square(factor @ ((x - mean) / scales)))

    return mean, covariance, potential_fn


def relative_eigenvalues(estimate, covariance):
    """Eigenvalues of the estimate in coordinates in which the truth is the identity."""
    inverse = np.linalg.inv(np.linalg.cholesky(covariance))
    return np.linalg.eigvalsh(inverse @ np.asarray(estimate, float) @ inverse.T)


# Schedule


@pytest.mark.parametrize("num_warmup", [20, 60, 150, 300, 1000, 3000])
def test_windows_double_between_settling_and_final_phase(num_warmup):
    ends = window_ends(num_warmup)
    assert ends[0] == round(0.05 * num_warmup) and ends[-1] == round(0.8 * num_warmup)
    lengths = np.diff(ends)
    assert np.all(lengths[1:-1] == 2 * lengths[:-2])
    assert np.all(lengths[1:] >= lengths[:-1])


def test_window_ends_literally():
    assert window_ends(1000).tolist() == [50, 100, 200, 400, 800]


@pytest.mark.parametrize("num_warmup", [0, 1, 5, 19])
def test_short_warmup_is_one_window(num_warmup):
    assert window_ends(num_warmup).tolist() == [0, num_warmup]


# Moments and scale


def moments_of(draws, factor):
    start = zero_moments(Scale(jnp.zeros(draws.shape[1]), jnp.asarray(factor)))

    def update(carry, z):
        moments, last = carry
        return (update_moments(moments, z[None], last[None]), z), None

    return lax.scan(update, (start, jnp.zeros(draws.shape[1])), draws)[0][0]


@pytest.mark.parametrize("dense", [True, False])
def test_update_moments_against_numpy(dense):
    draws = 3 + 2 * random.normal(random.key(0), (50, 3))
    moments = moments_of(draws, np.eye(3, dtype="f4") if dense else np.ones(3, "f4"))
    covariance = np.cov(draws, rowvar=False, ddof=0)
    expected = covariance if dense else np.diag(covariance)
    assert moments.num == 50
    np.testing.assert_allclose(moments.mean, np.mean(draws, 0), rtol=1e-5)
    np.testing.assert_allclose(moments.m2 / moments.num, expected, rtol=1e-4, atol=1e-5)


def test_draws_that_were_cut_off_count_little():
    """They are where gradients were needed, and not at a given time."""
    sampler, z = BouncyParticle(), jnp.zeros(2)
    path = start_path(random.key(0), z, jnp.ones(2), sampler, 9.0, t_output=1.5)
    path = path._replace(t_from=jnp.asarray(1.0))
    path, place = read_output(path, sampler, 2.0)
    np.testing.assert_allclose(place, 1)
    assert path.t_output == 1.5  # still waits for it
    path, place = read_output(path._replace(t_from=jnp.asarray(2.0)), sampler, 2.0)
    np.testing.assert_allclose(place, 1.5)
    assert path.t_output == 3.5
    cut_off = path.stats.with_cut_off(jnp.asarray(True))
    weights = [
        draw_moments(z, None, path.t_output, stats).weight
        for stats in (path.stats, cut_off)
    ]
    assert weights[0] == 1 and weights[1] < 0.05


def test_renewed_scale_ignores_noise():
    dim, num = 20, 60
    draws = random.normal(random.key(1), (num, dim))
    old = Scale(jnp.zeros(dim), jnp.eye(dim))
    new = renew_scale(old, moments_of(draws, old.factor), None)
    raw = np.cov(draws, rowvar=False, ddof=0)
    error = np.linalg.norm(new.covariance() - np.eye(dim))
    assert error < 0.2 * np.linalg.norm(raw - np.eye(dim))
    assert np.linalg.norm(new.center) < 0.2 * np.linalg.norm(np.mean(draws, 0))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_renewed_scale_recovers(dense, wrong):
    dim = 3
    truth = np.linspace(1, 2, dim)
    scale = Scale(
        jnp.full(dim, 5.0), (jnp.eye(dim) if dense else jnp.ones(dim)) * wrong
    )
    for key in random.split(random.key(2), 3):
        x = 1 + truth * random.normal(key, (400, dim))
        moments = moments_of(jax.vmap(scale.whiten)(x), scale.factor)
        scale = renew_scale(scale, moments, None)
    variances = scale.covariance()
    variances = np.diag(variances) if dense else variances
    # Three standard errors of a standard deviation from 400 draws are 11 %.
    np.testing.assert_allclose(np.sqrt(variances), truth, rtol=0.15)
    np.testing.assert_allclose(scale.center, 1, atol=0.5)


def test_renewed_scale_keeps_blocks():
    draws = random.normal(random.key(3), (100, 3)) @ random.normal(
        random.key(4), (3, 3)
    )
    mask = np.eye(3, dtype=bool)
    mask[0, 1] = mask[1, 0] = True
    old = Scale(jnp.zeros(3), jnp.eye(3))
    covariance = renew_scale(old, moments_of(draws, old.factor), mask).covariance()
    assert np.all((np.abs(covariance) > 1e-3) == mask)


@pytest.mark.parametrize("num", [0, 1])
def test_renewed_scale_needs_draws(num):
    old = Scale(jnp.zeros(2), jnp.eye(2))
    new = renew_scale(old, moments_of(jnp.ones((num, 2)), old.factor), None)
    np.testing.assert_array_equal(new.factor, old.factor)
    np.testing.assert_array_equal(new.center, old.center)


# Descent


def test_mode_of_badly_scaled_quadratic():
    mean, covariance, potential_fn = gaussian()
    mode, root, log_mass = find_mode(potential_fn, jnp.ones(6))
    # The descent stops within 0.01 of the minimal energy.
    assert potential_fn(mode) < 0.02
    values = relative_eigenvalues(root @ root.T, covariance)
    np.testing.assert_allclose(values, 1, rtol=0.02)
    # The mass of a Gaussian without its factors of 2 pi.
    expected = 0.5 * np.linalg.slogdet(covariance)[1]
    np.testing.assert_allclose(log_mass, expected, atol=0.05)


def rosenbrock(x):
    return 0.5 * (1 - x[0]) ** 2 + 20 * (x[1] - x[0] ** 2) ** 2


@pytest.mark.parametrize("start", [(-2.0, 2.0), (2.0, -2.0), (-1.0, 1.0)])
def test_mode_of_a_curved_valley(start):
    mode, root, _ = find_mode(rosenbrock, jnp.asarray(start))
    # Along the valley steps are short; a draw has energy 1 on average.
    assert rosenbrock(mode) < 0.5
    assert np.all(np.isfinite(root))


@pytest.mark.parametrize("start", [1.5, 5.0, 50.0])
def test_mode_of_a_steep_potential(start):
    def potential_fn(x):
        return jnp.sum((x / 2) ** 20)

    mode, root, _ = find_mode(potential_fn, jnp.full(2, start))
    assert potential_fn(mode) < 0.1
    assert np.all(np.isfinite(root))


def test_start_leaves_a_negligible_mode():
    def potential_fn(x):  # a mode at 1.5 and one of e^20 times its mass at -1.5
        energies = 20 * (x - jnp.asarray([1.5, -1.5])) ** 2 + jnp.asarray([20.0, 0.0])
        return -jax.nn.logsumexp(-energies)

    start = jnp.asarray([1.5])
    scale, *_ = find_start(potential_fn, start, Scale(start, jnp.eye(1)), None)
    np.testing.assert_allclose(scale.center, -1.5, atol=0.1)


# The kernel


def trajectory(kernel, num_warmup, num_steps, init_params, seed=0):
    """All states of a run, warm-up included."""
    state = kernel.init(random.key(seed), num_warmup, init_params)

    def step(state, _):
        state = kernel.sample(state, (), {})
        return state, state

    return jax.jit(lambda s: lax.scan(step, s, None, num_steps))(state)[1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_warmup_recovers_scales_then_freezes(kernel):
    mean, covariance, potential_fn = gaussian()
    num_warmup = 1000
    states = trajectory(
        kernel(potential_fn=potential_fn), num_warmup, num_warmup + 30, jnp.ones(6)
    )
    scale, tuning = states.adapt_state.scale, states.adapt_state.tuning
    metric = scale.factor[-1] @ scale.factor[-1].T
    deviations = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(np.sqrt(np.diag(metric)), deviations, rtol=0.2)
    # The worst direction has more noise: BPS leaves some 90 effective draws for 6.
    values = np.sqrt(relative_eigenvalues(metric, covariance))
    assert 1 / 1.5 < values.min() and values.max() < 1.5
    assert np.abs((scale.center[-1] - mean) / deviations).max() < 0.5
    for x in jax.tree.leaves((scale, tuning)):
        frozen = np.asarray(x)[num_warmup - 1 :]
        np.testing.assert_array_equal(frozen, np.broadcast_to(frozen[0], frozen.shape))
    assert np.unique(tuning.offset[:num_warmup]).size > 10  # it did adapt before


@pytest.mark.parametrize("target", [0.005, 0.05])
def test_offset_settles_where_the_share_is_the_target(target):
    """Of proposals whose violations are known to fall as the cube of the offset."""
    kernel = BPS(potential_fn=lambda x: jnp.sum(x**2), target_violation=target)
    state = kernel.init(random.key(0), 1000, jnp.ones(2))
    wanted, num_proposals = 0.3, 25

    def share(offset):
        return jnp.minimum(target * (wanted / offset) ** 3, 1)

    def one_draw(adapt_state, i_key):
        i, key = i_key
        violations = random.binomial(
            key, num_proposals, share(adapt_state.tuning.offset)
        )
        # As many evaluations at ends of windows as keep those as they are.
        counts = jnp.zeros_like(state.stats.counts)
        counts = counts.at[jnp.asarray([0, 1, 3, 4])].set(
            jnp.asarray([45, 15, num_proposals, violations], int)
        )
        draw = draw_moments(
            state.path.z, None, jnp.ones(()), state.stats._replace(counts=counts)
        )
        draws = jax.tree.map(lambda a: a[None], draw)
        return tune(
            adapt_state,
            draws,
            state.path.z[None],
            i,
            BouncyParticle(),
            event_time_scheme("interpolation"),
            target,
            moments=False,
        ), None

    @jax.vmap
    def frozen(key):
        i_key = jnp.arange(1000), random.split(key, 1000)
        return lax.scan(one_draw, state.adapt_state, i_key)[0].tuning.offset

    found = share(frozen(random.split(random.key(1), 100))) / target
    # With steps that do not shrink the mean is -0.08 for the smaller target. The final
    # phase expects 25 violations, or 250: Poisson noise of 0.2 and 0.06.
    logs = np.log(found)
    assert abs(logs.mean()) < 0.02 + 3 * logs.std() / 100**0.5
    assert logs.std() < {0.005: 0.22, 0.05: 0.08}[target]


def test_without_warmup_nothing_is_adapted():
    states = trajectory(
        Boomerang(potential_fn=gaussian(2, 0, 0)[2]), 0, 10, jnp.ones(2)
    )
    adapted = states.adapt_state
    np.testing.assert_array_equal(adapted.scale.factor[-1], jnp.eye(2))
    np.testing.assert_array_equal(adapted.scale.center[-1], jnp.zeros(2))
    assert np.unique(adapted.tuning.window).size == 1
    assert np.unique(adapted.tuning.offset).size == 1


@pytest.mark.parametrize("num_warmup", [1, 5])
def test_short_warmup(num_warmup):
    _, covariance, potential_fn = gaussian(2, 0, 0)
    states = trajectory(
        Boomerang(potential_fn=potential_fn), num_warmup, 10, jnp.ones(2)
    )
    factor = states.adapt_state.scale.factor[-1]
    assert np.all(np.isfinite(states.z)) and np.all(np.isfinite(factor))
    # The descent alone has found it; so few draws cannot do harm.
    values = relative_eigenvalues(factor @ factor.T, covariance)
    assert 0.5 < values.min() and values.max() < 2


def test_adaptation_can_be_off():
    matrix = np.asarray([[2.0, 0.5], [0.5, 1.0]])
    kernel = ZigZag(
        potential_fn=gaussian(2, 0, 0)[2],
        inverse_mass_matrix=matrix,
        center=np.ones(2),
        adapt_mass_matrix=False,
    )
    states = trajectory(kernel, 30, 40, jnp.ones(2))
    scale = states.adapt_state.scale
    factor = np.linalg.cholesky(matrix)
    np.testing.assert_allclose(
        scale.factor, np.broadcast_to(factor, (40, 2, 2)), rtol=1e-6
    )
    assert np.all(np.asarray(scale.center) == 1)
    assert np.unique(states.adapt_state.tuning.offset).size > 5  # envelopes still are


def test_given_metric_is_refined_without_descent():
    _, covariance, potential_fn = gaussian(2, 0, 0)
    kernel = BPS(potential_fn=potential_fn, inverse_mass_matrix=np.full(2, 100.0))
    mcmc = MCMC(kernel, num_warmup=300, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.ones(2))
    factor = mcmc.last_state.adapt_state.scale.factor
    values = relative_eigenvalues(factor @ factor.T, covariance)
    assert 0.5 < values.min() and values.max() < 2


# The start


def starts(kernel, num_chains, num_warmup=100):
    """State and positions of chains that begin."""
    keys = random.split(random.key(0), num_chains)
    state = kernel.init(keys, num_warmup, jnp.zeros((num_chains, kernel.dim)))
    positions = jax.vmap(state.adapt_state.scale.position)(state.path.z)
    return state, np.asarray(positions, float)


@pytest.mark.parametrize("options", [{"dense_mass": False}, {"low_rank": 1}, {}])
def test_starts_have_all_of_the_curvature(options):
    """Whatever the metric leaves out: else paths have to grow to their size first."""
    mean, covariance, potential_fn = gaussian(dim=4, low=-1, high=1, rho=0.97)
    kernel = Boomerang(potential_fn=potential_fn, **options)
    kernel.dim = 4
    _, x = starts(kernel, 400)
    white = np.linalg.solve(np.linalg.cholesky(covariance), (x - mean).T)
    values = np.linalg.eigvalsh(white @ white.T / 400)
    # Of a Wishart matrix: Marchenko and Pastur's limits are 0.81 and 1.21.
    assert 0.7 < values[0] and values[-1] < 1.35


def test_first_envelopes_are_for_the_rates_at_the_start():
    """A metric without correlations has rates far above those of a good one."""
    dim = 20
    _, _, potential_fn = gaussian(dim=dim, low=0, high=0, rho=0.99)
    kernel = Boomerang(potential_fn=potential_fn, dense_mass=False)
    kernel.dim = dim
    state, _ = starts(kernel, 32)

    @jax.jit
    def first_draws(state):
        return lax.scan(lambda s, _: 2 * (kernel.sample(s, (), {}),), state, None, 5)[1]

    stats = first_draws(state).stats
    violations = np.sum(stats.num_violations) / np.sum(stats.num_proposals)
    assert violations < 0.15, violations
