# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Random numbers: one call of the generator a tick."""

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.typing import ArrayLike


def draw_uniform(
    rng_key: Array, num: int, dtype: jnp.dtype, num_words: int = 0
) -> tuple[Array, Array, Array]:
    """A new key, ``num`` uniform variables in [0, 1) and raw words from one call.

    Splitting a key and drawing from one half are two runs of the generator. Here one
    run yields a block of random words, of which the first make the new key; on small
    models this saves a good part of a tick, and of its compilation.

    :param rng_key: a typed or a raw key.
    :param num: how many.
    :param dtype: float32 or float64.
    :param num_words: how many words of type uint32.
    """
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    key_size = (random.key_data(rng_key) if typed else rng_key).size
    words = 1 if jnp.finfo(dtype).bits <= 32 else 2
    size = key_size + num_words + words * num
    bits = random.bits(rng_key, (size,), jnp.uint32)
    new_key, raw = bits[:key_size], bits[key_size : key_size + num_words]
    if typed:
        new_key = random.wrap_key_data(new_key, impl=random.key_impl(rng_key))
    bits = bits[key_size + num_words :]
    if words == 1:
        return new_key, (bits >> 9).astype(dtype) * 2.0**-23, raw
    high, low = bits[:num].astype(jnp.uint64), bits[num:].astype(jnp.uint64)
    return new_key, ((high << 32 | low) >> 11).astype(dtype) * 2.0**-53, raw


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
