# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Random numbers: one call of the generator a tick."""

from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.typing import ArrayLike


class Numbers(NamedTuple):
    """What a tick takes of the generator."""

    rng_key: Array  # of the next one
    uniform: Array  # in [0, 1)
    words: Array  # raw, of type uint32


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_words(key: Array, num: int) -> Array:
    r"""Random words of 32 bits: Threefry-2x32-20 (Salmon, Moraes, Dror, Shaw 2011).

    The same ones as ``jax.random.bits(key, (num,), "uint32")``, whose rounds are on CPU
    a loop of its own. Here they are written out, so that a tick is without an inner
    loop, and XLA makes one piece of code of them: on small models the inner loop took
    a third of a tick.

    :param key: (2,) words.
    :param num: how many.
    """
    word = partial(jnp.asarray, dtype=jnp.uint32)
    schedule = key[0], key[1], key[0] ^ key[1] ^ word(_PARITY)
    x = jnp.zeros(num, jnp.uint32) + schedule[0]
    y = jnp.arange(num, dtype=jnp.uint32) + schedule[1]
    for i in range(5):
        for shift in _ROTATIONS[i % 2]:
            x = x + y
            y = (y << word(shift) | y >> word(32 - shift)) ^ x
        x = x + schedule[(i + 1) % 3]
        y = y + schedule[(i + 2) % 3] + word(i + 1)
    return x ^ y


class Recipe(NamedTuple):
    """How many numbers a tick takes, and of what kind.

    Splitting a key and drawing from one half are two runs of the generator. Here one
    run yields a block of random words, of which the first make the new key; on small
    models this saves a good part of a tick, and of its compilation.
    """

    num: int  # of uniform variables
    dtype: jnp.dtype  # float32 or float64
    num_words: int = 0  # of type uint32

    def draw(self, rng_key: Array) -> Array:
        """The block of a typed or raw key."""
        data = random.key_data(rng_key) if _is_typed(rng_key) else rng_key
        size = data.size + self.num_words + self._words * self.num
        if data.size == 2:  # of JAX's generators, only Threefry has such keys
            return threefry_words(data, size)
        return random.bits(rng_key, (size,), jnp.uint32)

    def read(self, block: Array, rng_key: Array) -> Numbers:
        """What a block of such a key holds."""
        key_size = block.size - self.num_words - self._words * self.num
        new_key, raw = block[:key_size], block[key_size : key_size + self.num_words]
        if _is_typed(rng_key):
            new_key = random.wrap_key_data(new_key, impl=random.key_impl(rng_key))
        bits = block[key_size + self.num_words :]
        if self._words == 1:
            return Numbers(new_key, (bits >> 9).astype(self.dtype) * 2.0**-23, raw)
        high, low = (a.astype(jnp.uint64) for a in (bits[: self.num], bits[self.num :]))
        uniform = ((high << 32 | low) >> 11).astype(self.dtype) * 2.0**-53
        return Numbers(new_key, uniform, raw)

    def numbers(self, rng_key: Array) -> Numbers:
        """Both at once."""
        # The barrier, since XLA would run the generator for each part of the block.
        return self.read(lax.optimization_barrier(self.draw(rng_key)), rng_key)

    @property
    def _words(self) -> int:
        """Of 32 bits, in one uniform variable."""
        return 1 if jnp.finfo(self.dtype).bits <= 32 else 2


def _is_typed(rng_key: Array) -> bool:
    return jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)


def draw_uniform(
    rng_key: Array, num: int, dtype: jnp.dtype, num_words: int = 0
) -> Numbers:
    """A new key, ``num`` uniform variables in [0, 1) and raw words from one call.

    :param rng_key: a typed or a raw key.
    :param num: how many.
    :param dtype: float32 or float64.
    :param num_words: how many words of type uint32.
    """
    return Recipe(num, dtype, num_words).numbers(rng_key)


def normal(uniform: Array) -> Array:
    """Standard normal variables from uniform ones, by inversion."""
    above = -1 + jnp.finfo(uniform.dtype).epsneg  # erf_inv(-1) is infinite
    return 2**0.5 * lax.erf_inv(jnp.maximum(2 * uniform - 1, above))


def exponential(uniform: Array, rate: ArrayLike = 1.0) -> Array:
    """Exponential variable of the given rate from a uniform one; infinite at rate 0."""
    rate = jnp.asarray(rate, uniform.dtype)
    positive = rate > 0
    return jnp.where(
        positive, -jnp.log1p(-uniform) / jnp.where(positive, rate, 1), jnp.inf
    )
