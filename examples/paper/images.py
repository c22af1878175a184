# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Images: Table 2 of the paper, and supplements C, G and H.

MNIST and Fashion-MNIST with LeNet5, SVHN, CIFAR-10 and CIFAR-100 with ResNet20, by the
stages of ``python -m numpyro_pdmp.bnn``: MAP, curvature, sampling from mini-batches
with a batch for every evaluation, predictions. All samplers of a seed start at one MAP,
and are scaled by the curvature there (BPS by one number). Default sizes fit two cores:
images of SVHN and CIFAR are halved; ``LENET`` and ``RESNET`` have the rest.

    python examples/paper/images.py --data-dir DIR
    python examples/paper/images.py --data-dir DIR --data svhn cifar10 cifar100

``--all-rows`` takes all rows and all test rows of MNIST or Fashion-MNIST, and more
epochs to the MAP; draws are as many as otherwise:

    python examples/paper/images.py --data-dir DIR --all-rows --seeds 1 \
        --data mnist --methods map sigma-bps boomerang

At the size of the paper, for a GPU (2,000 draws thinned to 200, its batches and steps):

    python examples/paper/images.py --data-dir DIR --data mnist fashion_mnist \
        --paper-size --seeds 5 --results results_gpu
    python examples/paper/images.py --data-dir DIR --data svhn cifar10 cifar100 \
        --paper-size --seeds 5 --results results_gpu
"""

import shutil
from typing import Any
import warnings

import numpy as np
from runner import jobs, main, parse, run_jobs

import jax

from numpyro_pdmp import MAP, bnn
from numpyro_pdmp.bnn import pipeline, results
from numpyro_pdmp.bnn.__main__ import parser, prepare
from numpyro_pdmp.bnn.data import data_file, load_data

METHODS = ["map", "boomerang", "sigma-bps", "bps", "sgld", "sgld-nd", "sghmc"]
DATA = ["mnist", "fashion_mnist"]
OUTSIDE = {
    "mnist": "fashion_mnist",
    "fashion_mnist": "mnist",
    "svhn": "cifar10",
    "cifar10": "svhn",
}
LENET = {
    "full": {
        "rows": 10_000,
        "test-rows": 1000,
        "batch-size": 100,
        "map-steps": 1500,
        "num-warmup": 40,
        "num-samples": 60,
        "gradients-per-draw": 12,
    },
    "all": {
        "rows": 60_000,
        "test-rows": 10_000,
        # More than above: noise of batches counts by N over the root of m.
        "batch-size": 300,
        "map-steps": 2000,
        "num-warmup": 40,
        "num-samples": 60,
        "gradients-per-draw": 12,
    },
    "quick": {
        "rows": 2000,
        "test-rows": 500,
        "batch-size": 100,
        "map-steps": 300,
        "num-warmup": 20,
        "num-samples": 30,
        "gradients-per-draw": 10,
    },
    "tiny": {
        "rows": 30,
        "test-rows": 20,
        "batch-size": 10,
        "map-steps": 5,
        "num-warmup": 10,
        "num-samples": 12,
        "gradients-per-draw": 2,
    },
}
RESNET = {
    "full": {
        "rows": 5000,
        "test-rows": 500,
        "batch-size": 32,
        "map-steps": 600,
        "num-warmup": 10,
        "num-samples": 10,
        "gradients-per-draw": 4,
    },
    "quick": {
        "rows": 500,
        "test-rows": 200,
        "batch-size": 20,
        "map-steps": 50,
        "num-warmup": 10,
        "num-samples": 12,
        "gradients-per-draw": 3,
    },
    "tiny": LENET["tiny"],
}
PAPER = {
    "num-warmup": 200,
    "num-samples": 2000,
    "thinning": 10,
    "gradients-per-draw": 50,
    "keep-draws": 200,
}
#: bins of predictive entropies, in nats, and how many hard images to keep
BINS, NUM_HARD = 30, 2


def sizes(data, args):
    lenet = data in ("mnist", "fashion_mnist", "digits")
    if args.paper_size:
        preset = bnn.presets[data]
        steps = preset["map"]["num_steps"]
        return {**PAPER, "batch-size": preset["batch_size"], "map-steps": steps}
    if args.all_rows:
        return LENET["all"]
    size = dict((LENET if lenet else RESNET)[args.mode])
    if args.tiny:
        size["network"] = "regression_mlp"
    return size


def halved(data, args):
    """A directory with images of half the width and height, made once."""
    whole = data_file(data, args.data_dir)
    path = args.cache / "halved" / data / f"{data}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with np.load(whole) as file:
            arrays = {k: file[k] for k in ("x_train", "y_train", "x_test", "y_test")}
        for name in ("x_train", "x_test"):
            x = arrays[name].astype(float)
            num, height, width, channels = x.shape
            x = x.reshape(num, height // 2, 2, width // 2, 2, channels)
            arrays[name] = x.mean((2, 4)).round().astype(np.uint8)
        np.savez(path, **arrays)
    return str(args.cache / "halved")


def options(data, method, seed, args):
    """Options of the command line, with a directory of their own."""
    directory = args.data_dir
    size = sizes(data, args)
    if data in ("svhn", "cifar10", "cifar100") and not args.paper_size:
        directory = halved(data, args)
        if data in OUTSIDE:
            halved(OUTSIDE[data], args)
    out = args.cache / f"{data}_{method}_{seed}{'_all' * args.all_rows}"
    given = ["--data", data, "--sampler", method, "--seed", str(seed), "--quiet"]
    given += ["--out", str(out), "--no-plots", "--learning-rate", "0.003"]
    given += ["--temperature", "1"]
    if directory is not None:
        given += ["--data-dir", directory]
    if data in OUTSIDE and not args.all_rows:
        given += ["--ood", OUTSIDE[data]]
    for name, value in size.items():
        given += [f"--{name}", str(value)]
    chosen = parser().parse_args(given)
    prepare(chosen)
    return chosen, out


def load_problem(chosen):
    """Data, network and model as the pipeline has them."""
    data = load_data(
        chosen.data,
        chosen.data_dir,
        rows=chosen.rows,
        test_rows=chosen.test_rows,
    )
    return pipeline.make_model(chosen, data)


def hard_rows(data, args):
    """Test rows that the MAP of the first seed finds hardest."""
    path = args.cache / f"hard_{data}{'_all' * args.all_rows}.npz"
    if path.is_file():
        with np.load(path) as file:
            return file["rows"]
    chosen, out = options(data, "map", 0, args)
    rows, _, model = load_problem(chosen)
    mode = MAP.load(out / "map.npz")
    draw = pipeline.constrained(model, mode, rows)
    probs = np.asarray(bnn.predict(model, draw, rows.x_test).mean)
    hard = np.argsort(probs[np.arange(len(probs)), rows.y_test])[:NUM_HARD]
    np.savez(path, rows=hard)
    return hard


def histogram(entropy, num_classes):
    edges = np.linspace(0, np.log(num_classes), BINS + 1)
    return np.histogram(np.asarray(entropy), edges)[0]


def extras(data, out, chosen, args):
    """Traces, entropies and hard images, from the files of a run."""
    content: dict[str, Any] = {}
    rows, _, model = load_problem(chosen)
    draws = results.load_draws(out / "draws.nc")
    num = next(iter(draws.values())).shape[1]
    if chosen.seed == 0 and num >= 8:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            components = bnn.principal_components(draws)
        content["component_scores"] = components.scores[0].T
        content["component_sd"] = np.sqrt(components.variances)
        names = [k for k in draws if k.endswith(".w")]
        lines = [draws[k][0].reshape(num, -1)[:, 0] for k in (names[0], names[-1])]
        content["weights"] = [line - line[0] for line in lines]
        hard = hard_rows(data, args)
        values = bnn.function_values(model, draws, rows.x_test[hard], batch_ndims=2)
        probs = np.exp(np.asarray(values, float))[0]
        low, high = np.quantile(probs, [0.025, 0.975], axis=0)
        content["hard"] = {"mean": probs.mean(0), "low": low, "high": high}
    with np.load(out / "prediction.npz") as arrays:
        # Of the mean over test rows, so that one may tell how far to trust it.
        density = np.asarray(arrays["log_density"], float)
        content["nll_error"] = density.std(ddof=1) / len(density) ** 0.5
    for name, file in (("inside", "prediction.npz"), ("outside", "outside.npz")):
        if (out / file).is_file():
            with np.load(out / file) as arrays:
                content[f"entropy_{name}"] = histogram(
                    arrays["total"], rows.num_classes
                )
    return content


def run(job, args):
    data, method, seed = job.values()
    if method != "map":
        _, source = options(data, "map", seed, args)
    chosen, out = options(data, method, seed, args)
    found_before = method == "map" and (out / "map.npz").is_file()
    if method != "map" and (source / "map.npz").is_file():
        shutil.copy(source / "map.npz", out / "map.npz")
    result = pipeline.run(chosen)
    if method != "map" and not (source / "map.npz").is_file():
        # The cache of an earlier run is gone: the mode was found again, for all others.
        source.mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "map.npz", source / "map.npz")
    content = {
        "network": result["network"],
        "num_weights": result["num_weights"],
        "sizes": sizes(data, args),
        "scores": result["map" if method == "map" else "posterior"],
        "ood": result.get("ood"),
        "seconds": None if found_before else result["seconds"],
    }
    if method == "map":
        content["gradients"] = chosen.map_steps
        if seed == 0:
            hard = hard_rows(data, args)
            with np.load(data_file(data, chosen.data_dir)) as file:
                content["hard_images"] = file["x_test"][hard]
                content["hard_labels"] = file["y_test"][hard]
        return content
    sampling = result["sampling"]
    sampling.pop("report", None)
    content["sampling"] = sampling
    content["gradients"] = sampling["gradients_per_draw"] * chosen.num_samples
    content.update(extras(data, out, chosen, args))
    return content


def script(argv=None):
    choices = {"paper_size": False, "all_rows": False}
    args = parse(__doc__, argv, data=DATA, methods=METHODS, **choices)
    name = "images_all" if args.all_rows else "images"
    code = run_jobs(name, jobs(args), run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
