# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Reading files that may be damaged, or not ours: arrays and text, nothing executed."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np


def read_arrays(path: str | PathLike, remedy: str) -> dict[str, Any]:
    """All arrays of a file of NumPy's format ``.npz``.

    :param path: of the file.
    :param remedy: end of the message, if it cannot be read.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    # The libraries that read it raise whatever the bytes make them stumble over.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"`path`: {path} is damaged or not a file of arrays ({reason}). {remedy}"
        ) from error


def read_json(path: str | PathLike, remedy: str) -> dict[str, Any]:
    """An object of a JSON file.

    :param path: of the file.
    :param remedy: end of the message, if it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(
            f"`path`: {path} is damaged or not a file of this kind. {remedy}"
        )
    return content


def require_names(arrays: Any, names: Any, path: Any, remedy: str) -> None:
    """Raise unless a file has all that is expected of it."""
    missing = sorted(set(names) - set(arrays))
    if missing:
        raise ValueError(f"`path`: {path} has no {missing}. {remedy}")
