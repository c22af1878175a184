# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that survive being killed: draws and state in files, chunk by chunk.

A directory holds ``run.json`` (what is run), ``chunk-00000.npz`` and so on (draws), and
``state.npz`` (how to go on, and how many chunks it stands for). Every file is written
under another name, flushed to the disk and renamed, so that it is there as a whole or
not at all. A chunk that the state does not know of yet is drawn again, with the same
numbers. Files hold arrays and text only; nothing in them is executed.
"""

from hashlib import blake2b
import json
import os
from pathlib import Path
from typing import Any
import warnings

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer import MCMC
from numpyro.util import find_stack_level, is_prng_key
from numpyro_pdmp.chunks import first_state, run_chunks
from numpyro_pdmp.options import require_count
from numpyro_pdmp.storage import (
    PART,
    UNCHANGED,
    read_arrays,
    read_json,
    restored_tree,
    tree_arrays,
    write_arrays,
    write_file,
)
from numpyro_pdmp.version import __version__

FORMAT = 1
RUN, STATE = "run.json", "state.npz"


def _digest(value: Any) -> str:
    """A short text that is the same for equal values and hardly ever for others."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = random.key_data(jnp.asarray(value))
        if isinstance(value, jax.Array) and not value.is_fully_replicated:
            # Rows on many devices, or hosts: not to be brought together.
            shards = sorted(value.addressable_shards, key=lambda s: str(s.index))
            parts = [_digest(np.asarray(s.data)) for s in shards if not s.replica_id]
            return f"{value.dtype}{list(value.shape)}:{parts}"
        value = np.ascontiguousarray(value)
        data = blake2b(value.tobytes(), digest_size=16).hexdigest()
        return f"{value.dtype}{list(value.shape)}:{data}"
    if isinstance(value, dict):
        return str({str(k): _digest(v) for k, v in sorted(value.items())})
    if isinstance(value, (list, tuple)):
        name = "" if type(value) in (list, tuple) else type(value).__name__
        return name + str([_digest(v) for v in value])
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__qualname__ + _digest(vars(value))
    return repr(value)


def _description(mcmc: MCMC, rng_key, args, kwargs, init_params, fields) -> dict:
    kernel = mcmc.sampler
    return {
        "format": FORMAT,
        "kernel": type(kernel).__qualname__,
        "options": _digest(vars(kernel)),
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "num_chains": mcmc.num_chains,
        "thinning": mcmc.thinning,
        "extra_fields": list(fields),
        "rng_key": _digest(rng_key),
        "arguments": _digest((args, kwargs)),
        "init_params": _digest(init_params),
        "x64": bool(jnp.zeros(()).dtype == np.float64),
        "versions": {"numpyro_pdmp": __version__, "jax": jax.__version__},
    }


def _check_run(path: Path, new: dict) -> None:
    """Refuse a directory of another run."""
    old = read_json(path / RUN, UNCHANGED)
    if old.get("format") != FORMAT:
        raise ValueError(
            f"`path`: {path} has format {old.get('format')}, and this version reads "
            f"{FORMAT}. Nothing was changed. Go on with the version that wrote it."
        )
    if not isinstance(old.get("versions"), dict):
        raise ValueError(
            f"`path`: {path / RUN} is damaged: it does not say which versions wrote "
            "it. Nothing was changed. Restore the file, or give another directory."
        )
    differ = [k for k in new if k != "versions" and old.get(k) != new[k]]
    if differ:
        plain = [k for k in differ if not isinstance(new[k], str) or len(new[k]) < 40]
        values = "; ".join(f"{k}: {old.get(k)} there, {new[k]} now" for k in plain)
        raise ValueError(
            f"`path`: {path} is of another run; {', '.join(differ)} differ"
            f"{' (' + values + ')' if values else ''}. Nothing was changed. Give the "
            "same arguments, or another directory."
        )
    if old.get("versions") != new["versions"]:
        warnings.warn(
            f"{path} was written with {old.get('versions')}, and this is "
            f"{new['versions']}: what follows may differ in the last bits.",
            stacklevel=find_stack_level(),
        )


def _restored(like: Any, arrays: dict[str, np.ndarray], path: Path) -> Any:
    """A state with the structure of ``like`` and the values of a file."""
    counts = [arrays.get(k, np.zeros(1)) for k in ("step", "num_chunks")]
    fits = all(a.shape == () and a.dtype.kind == "i" and 0 <= a < 2**31 for a in counts)
    state = restored_tree(like, arrays) if fits else None
    if state is None:
        raise ValueError(
            f"`path`: the state in {path} does not fit this kernel and model. Nothing "
            "was changed. Give the same arguments, or another directory."
        )
    return state


def _chunk_name(index: int) -> str:
    return f"chunk-{index:05d}.npz"


def _save(path: Path, index: int, chunk: Any) -> int:
    """Write a chunk, then the state that knows of it; the number of chunks."""
    if jax.tree.leaves(chunk.samples)[0].shape[1]:
        named = {f"sample:{k}": v for k, v in _as_dict(chunk.samples).items()}
        named |= {f"field:{k}": v for k, v in chunk.extra_fields.items()}
        write_arrays(path / _chunk_name(index), named)
        index += 1
    counts = {"step": chunk.step, "num_chunks": index}
    write_arrays(path / STATE, tree_arrays(chunk.state) | counts)
    return index


def _as_dict(samples: Any) -> dict[str, Any]:
    return samples if isinstance(samples, dict) else {"": samples}


def _read_state(path: Path, like: Any) -> tuple[Any, int, int]:
    """State, steps and number of chunks, from the file of a state like this one."""
    arrays = read_arrays(path / STATE, UNCHANGED)
    state = _restored(like, arrays, path / STATE)
    step, index = int(arrays["step"]), int(arrays["num_chunks"])
    missing = [i for i in range(index) if not (path / _chunk_name(i)).exists()]
    if missing:
        raise ValueError(
            f"`path`: {path / _chunk_name(missing[0])} is missing, one of {index} "
            "chunks. Nothing was changed. Restore it, or give another directory."
        )
    return state, step, index


def _kinds(arrays: dict[str, np.ndarray]) -> dict:
    """What is the same in all chunks of a run."""
    return {k: (a.dtype, a.shape[:1], a.shape[2:]) for k, a in arrays.items()}


def _collect(path: Path, num_chunks: int) -> tuple[Any, dict[str, np.ndarray]]:
    parts: list[dict[str, np.ndarray]] = []
    for i in range(num_chunks):
        part = read_arrays(path / _chunk_name(i), UNCHANGED)
        lengths = {a.shape[1:2] for a in part.values()}
        if (
            len(lengths) != 1
            or () in lengths
            or _kinds(part) != _kinds((*parts, part)[0])
        ):
            raise ValueError(
                f"`path`: {path / _chunk_name(i)} is not a chunk of this run. "
                f"{UNCHANGED}"
            )
        parts.append(part)
    joined = {k: np.concatenate([p[k] for p in parts], 1) for k in parts[0]}
    samples, fields = (
        {k.removeprefix(p): v for k, v in joined.items() if k.startswith(p)}
        for p in ("sample:", "field:")
    )
    return samples[""] if set(samples) == {""} else samples, fields


def run_checkpointed(
    mcmc: MCMC,
    rng_key: jax.Array,
    *args: Any,
    path: str | os.PathLike,
    every: int = 100,
    extra_fields: tuple[str, ...] = (),
    init_params: Any = None,
    **kwargs: Any,
) -> MCMC:
    """``mcmc.run``, with draws and state written to a directory while it runs.

    Call it again with the same arguments to go on where a run was stopped, in whatever
    way, or to read a finished one. The draws are the same to the last bit as if it had
    never been stopped. Ctrl-C ends a run with the draws so far, of which a warning
    tells.

    :param mcmc: as for ``mcmc.run``; of any kernel. Chains are vectorised.
    :param rng_key: random number generator key.
    :param args: arguments of the model.
    :param path: directory, made if there is none. One that has another run in it is
        refused and left as it is.
    :param every: draws of a chain between two writings, also in warm-up.
    :param extra_fields: as for ``mcmc.run``.
    :param init_params: as for ``mcmc.run``.
    :param kwargs: keyword arguments of the model.
    :return: ``mcmc``, with its draws, for ``get_samples``, ``print_summary``,
        ``check``, ``to_inference_data``.

    **Example**

    >>> from tempfile import TemporaryDirectory
    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import BPS, run_checkpointed
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mcmc = MCMC(BPS(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> with TemporaryDirectory() as directory:
    ...     mcmc = run_checkpointed(mcmc, random.key(0), path=directory)
    >>> mcmc.get_samples()["x"].shape
    (500,)
    """
    require_count("every", every)
    path, kernel = Path(path), mcmc.sampler
    if path.exists() and not path.is_dir():
        raise ValueError(f"`path={str(path)!r}` is a file; give a directory.")
    new = _description(mcmc, rng_key, args, kwargs, init_params, extra_fields)
    path.mkdir(parents=True, exist_ok=True)
    if (path / RUN).exists():
        _check_run(path, new)
    elif any(p.name != RUN + PART for p in path.iterdir()):
        raise ValueError(
            f"`path={str(path)!r}` has other files in it and no {RUN}: not a "
            "checkpoint. Nothing was changed. Give another directory."
        )
    else:
        write_file(
            path / RUN, lambda file: file.write(json.dumps(new, indent=1).encode())
        )
    state, step, index = None, 0, 0
    if (path / STATE).exists():
        keys = rng_key
        if mcmc.num_chains > 1 and is_prng_key(rng_key):
            keys = random.split(rng_key, mcmc.num_chains)
        # Only a new start has the structure that the stored values belong to.
        like = first_state(
            kernel, keys, mcmc.num_warmup, init_params, args, kwargs, None
        )
        state, step, index = _read_state(path, like)
    if step < mcmc.num_warmup + mcmc.num_samples:
        chunks = run_chunks(
            mcmc,
            rng_key,
            *args,
            chunk=every,
            extra_fields=extra_fields,
            init_params=init_params,
            state=state,
            step=step,
            yield_warmup=True,
            **kwargs,
        )
        try:
            for chunk in chunks:
                index = _save(path, index, chunk)
                state = chunk.state
        except KeyboardInterrupt:
            if not index:
                raise  # in warm-up: there are no draws to return
            warnings.warn(
                f"Stopped after {index} chunks of {every} draws, which are returned. "
                "Run again with the same arguments to go on.",
                stacklevel=find_stack_level(),
            )
    _fill(mcmc, path, index, state, args, kwargs)
    return mcmc


def _fill(mcmc: MCMC, path: Path, num_chunks: int, state: Any, args, kwargs) -> None:
    """Put stored draws where ``mcmc.run`` would have put them."""
    samples, fields = _collect(path, num_chunks)
    states = {mcmc.sampler.sample_field: samples, **fields}
    mcmc._args, mcmc._kwargs = args, kwargs
    mcmc._last_state = state
    mcmc._states = jax.tree.map(jnp.asarray, states)
    mcmc._states_flat = None
