# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The scripts of the paper's experiments, at the smallest size, and their page."""

import json
from pathlib import Path
import sys

import numpy as np
import pytest

PAPER = Path(__file__).parents[1] / "examples" / "paper"
if not PAPER.exists():
    pytest.skip("not in a checkout", allow_module_level=True)
pytest.importorskip("matplotlib")
pytest.importorskip("haiku")

# A few draws have no R-hat, and steps that fall to zero no correlations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("quickly_compiled"),
]


@pytest.fixture(scope="module", autouse=True)
def on_the_path():
    sys.path.insert(0, str(PAPER))
    yield
    sys.path.remove(str(PAPER))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Data of the layout that is asked for."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (root / "uci").mkdir()
    x = rng.normal(size=(60, 3))
    index = rng.permutation(60)[None]
    np.savez(
        root / "uci" / "yacht.npz",
        X=x,
        y=20 + 3 * x[:, 0] + 0.1 * rng.normal(size=60),
        train_idx=index[:, :40],
        test_idx=index[:, 40:],
    )
    for name in ("mnist", "fashion_mnist"):
        (root / name).mkdir()
        np.savez(
            root / name / f"{name}.npz",
            x_train=rng.integers(256, size=(30, 8, 8), dtype=np.uint8),
            y_train=np.arange(30) % 10,
            x_test=rng.integers(256, size=(20, 8, 8), dtype=np.uint8),
            y_test=np.arange(20) % 10,
        )
    return root


@pytest.fixture(scope="module")
def options(tmp_path_factory, directory):
    root = tmp_path_factory.mktemp("paper")
    given = ["--quick", "--tiny", "--data-dir", str(directory)]
    return [*given, "--results", str(root / "results"), "--cache", str(root / "cache")]


def results(options):
    return Path(options[options.index("--results") + 1])


def run(script, options, *more):
    module = __import__(script)
    assert module.script([*options, *more]) == 0


def write_truth(options, experiment, name, content):
    """As if NUTS had run before, so that it is not run again."""
    path = results(options) / experiment / f"{name}_nuts_0.json"
    path.parent.mkdir(parents=True)
    content = {"data": name, "method": "nuts", "seed": 0, "gradients": 1, **content}
    path.write_text(json.dumps(content))
    return path


def test_synthetic(options):
    truth = {"quantiles": np.zeros((20, 81)).tolist(), "sd": [1.0] * 81}
    truth.update(
        mean=[0.0] * 81, r_hat=1.0, settings={"num_samples": 1, "nuts": [1] * 4}
    )
    path = write_truth(options, "synthetic", "gap", truth)
    run("synthetic", options, "--data", "gap", "--methods", "nuts", "boomerang", "sgld")
    assert json.loads(path.read_text())["r_hat"] == 1.0
    found = json.loads((path.parent / "gap_sgld_0.json").read_text())
    assert found["w1"] > 0 and found["mode"] == "tiny"


def test_uci(options):
    run("uci", options, "--data", "yacht", "--methods", "map", "sgld")
    found = json.loads((results(options) / "uci_unit/yacht_sgld_0.json").read_text())
    assert np.isfinite(found["scores"]["nll"]) and found["gradients"] == 32


def test_images_and_envelopes(options):
    run("images", options, "--data", "mnist", "--methods", "map", "boomerang")
    run("supplement_a", options, "--methods", "bps")
    found = json.loads((results(options) / "images/mnist_boomerang_0.json").read_text())
    assert sum(found["entropy_inside"]) == 20 and len(found["hard"]["mean"]) == 2


@pytest.mark.filterwarnings("ignore:L-BFGS did not reach")  # in so few steps
def test_sensitivity(options):
    run("supplement_d", options, "--methods", "refreshment")
    path = results(options) / "supplement_d/refreshment_published_small.json"
    found = json.loads(path.read_text())
    assert np.isfinite(found["rmse"]) and len(found["mean"]) == 81


def test_comparison_with_the_paper():
    """Differences count in standard errors, and more accuracy is better."""
    module = __import__("acceptance")
    paper, names = (0.9, 0.01), ([], "NLL")
    # The paper's sd of five runs, and a rounding of 0.01.
    error = (0.01**2 / 5 + 0.01**2 / 12) ** 0.5

    def compare(value, sign):
        found = "bps", [sign * value], []
        as_is = (lambda v, _: v), np.mean
        return module.line(*names, found, paper, *as_is, sign=sign)[-2:]

    size, verdict = compare(0.9 + 3 * error, 1)
    assert size == pytest.approx(3) and verdict == "**worse**"
    size, verdict = compare(0.9 + 3 * error, -1)
    assert size == pytest.approx(-3) and verdict == "better"


def test_words_that_are_not_true_of_the_numbers():
    module = __import__("verdicts")
    name = "ablation__logistic__sgld{}__sd"
    published, correct = [0.2, 0.1], [1.0]
    values = {name.format("_noise"): published, name.format(""): correct}
    assert module.untrue(values) == []  # others have no numbers
    values[name.format("")] = [0.4]
    assert module.untrue(values) == ["SGLD collapses as published only"]


def test_ablation(options):
    truth = {"mean": [0.0] * 8, "sd": [1.0] * 8}
    path = write_truth(options, "ablation", "logistic", truth)
    run("ablation", options, "--methods", "nuts", "sgld", "sgld-noise")
    right, wrong = (
        json.loads((path.parent / f"logistic_{name}_0.json").read_text())
        for name in ("sgld", "sgld-noise")
    )
    assert right["sd_ratio"] > 3 * wrong["sd_ratio"]


def test_no_job_begins_when_time_is_up(options):
    module = __import__("uci")
    given = [*options, "--data", "yacht", "--methods", "vi", "--minutes", "-1"]
    assert module.script(given) == 75


def test_page(options, tmp_path):
    """With whatever there is: other tests may have run elsewhere."""
    module = __import__("results")
    page = tmp_path / "results.md"
    module.script(["--results", str(results(options)), "--page", str(page)])
    text = page.read_text()
    assert "Not run yet" in text and "--paper-size" in text  # rings, and the GPU
    images = (results(options) / "images").is_dir()
    assert (tmp_path / "images" / "paper" / "entropies.png").is_file() == images


def test_the_page_is_that_of_the_results(tmp_path):
    """Nothing on the page is typed by hand."""
    module = __import__("results")
    page = tmp_path / "results.md"
    docs = Path(__file__).parents[1] / "docs"
    figures = str(docs / "images" / "paper")
    module.script(["--page", str(page), "--figures", figures, "--no-figures"])
    assert page.read_text() == (docs / "results.md").read_text()
