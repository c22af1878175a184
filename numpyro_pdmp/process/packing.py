# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A loop's state in few arrays.

XLA copies an array of a loop's state in every iteration if its old value is still
needed when the new one is there. A path has more than twenty arrays, nearly all of them
small, and on small models copying them one by one took half of an iteration.
"""

import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.pieces import SMALL, makes_pieces


class Packing:
    """Small arrays of the same type and shape as one, with a leading axis.

    For loops in pieces of code (:mod:`~numpyro_pdmp.process.pieces`); elsewhere, and of
    large arrays, each is left as it is.

    :param tree: arrays as they will be.
    :param wanted: not of one chain of many, where it cannot be told what is small.
    """

    def __init__(self, tree: Any, wanted: bool = True):
        leaves, self._structure = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(leaves):
            plain = not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
            kind = (x.dtype, x.shape) if wanted and plain and makes_pieces() else i
            groups.setdefault(kind, []).append(i)
        self._groups: list[list[int]] = []
        for group in groups.values():
            small = len(group) * math.prod(leaves[group[0]].shape) <= SMALL
            self._groups += [group] if small else [[i] for i in group]

    def pack(self, tree: Any) -> list[Array]:
        """All arrays, in few."""
        leaves = jax.tree.leaves(tree)
        groups = ([leaves[i] for i in group] for group in self._groups)
        return [jnp.stack(group) if len(group) > 1 else group[0] for group in groups]

    def unpack(self, packed: list[Array]) -> Any:
        """The tree again."""
        leaves: dict[int, Array] = {}
        for group, array in zip(self._groups, packed, strict=True):
            if len(group) > 1:
                leaves.update((i, array[place]) for place, i in enumerate(group))
            else:
                leaves[group[0]] = array
        ordered = [leaves[i] for i in range(len(leaves))]
        return jax.tree.unflatten(self._structure, ordered)
