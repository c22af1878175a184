# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A function that is traced before it is needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax


class Prepared:
    """Holds one traced function until it is asked for, or another takes its place.

    Tracing is done by Python and compiling by XLA, so that one program can be compiled
    while the next one is traced. What was traced is found again by the objects that it
    was traced with. Nothing of it is copied or stored along with its holder.
    """

    def __init__(self) -> None:
        self._held: tuple[list, Any, Callable] | None = None
        self._wanted = True

    @contextmanager
    def unwanted(self) -> Iterator[None]:
        """Nothing is traced within it, since it would not be asked for."""
        self._wanted = False
        try:
            yield
        finally:
            self._wanted = True

    def put(self, fn: Callable, shapes: Any, *data: Any) -> None:
        """Trace ``fn`` for an argument of these shapes.

        :param data: what ``fn`` was made of.
        """
        if not self._wanted:
            return
        # Without a call, so that a program that uses it is the same as without.
        compiled = jax.jit(fn, inline=True)
        compiled.trace(shapes)
        self._held = *jax.tree.flatten(data), compiled

    def take(self, *data: Any) -> Callable | None:
        """The function if it was made of these very objects, once."""
        held, self._held = self._held, None
        if held is None:
            return None
        old, structure, fn = held
        new, new_structure = jax.tree.flatten(data)
        same = structure == new_structure
        same = same and all(a is b for a, b in zip(old, new, strict=True))
        return fn if same else None

    def __reduce__(self):
        return Prepared, ()

    def __copy__(self):
        return Prepared()
