# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

from functools import cache, partial

import numpy as np
import pytest

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer.util import potential_energy
from numpyro_pdmp.batch import (
    BATCHING,
    _below,
    _high,
    draw_batch,
    next_batch,
    num_words,
    start_batches,
)
from numpyro_pdmp.control_variates import (
    control_variate,
    gradient,
    value,
)
from numpyro_pdmp.subsample import SubsampledModel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

PARALLEL = {"enumerate": "parallel"}
STATELESS = [batching for batching in BATCHING if batching != "epoch"]


def words(seed, plates, batching, num=None):
    shape = (num_words(plates, batching),)
    shape = shape if num is None else (num, *shape)
    return random.bits(random.key(seed), shape, jnp.uint32)


def draw_many(seed, plates, batching, num):
    draw = jax.jit(jax.vmap(lambda bits: draw_batch(bits, plates, batching)))
    return draw(words(seed, plates, batching, num))


# Indices


def test_arithmetic_of_words_against_integers():
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 1000), dtype=np.uint64)
    both = jnp.asarray(np.stack([a, b]).astype(np.uint32))
    for size in (1, 5, 65_536, 10**6, 2**22 + 17, 2**31 - 1):
        high = [int(x) * size >> 32 for x in a]
        np.testing.assert_array_equal(_high(both[0], size), high)
        np.testing.assert_array_equal(_below(both[:1], size), high)
        two = [(int(x) << 32 | int(y)) * size >> 64 for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(_below(both, size), two)


@pytest.mark.parametrize("size", [1, 2, 3, 97, 100])
def test_without_replacement_of_all_rows_is_a_permutation(size):
    plates = {"a": (size, size)}
    rows = draw_many(0, plates, "without_replacement", 20)["a"]
    np.testing.assert_array_equal(np.sort(rows), np.tile(np.arange(size), (20, 1)))


@pytest.mark.parametrize("batching", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize("size, num", [(4, 2), (7, 3), (53, 8)])
def test_single_and_pair_inclusion_are_uniform(batching, size, num):
    draws = 100_000
    rows = np.asarray(draw_many(1, {"a": (size, num)}, batching, draws)["a"])
    counts = np.zeros((draws, size), np.float32)
    np.add.at(counts, (np.arange(draws)[:, None], rows), 1)
    sums = counts.T @ counts
    single = counts.sum(0)
    expected = draws * num / size
    np.testing.assert_allclose(single, expected, atol=4.5 * expected**0.5)
    ordered = size**2 if batching == "with_replacement" else size * (size - 1)
    pairs = sums[np.triu_indices(size, 1)]
    expected = draws * num * (num - 1) / ordered
    np.testing.assert_allclose(pairs, expected, atol=5 * expected**0.5 + 1)


@pytest.mark.parametrize("size", [581_012, 2**31 - 1])
@pytest.mark.parametrize("batching", STATELESS)
def test_large_plates(size, batching):
    rows = np.asarray(draw_many(2, {"a": (size, 500)}, batching, 400)["a"])
    assert rows.dtype == np.int32 and rows.min() >= 0 and rows.max() < size
    if batching == "without_replacement":
        assert all(len(set(batch)) == 500 for batch in rows.tolist())
    # Of a contiguous batch the first row is random, and the others follow.
    rows = rows[:, :1] if batching == "contiguous" else rows
    histogram = np.histogram(rows, 20, (0, size))[0]
    expected = rows.size / 20
    assert np.sum((histogram - expected) ** 2 / expected) < 50  # 19 degrees of freedom


def test_contiguous_rows_wrap_around():
    rows = draw_many(3, {"a": (10, 4)}, "contiguous", 200)["a"]
    np.testing.assert_array_equal(np.diff(rows, axis=1) % 10, 1)
    assert set(np.asarray(rows[:, 0]).tolist()) == set(range(10))


@pytest.mark.parametrize("size, num", [(13, 5), (5, 5), (101, 7)])
def test_epochs_use_every_row_once(size, num):
    plates = {"a": (size, num), "b": (7, 2)}
    state = start_batches(words(0, plates, "epoch"), plates, "epoch")
    step = partial(next_batch, plates=plates, batching="epoch")
    _, batches = jax.lax.scan(step, state, words(1, plates, "epoch", 200))
    for name, (n, _) in plates.items():
        rows = np.ravel(batches[name])
        epochs = rows[: rows.size // n * n].reshape(-1, n)
        np.testing.assert_array_equal(
            np.sort(epochs), np.tile(np.arange(n), (len(epochs), 1))
        )
        assert np.mean(np.any(epochs[1:] != epochs[:-1], axis=1)) > 0.9


@pytest.mark.parametrize("batching", BATCHING)
def test_cost_of_a_batch_does_not_grow_with_the_plate(batching):
    plates = {"a": (10**6, 50)}
    bits = words(0, plates, batching)

    def run(bits):
        return next_batch(start_batches(bits, plates, batching), bits, plates, batching)

    assert largest(jax.make_jaxpr(run)(bits)) <= 8 * 50


def test_batches_of_two_plates_are_independent():
    rows = draw_many(4, {"a": (10, 1), "b": (10, 1)}, "without_replacement", 50_000)
    pair = np.ravel(rows["a"]) * 10 + np.ravel(rows["b"])
    histogram = np.bincount(pair, minlength=100)
    assert np.sum((histogram - 500) ** 2 / 500) < 170  # 99 degrees of freedom


def test_bad_batching_arguments():
    plates = {"a": (10, 4)}
    with pytest.raises(ValueError, match="`batching` must be one of .*'shuffle'"):
        num_words(plates, "shuffle")
    with pytest.raises(ValueError, match="`bits` must be 4 words of type uint32"):
        draw_batch(jnp.zeros(3, jnp.uint32), plates)
    with pytest.raises(ValueError, match="needs a state"):
        draw_batch(words(0, plates, "epoch"), plates, "epoch")
    with pytest.raises(ValueError, match="Plate 'a' has size=10"):
        num_words({"a": (10, 11)})


# Models


def logistic(x, y, num):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.deterministic("norm", jnp.sum(b**2))
    with numpyro.plate("data", len(x), subsample_size=num):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=s + x @ b), obs=y)


def by_index(x, y, num):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x), subsample_size=num) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=s + x[rows] @ b), obs=y[rows])


def nested(x, y, num):
    """Plates of rows and columns, with sites in one and in both of them."""
    b = numpyro.sample("b", dist.Normal(0, 2))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    columns = numpyro.plate(
        "columns", x.shape[1], subsample_size=None if num is None else 3, dim=-1
    )
    with numpyro.plate("rows", len(x), subsample_size=num, dim=-2):
        rows = numpyro.subsample(y[:, None], event_dim=0)
        numpyro.sample("y", dist.Normal(b, s), obs=rows)
        with columns:
            both = numpyro.subsample(x, event_dim=0)
            numpyro.sample("x", dist.StudentT(5, b, s), obs=both)


def several(x, y, num):
    """Two plates that have nothing to do with each other, and one that is whole."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("columns", x.shape[1]):
        numpyro.sample("c", dist.Normal(0, s), obs=x[0])
    with numpyro.plate("one", len(x), subsample_size=num):
        logits = numpyro.subsample(x, event_dim=1) @ b
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=numpyro.subsample(y, 0))
    size = len(x) // 2
    with numpyro.plate("two", size, subsample_size=num and num // 2) as rows:
        numpyro.sample("x", dist.Normal(b[0], s), obs=x[rows, 0])


def linear(x, y, num):
    """A quadratic potential."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=num):
        mean = numpyro.subsample(x, event_dim=1) @ b
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, 0))


MODELS = [logistic, by_index, nested, several]
SIZE = 103


def make_data(size=SIZE, dim=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, dim)).astype(np.float32)
    y = (rng.random(size) < 0.4).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


@cache
def make_model(model, num=10, size=SIZE):
    args = make_data(size)
    subsampled = SubsampledModel(model, (*args, num))
    sites = {"b": () if model is nested else (4,), "s": ()}
    keys = dict(zip(sites, random.split(random.key(7)), strict=True))
    z = {k: 0.5 * random.normal(keys[k], sites[k]) for k in subsampled.sites}
    return subsampled, args, z


@partial(jax.jit, static_argnums=0)
def reference(model, args, z):
    """Potential without subsampling, by NumPyro, and its gradient."""
    both = jax.value_and_grad(partial(potential_energy, model, (*args, None), {}))
    return both(z)


def flat(tree):
    return ravel_pytree(tree)[0]


def largest(jaxpr):
    """Size of the largest array that a program computes, with the functions in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [v.aval.size for v in equation.outvars if hasattr(v.aval, "size")]
        parts = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
        sizes += [largest(part) for part in parts if is_program(part)]
    return max(sizes)


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize("model", MODELS)
def test_full_potential_is_that_without_subsampling(model):
    subsampled, args, z = make_model(model)
    expected, expected_grad = reference(model, args, z)

    def run(z, chunk_size):
        potential = subsampled.full_potential_fn(z, chunk_size)
        return potential, *subsampled.full_gradient(z, chunk_size)

    for chunk_size in (20, 1000):
        potential, energy, grad = jax.jit(run, static_argnums=1)(z, chunk_size)
        np.testing.assert_allclose(potential, expected, rtol=1e-5)
        np.testing.assert_allclose(energy, expected, rtol=1e-5)
        np.testing.assert_allclose(
            flat(grad), flat(expected_grad), rtol=1e-4, atol=1e-3
        )


UNBIASED = [(logistic, batching) for batching in STATELESS]
UNBIASED += [(model, STATELESS[1]) for model in (by_index, nested, several)]


@pytest.mark.parametrize("model, batching", UNBIASED)
def test_batch_gradients_are_unbiased(model, batching):
    subsampled, args, z = make_model(model)
    batches = draw_many(0, subsampled.plates, batching, 4000)
    grads = flat_gradients(subsampled, z, batches, None)
    exact = flat(reference(model, args, z)[1])
    error = jnp.std(grads, axis=0) / 4000**0.5
    assert jnp.all(jnp.abs(jnp.mean(grads, axis=0) - exact) < 4 * error + 1e-3)


def test_plates_found():
    assert make_model(nested)[0].plates == {"rows": (103, 10), "columns": (4, 3)}
    assert make_model(several)[0].plates == {"one": (103, 10), "two": (51, 5)}
    assert make_model(logistic, num=None)[0].plates == {}


@pytest.mark.parametrize("model", [logistic, by_index, nested, several])
def test_scale_and_prior_once(model):
    """A batch of k copies of a row has the prior once and the row N times."""
    subsampled, args, z = make_model(model)
    plates = subsampled.plates
    rows = [{name: jnp.full(k, 2) for name in plates} for k in (1, 3)]
    potential_fn = jax.jit(subsampled.potential_fn)
    one, three = (potential_fn(z, batch) for batch in rows)
    np.testing.assert_allclose(one, three, rtol=1e-5)
    prior = potential_fn(z, {name: jnp.zeros(0, int) for name in plates})
    if model is not several:
        expected = -dist.Normal(0, 2).log_prob(z["b"]).sum()
        expected -= dist.HalfNormal(1.0).log_prob(jnp.exp(z["s"])) + z["s"]
        np.testing.assert_allclose(prior, expected, rtol=1e-5)


@pytest.mark.parametrize("model", [logistic, by_index, several])
def test_nothing_as_large_as_the_data_is_computed(model):
    size, num = 20_000, 10
    subsampled, args, z = make_model(model, num, size)
    batch = draw_batch(words(0, subsampled.plates, STATELESS[0]), subsampled.plates)

    def run(args, z, batch):
        subsampled = SubsampledModel(model, (*args, num))
        return jax.grad(subsampled.potential_fn)(z, batch), subsampled.postprocess_fn(z)

    assert largest(jax.make_jaxpr(run)(args, z, batch)) < size // 10


def test_numpy_data_in_compiled_functions():
    args = [np.asarray(a) for a in make_data()]
    plates = {"data": (SIZE, 10)}
    batch = draw_batch(words(0, plates, STATELESS[0]), plates)
    z = jnp.ones(5)

    def potential(z, batch):
        return SubsampledModel(by_index, (*args, 10)).potential_fn(z, batch)

    expected = make_model(by_index)[0].potential_fn(z, batch)
    np.testing.assert_allclose(jax.jit(potential)(z, batch), expected, rtol=1e-6)


def test_double_precision(x64):
    x, y = (a.astype(jnp.float64) for a in make_data())
    z = jnp.full(5, 0.3, jnp.float64)
    plates = {"data": (SIZE, 10)}

    @jax.jit
    def run(x, y, z, bits):
        subsampled = SubsampledModel(logistic, (x, y, 10))
        batch = draw_batch(bits, plates)
        assert batch["data"].dtype == jnp.int32
        cv = control_variate(subsampled, z, order=2)
        exact = potential_energy(logistic, (x, y, None), {}, subsampled.unravel(z))
        return cv.energy_full, exact, gradient(subsampled, z, batch, cv)

    energy, exact, grad = run(x, y, z, words(0, plates, STATELESS[0]))
    np.testing.assert_allclose(energy, exact, rtol=1e-12)
    assert grad.dtype == jnp.float64


def test_latent_site_in_subsampled_plate():
    def model():
        with numpyro.plate("data", 100, subsample_size=10):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("y", dist.Normal(z), obs=0.0)

    with pytest.raises(ValueError, match="Site 'z' is inside of plate 'data' with"):
        SubsampledModel(model)


ROWS = jnp.arange(20.0)


@pytest.mark.parametrize(
    "size, taken, message",
    [
        (5, ("x",), "Site 'y' has 20 observations inside of plate 'data', which takes"),
        (5, ("y",), "broadcast"),
        (50, (), "subsample_size=50, but only 20 rows"),
    ],
)
def test_rows_that_were_not_taken(size, taken, message):
    """The mistakes that are made first say what to do."""

    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 20, subsample_size=size):
            x = numpyro.subsample(x, event_dim=0) if "x" in taken else x
            y = numpyro.subsample(y, event_dim=0) if "y" in taken else y
            numpyro.sample("y", dist.Normal(mu * x, 1), obs=y)

    with pytest.raises(ValueError, match=message) as error:
        SubsampledModel(model, (ROWS, ROWS))
    if size < 20:
        assert "docs/subsampling.md" in "".join(error.value.__notes__)


def test_one_observation_for_all_rows():
    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 20, subsample_size=5):
            x = numpyro.subsample(x, event_dim=0)
            numpyro.sample("y", dist.Normal(mu * x, 1), obs=0.0)

    assert SubsampledModel(model, (ROWS,)).plates == {"data": (20, 5)}


def test_discrete_latent_site_with_subsampled_plate():
    def model():
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("data", 100, subsample_size=10):
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer=PARALLEL)
            numpyro.sample("y", dist.Normal(b + k), obs=0.0)

    with pytest.raises(NotImplementedError, match="Discrete latent site 'k'"):
        SubsampledModel(model)


def test_bad_position_and_batch():
    subsampled, _, z = make_model(logistic)
    with pytest.raises(ValueError, match="`batch` has indices of the plates"):
        subsampled.potential_fn(z, {})
    batch = {"data": jnp.arange(10)}
    with pytest.raises(ValueError, match="`z` has the sites"):
        subsampled.potential_fn({"b": z["b"]}, batch)
    with pytest.raises(ValueError, match="`z` has shape"):
        subsampled.potential_fn(jnp.zeros(3), batch)
    with pytest.raises(ValueError, match="`chunk_size` must be positive"):
        subsampled.full_potential_fn(z, 0)
    with pytest.raises(ValueError, match="`order` of control variates must be 1 or 2"):
        control_variate(subsampled, z, order=3)


# Draws


def test_postprocessing():
    subsampled, _, z = make_model(logistic)
    values = subsampled.postprocess_fn(z)
    assert set(values) == {"b", "s", "norm"}
    np.testing.assert_allclose(values["s"], jnp.exp(z["s"]), rtol=1e-6)
    np.testing.assert_allclose(values["norm"], jnp.sum(z["b"] ** 2), rtol=1e-6)
    assert set(subsampled.constrain_fn(z)) == {"b", "s"}


def test_deterministic_site_in_plate_is_computed_in_full_and_said_so():
    def model(x, y, num):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("data", len(x), subsample_size=num):
            mean = numpyro.subsample(x[:, 0], event_dim=0) * b
            numpyro.deterministic("mean", mean)
            numpyro.sample("y", dist.Normal(mean), obs=numpyro.subsample(y, 0))

    x, y = make_data()
    subsampled, z = SubsampledModel(model, (x, y, 10)), {"b": 0.5}
    with pytest.warns(UserWarning, match="'mean' is inside .* on all 103 rows"):
        values = subsampled.postprocess_fn(z)
    np.testing.assert_allclose(values["mean"], x[:, 0] * z["b"], rtol=1e-6)


# Control variates


def flat_gradients(subsampled, z, batches, cv):
    run = jax.vmap(lambda batch: flat(gradient(subsampled, z, batch, cv)))
    return jax.jit(run)(batches)


def make_control_variate(model, center, order, chunk_size=30):
    subsampled = make_model(model)[0]  # cached, so not made under a trace
    make = jax.jit(lambda c: control_variate(subsampled, c, order, chunk_size))
    return make(center)


@pytest.mark.parametrize("model", [logistic, nested, several])
@pytest.mark.parametrize("order", [1, 2])
def test_control_variates(model, order):
    """Exact at their centre, and unbiased with little variance around it."""
    subsampled, args, center = make_model(model)
    cv = make_control_variate(model, center, order)
    batches = draw_many(0, subsampled.plates, "without_replacement", 2000)
    run = jax.jit(
        jax.vmap(lambda z, b, cv: flat(gradient(subsampled, z, b, cv)), (None, 0, None))
    )
    exact = flat(reference(model, args, center)[1])
    grads = run(center, batches, cv)
    np.testing.assert_allclose(grads - exact, 0, atol=2e-3)

    z = jax.tree.map(lambda a: a + 0.03, center)
    grads = run(z, batches, cv)
    spread = jnp.std(grads, axis=0)
    error = jnp.abs(jnp.mean(grads, axis=0) - flat(reference(model, args, z)[1]))
    assert jnp.all(error < 4 * spread / 2000**0.5 + 2e-3)
    plain = flat_gradients(subsampled, z, batches, None)
    ratio = jnp.linalg.norm(spread) / jnp.linalg.norm(jnp.std(plain, axis=0))
    assert ratio < {1: 0.15, 2: 0.02}[order]


def test_order_two_is_exact_for_a_quadratic_potential():
    subsampled, args, z = make_model(linear)
    cv = make_control_variate(linear, {"b": jnp.zeros(4)}, 2)
    batches = draw_many(0, subsampled.plates, "with_replacement", 5)
    energy, grad = reference(linear, args, z)
    grads = flat_gradients(subsampled, z, batches, cv)
    np.testing.assert_allclose(grads - flat(grad), 0, atol=2e-3)
    values = jax.jit(jax.vmap(lambda batch: value(subsampled, z, batch, cv)))(batches)
    np.testing.assert_allclose(values, np.full(5, energy), rtol=1e-5)


@pytest.mark.parametrize("order", [None, 1, 2])
def test_gradient_is_that_of_the_value(order):
    subsampled, _, z = make_model(logistic)
    x = flat(z)
    cv = None if order is None else make_control_variate(logistic, x + 0.3, order)
    batch = {"data": jnp.arange(10) * 3}

    @jax.jit
    def run(x):
        return (
            jax.grad(lambda x: value(subsampled, x, batch, cv))(x),
            gradient(subsampled, x, batch, cv),
            gradient(subsampled, x, batch, cv, grad=jax.jacfwd),
        )

    expected, reverse, forward = run(x)
    np.testing.assert_allclose(reverse, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(forward, expected, rtol=1e-4, atol=1e-3)


def test_subsampled_potential_is_that_of_substitution():
    """The same as NumPyro with the indices given by hand."""
    subsampled, args, z = make_model(logistic)
    batch = {"data": jnp.array([3, 3, 100, 7, 0, 1, 2, 50, 60, 102])}
    model = substitute(logistic, data=batch)
    expected = potential_energy(model, (*args, 10), {}, z)
    np.testing.assert_allclose(subsampled.potential_fn(z, batch), expected, rtol=1e-6)
