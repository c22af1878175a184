# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that are stopped in all ways, and go on."""

import errno
import os
from pathlib import Path
import shutil
import zipfile

import numpy as np
import pytest

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import (
    BPS,
    Boomerang,
    check,
    checkpoint,
    run_checkpointed,
    storage,
    to_inference_data,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

X = jnp.asarray(np.random.default_rng(0).normal(size=(40, 2)), jnp.float32)
Y = X @ jnp.array([1.0, -1.0])
FIELDS = ("num_grad",)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(y), subsample_size=10):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def new(num_chains=2, num_samples=50, **options):
    return MCMC(
        Boomerang(model, **options),
        num_warmup=30,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )


def run(path, mcmc=None, args=(X, Y), seed=0, **kwargs):
    mcmc = new() if mcmc is None else mcmc
    options = {"every": 20, "extra_fields": FIELDS, **kwargs}
    return run_checkpointed(mcmc, random.key(seed), *args, path=path, **options)


def assert_same(a, b):
    for get in ("get_samples", "get_extra_fields"):
        one, other = (getattr(mcmc, get)(group_by_chain=True) for mcmc in (a, b))
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never stopped, and its directory."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return run(path), path


def test_as_without_checkpoints(whole):
    mcmc = new()
    mcmc.run(random.key(0), X, Y, extra_fields=FIELDS)
    assert_same(mcmc, whole[0])
    assert check(whole[0]).num_draws == 100
    assert "w" in to_inference_data(whole[0]).posterior


def test_a_finished_run_is_read(whole, monkeypatch):
    mcmc, path = whole
    monkeypatch.setattr(checkpoint, "run_chunks", None)
    again = run(path)
    assert_same(again, mcmc)
    np.testing.assert_array_equal(again.last_state.z["w"], mcmc.last_state.z["w"])


class Killed(BaseException):
    """As a kill: no handler of errors sees it."""


def test_killed_at_every_step_of_writing(whole, tmp_path, monkeypatch):
    """Before and after every renaming, flushing and opening of a file."""
    mcmc, _ = whole
    path, calls = tmp_path / "run", 0
    limit = [1]

    def counted(fn):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == limit[0]:
                raise Killed
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(storage.os, "replace", counted(os.replace))
    monkeypatch.setattr(storage.os, "fsync", counted(os.fsync))
    monkeypatch.setattr(storage.np, "savez", counted(np.savez))
    kills = 0
    while True:
        calls, limit[0] = 0, kills % 11 + 2
        before = {p: p.read_bytes() for p in path.glob("chunk-*.npz")}
        try:
            result = run(path)
        except Killed:
            kills += 1
            for file, content in before.items():
                assert file.read_bytes() == content
            assert kills < 60
            continue
        break
    assert kills > 5
    assert_same(result, mcmc)


def test_interrupted(whole, tmp_path, monkeypatch):
    mcmc, path = whole
    save, saved = checkpoint._save, []

    def once(path, index, chunk):
        saved.append(save(path, index, chunk))
        if saved[-1] == 1:
            raise KeyboardInterrupt
        return saved[-1]

    monkeypatch.setattr(checkpoint, "_save", once)
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(path)  # the chunk is written, but not known of
    monkeypatch.undo()
    chunks = checkpoint.run_chunks

    def stopping(*args, **kwargs):
        for i, chunk in enumerate(chunks(*args, **kwargs)):
            if i == 1:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(checkpoint, "run_chunks", stopping)
    with pytest.warns(UserWarning, match="Stopped after 2 chunks"):
        part = run(path)
    assert part.get_samples()["w"].shape[0] == 80
    monkeypatch.undo()
    assert_same(run(path), mcmc)


def test_disk_full(whole, tmp_path, monkeypatch):
    path, savez, calls = tmp_path / "run", np.savez, []

    def full(file, **arrays):
        calls.append(None)
        if len(calls) == 5:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return savez(file, **arrays)

    monkeypatch.setattr(storage.np, "savez", full)
    with pytest.raises(OSError, match="No space left.*all chunks before"):
        run(path)
    assert not list(path.glob("*.part"))
    monkeypatch.undo()
    assert_same(run(path), whole[0])


def contents(path):
    return {p.name: p.read_bytes() for p in Path(path).iterdir()}


@pytest.mark.parametrize("name", ["run.json", "state.npz", "chunk-00001.npz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_damaged_files_are_refused_and_left(whole, tmp_path, name, damage):
    path = shutil.copytree(whole[1], tmp_path / "run")
    data = (path / name).read_bytes()
    middle = len(data) // 2
    if name.endswith(".npz"):
        # Within an array: most bytes between two of them, such as dates, mean nothing.
        with zipfile.ZipFile(path / name) as archive:
            largest = max(archive.infolist(), key=lambda member: member.compress_size)
        middle = data.index(b"\x93NUMPY", largest.header_offset)
        middle += largest.compress_size - 1
    data = {
        "cut": data[:middle],
        "flip": data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :],
        "empty": b"",
        "text": b"not a checkpoint",
    }[damage]
    (path / name).write_bytes(data)
    before = contents(path)
    with pytest.raises(ValueError, match="`path`.*Nothing was changed"):
        run(path)
    assert contents(path) == before


def test_missing_chunk(whole, tmp_path):
    path = shutil.copytree(whole[1], tmp_path / "run")
    (path / "chunk-00000.npz").unlink()
    with pytest.raises(ValueError, match="chunk-00000.npz is missing"):
        run(path)


def test_other_runs_are_refused(whole, tmp_path):
    _, path = whole
    before = contents(path)
    others = {
        "num_samples": {"mcmc": new(num_samples=60)},
        "num_chains": {"mcmc": new(num_chains=1)},
        "options": {"mcmc": new(refresh_rate=0.3)},
        "kernel": {"mcmc": MCMC(BPS(model), num_warmup=30, num_samples=50)},
        "arguments": {"args": (X, Y + 1)},
        "rng_key": {"seed": 1},
        "extra_fields": {"extra_fields": ()},
    }
    for name, options in others.items():
        with pytest.raises(ValueError, match=f"another run; .*{name}"):
            run(path, **options)
    assert contents(path) == before


def test_paths(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        run(tmp_path / "file")
    with pytest.raises(ValueError, match="other files in it"):
        run(tmp_path)
    with pytest.raises(ValueError, match="every"):
        run(tmp_path / "run", every=0)


def test_newer_formats_and_other_versions(whole, tmp_path):
    path = shutil.copytree(whole[1], tmp_path / "run")
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="format 99"):
        run(path)
    (path / "run.json").write_text(text.replace('"jax": "', '"jax": "0.0.'))
    with pytest.warns(UserWarning, match="last bits"):
        run(path)
