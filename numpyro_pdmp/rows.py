# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Run a model on some rows of its plates."""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro.handlers import substitute
from numpyro_pdmp.batch import Batch


class WeightedRows(NamedTuple):
    """Rows of a plate that count more or less than once."""

    rows: Array  # (m,)
    weights: Array  # (m,) inverse of the rows' probabilities, 1 for equal ones


class ShareOfRows(NamedTuple):
    """Rows of a plate, counted from the first that a device has."""

    rows: Array  # (m,)
    size: int  # rows that all devices have


def _indices(rows: Any) -> Any:
    return rows.rows if isinstance(rows, (WeightedRows, ShareOfRows)) else rows


class with_batch(substitute):
    """Run a model on the given rows of its plates.

    As NumPyro's ``substitute``, but any number of rows is allowed without a warning.

    :param fn: the model.
    :param data: indices of each plate, or :class:`WeightedRows`, or
        :class:`ShareOfRows`, which count for those of all devices.
    """

    def __init__(self, fn: Any = None, data: Batch | None = None):
        data = {} if data is None else data
        weighted = {k: v for k, v in data.items() if isinstance(v, WeightedRows)}
        self.weights = {k: v.weights for k, v in weighted.items()}
        shares = {k: v for k, v in data.items() if isinstance(v, ShareOfRows)}
        self.sizes = {k: v.size for k, v in shares.items()}
        super().__init__(fn, {k: _indices(v) for k, v in data.items()})

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] == "plate" and msg["name"] in self.data:
            size, _ = msg["args"]
            msg["args"] = (size, len(msg["value"]))
            if msg["name"] in self.sizes:
                # The model may know the size of all data, or see that of the device's.
                self.weights[msg["name"]] = jnp.full(1, self.sizes[msg["name"]] / size)
        if msg["type"] == "sample" and self.weights:
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.weights:
                    weights = self.weights[frame.name]
                    weights = weights.reshape(-1, *(1,) * (-frame.dim - 1))
                    scale = msg["scale"]
                    msg["scale"] = weights if scale is None else scale * weights
