# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import re

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_pdmp.process import pieces
from numpyro_pdmp.process.pieces import in_pieces

used = jax.default_backend() == "cpu" and jax.__version_info__[:2] in pieces.TESTED
needs_pieces = pytest.mark.skipif(not used, reason="an untried version of JAX")


def tangle(key, x, y, matrix):
    """Small operations before, between and after larger ones."""
    x = jnp.where(x > 0, x, 0.5 * y) + random.uniform(key, x.shape)
    z = jnp.concatenate([matrix @ x, jnp.tanh(x)])
    chosen = jnp.argmin(jnp.square(z))
    z = jnp.where(jnp.arange(z.size) == chosen, 1.0, z)
    factor = jnp.linalg.cholesky(jnp.outer(z, z) + jnp.eye(z.size))
    w = factor @ z
    return w / jnp.sqrt(w @ w), {"chosen": chosen, "unchanged": y}


@pytest.fixture
def arguments():
    x, y = random.normal(random.key(1), (2, 5))
    return random.key(0), x, y, jnp.linspace(-1, 1, 25).reshape(5, 5)


def test_same_values(arguments):
    expected = jax.jit(tangle)(*arguments)
    found = jax.jit(in_pieces(tangle))(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_in_a_loop(arguments):
    def step(fn):
        def body(i, carry):
            key, x = carry
            key, sub = random.split(key)
            return key, fn(sub, x, *arguments[2:])[0][:5]

        return jax.jit(lambda: lax.fori_loop(0, 10, body, arguments[:2]))()[1]

    assert jnp.allclose(step(in_pieces(tangle)), step(tangle), rtol=1e-4, atol=1e-5)


def kinds_of_code(fn, *arguments):
    """Kinds of instructions that XLA starts one by one."""
    text = jax.jit(in_pieces(fn)).lower(*arguments).compile().as_text()
    return re.findall(r" ([a-z-]+)\(", text[text.index("ENTRY") :])


@needs_pieces
def test_few_pieces(arguments):
    """Of many small operations one call, which XLA makes one function of."""

    def small(x, y):
        for _ in range(20):
            x, y = jnp.maximum(x, x + y), jnp.sin(x) * jnp.sum(y)
        return x, y

    kinds = kinds_of_code(small, *arguments[1:3])
    assert kinds.count("call") == 1
    assert "fusion" not in kinds


@needs_pieces
def test_sum_of_what_was_chosen(arguments):
    """Is in a piece of its own, with all sums of that kind."""

    def fn(x, y):
        x, y = jnp.sin(x) + y, jnp.cos(y) - x
        v, w = jnp.where(x > y, x, y), jnp.where(y > 0, 2 * y, x)
        return jnp.sum(v * w) + jnp.exp(v), jnp.tanh(w) * jnp.vdot(w, w) - v

    assert kinds_of_code(fn, *arguments[1:3]).count("call") == 2
    for a, b in zip(
        jax.jit(in_pieces(fn))(*arguments[1:3]), fn(*arguments[1:3]), strict=True
    ):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_data", [jnp.asarray, jnp.cumsum, jnp.sort, jnp.outer])
def test_constants(of_data):
    """XLA would end the process on a piece with a constant as argument."""
    data = np.sin(np.arange(1330.0, dtype=np.float32)) + 2

    def fn(x):
        y = of_data(data, data[:2])[:, 0] if of_data is jnp.outer else of_data(data)
        for _ in range(3):
            x = jnp.where(x > y, x + y, jnp.sin(x))
        return x, jnp.exp(-x) * y, x - y

    x = jnp.linspace(-1, 1, data.size)
    for a, b in zip(jax.jit(in_pieces(fn))(x), fn(x), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_an_argument_that_does_not_matter():
    """XLA would end the process if it found an argument of a piece to be unused."""

    def fn(x, y, n):
        zero = jnp.where(jnp.zeros((), bool), y, 0 * n)
        return jnp.cos(x) + zero, jnp.sin(x) * 2 + (n - n), jnp.exp(x) - zero

    x, y = jnp.arange(3.0), jnp.ones(3)
    found = jax.jit(in_pieces(fn))(x, y, jnp.arange(3))
    assert jnp.allclose(found[0], jnp.cos(x))


def test_vmap(arguments):
    """What is small for one need not be small for many, as XLA would complain."""

    def fn(x, y):
        z = jnp.where(x > y, x * y, y - x)
        return jnp.sum(z * x) + jnp.cos(z), jnp.max(z)

    x, y = random.normal(random.key(0), (2, 4096, 5))
    found = jax.jit(jax.vmap(in_pieces(fn)))(x, y)
    expected = jax.vmap(fn)(x, y)
    for a, b in zip(found, expected, strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 1000, 2000, 3000, 10_000])
def test_sizes(size):
    def fn(x):
        y = jnp.abs(x) + 1
        total, most = jnp.sum(y * x), jnp.max(y)
        return total * jnp.log(y), most - y, jnp.argmax(x), jnp.sum(x.reshape(1, -1), 0)

    x = random.normal(random.key(0), (size,))
    for a, b in zip(jax.jit(in_pieces(fn))(x), fn(x), strict=True):
        assert jnp.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_not_used_elsewhere(monkeypatch):
    monkeypatch.setattr(pieces, "TESTED", ())
    assert in_pieces(tangle) is tangle


def test_switch(monkeypatch):
    monkeypatch.setenv("NUMPYRO_PDMP_PIECES", "0")
    assert in_pieces(tangle) is tangle
