# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Files of arrays that are there as a whole or not at all, and are never executed."""

from collections.abc import Callable
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

PART = ".part"  # at the end of the name of a file that is not yet whole

UNCHANGED = "Nothing was changed. Restore the file, or start anew in another directory."


def write_file(path: Path, write: Callable) -> None:
    """Write a file under another name, flush it to the disk and rename it."""
    new = path.with_name(path.name + PART)
    try:
        with open(new, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"cannot write the checkpoint {path} ({error.strerror}); all chunks before "
            "it are kept: run again with the same arguments to go on",
        ) from error
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the name, too
    finally:
        os.close(directory)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write named arrays."""
    arrays = {name: np.asarray(a) for name, a in arrays.items()}
    write_file(path, lambda file: np.savez(file, **arrays))


def read_arrays(path: str | os.PathLike, remedy: str = UNCHANGED) -> dict[str, Any]:
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


def read_json(path: str | os.PathLike, remedy: str) -> dict[str, Any]:
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


def _is_key(a: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key)


def _plain(a: Any) -> np.ndarray:
    return np.asarray(random.key_data(a) if _is_key(a) else a)


def tree_arrays(tree: Any) -> dict[str, np.ndarray]:
    """A pytree as named arrays, for :func:`restored_tree`."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = {f"leaf-{i:04d}": _plain(a) for i, a in enumerate(leaves)}
    return arrays | {"structure": np.asarray(str(treedef))}


def restored_tree(like: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A pytree with the structure of ``like`` and stored values; None if unlike."""
    leaves, treedef = jax.tree.flatten(like)
    stored = [arrays.get(f"leaf-{i:04d}") for i in range(len(leaves))]
    fits = str(arrays.get("structure")) == str(treedef) and all(
        b is not None and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(map(_plain, leaves), stored, strict=True)
    )
    if not fits:
        return None

    def value(a, b):
        if _is_key(a):
            return random.wrap_key_data(jnp.asarray(b), impl=random.key_impl(a))
        return jnp.asarray(b)

    return jax.tree.unflatten(treedef, map(value, leaves, stored))
