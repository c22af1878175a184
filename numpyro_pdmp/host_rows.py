# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of data that stay on the host, or on its disk, and are fetched by the batch."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
import threading
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

#: what is being fetched, and where in it, by the indices of a chain
Kept = OrderedDict[bytes, tuple[Future, int]]


class HostRows:
    """Rows of data that are fetched from the host when a mini-batch needs them.

    Inside of a model::

        with numpyro.plate("data", size, subsample_size=500) as indices:
            x, y = rows(indices)

    It may be compiled, mapped and differentiated: vectorised chains fetch their rows in
    one call, and data are constants. Only the last few batches are kept in memory.

    :param fetch: function of an array of row indices, of shape ``(n,)`` and type int32,
        that returns an array of ``n`` rows, or a tuple, dict or other pytree of arrays.
        It is called from other threads than the one that made it, and must not use JAX.
    :param prefetch: how many batches to fetch ahead, each in a thread of its own, so
        that with 2 or more ``fetch`` is called by several at once. The draws do not
        depend on it. Worth its threads where fetching takes long, as from a network;
        0 is faster for data in the host's memory.

    **Example**

    >>> import numpy as np
    >>> from numpyro_pdmp import HostRows
    >>> data = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    >>> rows = HostRows(lambda indices: data[indices])
    >>> rows(np.array([3, 0], np.int32)).tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """

    #: calls of a model that is being looked at, if any
    _calls: list[tuple["HostRows", Any]] | None = None

    def __init__(self, fetch: Callable[[np.ndarray], Any], prefetch: int = 0):
        if not callable(fetch):
            raise TypeError(
                f"`fetch` must be a function from row indices to rows, got {fetch!r}; "
                "for an array give `lambda indices: array[indices]`."
            )
        if not (isinstance(prefetch, (int, np.integer)) and 0 <= prefetch <= 64):
            raise ValueError(
                f"`prefetch` must be an integer from 0 to 64, got {prefetch!r}; it is "
                "how many batches are fetched ahead."
            )
        self.prefetch = int(prefetch)
        self._fetch = fetch
        self._row: tuple[Any, list] | None = None
        self._given: list[tuple[Any, Any]] = []
        self._used: Kept = OrderedDict()
        self._ahead: Kept = OrderedDict()  # and not used yet
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, prefetch), "HostRows")

    def __repr__(self) -> str:
        return f"HostRows({getattr(self._fetch, '__name__', self._fetch)!r})"

    def __call__(self, indices: Any) -> Any:
        """Rows of these indices, of shape ``(n,)``."""
        if HostRows._calls is not None:
            HostRows._calls.append((self, indices))
        for known, data in reversed(self._given):
            if known is indices:
                return data
        return self.load(indices)

    def load(self, indices: Any, ahead: Any = None) -> Any:
        """Rows of these indices; begin to fetch those of a batch to come.

        :param indices: row indices, of shape ``(n,)``.
        :param ahead: as many indices, of the batch ``prefetch`` evaluations later.
        """
        shape, dtype = np.shape(indices), np.dtype(jnp.result_type(indices))
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ValueError(
                f"{self!r} takes integer `indices` of shape (n,), got {dtype} of shape "
                f"{shape}; give those of the plate."
            )
        structure, row = self._one_row()
        if isinstance(indices, jax.core.Tracer):
            result = [jax.ShapeDtypeStruct(shape + a.shape, a.dtype) for a in row]
            given = (indices,) if ahead is None else (indices, ahead)
            leaves = jax.pure_callback(
                self._on_host, result, *given, vmap_method="broadcast_all"
            )
        else:
            leaves = map(jnp.asarray, self._on_host(indices))
        return jax.tree.unflatten(structure, leaves)

    @contextmanager
    def given(self, indices: Any, data: Any) -> Iterator[None]:
        """Within it, a call with these very indices returns ``data``."""
        self._given.append((indices, data))
        try:
            yield
        finally:
            self._given.pop()

    # On the host, with data as a list of arrays

    def _one_row(self) -> tuple[Any, list]:
        """Structure of the data, and shapes and JAX's data types of a row."""
        if self._row is None:
            self._fetched(np.zeros(1, np.int32))
        assert self._row is not None
        return self._row

    def _fetched(self, indices: np.ndarray) -> list[np.ndarray]:
        try:
            leaves, structure = jax.tree.flatten(self._fetch(indices))
            leaves = [np.asarray(a) for a in leaves]
            shapes = [a.shape for a in leaves]
            if not shapes or any(s[:1] != indices.shape for s in shapes):
                raise ValueError(
                    f"it returned arrays of shapes {shapes} for {indices.size} "
                    "indices; the first axis of each must be the rows asked for, in "
                    "that order"
                )
            if self._row is None:
                self._row = structure, [_row_of(a) for a in leaves]
            if (structure, [s[1:] for s in shapes]) != (
                self._row[0],
                [a.shape for a in self._row[1]],
            ):
                raise ValueError(
                    f"it returned arrays of shapes {shapes} in {structure}, but rows "
                    f"{self._row[1]} in {self._row[0]} before"
                )
            # A copy: the function may use its memory again, or return a lazy map.
            pairs = zip(leaves, self._row[1], strict=True)
            return [a.astype(row.dtype, casting="same_kind") for a, row in pairs]
        except Exception as error:
            raise RuntimeError(
                f"{self!r}: `fetch` failed on {indices.size} rows from {indices[:1]} "
                f"on: {type(error).__name__}: {error}"
            ) from error

    def _on_host(self, indices: Any, ahead: Any = None) -> list[np.ndarray]:
        """Rows of (..., n) indices: of those of each chain, if there are several."""
        indices = np.asarray(indices)
        chains = indices.reshape(-1, indices.shape[-1])
        # Chains by themselves: those whose draw is complete wait, while others go on.
        keys = [chain.tobytes() for chain in chains]
        with self._lock:
            for key in keys:
                if key in self._ahead:
                    self._used[key] = self._ahead.pop(key)
            self._order(chains, self._used, _done)
            if ahead is not None:
                later = np.asarray(ahead).reshape(chains.shape)
                self._order(later, self._ahead, self._pool.submit)
            try:
                places = [self._used[key] for key in keys]
                parts = [[a[i] for a in future.result()] for future, i in places]
            except Exception:
                self._used.clear()  # so that another run tries again
                raise
            for key in keys:
                self._used.move_to_end(key)
            # The batches in use, and those of the potential energy.
            for kept, num in ((self._used, 2), (self._ahead, self.prefetch)):
                while len(kept) > num * len(chains):
                    kept.popitem(last=False)
        if len(parts) > 1:
            parts = [[np.stack(a) for a in zip(*parts, strict=True)]]
        pairs = zip(parts[0], self._one_row()[1], strict=True)
        return [a.reshape(indices.shape + row.shape) for a, row in pairs]

    def _order(self, chains: np.ndarray, into: Kept, submit: Callable) -> None:
        """Have rows fetched that are not here, all in one call."""
        keyed = {chain.tobytes(): chain for chain in chains}
        missing = [k for k in keyed if k not in self._used and k not in self._ahead]
        if not missing:
            return
        rows = np.stack([keyed[key] for key in missing])

        def fetch():
            data = self._fetched(rows.reshape(-1))
            return [a.reshape(rows.shape + a.shape[1:]) for a in data]

        future = submit(fetch)
        into.update((key, (future, i)) for i, key in enumerate(missing))


def _row_of(a: np.ndarray) -> jax.ShapeDtypeStruct:
    if not any(jnp.issubdtype(a.dtype, t) for t in (jnp.number, jnp.bool_)):
        raise TypeError(f"it returned an array of type {a.dtype}, no numbers")
    dtype = jax.dtypes.canonicalize_dtype(a.dtype)
    return jax.ShapeDtypeStruct(a.shape[1:], dtype)


def _done(fn: Callable) -> Future:
    future: Future = Future()
    future.set_result(fn())
    return future


@contextmanager
def recorded_calls() -> Iterator[list[tuple[HostRows, Any]]]:
    """The calls of ``HostRows`` within it, with their indices."""
    calls: list[tuple[HostRows, Any]] = []
    before, HostRows._calls = HostRows._calls, calls
    try:
        yield calls
    finally:
        HostRows._calls = before
