# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What warm-up tunes, what chains share, and where references and starts come from."""

import functools

import numpy as np
from numpy.testing import assert_allclose
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro_pdmp import (
    BPS,
    SGLD,
    Boomerang,
    LowRankScale,
    Scale,
    SigmaBPS,
    ZigZag,
    find_map,
    laplace_reference,
)
from numpyro_pdmp.descent import merge_modes
from numpyro_pdmp.moments import (
    low_rank_scale,
    spike_variances,
    update_moments,
    zero_moments,
)
from numpyro_pdmp.process.path import (
    start_path,
)
from numpyro_pdmp.process.samplers import BouncyParticle
from numpyro_pdmp.warmup import draw_moments, stretch_sums

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KERNELS = (BPS, Boomerang, ZigZag)


def run(kernel, *args, num_chains=4, num_warmup=500, num_samples=1000, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(kwargs.pop("seed", 0)), *args, **kwargs)
    return mcmc


def diagonal_gaussian(sd):
    sd = jnp.asarray(sd, jnp.float32)
    return lambda x: 0.5 * jnp.sum(jnp.square(x / sd))


def assert_moments(draws, mean, sd):
    """Means and standard deviations, within five Monte-Carlo standard errors.

    :param draws: (chain, draw, d).
    """
    draws = np.asarray(draws, float)
    error = np.abs(draws.mean((0, 1)) - mean)
    assert np.all(error < 5 * sd / np.sqrt(effective_sample_size(draws)))
    square = (draws - mean) ** 2
    ratio = np.sqrt(square.mean((0, 1))) / sd
    # The relative error of a variance is sqrt(2 / n), half that for its root.
    assert np.all(np.abs(ratio - 1) < 5 / np.sqrt(2 * effective_sample_size(square)))


# Chains that share their adaptation


@pytest.mark.parametrize("shared", [True, False])
def test_cross_chain_adapt(shared):
    options = {} if shared else {"cross_chain_adapt": False}
    kernel = Boomerang(potential_fn=diagonal_gaussian([1.0, 2.0]), **options)
    start = random.normal(random.key(1), (3, 2))
    mcmc = run(kernel, num_chains=3, num_warmup=30, num_samples=10, init_params=start)
    state = mcmc.last_state
    axes = () if shared else (3,)
    adapted = state.adapt_state
    assert adapted.scale.factor.shape == (*axes, 2, 2)
    assert adapted.scale.center.shape == (*axes, 2)
    for leaf in (adapted.tuning.offset, adapted.draw_time, adapted.refresh_rate):
        assert leaf.shape == axes
    assert state.z.shape == (3, 2) and state.path.z.shape == (3, 2)
    if not shared:
        assert np.unique(adapted.tuning.offset).size == 3


# Sigma-BPS


def stretch(z, v, t):
    path = start_path(random.key(0), z, v, BouncyParticle(), 1.0, 1.0)
    return path._replace(z_from=z, v_from=v, t_from=jnp.asarray(t))


def test_stretch_sums_are_integrals(x64):
    z, v, t = jnp.asarray([1.0, -2.0, 0.0]), jnp.asarray([0.5, 3.0, 0.0]), 1.7
    expected = [np.full(3, t), z * t + v * t**2 / 2]
    expected.append(z**2 * t + z * v * t**2 + v**2 * t**3 / 3)
    np.testing.assert_allclose(stretch_sums(stretch(z, v, t)), expected, rtol=1e-12)


def test_moments_of_a_path_do_not_depend_on_its_cuts(x64):
    # A path of two segments, cut at any places, has the moments of its integrals.
    turn, end, z = 0.6, 2.0, jnp.asarray([1.0, -1.0])
    velocities = jnp.asarray([[1.0, 2.0], [-0.5, 0.3]])
    corner = z + turn * velocities[0]
    whole = stretch_sums(stretch(z, velocities[0], turn))
    whole += stretch_sums(stretch(corner, velocities[1], end - turn))
    expected_mean = whole[1] / end
    expected = whole[2] / end - expected_mean**2
    cuts = [0, 0.25, turn, 0.7, 1.9, end]
    moments = zero_moments(Scale(z, jnp.ones(2)))
    stats = start_path(random.key(0), z, z, BouncyParticle(), 1.0, 1.0).stats
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        first = b <= turn
        v = velocities[0] if first else velocities[1]
        x = z + a * v if first else corner + (a - turn) * v
        sums = stretch_sums(stretch(x, v, b - a))
        draw = draw_moments(x, sums, jnp.asarray(b - a), stats)
        moments = update_moments(
            moments,
            x[None],
            x[None],
            *(a[None] for a in (draw.mean, draw.within, draw.weight)),
        )
    np.testing.assert_allclose(moments.num, end)
    np.testing.assert_allclose(moments.mean, expected_mean)
    np.testing.assert_allclose(moments.m2 / moments.num, expected)


def test_sigma_bps_learns_scales():
    sd = np.logspace(-1, 1, 6)
    # A metric that is given is a start without a descent: scales come from the path.
    kernel = SigmaBPS(
        potential_fn=diagonal_gaussian(sd), inverse_mass_matrix=np.ones(6)
    )
    start = sd * np.random.default_rng(0).normal(size=(4, 6))
    mcmc = run(kernel, num_warmup=1000, num_samples=2000, init_params=start)
    scale = mcmc.last_state.adapt_state.scale
    assert scale.factor.shape == (6,)
    # The last window has 4 x 400 draws, of which a fifth are independent in squares:
    # a standard error of 4 %, and 15 % is nearly four of those.
    np.testing.assert_allclose(scale.factor, sd, rtol=0.15)
    assert_moments(mcmc.get_samples(group_by_chain=True), np.zeros(6), sd)


def test_sampling_goes_on_from_the_end_of_warmup():
    num_warmup, dim = 40, 30
    kernel = SigmaBPS(potential_fn=diagonal_gaussian(np.ones(dim)), draw_time=0.02)
    state = kernel.init(random.key(0), num_warmup, jnp.ones(dim))

    def step(state, _):
        state = kernel.sample(state, (), {})
        return state, state.z

    draws = jax.jit(lambda s: lax.scan(step, s, None, num_warmup + 5)[1])(state)
    draws = draws[num_warmup - 3 :]  # the last new coordinates were at draw 32
    steps = np.linalg.norm(np.diff(draws, axis=0), axis=1)
    # A draw is at most 0.02 |v| from the last, and |v|^2 is chi-squared: about 0.11.
    # The mode is about sqrt(30) = 5.5 away.
    assert np.all(steps < 0.2)
    assert np.all(np.linalg.norm(draws, axis=1) > 2)


@pytest.mark.parametrize("name, value", [("dense_mass", True), ("low_rank", 3)])
def test_sigma_bps_is_diagonal(name, value):
    with pytest.raises(ValueError, match=rf"`{name}={value}`.*diagonal; use `BPS\("):
        SigmaBPS(potential_fn=jnp.sum, **{name: value})


# Diagonal plus low rank


def example_low_rank(dim=7):
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(dim, 3)))[0]
    vectors[:, 2] = 0  # a column that is not in use
    factor, center = np.exp(rng.normal(size=dim)), rng.normal(size=dim)
    stretch = np.asarray([3.0, 0.2, 1.0])
    return LowRankScale(*map(jnp.asarray, (center, factor, vectors, stretch)))


def test_low_rank_algebra(x64):
    scale = example_low_rank()
    z, g = random.normal(random.key(0), (2, 7))
    matrix = jax.vmap(scale.direction, out_axes=1)(jnp.eye(7))
    np.testing.assert_allclose(scale.position(z), scale.center + matrix @ z)
    np.testing.assert_allclose(scale.whiten(scale.position(z)), z)
    np.testing.assert_allclose(scale.gradient(g), matrix.T @ g)
    np.testing.assert_allclose(scale.covariance(), matrix @ matrix.T, atol=1e-12)
    np.testing.assert_allclose(scale.variance(), np.diag(scale.covariance()))


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_low_rank_keeps_marginal_variances(rank, x64):
    rng = np.random.default_rng(1)
    root = rng.normal(size=(5, 5)) + np.eye(5)
    covariance = root @ root.T
    sd = np.sqrt(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(sd, sd))
    scale = low_rank_scale(
        jnp.zeros(5), *map(jnp.asarray, (sd**2, values, vectors)), rank
    )
    assert scale.vectors.shape == (5, rank)
    np.testing.assert_allclose(scale.variance(), sd**2)
    if rank == 5:
        np.testing.assert_allclose(scale.covariance(), covariance)


def test_low_rank_with_fewer_directions_than_rank(x64):
    scale = low_rank_scale(
        jnp.zeros(4), jnp.arange(1.0, 5), jnp.asarray([4.0]), jnp.eye(4)[:, 1:2], 3
    )
    assert scale.vectors.shape == (4, 3) and scale.stretch.shape == (3,)
    np.testing.assert_allclose(scale.covariance(), np.diag(np.arange(1.0, 5)))


def test_spike_variances():
    dim, num, spike = 40, 400, 9.0
    x = np.random.default_rng(2).normal(size=(num, dim))
    x[:, 0] *= spike**0.5
    values = jnp.asarray(np.linalg.eigvalsh(x.T @ x / num)[::-1])
    found = spike_variances(values, jnp.asarray(dim / num))
    # The bulk ends at (1 + sqrt(0.1))^2 = 1.73, and is noise.
    assert values[1] > 1.4
    np.testing.assert_array_equal(found[1:], 1)
    # A variance from 400 draws has a standard error of 7 %.
    np.testing.assert_allclose(found[0], spike, rtol=0.2)


def test_low_rank_run():
    dim = 60
    vectors = np.random.default_rng(3).choice([-1.0, 1.0], (dim, 1)) / dim**0.5
    unit = np.logspace(-1, 1, dim)
    truth = LowRankScale(*map(jnp.asarray, (np.ones(dim), unit, vectors, [4.0])))
    sd = np.sqrt(np.asarray(truth.variance(), float))
    kernel = Boomerang(
        potential_fn=lambda x: 0.5 * jnp.sum(jnp.square(truth.whiten(x))),
        low_rank=3,
        inverse_mass_matrix=2 * sd**2,
        center=np.zeros(dim),
    )
    start = jax.vmap(truth.position)(random.normal(random.key(1), (4, dim)))
    mcmc = run(kernel, num_warmup=1000, num_samples=2000, init_params=start)
    scale = mcmc.last_state.adapt_state.scale
    assert isinstance(scale, LowRankScale) and scale.vectors.shape == (dim, 3)
    # Standard errors are about 3 % from some 500 independent draws.
    np.testing.assert_allclose(np.sqrt(scale.variance()), sd, rtol=0.15)
    # The wide direction is found, too: in coordinates of the truth it is not special.
    root = jax.vmap(scale.direction)(jnp.eye(dim))  # rows are columns of the factor
    root = jax.vmap(truth.whiten)(truth.center + root)
    values = np.linalg.svd(root, compute_uv=False)
    assert 1 / 1.5 < values.min() and values.max() < 1.5
    assert_moments(mcmc.get_samples(group_by_chain=True), np.ones(dim), sd)


# Envelopes


def log_cosh(x):
    return jnp.sum(jnp.logaddexp(x, -x))


def test_target_violation():
    rates, offsets = [], []
    fields = ("num_violations", "num_proposals")
    for target in (0.005, 0.05):
        mcmc = run(
            Boomerang(potential_fn=log_cosh, target_violation=target),
            num_chains=8,
            num_warmup=2000,
            num_samples=2000,
            init_params=random.normal(random.key(1), (8, 5)),
            extra_fields=fields,
        )
        violations, proposals = (mcmc.get_extra_fields()[k].sum() for k in fields)
        # The offset is an average over the final phase, which has a fifth as many
        # draws. Poisson noise of 150 and 30 violations is 8 and 18 %: 20 % in all, and
        # a factor 2 is more than three of those.
        assert target * proposals > 150
        rates.append(violations / proposals)
        offsets.append(mcmc.last_state.adapt_state.tuning.offset)
        assert target / 2 < rates[-1] < target * 2
    assert rates[0] < rates[1] and offsets[0] > offsets[1]


# Draw time and refreshment


def test_draw_time_grows_where_mixing_is_slow():
    # One coordinate is a hundred times wider than the metric that is kept says.
    potential_fn = diagonal_gaussian([1.0, 100.0])
    options = {"inverse_mass_matrix": np.ones(2), "adapt_mass_matrix": False}
    start = jnp.ones((4, 2))
    for draw_time in ("auto", 0.7):
        kernel = BPS(potential_fn=potential_fn, draw_time=draw_time, **options)
        mcmc = run(kernel, num_samples=10, init_params=start)
        found = mcmc.last_state.adapt_state.draw_time
        if draw_time == "auto":
            assert found > 4 * BPS.first_draw_time
        else:
            np.testing.assert_allclose(found, draw_time)


def test_draw_time_of_boomerang_on_a_gaussian():
    mcmc = run(
        Boomerang(potential_fn=diagonal_gaussian([1.0, 2.0, 3.0])),
        num_samples=10,
        init_params=jnp.ones((4, 3)),
    )
    np.testing.assert_allclose(mcmc.last_state.adapt_state.draw_time, np.pi / 2)


@pytest.mark.parametrize(
    "kernel, rate, law",
    [
        (BPS, 1.0, "exponential"),
        (SigmaBPS, 1.0, "exponential"),
        (Boomerang, 0.45, "regular"),
        (ZigZag, 0.0, "exponential"),
    ],
)
def test_refresh_rate(kernel, rate, law):
    def found(**options):
        new = kernel(potential_fn=log_cosh, **options)
        assert new._sampler.refresh_law == law
        return new.init(random.key(0), 0, jnp.ones(2)).adapt_state.refresh_rate

    np.testing.assert_allclose(found(), rate)
    np.testing.assert_allclose(found(refresh_rate="auto"), rate)
    np.testing.assert_allclose(found(refresh_rate=0.3), 0.3)


# References

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]])
Y = X @ np.array([1.0, -1.0]) + RNG.normal(size=50)


def linear(x, y):
    """Gaussian posterior of two weights."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


COVARIANCE = np.linalg.inv(X.T @ X + np.eye(2) / 4)
MEAN, SD = COVARIANCE @ X.T @ Y, np.sqrt(np.diag(COVARIANCE))
FACTOR = np.linalg.cholesky(COVARIANCE)


@functools.cache
def references():
    """Wrong in centre and scale, so that there is something to correct."""
    center = jnp.asarray(MEAN + 0.3 * SD)
    guide = AutoMultivariateNormal(linear)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.block():
        guide(X, Y)
    params = {"auto_loc": center, "auto_scale_tril": jnp.asarray(1.3 * FACTOR)}
    vector = FACTOR[:, :1] / SD[:, None]
    return {
        "diagonal": Scale(MEAN + 0.3 * SD, SD),  # NumPy's, in double precision
        "low rank": LowRankScale(
            center,
            jnp.asarray(SD),
            jnp.asarray(vector / np.linalg.norm(vector)),
            jnp.asarray([1.4]),
        ),
        "guide": (guide, params),
        "laplace": laplace_reference(linear, {"w": center}, X, Y, gamma=1.5),
    }


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "guide", "laplace"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_reference_is_where_warmup_starts(kernel, kind):
    reference = references()[kind]
    state = kernel(linear, reference=reference).init(
        random.key(0), 100, None, (X, Y), {}
    )
    np.testing.assert_allclose(state.z["w"], MEAN + 0.3 * SD, rtol=1e-5)
    np.testing.assert_allclose(state.path.z, 0, atol=1e-5)
    scale = state.adapt_state.scale
    if kind != "guide":
        for found, expected in zip(scale, reference, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        np.testing.assert_allclose(scale.covariance(), 1.69 * COVARIANCE, rtol=1e-4)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        (Boomerang, "guide"),
        (Boomerang, "low rank"),
        (BPS, "laplace"),
        (ZigZag, "diagonal"),
    ],
)
def test_reference_is_kept_and_the_posterior_is_right(kernel, kind):
    new = kernel(linear, reference=references()[kind])
    before = new.init(random.key(0), 100, None, (X, Y), {}).adapt_state.scale
    mcmc = run(new, X, Y, num_warmup=300, num_samples=1500)
    after = mcmc.last_state.adapt_state.scale
    assert type(before) is type(after)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_moments(mcmc.get_samples(group_by_chain=True)["w"], MEAN, SD)


def test_reference_is_refined_on_request():
    wide = Scale(jnp.asarray(MEAN + 3 * SD), jnp.asarray(4 * FACTOR))
    kernel = Boomerang(linear, reference=wide, adapt_mass_matrix=True)
    scale = run(
        kernel, X, Y, num_warmup=1000, num_samples=10
    ).last_state.adapt_state.scale
    # The last window has 4 x 400 draws, some 600 of them independent: 3 %.
    np.testing.assert_allclose(np.sqrt(scale.variance()), SD, rtol=0.15)
    assert np.all(np.abs(scale.center - MEAN) < 0.3 * SD)


@pytest.mark.parametrize(
    "options",
    [
        {"inverse_mass_matrix": np.ones(2)},
        {"center": np.zeros(2)},
        {"dense_mass": False},
        {"low_rank": 1},
    ],
)
def test_reference_alone_sets_centre_and_scale(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`reference` and `{name}` are both given"):
        Boomerang(linear, reference=Scale(jnp.zeros(2), jnp.ones(2)), **options)


def test_reference_of_another_model():
    def other():
        numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))

    guide = AutoNormal(other)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        guide()
    params = {k: v["value"] for k, v in trace.items() if v["type"] == "param"}
    kernel = Boomerang(linear, reference=(guide, params))
    with pytest.raises(ValueError, match=r"\{'a': \(3,\)\}; the model's.*'w': \(2,\)"):
        kernel.init(random.key(0), 100, None, (X, Y), {})


# Starts


def test_map_starts_chains():
    result = find_map(linear, random.key(0), X, Y, progress_bar=False)
    np.testing.assert_allclose(result.params["w"], MEAN, atol=0.02 * SD.min())
    assert result.init_params()["w"].shape == (2,)
    start = result.init_params(3)
    assert start["w"].shape == (3, 2)
    kernel = BPS(linear, reference=laplace_reference(linear, result, X, Y))
    mcmc = run(
        kernel, X, Y, num_chains=3, num_warmup=0, num_samples=5, init_params=start
    )
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    assert draws.shape == (3, 5, 2)
    # Within a unit of time no coordinate is far from the mode.
    assert np.all(np.abs(draws[:, 0] - MEAN) < 5 * SD)
    assert np.unique(np.asarray(draws[:, 0, 0])).size == 3


@pytest.mark.parametrize("chain_method", ["vectorized", "sequential", "parallel"])
@pytest.mark.parametrize("kernel", (Boomerang, SGLD))
def test_map_as_reference_has_the_curvature_there(kernel, chain_method):
    result = find_map(linear, random.key(0), X, Y, progress_bar=False)
    new = kernel(linear, reference=result)
    mcmc = MCMC(
        new,
        num_warmup=3,
        num_samples=3,
        num_chains=1 if chain_method == "parallel" else 2,
        chain_method=chain_method,
        progress_bar=False,
    )
    mcmc.run(random.key(0), X, Y)
    expected = laplace_reference(linear, result, X, Y)
    for found, each in zip(mcmc.last_state.adapt_state.scale, expected, strict=True):
        found = np.broadcast_to(np.asarray(found), (2, *each.shape))[0]
        np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-6)
    # The kernel is not bound to these data: with others it has another scale.
    state = new.init(random.key(0), 3, None, (X[:50], Y[:50]), {})
    narrow = laplace_reference(linear, result, X[:50], Y[:50])
    np.testing.assert_allclose(state.adapt_state.scale.factor, narrow.factor, rtol=1e-4)


def test_map_as_reference_needs_a_model():
    result = find_map(linear, random.key(0), X, Y, progress_bar=False)
    kernel = Boomerang(potential_fn=lambda z: jnp.sum(z**2), reference=result)
    with pytest.raises(ValueError, match="whose curvature takes a `model`"):
        kernel.init(random.key(0), 3, {"w": jnp.zeros(2)})


@pytest.mark.parametrize("dense", [True, False])
def test_equal_modes_are_merged_to_their_mixture(dense):
    modes = jnp.asarray([[2.0, 1.0], [-2.0, 1.0]])
    unit = jnp.asarray([[1.0, 0.0], [0.5, 2.0]]) if dense else jnp.asarray([0.5, 2.0])
    scales = Scale(modes, jnp.stack([unit, unit]))
    starts = modes + 0.1
    scale, found = merge_modes(scales, jnp.asarray([-3.0, -3.0]), starts)
    np.testing.assert_allclose(scale.center, [0, 1], atol=1e-6)
    within = np.asarray(unit @ unit.T if dense else unit**2)
    between = np.asarray([[4.0, 0], [0, 0]] if dense else [4.0, 0])
    np.testing.assert_allclose(scale.covariance(), within + between, rtol=1e-6)
    np.testing.assert_array_equal(found, starts)


def test_a_chain_in_a_negligible_mode_is_started_elsewhere():
    modes = jnp.asarray([[0.0], [50.0], [1.0]])
    scales = Scale(modes, jnp.ones((3, 1)))
    scale, starts = merge_modes(scales, jnp.asarray([0.0, -30.0, 0.0]), modes + 0.1)
    np.testing.assert_allclose(starts, [[0.1], [0.1], [1.1]])
    np.testing.assert_allclose(scale.center, 0.5, rtol=1e-5)
    np.testing.assert_allclose(scale.variance(), 1.25, rtol=1e-5)


def test_models_may_need_the_values_of_arrays():
    def model(group, y):
        num_groups = int(np.asarray(group).max()) + 1
        a = numpyro.sample("a", dist.Normal(0, 1).expand([num_groups]).to_event(1))
        numpyro.sample("y", dist.Normal(a[group], 1.0), obs=y)

    data = jnp.asarray([0, 1, 2, 1]), jnp.ones(4)
    for keys in (random.key(0), random.split(random.key(0), 2)):
        state = Boomerang(model).init(keys, 50, None, data, {})
        assert state.z["a"].shape[-1] == 3
        assert np.all(np.isfinite(state.potential_energy))


# Bad input


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"target_violation": 0}, ValueError, "`target_violation`.* got 0;"),
        ({"target_violation": 1.0}, ValueError, "`target_violation`.* got 1.0;"),
        ({"low_rank": 0}, ValueError, "`low_rank` must be positive, got 0"),
        ({"low_rank": 2.5}, TypeError, "`low_rank` must be an integer, got 2.5"),
        (
            {"low_rank": 2, "dense_mass": True},
            ValueError,
            "`low_rank=2` and `dense_mass=True` exclude",
        ),
        (
            {"low_rank": 2, "inverse_mass_matrix": np.eye(3)},
            ValueError,
            "`inverse_mass_matrix` is a matrix but `low_rank` is given",
        ),
        ({"draw_time": "fast"}, ValueError, "`draw_time` must be .* got 'fast'"),
        ({"refresh_rate": "fast"}, ValueError, "or 'auto', got 'fast'"),
        ({"step_size": 0.1}, TypeError, "unknown arguments: .*`step_size`"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_input(kernel, options, error, message):
    with pytest.raises(error, match=message):
        kernel(potential_fn=log_cosh, **options)


def test_offset_that_is_not_needed_stays_small():
    """Lines are exact here: the offset sinks as long as warm-up lasts."""
    kernel = ZigZag(potential_fn=lambda x: 0.5 * x @ x, draw_time=1.0)
    mcmc = MCMC(
        kernel,
        num_warmup=1500,
        num_samples=1,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=np.ones((16, 10)))
    assert 0 < mcmc.last_state.adapt_state.tuning.offset < 1e-6


def test_envelope_is_that_of_the_final_phase():
    """Also where the scale and the draw time are given, and no window renews them."""
    kernel = BPS(
        potential_fn=lambda x: jnp.sum(jnp.sqrt(1 + x**2)),
        inverse_mass_matrix=jnp.ones(2),
        adapt_mass_matrix=False,
        draw_time=1.0,
    )
    state = kernel.init(random.key(0), 200, np.ones(2), (), {})
    tuning = state.adapt_state.tuning._replace(offset=jnp.asarray(1e3))
    state = state._replace(adapt_state=state.adapt_state._replace(tuning=tuning))

    def step(state, _):
        state = kernel.sample(state, (), {})
        return state, state.adapt_state.tuning.offset

    _, offsets = jax.jit(lambda s: lax.scan(step, s, length=200))(state)
    assert_allclose(offsets[-1], np.exp(np.log(offsets[160:-1]).mean()), rtol=0.05)
