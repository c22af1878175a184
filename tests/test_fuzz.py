# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Damaged files and senseless commands: read right, or refused with a clear error."""

from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings, strategies as st
import numpy as np
import pytest

import jax.numpy as jnp

from numpyro_pdmp import MAP, Chunk, checkpoint
from numpyro_pdmp.bnn import __main__ as command, pipeline, results

COMMON: Any = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def damage(draw):
    """A function from the bytes of a file to others."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "drop", "swap", "other"]))
    places = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    extra = draw(st.binary(min_size=1, max_size=40))

    def apply(data):
        at = [min(int(p * len(data)), len(data) - 1) for p in places]
        new = bytearray(data)
        if kind == "flip":
            for i in at:
                new[i] ^= 1 << extra[0] % 8
        elif kind == "cut":
            del new[at[0] :]
        elif kind == "insert":
            new[at[0] : at[0]] = extra
        elif kind == "drop":
            del new[at[0] : at[0] + len(extra)]
        elif kind == "swap":
            new[at[0] : at[0] + len(extra)] = extra
        else:
            new = bytearray(extra)
        return bytes(new)

    return apply


class State(NamedTuple):
    i: Any
    z: Any


STATE = State(jnp.asarray(7), {"w": jnp.arange(6.0).reshape(2, 3)})
DRAWS = np.random.default_rng(0).normal(size=(2, 10, 3)).astype(np.float32)
RUN = {"format": checkpoint.FORMAT, "kernel": "BPS", "num_chains": 2, "versions": {}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint of two chunks."""
    path = tmp_path_factory.mktemp("run")
    results.write_json(path / checkpoint.RUN, RUN)
    for i in range(2):
        fields = {"diverging": np.zeros((2, 10), bool)}
        chunk = Chunk({"w": DRAWS + i}, fields, STATE, 10 * (i + 1))
        checkpoint._save(path, i, chunk)
    return path


def read(path):
    checkpoint._check_run(path, RUN)
    state, step, index = checkpoint._read_state(path, STATE)
    return state, step, index, checkpoint._collect(path, index)


@settings(max_examples=250, **COMMON)
@given(st.sampled_from([checkpoint.RUN, checkpoint.STATE, "chunk-00001.npz"]), damage())
def test_checkpoint(directory, name, damage):
    path = directory / name
    data = path.read_bytes()
    path.write_bytes(damage(data))
    try:
        state, step, index, (samples, fields) = read(directory)
    except ValueError as error:
        assert "`path`" in str(error) and "Nothing was changed" in str(error)
    else:
        assert (step, index, int(state.i)) == (20, 2, 7)
        np.testing.assert_array_equal(state.z["w"], STATE.z["w"])
        np.testing.assert_array_equal(
            samples["w"], np.concatenate([DRAWS, DRAWS + 1], 1)
        )
        assert fields["diverging"].shape == (2, 20)
    finally:
        path.write_bytes(data)


def test_chunk_of_another_run(directory):
    path = directory / "chunk-00001.npz"
    data = path.read_bytes()
    try:
        for other in (
            {"sample:w": DRAWS[:1], "field:diverging": np.zeros((1, 10), bool)},
            {"sample:w": DRAWS, "field:diverging": np.zeros((2, 9), bool)},
            {"sample:b": DRAWS, "field:diverging": np.zeros((2, 10), bool)},
            {"sample:w": np.zeros(()), "field:diverging": np.zeros(())},
            {"sample:w": DRAWS.astype(complex), "field:diverging": DRAWS},
            {},
        ):
            np.savez(path, **other)
            with pytest.raises(ValueError, match="chunk-00001.npz is not a chunk"):
                read(directory)
    finally:
        path.write_bytes(data)


MODE = MAP({"w": jnp.ones(3)}, jnp.asarray(2.0), np.arange(5.0), 5, 0.1, True)


@settings(max_examples=150, **COMMON)
@given(damage())
def test_mode(tmp_path_factory, damage):
    path = tmp_path_factory.getbasetemp() / "fuzz-map.npz"
    MODE.save(path)
    path.write_bytes(damage(path.read_bytes()))
    try:
        mode = MAP.load(path)
    except ValueError as error:
        assert "MAP.save" in str(error)
    else:
        np.testing.assert_array_equal(mode.params["w"], MODE.params["w"])
        assert (mode.num_steps, mode.gradient_norm, mode.converged) == (5, 0.1, True)


def test_pickles_are_not_loaded(tmp_path):
    """Not even where they are where arrays should be."""

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    np.savez(tmp_path / "map.npz", losses=np.array([Bomb()], object))
    with pytest.raises(ValueError, match="damaged or not a file of arrays"):
        MAP.load(tmp_path / "map.npz")
    assert not (tmp_path / "exploded").exists()


# The command line

FLAGS = [a for action in command.parser()._actions for a in action.option_strings]
words = st.one_of(
    st.sampled_from([flag for flag in FLAGS if flag not in ("-h", "--help", "--out")]),
    st.sampled_from(["0", "-1", "1e400", "nan", "digits", "boomerang", "sgld", ""]),
    st.text(max_size=8).filter(lambda text: "\0" not in text),
)


@settings(max_examples=300, **COMMON)
@given(st.lists(words, max_size=6), st.sampled_from(["new", "results", "others"]))
def test_commands(tmp_path_factory, arguments, where):
    """Ends with a status, never with another error, and spares files of others."""
    root = tmp_path_factory.getbasetemp() / "fuzz-command"
    (root / "others").mkdir(parents=True, exist_ok=True)
    (root / "results").mkdir(exist_ok=True)
    (root / "others" / "thesis.txt").write_text("all of it")
    (root / "results" / "config.json").write_text("{}")
    old, pipeline.run = pipeline.run, lambda args: {"map": {}}
    try:
        status = command.main([*arguments, "--out", str(root / where)])
    except SystemExit as error:
        status = error.code
    finally:
        pipeline.run = old
    assert status in (0, 2)
    assert (root / "others" / "thesis.txt").read_text() == "all of it"


@settings(max_examples=60, **COMMON)
@given(damage(), st.sampled_from(["config.json", "metrics.json"]))
def test_damaged_results(tmp_path_factory, damage, name):
    out = tmp_path_factory.getbasetemp() / "fuzz-results"
    out.mkdir(exist_ok=True)
    arguments = ["--out", str(out), "--force", "--quiet"]
    args = command.parser().parse_args(arguments)
    assert command.prepare(args)
    results.write_json(out / "metrics.json", {"map": {"accuracy": 0.5}})
    path = out / name
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    arguments.remove("--force")
    assert command.main(arguments) in (0, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not NetCDF", None])
def test_damaged_draws(tmp_path, content):
    """HDF5 is not to be trusted with any bytes, so only a few are tried."""
    import arviz as az

    path = tmp_path / "draws.nc"
    az.from_dict(posterior={"w": DRAWS}).to_netcdf(str(path), engine="h5netcdf")
    np.testing.assert_array_equal(results.load_draws(path)["w"], DRAWS)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if content is None else content)
    with pytest.raises(ValueError, match="draws.nc is damaged or has no draws"):
        results.load_draws(path)
