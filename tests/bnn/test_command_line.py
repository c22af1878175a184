# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The command line: data, stages, what is refused, and what is not done twice."""

import json
from types import SimpleNamespace

import arviz as az
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
from numpyro_pdmp import BPS, MAP, SGHMC, SGLD, Boomerang, Scale, SigmaBPS, ZigZag
from numpyro_pdmp.bnn import pipeline, sampling
from numpyro_pdmp.bnn.__main__ import main, parser, prepare
from numpyro_pdmp.bnn.data import load_data, load_outside
from numpyro_pdmp.bnn.progress import Progress
from numpyro_pdmp.bnn.streaming import StreamingPrediction
from numpyro_pdmp.storage import tree_arrays

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Data of the layout that is asked for."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (root / "uci").mkdir()
    x = rng.normal(size=(60, 3)) * [1, 10, 0] + [0, 5, 7]
    index = np.stack([rng.permutation(60) for _ in range(2)])
    np.savez(
        root / "uci" / "toy.npz",
        X=x,
        y=20 + 3 * x[:, 0] + 0.1 * rng.normal(size=60),
        train_idx=index[:, :50],
        test_idx=index[:, 50:],
    )
    for name in ("mnist", "fashion_mnist"):
        (root / name).mkdir()
        np.savez(
            root / name / f"{name}.npz",
            x_train=rng.integers(256, size=(30, 28, 28), dtype=np.uint8),
            y_train=np.arange(30) % 10,
            x_test=rng.integers(256, size=(20, 28, 28), dtype=np.uint8),
            y_test=np.arange(20) % 10,
        )
    return root


def test_regressions_are_standardised(directory):
    data = load_data("toy", directory, split=1)
    assert data.x_train.shape == (50, 3) and data.num_classes is None
    assert_allclose(data.x_train[:, :2].mean(0), 0, atol=1e-6)
    assert_allclose(data.x_train[:, :2].std(0), 1, rtol=1e-5)
    assert_allclose(data.x_test[:, 2], 0)  # does not vary
    with np.load(directory / "uci" / "toy.npz") as file:
        original = file["y"][file["test_idx"][1]]
    assert_allclose(data.y_test * data.y_sd + data.y_mean, original, rtol=1e-5)


def test_images(directory, monkeypatch):
    monkeypatch.setenv("NUMPYRO_PDMP_DATA", str(directory))
    data = load_data("mnist", rows=20, test_rows=5)
    assert data.x_train.shape == (20, 28, 28, 1) and data.num_classes == 10
    assert data.x_test.shape == (5, 28, 28, 1)
    outside = load_outside("fashion_mnist", data, rows=7)
    with np.load(directory / "fashion_mnist" / "fashion_mnist.npz") as file:
        original = file["x_test"][:7, ..., None]
    assert_allclose(outside * data.x_sd + data.x_mean, original, atol=1e-3)
    assert load_outside("noise", data).shape == data.x_test.shape


def test_digits():
    data = load_data("digits")
    assert data.x_train.shape == (1347, 8, 8, 1)
    big = pipeline.for_network("lenet5", data.x_test)
    assert big.shape == (450, 16, 16, 1)
    other = load_data("digits", split=1)  # the same rows in another order
    assert other.x_test.shape == data.x_test.shape
    assert np.mean(other.y_test == data.y_test) < 0.5
    counts = [np.bincount(np.append(d.y_train, d.y_test)) for d in (data, other)]
    assert_array_equal(*counts)
    assert_array_equal(big[:, ::2, 1::2], data.x_test)
    with pytest.raises(ValueError, match="choose another one, or 'noise'"):
        load_outside("digits", data._replace(x_test=big))


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--data", "mnist"], "give --data-dir, or set NUMPYRO_PDMP_DATA"),
        (["--data", "mnist", "--data-dir", "nowhere"], "nowhere does not exist"),
        (["--data", "svhn", "--data-dir", "{}"], "mnist, fashion_mnist, toy; and"),
        (["--data", "toy", "--data-dir", "{}", "--split", "2"], "has splits 0 to 1"),
        (
            ["--data", "toy", "--data-dir", "{}", "--network", "lenet5"],
            "is for images",
        ),
        (["--num-samples", "0"], "--num-samples must be positive"),
        (["--ood", "cifar10"], "needs a directory"),
        (["--prior", "flat"], "give --target reference_prior"),
        (["--target", "reference_prior", "--sampler", "bps"], "--sampler boomerang"),
        (["--damping", "-1"], "--damping must not be negative"),
    ],
)
def test_what_is_missing(arguments, error, directory, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NUMPYRO_PDMP_DATA", raising=False)
    arguments = [a.format(directory) for a in arguments]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert error in capsys.readouterr().err


def test_stages(directory, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ["--data", "toy", "--data-dir", str(directory), "--out", str(out)]
    command += ["--map-steps", "200", "--batch-size", "20", "--num-warmup", "40"]
    command += ["--num-samples", "24", "--gradients-per-draw", "8"]
    command += ["--keep-draws", "12", "--quiet"]
    assert main(command) == 0
    assert "coverage_90" in capsys.readouterr().out
    content = json.loads((out / "metrics.json").read_text())
    assert content["map"]["rmse"] < 2  # of a standard deviation of 3
    assert content["posterior"]["rmse"] < 2
    said = content["sampling"]
    assert 2 < said["gradients_per_draw"] < 60  # warm-up is very short here
    assert said["draw_time"] != sampling.FIRST_DRAW_TIME
    assert "gradient evaluations a step" in said["report"]
    assert said["mixing"]["num_draws"] == 12
    figures = {"prediction.png", "components.png", "ratios.png"}
    assert figures <= {p.name for p in out.iterdir()}
    assert not [p.name for p in out.iterdir() if "part" in p.name]
    draws = az.from_netcdf(out / "draws.nc").posterior
    assert draws["net.mlp.linear_0.w"].shape == (1, 12, 3, 25)
    assert draws.attrs["sampler"] == "boomerang"
    assert MAP.load(out / "map.npz").params["net.mlp.linear_0.w"].shape == (3, 25)

    # Done: nothing is made again, and nothing is overwritten.
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert main(command) == 0
    assert "--force makes it anew" in capsys.readouterr().out
    assert main([*command, "--seed", "1"]) == 2
    assert "has results with --seed 0" in capsys.readouterr().err
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir()}

    # Interrupted: what is done is read.
    (out / "metrics.json").unlink()

    def never(*args):
        raise AssertionError("done already")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "find_mode", never)
        patch.setattr(pipeline, "sample", never)
        assert main([*command, "--no-plots"]) == 0
    again = json.loads((out / "metrics.json").read_text())
    assert again["posterior"] == content["posterior"]

    # Forced: all results go before anything is made.
    args = parser().parse_args([*command, "--force", "--seed", "1"])
    assert prepare(args)
    assert not {"map.npz", "draws.nc", "metrics.json"} & {p.name for p in out.iterdir()}


def test_sampling_goes_on(tmp_path, monkeypatch):
    """Interrupted in warm-up and after it, a run ends as if it had not been."""

    def model(x, y=None, subsample_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=subsample_size):
            x = numpyro.subsample(x, 1)
            y = None if y is None else numpyro.subsample(y, 0)
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    data = SimpleNamespace(x_train=x, y_train=x[:, 0])
    command = ["--out", "", "--num-warmup", "40", "--num-samples", "24", "--quiet"]
    command += ["--gradients-per-draw", "8", "--batch-size", "20"]
    args = parser().parse_args([*command, "--num-chains", "2"])

    def run(path, *stops):
        calls, save = [], Progress.save

        def stopping(self, force=False):
            calls.append(None)
            save(self, force=True)
            if len(calls) in stops:
                raise KeyboardInterrupt

        monkeypatch.setattr(Progress, "save", stopping)
        streams = []
        for _ in (*stops, None):
            streams = [StreamingPrediction(model, x, x[:, 0])]
            kernel = Boomerang(model, draw_time=0.01)
            try:
                result = sampling.sample(args, data, kernel, streams, 12, path)
            except KeyboardInterrupt:
                pass
        monkeypatch.undo()
        kept, state, extra, every = result
        arrays = {k: v for k, v in tree_arrays(state).items() if k != "structure"}
        return kept, extra, every, arrays, streams[0].result().mean

    whole = run(tmp_path / "whole.npz")
    parts = run(tmp_path / "parts.npz", 4, 13)
    assert whole[0]["w"].shape == (2, 12, 2) and whole[2] == 2
    assert whole[1]["num_grad"].shape == (2, 24)
    jax.tree.map(assert_array_equal, whole, parts)

    (tmp_path / "parts.npz").write_bytes(b"none")
    with pytest.raises(ValueError, match="is damaged"):
        run(tmp_path / "parts.npz")


@pytest.mark.parametrize(
    "sampler, kind",
    [
        ("boomerang", Boomerang),
        ("bps", BPS),
        ("sigma-bps", SigmaBPS),
        ("zigzag", ZigZag),
        ("sgld", SGLD),
        ("sgld-nd", SGLD),
        ("sghmc", SGHMC),
    ],
)
def test_samplers(sampler, kind, monkeypatch):
    def reference(*args, **kwargs):
        return Scale(jnp.zeros(2), jnp.array([1.0, 4.0]))

    monkeypatch.setattr(sampling, "laplace_reference", reference)
    command = ["--sampler", sampler, "--step-size", "0.1", "--out", "", "--draw-time"]
    args = parser().parse_args([*command, "0.3", "--refresh-rate", "0.7"])
    args.num_warmup, args.num_samples = 10, 90
    kernel = sampling.make_kernel(args, lambda x, y: None, None, None, None)
    assert isinstance(kernel, kind)
    if sampler == "bps":  # one scale: the geometric mean
        assert_allclose(kernel._reference.factor, 2)
    else:
        assert_allclose(kernel._reference.factor, [1, 4])
    if sampler == "sgld":  # falls to zero with the last of 50 gradients a draw
        assert_allclose([kernel._step_size(i) for i in (0, 2500, 5000)], [0.1, 0.05, 0])
    elif kind in (SGLD, SGHMC):
        assert kernel._step_size == 0.1
    else:
        assert kernel._draw_time == 0.3 and kernel._sampler.refresh_rate == 0.7


def test_the_papers_boomerang(monkeypatch):
    """The reference, with its factor, in place of a prior."""
    given = {}

    def reference(*args, **kwargs):
        given.update(kwargs)
        return Scale(jnp.zeros(2), jnp.ones(2))

    monkeypatch.setattr(sampling, "laplace_reference", reference)
    command = ["--out", "", "--prior", "flat", "--target", "reference_prior"]
    args = parser().parse_args([*command, "--gamma", "0.1", "--damping", "2"])
    kernel = sampling.make_kernel(args, lambda x, y: None, None, None, None)
    assert not kernel._sampler.residual
    assert given["gamma"] == 0.1 and given["damping"] == 2
    args = parser().parse_args(["--out", ""])
    kernel = sampling.make_kernel(args, lambda x, y: None, None, None, None)
    assert kernel._sampler.residual and kernel._sampler.refresh_rate == 3


def test_temperature_of_the_likelihood():
    """By the data unless given, and of the model, so of MAP and sampler alike."""
    args = parser().parse_args(["--out", ""])
    assert args.temperature is None
    assert pipeline.defaults("digits")["temperature"] < 1
    assert pipeline.defaults("mnist")["temperature"] == 1
    assert pipeline.defaults("yacht")["temperature"] == 1
    args.network, args.temperature = "digits_cnn", 0.25
    data, _, model = pipeline.make_model(args, load_data("digits", rows=4))
    sites = trace(seed(model, 0)).get_trace(data.x_train, data.y_train)
    assert sites["y"]["scale"] == 4
    assert all(s["scale"] is None for name, s in sites.items() if "net." in name)


def test_no_sampler(directory, tmp_path):
    """The MAP alone, of images that MLPs take as rows."""
    command = ["--data", "mnist", "--data-dir", str(directory), "--sampler", "map"]
    command += ["--network", "regression_mlp", "--map-steps", "20", "--batch-size", "9"]
    command += ["--ood", "fashion_mnist", "--quiet", "--out", str(tmp_path)]
    assert main(command) == 0
    content = json.loads((tmp_path / "metrics.json").read_text())
    assert "posterior" not in content and 0 <= content["ood"]["auroc"] <= 1
    assert {"reliability.png", "entropy.png"} <= {p.name for p in tmp_path.iterdir()}


def test_map_of_another_run(directory, tmp_path, capsys, monkeypatch):
    """A saved MAP is started from, and one of another network refused."""
    first, second = tmp_path / "a", tmp_path / "b"
    command = ["--data", "toy", "--data-dir", str(directory), "--sampler", "map"]
    command += ["--map-steps", "20", "--batch-size", "20", "--quiet", "--no-plots"]
    assert main([*command, "--out", str(first)]) == 0

    def never(*args):
        raise AssertionError("it is given")

    monkeypatch.setattr(pipeline, "find_mode", never)
    command += ["--map", str(first / "map.npz"), "--out", str(second)]
    assert main(command) == 0
    scores = [json.loads((d / "metrics.json").read_text()) for d in (first, second)]
    assert scores[0]["map"] == scores[1]["map"]
    capsys.readouterr()
    command[-1] = str(tmp_path / "c")
    assert main([*command, "--network", "uci_mlp"]) == 2
    assert "is of another network" in capsys.readouterr().err


def test_other_files_are_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert main(["--out", str(tmp_path)]) == 2
    assert "files that are not of a run" in capsys.readouterr().err


def test_help():
    text = parser().format_help()
    assert "--sampler" in text and "NUMPYRO_PDMP_DATA" in text
