# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import re

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_pdmp.process import packing
from numpyro_pdmp.process.packing import Packing
from numpyro_pdmp.process.pieces import in_pieces


def tree():
    return {
        "key": random.split(random.key(0), 4),
        "vectors": [jnp.arange(12.0).reshape(4, 3) + i for i in range(3)],
        "numbers": (jnp.arange(4), jnp.arange(4) + 1, jnp.arange(4.0)),
        "none": None,
        "large": [jnp.zeros(packing.SMALL), jnp.ones(packing.SMALL)],
    }


def assert_same(new, old):
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for a, b in zip(*map(jax.tree.leaves, (new, old)), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = random.key_data(a), random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wanted", [True, False])
def test_there_and_back(wanted, monkeypatch):
    monkeypatch.setattr(packing, "makes_pieces", lambda: True)
    packed = Packing(tree(), wanted).pack(tree())
    assert len(packed) == (6 if wanted else 9)
    assert_same(Packing(tree(), wanted).unpack(packed), tree())


def test_left_alone_without_pieces(monkeypatch):
    monkeypatch.setattr(packing, "makes_pieces", lambda: False)
    assert len(Packing(tree()).pack(tree())) == len(jax.tree.leaves(tree()))


def copies(packs):
    """Of the state, in an iteration of a loop."""
    start = [jnp.full(4, float(i)) for i in range(8)]
    packing = Packing(start, packs)

    def body(packed):
        x = packing.unpack(packed)
        # The old values are needed to the end.
        total = lax.optimization_barrier(sum(jnp.sin(a) for a in x))
        return packing.pack([0.5 * a + total for a in x])

    def loop(packed):
        return lax.fori_loop(0, 10, lambda _, p: in_pieces(body)(p), packed)

    compiled = jax.jit(loop).lower(packing.pack(start)).compile()
    found = packing.unpack(compiled(packing.pack(start)))
    return len(re.findall(r" copy\(", compiled.as_text())), found


def test_fewer_copies():
    (packed, found), (others, expected) = copies(True), copies(False)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if packing.makes_pieces():
        assert packed < others
