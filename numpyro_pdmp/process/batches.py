# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Mini-batches along a path: a fresh one every tick, or one until the next event."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp


class BatchSource(NamedTuple):
    """Where mini-batches of data come from; a batch is any pytree of arrays."""

    num_words: int  # random words of 32 bits that a batch takes
    start: Callable[[Array], Any]  # words -> state
    next: Callable[[Any, Array], tuple[Any, Any]]  # state, words -> state, batch
    ahead: int = 0  # how many later batches gradients are told of


class Batches(NamedTuple):
    """State of the batches of a path."""

    state: Any
    held: Any  # the batch in use until the next event, if it is held (else None)
    used: Array  # () whether that one has had its event


def start_batches(source: BatchSource, words: Array, hold: bool) -> Batches:
    """Before the first tick.

    :param source: where batches come from.
    :param words: (2, ``source.num_words``) random words.
    :param hold: whether a batch stays in use until the next event.
    """
    state, held = source.start(words[0]), None
    if hold:
        state, held = source.next(state, words[1])
    return Batches(state, held, jnp.zeros((), bool))


def next_batch(
    source: BatchSource, batches: Batches, words: Array
) -> tuple[Batches, Any]:
    """The batch of a tick: a fresh one, or the one that is held until its event."""
    state, batch = source.next(batches.state, words)
    if batches.held is not None:
        state, batch = jax.tree.map(
            lambda new, old: jnp.where(batches.used, new, old),
            (state, batch),
            (batches.state, batches.held),
        )
        return Batches(state, batch, jnp.zeros((), bool)), batch
    return batches._replace(state=state), batch


def batch_arguments(
    source: BatchSource | None,
    batches: Batches | None,
    words: Array,
    rng_key: Array,
    draw: Callable[[Array], tuple[Array, Any, Array]],
) -> tuple[Batches | None, tuple]:
    """The batch of a tick, and later ones, as arguments of the gradient.

    None on full data.

    :param source: where batches come from.
    :param batches: state before the tick.
    :param words: random words of the tick.
    :param rng_key: key after the tick.
    :param draw: from a key to the next one, anything and the words of a tick, to see
        batches in advance.
    """
    if source is None or batches is None:
        return None, ()
    batches, batch = next_batch(source, batches, words)
    # Of a batch that is held it is not known when it will be done with.
    num = source.ahead if batches.held is None else 0
    state, arguments = batches.state, [batch]
    for _ in range(num):
        rng_key, _, words = draw(rng_key)
        state, later = source.next(state, words)
        arguments.append(later)
    return batches, tuple(arguments)
