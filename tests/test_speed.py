# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A guard of the engine's speed that counts, and reads no clock."""

import re

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang
from numpyro_pdmp.products import chains_first

NUM_DATA, DIM, NUM_CHAINS = 509, 7, 4


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_DATA, DIM)).astype(np.float32)
    y = rng.random(NUM_DATA) < 1 / (1 + np.exp(-x.sum(1) / 4))
    return jnp.asarray(x), jnp.asarray(y, jnp.float32)


@pytest.fixture(scope="module")
def sample_and_state(data):
    kernel = Boomerang(model)
    keys = random.split(random.key(0), NUM_CHAINS)
    return jax.jit(lambda s: kernel.sample(s, data, {})), kernel.init(
        keys, 20, None, data, {}
    )


def equations(jaxpr):
    """Those of a program, and of the programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in jax.tree.leaves(
            eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def passes(jaxpr):
    """Matrix products with the data."""
    return sum(
        eqn.primitive.name == "dot_general"
        and any(NUM_DATA in v.aval.shape for v in eqn.invars)
        for eqn in equations(jaxpr)
    )


def test_one_gradient_an_iteration(sample_and_state):
    sample, state = sample_and_state
    jaxpr = jax.make_jaxpr(sample)(state).jaxpr
    loops = [e for e in equations(jaxpr) if e.primitive.name == "while"]
    bodies = [passes(loop.params["body_jaxpr"].jaxpr) for loop in loops]
    assert sum(bodies) == 2  # there and back


def test_products_have_chains_first(sample_and_state):
    sample, state = sample_and_state
    jaxpr = jax.make_jaxpr(sample)(state).jaxpr
    shapes = [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert (NUM_CHAINS, NUM_DATA) in shapes and (NUM_DATA, NUM_CHAINS) not in shapes


def test_turned_products_are_the_same(data):
    x, y = data

    def potential(beta, x):
        logits = jax.jit(jnp.matmul)(x, beta) + x[0] @ beta
        scaled = jnp.outer(beta, beta) @ beta  # both factors are the chain's
        return jnp.sum(jax.nn.softplus(logits) - y * logits) + scaled @ beta

    beta = random.normal(random.key(0), (NUM_CHAINS, DIM))
    for fn in (potential, jax.grad(potential), jax.grad(chains_first(potential))):
        for mapped in (0, None), (0, 0):
            given = x if mapped[1] is None else jnp.stack(NUM_CHAINS * [x])
            expected = jax.vmap(fn, mapped)(beta, given)
            found = jax.vmap(chains_first(fn), mapped)(beta, given)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    # In forward mode, as the slopes of rates are had.
    gradient = jax.grad(potential)
    expected, found = (
        jax.vmap(lambda b, fn=fn: jax.linearize(lambda b: fn(b, x), b)[1](b))(beta)
        for fn in (gradient, chains_first(gradient))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_operations_of_an_iteration(sample_and_state):
    sample, state = sample_and_state
    text = sample.lower(state).compile().as_text()
    # A loop of its own for random numbers was a third of an iteration.
    assert len(re.findall(r" while\(", text)) == 1
    body = re.search(r" while\(.*body=%?([\w.\-]+)", text).group(1)
    start = re.search(rf"^%?{re.escape(body)} ", text, re.M).start()
    body = text[start : text.index("\n}", start)]
    kernels = len(re.findall(r" (?:fusion|copy|custom-call|dot)\(", body))
    assert kernels <= 95, "on CPU each of them costs a tenth of a microsecond"


def test_start_is_one_program(data, caplog):
    """No generator is compiled by itself, nor is anything looked at by JAX."""
    keys = random.split(random.key(0), NUM_CHAINS)
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        Boomerang(model).init(keys, 20, None, data, {})
    names = re.findall(r"Compiling jit\((\w+)\)", caplog.text)
    assert names.count("of_arrays") == 1
    assert not {"_uniform", "_threefry_split", "_threefry_fold_in"} & set(names)


def test_gradients_of_a_draw(data):
    mcmc = MCMC(
        Boomerang(model),
        num_warmup=300,
        num_samples=500,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *data, extra_fields=("num_grad",))
    num_grad = mcmc.get_extra_fields(group_by_chain=True)["num_grad"]
    assert 1.5 < np.mean(num_grad) < 2.6


def test_chains_hardly_wait(num_draws=300):
    """Iterations of the loop, over the gradients that one chain needs."""
    iterations = 0

    def count(x):
        nonlocal iterations
        iterations += 1
        return np.asarray(x)

    @jax.custom_vjp
    def potential(x):
        return 0.5 * x @ x

    def backward(x, cotangent):
        x = jax.pure_callback(count, x, x, vmap_method="expand_dims")
        return (cotangent * x,)

    potential.defvjp(lambda x: (potential(x), x), backward)
    kernel = BPS(potential_fn=potential, potential_energy=False)
    keys = random.split(random.key(0), NUM_CHAINS)
    start = jnp.ones((NUM_CHAINS, 3))
    state = kernel.init(keys, 0, start, (), {})

    def loop(state):
        def body(state, _):
            state = kernel.sample(state, (), {})
            return state, state.num_grad

        return lax.scan(body, state, None, num_draws)[1]

    compiled = jax.jit(loop).lower(state).compile()
    iterations = 0
    num_grad = np.asarray(jax.block_until_ready(compiled(state)))
    waited = num_grad.max(1).sum()
    assert iterations < 1.1 * num_grad.mean(1).sum() + 20
    assert iterations < 0.8 * waited  # what it would be if all were waited for


def test_draws_do_not_depend_on_running_ahead(sample_and_state, data):
    sample, state = sample_and_state
    waiting = Boomerang(model, run_ahead=False)
    states = state, state._replace(queue=None)
    steps = sample, jax.jit(lambda s: waiting.sample(s, data, {}))
    ahead = 0
    for _ in range(60):
        states = tuple(step(s) for step, s in zip(steps, states, strict=True))
        ahead = max(ahead, np.max(states[0].queue.num))
        for name in ("num_grad", "diverging"):
            values = (getattr(s, name) for s in states)
            np.testing.assert_allclose(*values, rtol=1e-5)
    assert ahead > 1
    # Both round in their own way.
    draws = (s.z["beta"] for s in states)
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-6)


@pytest.fixture
def cache(tmp_path):
    """JAX's persistent compilation cache, and what it is asked for."""
    from jax.experimental.compilation_cache import compilation_cache

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    yield events
    for name, value in old.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_second_run_compiles_nothing(cache):
    def run():
        mcmc = MCMC(
            Boomerang(lambda: numpyro.sample("x", dist.Normal())),
            num_warmup=20,
            num_samples=20,
            progress_bar=False,
        )
        jax.clear_caches()  # as in a new process
        cache.clear()
        mcmc.run(random.key(0))
        return (
            sum(event.endswith(f"/cache_{kind}") for event in cache)
            for kind in ("misses", "hits")
        )

    misses, _ = run()
    assert misses > 0
    misses, hits = run()
    assert misses == 0 and hits > 0
