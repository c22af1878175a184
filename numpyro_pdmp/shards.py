# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Data whose rows are spread over devices: each device has its share of every batch.

With N rows on D devices in equal parts, and :math:`B_k` the m / D rows that device k
draws of its own, every device evaluates

.. math:: U_k(x) = -\log p(x) - \frac{N}{m / D} \sum_{j \in B_k} \log p(y_j \mid x)

on the rows it has, and the mean over devices is the potential of the batch: a
stratified, and so an unbiased estimate of that of all data, with the prior in it once.
Rows never move. What does is the mean of the gradients, by one all-reduce.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
import math
from typing import Any, NamedTuple
import warnings

import numpy as np

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from numpyro.util import find_stack_level
from numpyro_pdmp.batch import (
    Batch,
    Plates,
    _mix,
    draw_batch,
    num_words,
    split_words,
)
from numpyro_pdmp.pages import explained

EVERYWHERE = PartitionSpec()

CONSTANTS = (
    "Rows that are spread over devices have become constants of a compiled program, "
    "with a copy of all of them on every device. Give them as arguments, by "
    "`MCMC(..., jit_model_args=True)`."
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["words"],
    meta_fields=["num", "batching"],
)
@dataclass(frozen=True)
class ShardDraw:
    """Random words from which each device works out its own rows of a batch."""

    words: Array
    num: int  # rows of a device
    batching: str


class PlacedRows(NamedTuple):
    """Rows of a batch, each on its device and counted from the first that it has."""

    rows: Array  # (m,), spread over devices


@dataclass(frozen=True)
class Shards:
    """Where the rows of a model's arguments are."""

    mesh: Any
    axes: tuple[str, ...]  # of the mesh, over which rows are spread
    num: int  # devices along them
    size: int  # rows of all devices
    specs: list[PartitionSpec] = field(hash=False)  # of each leaf of the arguments
    dims: list[int | None] = field(hash=False)  # the axis of each leaf that is spread

    @property
    def local_size(self) -> int:
        """Rows of a device."""
        return self.size // self.num

    def share(self, name: str, sizes: tuple[int, int]) -> tuple[int, int]:
        """Rows of a device, and those of a batch; an error if they do not divide."""
        size, num = sizes
        if num % self.num:
            near = max(num // self.num, 1) * self.num
            raise ValueError(
                f"Plate '{name}' has subsample_size={num}, and its rows are on "
                f"{self.num} devices: each must have the same share of a batch. Give a "
                f"multiple, such as {near}."
            )
        return size // self.num, num // self.num

    def spread(self, rows: Array) -> Array:
        """The same rows of every device, as rows of all data."""
        first = self.local_size * jnp.arange(self.num, dtype=jnp.int32)
        return (first[:, None] + rows).reshape(-1)

    def local_rows(self, entry: Any) -> Array:
        """This device's share of a batch, counted from its first row.

        :param entry: words to draw them from, or rows of all data: as many of each
            device, in the order of the devices.
        """
        index = lax.axis_index(self.axes)
        if isinstance(entry, ShardDraw):
            # Uniform words stay so: this is a one-to-one map for every device.
            words = _mix(
                entry.words + index.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
            )
            plates = {"rows": (self.local_size, entry.num)}
            return draw_batch(words, plates, entry.batching)["rows"]
        num = len(entry) // self.num
        rows = lax.dynamic_slice_in_dim(entry, index * num, num)
        return rows - index * self.local_size

    def placed(self, entry: Any) -> PlacedRows:
        """Rows of a batch as each device counts its own, and where it needs them."""
        if isinstance(entry, PlacedRows):
            return entry
        traced = any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(entry))
        if traced and isinstance(self.mesh, Mesh):
            warnings.warn(CONSTANTS, stacklevel=find_stack_level())
        rows = self._map(self.local_rows, EVERYWHERE, PartitionSpec(self.axes))(entry)
        return PlacedRows(rows)

    def run(
        self, fn: Callable, arrays: list[Array | None], rows: Any, *rest: Any
    ) -> Any:
        """Run ``fn(arrays, rows, *rest)`` on each device with the rows it has.

        :param fn: returns an array, or a tree of them.
        :param arrays: leaves of the arguments; None for those that are no arrays.
        :param rows: of a batch, as placed.
        :param rest: the same on all devices.
        :return: results of all devices, with a leading axis for these.
        """

        def local(*args):
            return jax.tree.map(lambda a: a[None], fn(*args))

        spread = PartitionSpec(self.axes)
        specs = (self.specs, spread, *(EVERYWHERE for _ in rest))
        return self._map(local, specs, spread)(arrays, rows, *rest)

    def everywhere(self, found: Array) -> Array:
        """Results of all devices on each of them."""
        spread = PartitionSpec(self.axes)
        gather = partial(lax.all_gather, axis_name=self.axes, tiled=True)
        return self._map(gather, spread, EVERYWHERE)(found)

    def _map(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        # Loops of a model may begin with constants and go on with data, which a check
        # of what differs between devices would not let them.
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def few(self, arrays: list[Array | None], num: int) -> list[Array | None]:
        """The last ``num`` rows of each device, where all can see them."""

        def last(arrays):
            def of(x, dim):
                if x is None or dim is None:
                    return x
                x = lax.slice_in_dim(x, x.shape[dim] - num, x.shape[dim], axis=dim)
                return lax.all_gather(x, self.axes, axis=dim, tiled=True)

            return [of(*both) for both in zip(arrays, self.dims, strict=True)]

        return plain(jax.jit(self._map(last, (self.specs,), EVERYWHERE))(arrays))


def plain(tree: Any) -> Any:
    """Arrays that all devices have, as if there were one: for use outside of `jit`.

    There, not all of JAX works on a mesh.
    """

    def local(x):
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        if len(x.sharding.device_set) == 1 or not x.is_fully_replicated:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(random.key_data(x)))
            return random.wrap_key_data(data, impl=random.key_impl(x))
        return jnp.asarray(np.asarray(x))

    return jax.tree.map(local, tree)


def _spec(x: Any) -> tuple[PartitionSpec, Any] | None:
    """How an array is spread, as far as a compiled program knows, and its mesh."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    known: Any = jax.typeof(x).sharding
    if all(axes is None for axes in known.spec):
        return None
    concrete: Any = None if isinstance(x, jax.core.Tracer) else x.sharding
    return known.spec, (concrete or known).mesh


@explained("devices")
def find_shards(leaves: list) -> Shards | None:
    """Look for arrays that are spread over devices among a model's arguments.

    Only a mesh with explicit axes tells compiled programs; see the guide.
    """
    found = [_spec(x) for x in leaves]
    if all(one is None for one in found):
        return None
    dims: list[int | None] = []
    kinds, specs = {}, []
    for x, one in zip(leaves, found, strict=True):
        dims.append(None)
        specs.append(EVERYWHERE if one is None else one[0])
        if one is None:
            continue
        spread = [k for k, axes in enumerate(one[0]) if axes is not None]
        axes = one[0][spread[0]]
        axes = axes if isinstance(axes, tuple) else (axes,)
        dims[-1] = spread[0]
        kinds[len(spread), x.shape[spread[0]], axes] = one[1]
    if len(kinds) > 1 or next(iter(kinds))[0] > 1:
        shapes = [
            (x.shape, one[0]) for x, one in zip(leaves, found, strict=True) if one
        ]
        raise ValueError(
            "Arguments of the model are spread over devices in several ways: "
            f"{shapes}. Spread the rows of all data over the same axes of one mesh, "
            'as `jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))` does.'
        )
    (((_, size, axes), mesh),) = kinds.items()
    num = math.prod(
        dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))[a] for a in axes
    )
    return Shards(mesh, axes, num, size, specs, dims)


@explained("devices")
def check_shards(shards: Shards, leaves: list, plates: Plates) -> list[str]:
    """Names of the plates of these rows, or an error where they do not fit."""
    names = [name for name, (size, _) in plates.items() if size == shards.size]
    if len(names) != 1:
        sizes = {name: size for name, (size, _) in plates.items()}
        raise ValueError(
            f"Arguments of the model have {shards.size} rows spread over {shards.num} "
            f"devices, and its subsampled plates have the sizes {sizes or 'none'}. One "
            "plate must be of these rows, with a `subsample_size`; for gradients of "
            "all data put them on a mesh with axes of type `AxisType.Auto` instead."
        )
    shards.share(names[0], plates[names[0]])
    for x, dim in zip(leaves, shards.dims, strict=True):
        if dim is None and shards.size in getattr(x, "shape", ()):
            raise ValueError(
                f"An argument of shape {x.shape} is not spread over devices, as others "
                f"of {shards.size} rows are. Put it on the same mesh: "
                '`jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))`.'
            )
    return names


@explained("devices")
def check_copies(here: float, there: float, model: Any) -> None:
    """Raise unless rows have the same potential on their devices and as copies."""
    error = abs(here - there)
    fine = error <= 1e-3 * abs(there) + 1e-5 * model.shards.size
    if fine or not (math.isfinite(here) or math.isfinite(there)):
        return
    raise ValueError(
        f"Plate {model.sharded}: a few of its rows have the potential energy {here} "
        f"where they are, on {model.shards.num} devices, and {there} as a small data "
        "set. A device sees its own rows only: all that belongs to a row must be an "
        "argument of the model that is spread as the others are, and nothing may "
        "depend on all rows, such as their mean or their number."
    )


def warn_of_hidden(leaves: list, plates: Plates) -> None:
    """Warn of rows on many devices of which compiled programs will not know."""
    sizes = {size for size, _ in plates.values()}
    for x in leaves:
        if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
            continue
        spec = getattr(x.sharding, "spec", ())
        rows = any(n in sizes for n, axes in zip(x.shape, spec, strict=False) if axes)
        if rows and find_shards([x]) is None:
            warnings.warn(
                f"An argument of shape {x.shape} is spread over "
                f"{len(x.sharding.device_set)} devices by a mesh without explicit "
                "axes: rows of mini-batches will be sent between them. Make it by "
                "`jax.make_mesh(..., axis_types=(AxisType.Explicit,))`.",
                stacklevel=find_stack_level(),
            )
            return


def shard_draws(
    words: Array, plates: Plates, sharded: list[str], batching: str
) -> Batch:
    """A batch of which each device will work out its own rows.

    :param words: random words of type uint32.
    :param plates: sizes and subsample sizes, those of a device for sharded plates.
    :param sharded: names of those.
    :param batching: as of :func:`~numpyro_pdmp.batch.draw_batch`.
    """
    parts, batch = split_words(words, plates, batching), {}
    for name, sizes in plates.items():
        if name in sharded:
            batch[name] = ShardDraw(parts[name], sizes[1], batching)
        else:
            batch[name] = draw_batch(parts[name], {name: sizes}, batching)[name]
    return batch


def random_shard_draws(rng_key: Array, plates: Plates, sharded: list[str]) -> Batch:
    """The same from a key, without any row twice."""
    num = num_words(plates, "without_replacement")
    words = random.bits(rng_key, (num,), jnp.uint32)
    return shard_draws(words, plates, sharded, "without_replacement")
