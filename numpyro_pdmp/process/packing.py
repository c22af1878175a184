# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A loop's state in few arrays.

XLA copies every array of a loop's state once an iteration, unless its new value is the
last thing made of it. A path has more than twenty arrays, nearly all of them small, and
on small models copying them one by one took half of an iteration.
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
    """

    def __init__(self, tree: Any):
        leaves, self._structure = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(leaves):
            small = math.prod(x.shape) <= SMALL
            plain = not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
            kind = (x.dtype, x.shape) if makes_pieces() and small and plain else i
            groups.setdefault(kind, []).append(i)
        self._groups = list(groups.values())

    def pack(self, tree: Any) -> list[Array]:
        """All arrays, in few."""
        leaves = self._structure.flatten_up_to(tree)
        return [
            leaves[group[0]] if len(group) == 1 else jnp.stack([leaves[i] for i in group])
            for group in self._groups
        ]

    def unpack(self, packed: list[Array]) -> Any:
        """The tree again."""
        leaves: dict[int, Array] = {}
        for group, array in zip(self._groups, packed, strict=True):
            parts = [array] if len(group) == 1 else [array[i] for i in range(len(group))]
            leaves.update(zip(group, parts, strict=True))
        return self._structure.unflatten([leaves[i] for i in range(len(leaves))])
