# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Models with rows that are spread over devices: which rows, and what is done where."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.batch import Batch, Plates, random_batch
from numpyro_pdmp.rows import ShareOfRows, with_batch
from numpyro_pdmp.shards import (
    Shards,
    check_shards,
    find_shards,
    random_shard_draws,
)


def _evenly(size: int, num: int) -> Array:
    return (jnp.arange(num) * (size / num)).astype(jnp.int32)


def _arrays(leaves: list) -> list[Array | None]:
    """JAX arrays among the leaves of a model's arguments."""
    return [x if isinstance(x, jax.Array) else None for x in leaves]


def _merged(treedef: Any, leaves: list, arrays: list) -> Any:
    """The arguments with these arrays, and other leaves as they are."""
    both = zip(arrays, leaves, strict=True)
    return jax.tree.unflatten(treedef, [b if a is None else a for a, b in both])


def _few_rows(data: Any, num: int) -> Any:
    """A model's arguments with so many rows of each device, where all can see them."""
    leaves, treedef = jax.tree.flatten(data)
    shards = find_shards(leaves)
    if shards is None:
        return data
    return _merged(treedef, leaves, shards.few(_arrays(leaves), num))


class SpreadMixin:
    """The part of a model that knows where its rows are, kept apart from it.

    Without rows on many devices all of it does what is done on one.
    """

    if TYPE_CHECKING:  # the rest of the model

        def __getattr__(self, name: str) -> Any: ...

    #: where rows are that are spread over devices
    shards: Shards | None
    #: the plates of such rows
    sharded: list[str]
    #: size and subsample size of each subsampled plate
    plates: Plates

    def _find_shards(self) -> tuple[Shards | None, list[str]]:
        leaves, treedef = jax.tree.flatten((self._args, self._kwargs))
        shards = find_shards(leaves)
        if shards is None:
            return None, []
        # The model sees the rows of a device; only shapes tell the sizes of all.
        found: list[Any] = []
        kind: Any = type(self)

        def look(arrays):
            data = _merged(treedef, leaves, arrays)
            found.append(kind(self._model, *data))

        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else None
            for x in leaves
        ]
        jax.eval_shape(look, shapes)
        self.plates = found[0].plates
        return shards, check_shards(shards, leaves, self.plates)

    @property
    def few_arguments(self) -> tuple[tuple, dict]:
        """The model's arguments; of rows on many devices only a few, on each of them.

        They are for what does not depend on data: supports, shapes, priors.
        """
        if self.shards is None:
            return self._args, self._kwargs
        share = self.plates[self.sharded[0]][1] // self.shards.num
        return _few_rows((self._args, self._kwargs), share)

    def start_model(self, batch: Batch) -> Callable:
        """The model without random batches, to try where to start.

        :param batch: on which rows; of those on many devices only a few are used.
        """
        if self.shards is None:
            return with_batch(self._model, batch)
        nums = {name: num for name, (_, num) in self.plates.items()}
        share = nums[self.sharded[0]] // self.shards.num

        def on_copies(*args, **kwargs):
            few, few_kwargs = _few_rows((args, kwargs), share)
            first = {k: jnp.arange(num, dtype=jnp.int32) for k, num in nums.items()}
            return with_batch(self._model, first)(*few, **few_kwargs)

        return on_copies

    def draw_plates(self, plates: Plates | None = None) -> Plates:
        """Sizes that rows are drawn from: those of a device, where they are spread."""
        plates = self.plates if plates is None else plates
        if self.shards is None:
            return plates
        return {
            name: self.shards.share(name, sizes) if name in self.sharded else sizes
            for name, sizes in plates.items()
        }

    def spread(self, name: str, rows: Array) -> Array:
        """Rows of a plate; the same ones of every device, if they are spread."""
        spread = self.shards is not None and name in self.sharded
        return self.shards.spread(rows) if spread else rows  # type: ignore[union-attr]

    def pilot_batch(self, num_rows: int) -> Batch:
        """A fixed batch, evenly spread over the data, of so many rows or a batch's."""
        batch = {}
        for name, (size, num) in self.draw_plates().items():
            share = self.shards.num if self.shards and name in self.sharded else 1
            num = min(size, max(num, -(-num_rows // share)))
            batch[name] = self.spread(name, _evenly(size, num))
        return batch

    def random_batch(self, rng_key: Array, plates: Plates) -> Batch:
        """A mini-batch without any row twice.

        :param rng_key: decides the batch.
        :param plates: size and subsample size of each plate.
        """
        if self.shards is None:
            return random_batch(rng_key, plates)
        return random_shard_draws(rng_key, self.draw_plates(plates), self.sharded)

    def placed(self, batch: Batch) -> Batch:
        """Rows where they are needed, so that they are worked out but once."""
        if self.shards is None:
            return batch
        return {
            name: self.shards.placed(rows) if name in self.sharded else rows
            for name, rows in batch.items()
        }

    def _on_data(self, fn: Callable, z: Any, batch: Batch) -> Any:
        """``fn(z, batch, args, kwargs)``, where the data are.

        :param fn: of the rows of a device, if they are spread. Then results of the
            devices are stacked.
        """
        shards = self.shards
        if shards is None:
            return fn(z, batch, self._args, self._kwargs)
        leaves, treedef = jax.tree.flatten((self._args, self._kwargs))

        batch = self.placed(batch)
        spread = {name: rows for name, rows in batch.items() if name in self.sharded}
        others = {name: rows for name, rows in batch.items() if name not in spread}

        def local(arrays, spread, z, others):
            shares = {
                name: ShareOfRows(placed.rows, shards.size)
                for name, placed in spread.items()
            }
            return fn(z, shares | others, *_merged(treedef, leaves, arrays))

        return shards.run(local, _arrays(leaves), spread, z, others)

    def check_shards(self, z: Any) -> tuple[Array, Array]:
        """Potential of a few rows, where they are and as a small data set: the same.

        Unless a row needs what its device does not have, such as an array that the
        model has not as an argument, or a mean over all rows.
        """
        assert self.shards is not None
        (plate,), num = self.sharded, self.shards.num
        share = self.plates[plate][1] // num
        last = self.shards.local_size - share + jnp.arange(share, dtype=jnp.int32)
        batch = self.pilot_batch(1)
        here = self.potential_fn(z, {**batch, plate: self.shards.spread(last)})
        rows = ShareOfRows(jnp.arange(num * share), self.shards.size)
        copies = {**batch, plate: rows}
        there = self._functions(copies, *self.few_arguments)[0](self._sites(z))
        return here, there
