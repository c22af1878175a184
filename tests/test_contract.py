# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What NumPyro's ``MCMC`` and its other users of kernels expect of one."""

from functools import cache
import os
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import kstest

import jax
from jax import export, lax, random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import (
    MCMC,
    NUTS,
    DiscreteGibbs,
    Gibbs,
    Predictive,
    init_to_value,
    log_likelihood,
)
from numpyro.infer.gibbs import discrete_latent_sites
from numpyro.infer.util import (
    ParamInfo,
    initialize_model,
    potential_energy,
    unconstrain_fn,
)
from numpyro_pdmp import (
    ALL_STATS,
    BPS,
    SBPS,
    Boomerang,
    ForwardBPS,
    ZigZag,
    run_chunks,
)
from numpyro_pdmp.process import REFRESH

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KERNELS = (BPS, Boomerang, ZigZag)
X = np.linspace(-1, 1, 10)[:, None] ** np.arange(1, 3)
Y = X @ [1.0, -1.0] + 0.3 * np.sin(np.arange(10))
SITES = ("a", "b", "s")

# NumPyro donates buffers that `jax.vmap` over whole chains cannot use.
DONATED = pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")


def regression(x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    mean = numpyro.deterministic("mean", a + x @ b)
    numpyro.sample("y", dist.Normal(mean, s), obs=y)


def run(kernel, key=0, args=(), num_warmup=5, num_samples=40, extra=(), **kwargs):
    init_params = kwargs.pop("init_params", None)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
        **kwargs,
    )
    key = random.key(key) if isinstance(key, int) else key
    mcmc.run(key, *args, extra_fields=extra, init_params=init_params)
    return mcmc


def assert_expectation(draws, expected, slack=0.0):
    """The mean of ``(chains, draws, ...)`` is within five standard errors."""
    draws = np.asarray(draws, float)
    error = draws.std((0, 1)) / np.sqrt(effective_sample_size(draws))
    distance = np.abs(draws.mean((0, 1)) - expected)
    assert np.all(distance < 5 * error + slack), (draws.mean((0, 1)), expected, error)


# Their warm-ups differ, for variety and for shorter compilation.
ADAPTATIONS = {
    BPS: {"dense_mass": False, "inverse_mass_matrix": np.ones(4)},
    Boomerang: {},
    ZigZag: {"adapt_mass_matrix": False},
}


OPTIONS = {"args": (X, Y), "extra": ALL_STATS}


@cache
def runs_of(kernel):
    """Two chains by two methods, and one chain, all of the same kernel *object*."""
    kernel = kernel(regression, cross_chain_adapt=False, **ADAPTATIONS[kernel])
    return {
        "vectorized": run(kernel, num_chains=2, chain_method="vectorized", **OPTIONS),
        "sequential": run(kernel, num_chains=2, chain_method="sequential", **OPTIONS),
        "single": run(kernel, random.split(random.key(0))[1], **OPTIONS),
    }


@pytest.fixture(scope="module", params=KERNELS, ids=lambda k: k.__name__)
def runs(request):
    return runs_of(request.param)


@pytest.fixture(scope="module")
def finished(runs):
    return runs["vectorized"]


def draws_of(mcmc, sites=SITES):
    draws = mcmc.get_samples(group_by_chain=True)
    return np.concatenate(
        [np.reshape(draws[k], (*draws[k].shape[:2], -1)) for k in sites], -1
    )


def assert_same_start(actual, desired, num=5):
    """Equal up to rounding errors, which grow with every event: so only at first."""
    assert actual.shape == desired.shape
    np.testing.assert_allclose(actual[:, :num], desired[:, :num], atol=1e-3)


# The kernel's own methods


@pytest.mark.parametrize("kernel", (*KERNELS, ForwardBPS, SBPS))
def test_attributes(kernel):
    kernel = kernel(regression)
    assert kernel.sample_field == "z"
    assert kernel.default_fields == ("z", "diverging")
    assert kernel.model is regression
    assert not kernel.is_ensemble_kernel
    assert repr(kernel).startswith(f"{type(kernel).__name__}(regression")


@pytest.mark.parametrize("batch", [(), (2,)], ids=["single", "batch"])
@pytest.mark.parametrize("kernel", (*KERNELS, SBPS))
def test_init_and_sample(kernel, batch):
    kernel = kernel(regression)
    key = random.split(random.key(0)) if batch else random.key(0)
    state = kernel.init(key, 30, None, (X, Y), {})
    assert {k: v.shape for k, v in state.z.items()} == {
        "a": batch,
        "b": (*batch, 2),
        "s": batch,
    }
    assert state.i.shape == batch and np.all(state.i == 0)
    for name in ("potential_energy", *ALL_STATS, "diverging"):
        assert getattr(state, name).shape == batch, name
    # MCMC carries the state through `fori_loop`: its type must not change.
    after = jax.eval_shape(lambda s: kernel.sample(s, (X, Y), {}), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert new.shape == old.shape and new.dtype == old.dtype


def test_postprocess_constrains():
    z = {"a": jnp.asarray(1.0), "b": jnp.zeros(2), "s": jnp.asarray(-1.0)}
    draw = Boomerang(regression).postprocess_fn((X, Y), {})(z)
    assert set(draw) == {"a", "b", "s", "mean"}
    np.testing.assert_allclose(draw["s"], np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(draw["mean"], np.ones(10), rtol=1e-6)


def test_diagnostics_string(runs):
    mcmc = runs["single"]
    text = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    match = re.fullmatch(r"(\d+\.\d) gradients a draw, (\d+\.\d)% violations", text)
    fields = mcmc.get_extra_fields()
    grads = np.mean(fields["num_grad"])
    np.testing.assert_allclose(float(match[1]), grads, atol=0.06)
    violations = np.sum(fields["num_violations"]) / np.sum(fields["num_proposals"])
    np.testing.assert_allclose(float(match[2]), 100 * violations, atol=0.06)


@pytest.mark.parametrize("kernel", (*KERNELS, SBPS))
def test_no_host_callback(kernel):
    kernel = kernel(regression)
    state = kernel.init(random.key(0), 30, None, (X, Y), {})
    jaxpr = jax.make_jaxpr(lambda s: kernel.sample(s, (X, Y), {}))(state)
    assert "while" in str(jaxpr) and "callback" not in str(jaxpr)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_lowers_for_accelerators(kernel, platform):
    kernel = kernel(regression)

    def whole_run(seed):
        state = kernel.init(random.key(seed), 5, None, (X, Y), {})
        return lax.fori_loop(0, 10, lambda _, s: kernel.sample(s, (X, Y), {}), state).z

    seed = jax.ShapeDtypeStruct((), jnp.int32)
    exported = export.export(jax.jit(whole_run), platforms=[platform])(seed)
    assert exported.platforms == (platform,)
    assert len(exported.out_avals) == 3


# Chains


def test_chain_methods_agree(runs):
    vectorized, sequential = draws_of(runs["vectorized"]), draws_of(runs["sequential"])
    assert vectorized.shape == (2, 40, 4)
    assert_same_start(vectorized, sequential)
    assert np.abs(vectorized[0] - vectorized[1]).max() > 0.1


def test_single_chain_with_a_chain_key(runs):
    """Also: the kernel object was used for a batch of chains before."""
    single = draws_of(runs["single"])
    np.testing.assert_array_equal(single[0], draws_of(runs["sequential"])[1])


@DONATED
def test_callable_chain_method():
    mapped = run(Boomerang(regression), num_chains=2, chain_method=jax.vmap, **OPTIONS)
    sequential = runs_of(Boomerang)["sequential"]
    assert_same_start(draws_of(mapped), draws_of(sequential))


PARALLEL = """
import sys
import jax, numpy
sys.path[:0] = sys.argv[1:3]
import test_contract as t
assert jax.local_device_count() == 2
mcmc = t.run(t.Boomerang(t.regression), num_chains=2, chain_method="parallel",
             **t.OPTIONS)
numpy.save(sys.argv[3], t.draws_of(mcmc))
"""


def test_parallel_chains(tmp_path):
    here = pathlib.Path(__file__).parent
    flags = os.environ.get("XLA_FLAGS", "")
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PARALLEL]
        + [str(here), str(here.parent), str(tmp_path / "draws.npy")],
        env=os.environ
        | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2"},
        check=True,
    )
    sequential = runs_of(Boomerang)["sequential"]
    parallel = np.load(tmp_path / "draws.npy")
    assert_same_start(parallel, draws_of(sequential))


# What MCMC collects


def test_thinning():
    runs = runs_of(ZigZag)
    kernel = runs["single"].sampler
    thinned = run(kernel, random.split(random.key(0))[1], thinning=4, **OPTIONS)
    assert_same_start(draws_of(thinned), draws_of(runs["single"])[:, 3::4])


def test_extra_fields(finished):
    fields = finished.get_extra_fields(group_by_chain=True)
    assert set(fields) == {*ALL_STATS, "diverging"}
    for name, values in fields.items():
        assert values.shape == (2, 40), name
        kind = {"diverging": "b"}.get(name, "i" if name.startswith("num_") else "f")
        assert values.dtype.kind == kind, name
        assert np.all(np.isfinite(values)), name
    assert np.all(fields["num_bounces"] <= fields["num_proposals"])
    assert np.all(fields["num_violations"] <= fields["num_proposals"])
    assert np.all(fields["num_grad"] >= fields["num_proposals"])
    assert np.all((fields["accept_prob"] >= 0) & (fields["accept_prob"] <= 1))
    assert np.all(fields["excess"][fields["num_violations"] == 0] == 0)
    assert np.sum(fields["num_grad"]) > 0 and not np.any(fields["diverging"])


def test_totals_are_the_sums_since_warmup(finished):
    fields = finished.get_extra_fields(group_by_chain=True)
    for name in ALL_STATS:
        if name.startswith("num_"):
            total = getattr(finished.last_state.totals, name)
            np.testing.assert_array_equal(total, np.sum(fields[name], 1), err_msg=name)


def test_potential_energy_is_the_models(finished):
    draws = {k: v[:, ::8] for k, v in finished.get_samples(True).items() if k in SITES}

    def energy(draw):
        z = unconstrain_fn(regression, (X, Y), {}, draw)
        return potential_energy(regression, (X, Y), {}, z)

    expected = jax.vmap(jax.vmap(energy))(draws)
    actual = finished.get_extra_fields(True)["potential_energy"][:, ::8]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def counted_quadratic():
    """A potential, and how often its value is had, not counting gradients."""
    count = np.zeros((), int)

    def add(energy):
        np.add(count, 1, out=count)
        return np.asarray(energy)

    @jax.custom_vjp
    def potential(x):
        energy = quadratic(x)
        return jax.pure_callback(add, energy, energy, vmap_method="expand_dims")

    potential.defvjp(lambda x: (quadratic(x), x), lambda x, g: (g * (x - 1),))
    return potential, count


@pytest.mark.parametrize("num_chains", (1, 3))
def test_potential_energy_costs_nothing_unless_collected(num_chains):
    potential, count = counted_quadratic()
    start = np.ones((num_chains, 2) if num_chains > 1 else 2)

    def run(extra_fields=(), **options):
        mcmc = MCMC(
            BPS(potential_fn=potential, inverse_mass_matrix=np.ones(2), **options),
            num_warmup=0,
            num_samples=320,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), init_params=start, extra_fields=extra_fields)
        return mcmc

    run()
    assert 10 < count < 30  # at one draw in 16, of all chains at once
    asked = run(("potential_energy",))
    assert count > 320
    assert np.all(np.isnan(asked.last_state.potential_energy))
    kept = run(("potential_energy",), potential_energy=True)
    for mcmc in (asked, kept):
        energy = mcmc.get_extra_fields(True)["potential_energy"]
        expected = 0.5 * np.sum((mcmc.get_samples(True) - 1) ** 2, -1)
        np.testing.assert_allclose(energy, expected, rtol=1e-4, atol=1e-5)
    last = pickle.loads(pickle.dumps(kept.last_state)).potential_energy
    np.testing.assert_array_equal(np.ravel(last), energy[:, -1])


def test_potential_energy_of_resumed_and_other_runs():
    """With data as arguments, of runs that go on, and of thinned chunks."""
    fields, found = ("potential_energy",), []
    data = jnp.asarray(X), jnp.asarray(Y)
    mcmc = MCMC(
        Boomerang(regression),
        num_warmup=20,
        num_samples=10,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), *data)
    for _ in range(2):
        mcmc.post_warmup_state = pickle.loads(pickle.dumps(mcmc.last_state))
        mcmc.run(mcmc.last_state.rng_key, *data, extra_fields=fields)
        found.append((mcmc.get_samples(True), mcmc.get_extra_fields(True)))
    chunks = run_chunks(
        mcmc, random.key(0), *data, thinning=3, chunk=2, extra_fields=fields
    )
    found.extend((chunk.samples, chunk.extra_fields) for chunk in chunks)

    def energy(draw):
        z = unconstrain_fn(regression, data, {}, draw)
        return potential_energy(regression, data, {}, z)

    for samples, extra in found:
        draws = {k: v for k, v in samples.items() if k in SITES}
        expected = jax.vmap(jax.vmap(energy))(draws)
        np.testing.assert_allclose(extra["potential_energy"], expected, rtol=1e-4)


def test_potential_energy_can_be_left_out():
    kernel = BPS(potential_fn=jnp.square, potential_energy=False)
    state = kernel.init(random.key(0), 0, 1.0)
    assert np.isnan(state.potential_energy)
    assert np.isnan(jax.jit(lambda s: kernel.sample(s, (), {}))(state).potential_energy)


def test_summary_is_printed(finished, capsys):
    finished.print_summary()
    text = capsys.readouterr().out
    assert "b[1]" in text and "mean[0]" not in text
    assert "Number of divergences: 0" in text


def test_pickle(finished):
    again = pickle.loads(pickle.dumps(finished))
    np.testing.assert_array_equal(draws_of(again), draws_of(finished))
    assert again.sampler.model is regression
    assert type(again.last_state).__name__ == "PDMPState"
    assert repr(pickle.loads(pickle.dumps(finished.sampler))) == repr(finished.sampler)


def test_predictive_and_log_likelihood(finished):
    draws = finished.get_samples()
    predicted = Predictive(regression, draws)(random.key(1), X)["y"]
    assert predicted.shape == (80, 10) and np.all(np.isfinite(predicted))
    likelihood = log_likelihood(regression, draws, X, Y)["y"]
    expected = dist.Normal(draws["mean"], draws["s"][:, None]).log_prob(Y)
    np.testing.assert_allclose(likelihood, expected, rtol=1e-4, atol=1e-4)


# Starts and resumed runs


@pytest.mark.parametrize(
    "kernel, wrap",
    [(kernel, lambda z: z) for kernel in KERNELS]
    + [(BPS, lambda z: ParamInfo(z, None, None))],
)
def test_init_params(kernel, wrap):
    z = {"a": np.float32(1), "b": np.asarray([2.0, 3.0], "f4"), "s": np.float32(-1)}
    state = kernel(regression).init(random.key(0), 0, wrap(z), (X, Y), {})
    for name in SITES:
        np.testing.assert_array_equal(state.z[name], z[name])
    np.testing.assert_allclose(
        state.potential_energy, potential_energy(regression, (X, Y), {}, z), rtol=1e-5
    )


def test_init_params_of_a_batch():
    z = {"a": jnp.arange(2.0), "b": jnp.ones((2, 2)), "s": jnp.zeros(2)}
    state = BPS(regression).init(random.split(random.key(0)), 0, z, (X, Y), {})
    jax.tree.map(np.testing.assert_array_equal, state.z, z)


def test_init_strategy():
    strategy = init_to_value(values={"a": 1.5, "b": jnp.ones(2), "s": 2.0})
    kernel = BPS(regression, init_strategy=strategy)
    z = kernel.init(random.key(0), 0, None, (X, Y), {}).z
    np.testing.assert_allclose(z["a"], 1.5)
    np.testing.assert_allclose(z["s"], np.log(2), rtol=1e-6)


def test_starts_have_the_law_of_numpyros():
    keys = random.split(random.key(0), 1000)
    z = BPS(regression).init(keys, 0, None, (X, Y), {}).z
    info = initialize_model(keys, regression, model_args=(X, Y)).param_info
    assert jax.tree.map(jnp.shape, z) == jax.tree.map(jnp.shape, info.z)
    values = np.concatenate([np.reshape(x, (len(keys), -1)) for x in z.values()], 1)
    assert kstest(values.ravel(), "uniform", (-2, 4)).pvalue > 1e-3
    # No number is used twice.
    correlation = np.corrcoef(values.T) - np.eye(values.shape[1])
    assert np.abs(correlation).max() < 5 / len(keys) ** 0.5


@pytest.fixture
def no_init(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the kernel was initialised again")

    return lambda: monkeypatch.setattr(Boomerang, "init", fail)


def test_warmup_resume_and_split(no_init):
    options = {"num_warmup": 20, "progress_bar": False}
    whole = MCMC(Boomerang(regression), num_samples=40, **options)
    whole.run(random.key(3), X, Y, extra_fields=ALL_STATS)
    half = MCMC(Boomerang(regression), num_samples=20, **options)
    half.warmup(random.key(3), X, Y)
    no_init()
    half.run(half.post_warmup_state.rng_key, X, Y)
    first = draws_of(half)
    half.post_warmup_state = half.last_state
    half.run(half.last_state.rng_key, X, Y)
    halves = np.concatenate([first, draws_of(half)], 1)
    np.testing.assert_allclose(halves, draws_of(whole), atol=1e-3)
    assert half.last_state.i == whole.last_state.i == 60
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        half.last_state.totals,
        whole.last_state.totals,
    )


def normal_mean(y):
    a = numpyro.sample("a", dist.Normal(0, 100))
    numpyro.sample("y", dist.Normal(a, 1), obs=y)


def test_new_data_without_a_new_trace(monkeypatch):
    traced, sample = [], BPS.sample
    monkeypatch.setattr(BPS, "sample", lambda *args: traced.append(0) or sample(*args))
    mcmc = MCMC(
        BPS(normal_mean, adapt_mass_matrix=False),
        num_warmup=100,
        num_samples=400,
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), jnp.zeros(20))
    first = mcmc.get_samples(group_by_chain=True)["a"]
    assert len(traced) == 1
    mcmc.run(random.key(0), jnp.zeros(20) + 5)
    assert len(traced) == 1
    second = mcmc.get_samples(group_by_chain=True)["a"]
    assert_expectation(first, 0.0)
    assert_expectation(second, 5.0)


# Targets


def quadratic(z):
    return 0.5 * sum(jnp.sum((x - 1.0) ** 2) for x in jax.tree.leaves(z))


@pytest.mark.parametrize(
    "init_params",
    [{"u": 0, "v": np.zeros((2, 2))}, np.zeros(3, int)],
    ids=["dict", "flat-int"],
)
def test_potential_fn(init_params):
    kernel = ZigZag(potential_fn=quadratic, adapt_mass_matrix=False)
    mcmc = run(kernel, init_params=init_params, num_samples=1000)
    assert kernel.model is None
    draws = mcmc.get_samples(group_by_chain=True)
    shapes = jax.tree.map(lambda x: (1, 1000, *np.shape(x)), init_params)
    assert jax.tree.map(jnp.shape, draws) == shapes
    for x in jax.tree.leaves(draws):
        assert x.dtype == jnp.float32
        assert_expectation(x, 1.0)
        assert_expectation((x - 1) ** 2, 1.0)


def test_potential_fn_of_a_batch():
    kernel = BPS(potential_fn=quadratic)
    state = kernel.init(random.split(random.key(0)), 10, np.zeros((2, 3), int))
    assert state.z.shape == (2, 3) and state.z.dtype == jnp.float32
    np.testing.assert_allclose(state.potential_energy, [1.5, 1.5])


def supports():
    scale = numpyro.sample("half_normal", dist.HalfNormal(2.0))
    numpyro.sample("beta", dist.Beta(2.0, 3.0))
    numpyro.sample("dirichlet", dist.Dirichlet(jnp.asarray([2.0, 3.0, 4.0])))
    ordered = numpyro.sample(
        "ordered", dist.ImproperUniform(constraints.ordered_vector, (), (2,))
    )
    numpyro.sample("data", dist.Normal(ordered, 1.0), obs=jnp.asarray([0.0, 1.0]))
    share = numpyro.sample("share", dist.Uniform(0.0, scale))  # support by value
    numpyro.deterministic("ratio", share / scale)


def test_supports():
    kernel = BPS(supports, adapt_mass_matrix=False)
    mcmc = run(kernel, num_warmup=200, num_samples=4000)
    draws = mcmc.get_samples(group_by_chain=True)
    assert draws["half_normal"].min() > 0
    assert 0 < draws["beta"].min() and draws["beta"].max() < 1
    np.testing.assert_allclose(np.sum(draws["dirichlet"], -1), 1, rtol=1e-5)
    assert np.all(np.diff(draws["ordered"]) >= 0)
    assert np.all(draws["share"] <= draws["half_normal"])
    np.testing.assert_allclose(
        draws["ratio"], draws["share"] / draws["half_normal"], rtol=1e-5
    )
    # The envelopes are approximate: a bias of a few per cent of a deviation is allowed.
    half_normal = 2 * np.sqrt(2 / np.pi)
    assert_expectation(draws["half_normal"], half_normal, 0.05)
    assert_expectation(draws["beta"], 0.4, 0.01)
    assert_expectation(draws["dirichlet"], np.asarray([2, 3, 4]) / 9, 0.01)
    assert_expectation(draws["ratio"], 0.5, 0.01)
    # The difference of the two is N(1, 2), conditioned on being positive.
    gap = 1 + np.sqrt(2) * _inverse_mills(-1 / np.sqrt(2))
    assert_expectation(np.diff(draws["ordered"])[..., 0], gap, 0.05)


def _inverse_mills(x):
    normal = dist.Normal(0, 1)
    return float(jnp.exp(normal.log_prob(x)) / (1 - normal.cdf(x)))


def mixture(y):
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    with numpyro.plate("data", y.size):
        kind = numpyro.sample(
            "kind", dist.Bernoulli(weight), infer={"enumerate": "parallel"}
        )
        numpyro.sample("y", dist.Normal(2.0 * kind, 1.0), obs=y)


def test_enumerated_latent():
    y = np.asarray([-0.5, 0.2, 0.4, 1.1, 1.7, 2.1, 2.4, 3.0])
    kernel = BPS(mixture, adapt_mass_matrix=False)
    mcmc = run(kernel, args=(y,), num_warmup=200, num_samples=3000)
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == {"weight"}
    w = np.linspace(0, 1, 10001)[:, None]
    density = np.prod(
        w * np.exp(-0.5 * (y - 2) ** 2) + (1 - w) * np.exp(-0.5 * y**2), 1
    )
    density *= (w * (1 - w))[:, 0]
    exact = np.sum(w[:, 0] * density) / np.sum(density)
    assert_expectation(draws["weight"], exact, 0.01)


def test_other_discrete_latents_give_numpyros_error():
    def model():
        numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("count", dist.Poisson(2.0))

    messages = []
    for kernel in (NUTS, BPS):
        with pytest.raises(RuntimeError) as error:
            run(kernel(model))
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "Poisson" in messages[1]


def needs_forward_mode():
    x = numpyro.sample("x", dist.Normal(0, 1))
    _, power = lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, carry[1] * x), (0, x)
    )
    numpyro.factor("factor", -0.01 * power)


def test_forward_mode():
    kernel = BPS(needs_forward_mode, forward_mode_differentiation=True)
    assert np.all(np.isfinite(run(kernel).get_samples()["x"]))


# Gibbs blocks


def categories(probs, locs):
    kind = numpyro.sample("kind", dist.Categorical(probs))
    numpyro.sample("x", dist.Normal(locs[kind], 0.5))


# NumPyro asks for the constraints of a block without the values of the others.
@pytest.mark.filterwarnings("ignore:Some algorithms will:FutureWarning")
def test_gibbs_with_discrete_sites():
    kernel = Gibbs(
        [
            (DiscreteGibbs(categories), discrete_latent_sites),
            (ZigZag(categories, adapt_mass_matrix=False), ["x"]),
        ]
    )
    args = (jnp.asarray([0.3, 0.7]), jnp.asarray([-0.5, 0.5]))
    mcmc = run(kernel, args=args, num_warmup=100, num_samples=3000)
    draws = mcmc.get_samples(group_by_chain=True)
    assert_expectation(draws["kind"], 0.7)
    assert_expectation(draws["x"], 0.2)
    assert_expectation((draws["x"] - 0.2) ** 2, 0.25 + 0.21)


@pytest.mark.parametrize("kernel", KERNELS)
def test_refresh_stays_on_the_path(kernel):
    """A block is refreshed whenever another one moves; here nothing has changed."""
    kernel = kernel(
        potential_fn=quadratic, refresh_rate=0.1, draw_time=0.3, adapt_mass_matrix=False
    )
    state = kernel.init(random.key(1), 0, np.zeros(2))

    def step(state, _):
        state = kernel.sample(state, (), {})
        new = kernel.refresh(state, (), {})
        return state, (state, new, state.potential_energy, new.potential_energy)

    old, new, *energies = jax.jit(lambda s: lax.scan(step, s, None, 20))(state)[1]
    time = old.path.t_output - 0.3  # of the draw, from the start of the stretch
    assert np.any(time > 0.01)
    z, v = jax.vmap(kernel._sampler.flow)(old.path.z_from, old.path.v_from, time)
    np.testing.assert_allclose(new.path.z, z, atol=1e-5)
    np.testing.assert_allclose(new.path.v, v, atol=1e-5)
    rest = old.path.t_from - time  # to the anchor, which may be a refreshment
    t_refresh = np.where(old.path.event == REFRESH, rest, old.path.t_refresh + rest)
    np.testing.assert_allclose(new.path.t_refresh, t_refresh, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new.path.t_output, 0.3)
    np.testing.assert_array_equal(new.z, old.z)
    np.testing.assert_allclose(*energies, atol=1e-5)
    assert np.all(np.isfinite(energies))


def test_refresh_keeps_the_law():
    kernel = Boomerang(
        potential_fn=quadratic, draw_time=1.0, center=[1.0], adapt_mass_matrix=False
    )
    state = kernel.init(random.key(1), 0, np.zeros(1))

    def step(state, _):
        state = kernel.refresh(kernel.sample(state, (), {}), (), {})
        return state, state.z

    z = jax.jit(lambda s: lax.scan(step, s, None, 50_000))(state)[1]
    assert_expectation(z[None], 1.0)
    assert_expectation((z[None] - 1) ** 2, 1.0)


def simplex_and_scale(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("y", dist.Normal(p[0], s), obs=y)


def with_deterministic(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    p = numpyro.sample("p", dist.Normal(0, s))
    numpyro.deterministic("double", 2 * p)
    numpyro.sample("y", dist.Normal(p, s), obs=y)


@pytest.mark.parametrize("model", [simplex_and_scale, with_deterministic])
def test_gibbs_of_two_blocks(model):
    options = {"adapt_mass_matrix": False}
    kernel = Gibbs([(BPS(model, **options), ["s"]), (ZigZag(model, **options), ["p"])])
    draws = run(kernel, args=(jnp.ones(3),)).get_samples()
    assert draws["s"].min() > 0
    assert np.all(np.isfinite(draws["p"]))


def test_wrap_model():
    kernel = BPS(regression)
    wrapped = kernel.wrap_model(numpyro.handlers.block)
    assert kernel.model is regression and wrapped.model is not regression
    with pytest.raises(ValueError, match="potential function"):
        BPS(potential_fn=quadratic).wrap_model(lambda model: model)


# Options


def assert_double(tree):
    dtypes = {str(x.dtype) for x in jax.tree.leaves(tree)}
    assert "float64" in dtypes and not {"float32", "int32"} & dtypes, dtypes


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", (*KERNELS, SBPS))
def test_double_precision_of_the_state(kernel):
    kernel, args = kernel(regression), (jnp.asarray(X), jnp.asarray(Y))
    state = kernel.init(random.key(0), 30, None, args, {})
    assert_double(state)
    assert_double(jax.eval_shape(lambda s: kernel.sample(s, args, {}), state))


@pytest.mark.usefixtures("x64")
def test_double_precision_run():
    kernel = ZigZag(potential_fn=quadratic)
    mcmc = run(kernel, init_params=np.zeros(2), extra=ALL_STATS)
    assert_double((mcmc.last_state, mcmc.get_samples(), mcmc.get_extra_fields()))
    # More digits than single precision has: the energy is that of the draw.
    energy = 0.5 * np.sum((np.asarray(mcmc.get_samples()) - 1) ** 2, 1)
    np.testing.assert_allclose(
        mcmc.get_extra_fields()["potential_energy"], energy, rtol=1e-12
    )


def test_record_events():
    kernel = BPS(potential_fn=quadratic, record="events", adapt_mass_matrix=False)
    mcmc = run(kernel, init_params=np.zeros(2), extra=ALL_STATS)
    fields = mcmc.get_extra_fields()
    assert np.all(fields["num_bounces"] + fields["num_refreshments"] == 1)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, np.eye(4)),
        ({"dense_mass": False}, np.ones(4)),
        ({"dense_mass": [("a", "s")]}, np.eye(4)),
        ({"inverse_mass_matrix": [1.0, 2, 3, 4]}, np.diag([1.0, 2, 3, 4])),
        (
            {"inverse_mass_matrix": [1.0, 2, 3, 4], "dense_mass": False},
            np.asarray([1.0, 2, 3, 4]),
        ),
        ({"inverse_mass_matrix": np.eye(4) + 0.5}, np.eye(4) + 0.5),
        (
            {"inverse_mass_matrix": {("s", "a"): np.asarray([[2.0, 1], [1, 3]])}},
            np.asarray([[3.0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 2]]),
        ),
        (
            {"inverse_mass_matrix": {("b",): np.asarray([2.0, 3])}},
            np.diag([1.0, 2, 3, 1]),
        ),
    ],
)
def test_first_metric(options, expected):
    z = {"a": 0.0, "b": np.zeros(2), "s": 0.0}
    state = BPS(potential_fn=quadratic, **options).init(random.key(0), 10, z)
    covariance = state.adapt_state.scale.covariance()
    np.testing.assert_allclose(covariance, expected, rtol=1e-5)


def test_center_by_site():
    center = {"s": 3.0, "b": np.asarray([1.0, 2.0]), "a": 0.0}
    state = BPS(potential_fn=quadratic, center=center).init(random.key(0), 0, center)
    np.testing.assert_array_equal(state.adapt_state.scale.center, [0, 1, 2, 3])


@pytest.mark.parametrize("dense_mass, shape", [(False, (4,)), ([("b",)], (4, 4))])
def test_metric_after_warmup(dense_mass, shape):
    mcmc = run(BPS(regression, dense_mass=dense_mass), args=(X, Y), num_warmup=50)
    covariance = np.asarray(mcmc.last_state.adapt_state.scale.covariance())
    assert covariance.shape == shape and np.all(np.isfinite(covariance))
    assert not np.allclose(covariance, 1)
    if isinstance(dense_mass, list):
        blocks = np.zeros((4, 4), bool)
        blocks[1:3, 1:3] = True
        assert np.all((covariance != 0) == (blocks | np.eye(4, dtype=bool)))
