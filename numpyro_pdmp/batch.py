# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of a mini-batch from random words, in O(m) time and memory.

Nothing here depends on the number of rows N but through arithmetic. Sampling without
replacement evaluates a keyed pseudo-random permutation of ``0..N-1`` at m places.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from jax import Array, lax, random
import jax.numpy as jnp
from jax.typing import ArrayLike

Plates = dict[str, tuple[int, int]]  # name -> (size, subsample_size)
Batch = dict[str, Any]  # name -> (subsample_size,) indices, or weighted ones

BATCHING = ("with_replacement", "without_replacement", "epoch", "contiguous")

#: from this size on, one word of 32 bits is not uniform enough (1e-3)
_TWO_WORDS = 2**22


class EpochState(NamedTuple):
    """How far each plate is in its current pass over the data."""

    keys: dict[str, Array]  # of the permutation in use
    position: dict[str, Array]  # rows of it already used


def _validate(plates: Plates, batching: str) -> None:
    if batching not in BATCHING:
        raise ValueError(f"`batching` must be one of {BATCHING}, got {batching!r}.")
    for name, (size, subsample_size) in plates.items():
        if not 0 < subsample_size <= size < 2**31:
            raise ValueError(
                f"Plate '{name}' has size={size} and subsample_size={subsample_size}; "
                "need 0 < subsample_size <= size < 2**31."
            )


def _plate_words(size: int, subsample_size: int, batching: str) -> int:
    words = 1 if size < _TWO_WORDS else 2
    if batching == "with_replacement":
        return subsample_size * words
    return words if batching == "contiguous" else _num_rounds(*_grid(size))


def num_words(plates: Plates, batching: str = "with_replacement") -> int:
    """How many random words of 32 bits :func:`next_batch` needs.

    :param plates: size and subsample size of each plate.
    :param batching: see :func:`next_batch`.
    """
    _validate(plates, batching)
    return sum(_plate_words(*sizes, batching) for sizes in plates.values())


def split_words(bits: Array, plates: Plates, batching: str) -> dict[str, Array]:
    expected = num_words(plates, batching)
    if bits.shape != (expected,) or bits.dtype != jnp.uint32:
        raise ValueError(
            f"`bits` must be {expected} words of type uint32, got {bits.dtype} of "
            f"shape {bits.shape}."
        )
    words, start = {}, 0
    for name, sizes in plates.items():
        stop = start + _plate_words(*sizes, batching)
        words[name], start = bits[start:stop], stop
    return words


def start_batches(
    bits: Array, plates: Plates, batching: str = "with_replacement"
) -> EpochState | None:
    """State before the first batch; None where batches are independent.

    :param bits: ``num_words`` random words of type uint32.
    :param plates: size and subsample size of each plate.
    :param batching: see :func:`next_batch`.
    """
    keys = split_words(bits, plates, batching)
    if batching != "epoch":
        return None
    return EpochState(keys, {name: jnp.zeros((), jnp.int32) for name in plates})


def next_batch(
    state: EpochState | None,
    bits: Array,
    plates: Plates,
    batching: str = "with_replacement",
) -> tuple[EpochState | None, Batch]:
    """The next mini-batch and the state after it.

    :param state: from :func:`start_batches`.
    :param bits: ``num_words`` random words of type uint32.
    :param plates: size and subsample size of each plate.
    :param batching: "with_replacement"; "without_replacement": no row twice in a batch;
        "epoch": every row once in a pass over the data, in a new order each pass;
        "contiguous": consecutive rows from a random one on, which reads memory much
        faster if there are more data than fit into the processor's cache. It is as
        unbiased as the others, but has their small variance only if the rows are in
        random order.
    """
    words = split_words(bits, plates, batching)
    if batching == "epoch":
        assert state is not None
        return _next_of_epoch(state, words, plates)
    batch = {}
    for name, (size, subsample_size) in plates.items():
        rows = jnp.arange(subsample_size, dtype=jnp.uint32)
        if batching == "with_replacement":
            batch[name] = _below(words[name].reshape(-1, subsample_size), size)
        elif batching == "contiguous":
            rows += _below(words[name].reshape(-1, 1), size)
            batch[name] = _until_rows(rows, size, lambda x, n=size: x - n)
        else:
            batch[name] = _permute(rows, words[name], size)
    return state, {name: index.astype(jnp.int32) for name, index in batch.items()}


def draw_batch(
    bits: Array, plates: Plates, batching: str = "with_replacement"
) -> Batch:
    """A mini-batch independent of all others.

    :param bits: ``num_words`` random words of type uint32.
    :param plates: size and subsample size of each plate.
    :param batching: see :func:`next_batch`; any but "epoch".
    """
    if batching == "epoch":
        raise ValueError(
            "`batching='epoch'` needs a state; use `start_batches` and `next_batch`."
        )
    return next_batch(None, bits, plates, batching)[1]


def random_batch(rng_key: Array, plates: Plates) -> Batch:
    """A mini-batch without any row twice; all rows in order where it has all of them.

    :param rng_key: decides the batch.
    :param plates: size and subsample size of each plate.
    """
    batch = {
        name: jnp.arange(size, dtype=jnp.int32)
        for name, (size, subsample_size) in plates.items()
        if subsample_size == size
    }
    others = {name: sizes for name, sizes in plates.items() if name not in batch}
    num = num_words(others, "without_replacement")
    bits = random.bits(rng_key, (num,), jnp.uint32)
    return batch | draw_batch(bits, others, "without_replacement")


def _next_of_epoch(
    state: EpochState, words: dict[str, Array], plates: Plates
) -> tuple[EpochState, Batch]:
    keys, position, batch = {}, {}, {}
    for name, (size, subsample_size) in plates.items():
        rows = state.position[name] + jnp.arange(subsample_size, dtype=jnp.int32)
        rows = rows.astype(jnp.uint32)
        # A batch across the end of a pass takes its other rows from the next one.
        old = state.keys[name]
        row_keys = jnp.where(rows < size, old[:, None], words[name][:, None])
        rows = jnp.where(rows < size, rows, rows - size)
        batch[name] = _permute(rows, row_keys, size).astype(jnp.int32)
        left = size - subsample_size - state.position[name]
        keys[name] = jnp.where(left <= 0, words[name], old)
        position[name] = jnp.where(left <= 0, -left, size - left)
    return EpochState(keys, position), batch


# Arithmetic on words


def _high(a: Array, b: ArrayLike) -> Array:
    """High word of the product of two words, by halves: there may be no uint64."""
    b = jnp.asarray(b, jnp.uint32)
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a1 * b0 + (a0 * b0 >> 16)
    return a1 * b1 + (middle >> 16) + ((middle & 0xFFFF) + a0 * b1 >> 16)


def _below(words: Array, size: int) -> Array:
    """Uniform integers in ``0..size-1`` from one or two rows of words."""
    index = _high(words[0], size)
    if len(words) == 2:
        low = words[0] * jnp.uint32(size)
        index += low + _high(words[1], size) < low  # carry
    return _until_rows(index, size, lambda x: x - size)


def _until_rows(index: Array, size: int, step: Callable) -> Array:
    """Apply ``step`` to indices that are no rows until all are.

    The loop stays even where it never runs: the compiler cannot fuse across it, and
    would else work out an index anew for every entry of its row.
    """
    return lax.while_loop(
        lambda x: jnp.any(x >= size), lambda x: jnp.where(x < size, x, step(x)), index
    )


def _grid(size: int) -> tuple[int, int]:
    """Sides of the smallest grid, nearly square, with at least ``size`` points."""
    root = max(2, math.isqrt(size - 1) + 1)
    sides = range(root, max(2, 3 * root // 4) - 1, -1)
    width = min(sides, key=lambda a: -size % a)
    return width, max(2, -(-size // width))


def _num_rounds(width: int, height: int) -> int:
    """Rounds after which any two places are any two rows, within a factor 1 +- 1e-3.

    Two rounds take the deviation, with random functions, down by the shorter side.
    """
    side = min(width, height)
    return 2 + math.ceil(2 * math.log(1000 * side) / math.log(side))


def _mix(x: Array) -> Array:
    """A word whose high bits depend on all bits of ``x``; the start of lowbias32."""
    x = (x ^ x >> 16) * jnp.uint32(0x7FEB352D)
    return (x ^ x >> 15) * jnp.uint32(0x846CA68B)


def _permute(rows: Array, keys: Array, size: int) -> Array:
    """Pseudo-random permutation of ``0..size-1`` with these keys, at ``rows``.

    A Feistel network on a grid: the coordinates in turn are shifted by a keyed function
    of the other one. The few points of the grid that are no rows are passed on until
    they fall on a row, which keeps it a permutation.
    """
    width, height = _grid(size)

    def once(x):
        pair, sides = [x // height, x % height], (width, height)
        for i, key in enumerate(keys):
            one, other = i % 2, 1 - i % 2
            side = jnp.uint32(sides[one])
            shifted = pair[one] + _high(_mix(pair[other] ^ key), side)
            pair[one] = jnp.where(shifted < side, shifted, shifted - side)
        return pair[0] * height + pair[1]

    return _until_rows(once(rows), size, once)
