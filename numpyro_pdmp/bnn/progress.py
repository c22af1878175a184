# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Sampling that is interrupted goes on from its last file."""

from pathlib import Path
import time
from typing import Any

import numpy as np

import jax

from numpyro_pdmp.bnn.streaming import StreamingPrediction, Sums
from numpyro_pdmp.storage import read_arrays, restored_tree, tree_arrays, write_arrays

#: seconds between two writings
EVERY = 60.0


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Draws of successive chunks, (chains, draws, ...)."""
    return {k: np.concatenate([p[k] for p in parts], 1) for k in parts[0]}


class Progress:
    """Draws and predictions so far, and the state and step to go on from.

    :param path: of the file.
    :param streams: predictions that are updated while sampling.
    """

    def __init__(self, path: Path, streams: list[StreamingPrediction]):
        self._path, self._streams = path, streams
        self._written = time.monotonic()
        self.kept: list[dict[str, np.ndarray]] = []
        self.extra: list[dict[str, np.ndarray]] = []
        self.state: Any = None
        self.step, self.done = 0, 0

    def save(self, force: bool = False) -> None:
        """Write everything, if the last time is long ago."""
        if not force and time.monotonic() - self._written < EVERY:
            return
        arrays: dict[str, Any] = tree_arrays(self.state)
        arrays |= {"step": self.step, "done": self.done}
        for name, parts in (("kept", self.kept), ("extra", self.extra)):
            if parts:
                arrays |= {f"{name}:{k}": v for k, v in joined(parts).items()}
        for i, stream in enumerate(self._streams):
            if stream.sums is not None:
                sums = stream.sums._asdict().items()
                arrays |= {f"stream {i}:{k}": v for k, v in sums if v is not None}
        write_arrays(self._path, arrays)
        self._written = time.monotonic()

    def load(self, like: Any) -> None:
        """Read everything, if there is a file.

        :param like: a state of the same kernel and model.
        """
        if not self._path.is_file():
            return
        arrays = read_arrays(self._path)

        def part(prefix):
            names = [k for k in arrays if k.startswith(prefix)]
            return {k.removeprefix(prefix): arrays[k] for k in names}

        self.state = restored_tree(like, arrays)
        if self.state is None or not {"step", "done"} <= set(arrays):
            raise ValueError(
                f"{self._path} does not fit this run; delete it, or give --force."
            )
        self.step, self.done = int(arrays["step"]), int(arrays["done"])
        for name, parts in (("kept:", self.kept), ("extra:", self.extra)):
            if part(name):
                parts.append(part(name))
        for i, stream in enumerate(self._streams):
            fields = part(f"stream {i}:")
            if fields:
                sums = Sums(*(fields.get(k) for k in Sums._fields))
                stream.sums = jax.tree.map(jax.numpy.asarray, sums)
