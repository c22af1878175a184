# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Examples run, with small settings, and draw what they say."""

from pathlib import Path
import runpy
import sys

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
if not EXAMPLES.exists():
    pytest.skip("not in a checkout", allow_module_level=True)

SMALL = ["--num-warmup", "40", "--num-samples", "20"]
RUNS = {
    "paths": (["--output", "out.png"], ["out.png"]),
    "warmup_schedule": (["--output", "out.png", "--num-warmup", "60"], ["out.png"]),
    "concepts": ([], ["concepts_paths.png", "concepts_thinning.png"]),
    "fixed_batch": (["--output", "out.png", "--num-samples", "60"], ["out.png"]),
    "sparse_regression": (
        ["--output", "out.png", "--num-rows", "80", "--num-variables", "6"]
        + ["--num-effects", "2", "--subsample-size", "20", *SMALL],
        ["out.png"],
    ),
    "quickstart": ([], ["quickstart.png"]),
    "bnn_regression": (
        ["--figure", "out.png", "--nuts-warmup", "4", "--nuts-samples", "4"]
        + ["--num-chains", "2", "--svi-steps", "20", *SMALL],
        ["out.png", "truth.npz"],
    ),
}
FAST = ("paths", "warmup_schedule")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in RUNS],
)
def test_example(name, tmp_path, monkeypatch):
    arguments, files = RUNS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    for file in files:
        assert (tmp_path / file).stat().st_size > 1000


def test_no_example_is_left_out():
    scripts = {p.stem for p in EXAMPLES.glob("*.py")}
    assert scripts == {*RUNS, "gallery"}  # that one is in tests/bnn/test_plots.py
