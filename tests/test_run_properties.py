# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Properties of whole kernels that hold for all arguments, tried on many of them."""

from functools import cache

from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro_pdmp import BPS
from numpyro_pdmp.batch import next_batch, num_words, start_batches
from numpyro_pdmp.importance import make_importance, weighted_rows
from numpyro_pdmp.storage import restored_tree, tree_arrays
from numpyro_pdmp.subsample import SubsampledModel

COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}
NUM_DATA = 12


def model(y, num):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", len(y), subsample_size=num):
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(4, mu, s), obs=y)


# Batches

values = st.floats(-5, 5, width=32)
positions = hnp.arrays(np.float32, 2, elements=st.floats(-2, 2, width=32))


@cache
def potentials(num):
    """Of all data, and the mean over the batches of a pass over them."""
    plates = {"data": (NUM_DATA, num)}
    words = num_words(plates, "epoch")

    def both(y, x, key):
        whole = SubsampledModel(model, (y, num))
        bits = random.bits(key, (NUM_DATA // num + 1, words), jnp.uint32)
        state = start_batches(bits[0], plates, "epoch")

        def energy(state, bits):
            state, batch = next_batch(state, bits, plates, "epoch")
            return state, whole.potential_fn(x, batch)

        _, energies = lax.scan(energy, state, bits[1:])
        return whole.full_potential_fn(x), jnp.mean(energies)

    return jax.jit(both)


@settings(max_examples=60, **COMMON)
@given(
    st.sampled_from([1, 3, 4, 6]),
    hnp.arrays(np.float32, NUM_DATA, elements=values),
    positions,
    st.integers(0, 2**20),
)
def test_batches_are_right_on_average(num, y, x, seed):
    """Over a pass each row comes once, so this holds without an error of chance."""
    full, mean = potentials(num)(y, x, random.key(seed))
    np.testing.assert_allclose(mean, full, rtol=2e-4, atol=1e-3)


@jax.jit
def expected_energy(y, x, spreads):
    """Of all data, and of a row that is drawn with unequal probabilities."""
    whole = SubsampledModel(model, (y, 1))
    importance = make_importance(spreads)

    def energy(entry):
        batch = weighted_rows({"data": importance}, {"data": entry[None]})
        return whole.potential_fn(x, batch)

    # All entries of the table are as likely.
    energies = lax.map(energy, jnp.arange(2 * NUM_DATA))
    return whole.full_potential_fn(x), jnp.mean(energies)


@settings(max_examples=60, **COMMON)
@given(
    hnp.arrays(np.float32, NUM_DATA, elements=values),
    positions,
    hnp.arrays(np.float32, NUM_DATA, elements=st.floats(0, 1e6, width=32)),
)
def test_unequal_rows_are_right_on_average(y, x, spreads):
    full, mean = expected_energy(y, x, spreads)
    np.testing.assert_allclose(mean, full, rtol=2e-4, atol=1e-3)


# Chains

KERNEL = BPS(
    model,
    inverse_mass_matrix=np.ones(2),
    cross_chain_adapt=False,
    control_variates=None,
    batching="with_replacement",
)
ARGS = (jnp.asarray(np.random.default_rng(0).normal(size=NUM_DATA)), 4)
NUM = 20


@jax.jit
def advance(state, num):
    return lax.fori_loop(0, num, lambda _, s: KERNEL.sample(s, ARGS, {}), state)


@cache
def start(num_chains):
    keys = random.split(random.key(num_chains), num_chains)
    return KERNEL.init(keys, NUM // 2, None, ARGS, {})


@cache
def start_alone(num):
    """One of three chains: others run ahead, which has a place in their state."""
    return KERNEL.init(random.split(random.key(3), 3)[num], NUM // 2, None, ARGS, {})


@settings(max_examples=25, **COMMON)
@given(st.lists(st.integers(1, NUM - 1), max_size=4, unique=True).map(sorted))
def test_stopping_changes_nothing(stops):
    """Wherever a run is stopped, in warm-up or after it, and its state stored."""
    state = start(3)
    whole = advance(state, NUM)
    for first, last in zip([0, *stops], [*stops, NUM], strict=True):
        state = advance(state, last - first)
        state = restored_tree(start(3), tree_arrays(state))
    for name, value in tree_arrays(state).items():
        np.testing.assert_array_equal(value, tree_arrays(whole)[name])


@settings(max_examples=10, **COMMON)
@given(st.permutations(range(3)), st.integers(0, 2))
def test_chains_do_not_know_of_each_other(order, num):
    """In any order and company a chain is the same, and as it is alone."""
    state = start(3)
    order = jnp.asarray(order)
    together = advance(state, NUM).z
    others = advance(jax.tree.map(lambda a: a[order], state), NUM).z
    # Rounding differs in a program for one chain, and grows along its path.
    early = advance(state, 5).z
    alone = advance(start_alone(num), 5).z
    for name, draws in together.items():
        np.testing.assert_array_equal(others[name], draws[order])
        np.testing.assert_allclose(alone[name], early[name][num], rtol=1e-3, atol=1e-4)
