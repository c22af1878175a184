# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a data set to scored predictions, in stages whose results are files."""

from argparse import Namespace
from collections.abc import Callable
import os
from pathlib import Path
import time
from typing import Any

import numpy as np

from jax import Array, random
import jax.numpy as jnp
import optax

import numpyro.distributions as dist
from numpyro_pdmp.bnn import metrics, models, networks
from numpyro_pdmp.bnn.data import Data, load_data, load_outside
from numpyro_pdmp.bnn.predict import predict, score
from numpyro_pdmp.bnn.results import (
    ANEW,
    load_draws,
    load_prediction,
    save_draws,
    save_prediction,
    write_json,
)
from numpyro_pdmp.bnn.sampling import describe, describe_mixing, make_kernel, sample
from numpyro_pdmp.bnn.streaming import Prediction, StreamingPrediction
from numpyro_pdmp.find_map import MAP, find_map
from numpyro_pdmp.storage import read_json
from numpyro_pdmp.subsample import SubsampledModel

SAMPLERS = (
    "bps",
    "sigma-bps",
    "boomerang",
    "zigzag",
    "sgld",
    "sgld-nd",
    "sghmc",
    "map",
)
NETWORKS = (
    "digits_cnn",
    "lenet5",
    "resnet20",
    "regression_mlp",
    "uci_mlp",
)
#: what is not given on the command line, by kind of data set
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "network": "lenet5",
        "temperature": 0.003,  # measured: see docs/bnn.md
        "batch_size": 200,
        "map_steps": 2000,
        "num_warmup": 100,
        "num_samples": 200,
    },
    "grey images": {
        "network": "lenet5",
        "temperature": 1.0,
        "batch_size": 500,
        "map_steps": 2000,
        "num_warmup": 60,
        "num_samples": 100,
    },
    "colour images": {
        "network": "resnet20",
        "temperature": 1.0,
        "batch_size": 256,
        "map_steps": 3000,
        "num_warmup": 50,
        "num_samples": 100,
    },
    "regressions": {
        "network": "regression_mlp",
        "temperature": 1.0,
        "batch_size": 200,
        "map_steps": 2000,
        "num_warmup": 100,
        "num_samples": 500,
    },
}
KINDS = {
    "digits": "digits",
    **dict.fromkeys(("mnist", "fashion_mnist"), "grey images"),
    **dict.fromkeys(("svhn", "cifar10", "cifar100"), "colour images"),
}


def defaults(data: str) -> dict[str, Any]:
    """What is not given on the command line, for a data set."""
    return DEFAULTS[KINDS.get(data, "regressions")]


# The model


def for_network(network: str, x: np.ndarray) -> np.ndarray:
    """Inputs in the shape that a network takes.

    Images too small for LeNet5 have every pixel repeated, and MLPs take flat rows.
    """
    if network.endswith("mlp"):
        return x.reshape(len(x), -1)
    if x.ndim != 4:
        raise ValueError(
            f"`network={network}` is for images; here are rows of {x.shape[1]} "
            "features: use regression_mlp or uci_mlp."
        )
    if network == "lenet5":
        times = -(-16 // min(x.shape[1:3]))
        return x.repeat(times, axis=1).repeat(times, axis=2)
    return x


def make_model(args: Namespace, data: Data) -> tuple[Data, Any, Callable]:
    """Data in the shape for the network, the network, and the model."""
    train, test = [for_network(args.network, x) for x in (data.x_train, data.x_test)]
    data = data._replace(x_train=train, x_test=test)
    priors: dict[str, Callable] = {
        "normal": models.normal_prior,
        "fan_in": models.fan_in_prior,
        "flat": lambda _: models.flat_prior(),
    }
    prior = priors[args.prior](args.prior_scale)
    network = getattr(networks, args.network)(data.num_classes or 1)
    if data.num_classes is None:
        noise = dist.HalfNormal(1.0)
        model = models.regression(network, prior, noise, args.temperature)
    else:
        model = models.categorical(network, prior, args.temperature)
    return data, network, model


# Stages


def find_mode(args: Namespace, data: Data, network: Any, model: Callable) -> MAP:
    key = random.fold_in(random.key(args.seed), 0)
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    start = models.initial_params(network, x, random.fold_in(key, 1))
    if data.num_classes is None:
        start["noise"] = jnp.log(0.3)
    return find_map(
        model,
        key,
        x,
        y,
        subsample_size=args.batch_size,
        init_params=start,
        num_steps=args.map_steps,
        optimizer=optax.adam(
            optax.cosine_decay_schedule(args.learning_rate, args.map_steps)
        ),
        progress_bar=args.progress_bar,
    )


def load_mode(path: str | Path, data: Data, model: Callable) -> MAP:
    """A mode from a file, if it is one of this model."""
    mode = MAP.load(path)
    shapes = SubsampledModel(model, (data.x_train[:2], data.y_train[:2])).shapes
    found, wanted = (
        {k: tuple(a.shape) for k, a in sites.items()} for sites in (mode.params, shapes)
    )
    if found != wanted:
        either = found.keys() | wanted.keys()
        names = sorted(k for k in either if found.get(k) != wanted.get(k))
        raise ValueError(
            f"{path} is of another network or other data: they differ in {names}."
        )
    return mode


def in_units(scores: dict[str, float], data: Data) -> dict[str, float]:
    """Scores of a regression in the units of its targets."""
    if data.num_classes is not None:
        return scores
    scores["rmse"] *= data.y_sd
    scores["nll"] += float(np.log(data.y_sd))
    return scores


def constrained(model: Callable, mode: MAP, data: Data) -> dict[str, Array]:
    """The mode as one draw."""
    whole = SubsampledModel(model, (data.x_train[:2], data.y_train[:2]))
    return {k: v[None] for k, v in whole.constrain_fn(mode.params).items()}


def sampling_stage(
    args: Namespace, data: Data, model: Callable, mode: MAP, outside: Any, say: Callable
) -> tuple[Prediction, Prediction | None, dict[str, Any]]:
    """Sample, or read what was sampled: predictions and what is to be said of it."""
    out = Path(args.out)
    files = [out / "prediction.npz", out / "outside.npz"]
    done = out / "sampling.json"
    if done.is_file():
        say("Draws: from their files.")
        other = load_prediction(files[1]) if outside is not None else None
        return load_prediction(files[0]), other, read_json(done, ANEW)
    clock = time.perf_counter()
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    kernel = make_kernel(args, model, mode, x, y)
    streams = [StreamingPrediction(model, data.x_test, data.y_test)]
    if outside is not None:
        streams.append(StreamingPrediction(model, outside))
    path = out / "progress.npz"
    if path.is_file():
        say("Draws: some are in a file.")
    kept, state, extra, every = sample(
        args, data, kernel, streams, args.keep_draws, path
    )
    results = [stream.result() for stream in streams]
    for file, result in zip(files, results, strict=False):
        save_prediction(file, result)
    save_draws(out / "draws.nc", kept, extra, every, args)
    content = describe(kernel, state, kept, extra, args.thinning * every)
    content["mixing"] = describe_mixing(model, kept, data)
    content["seconds"] = time.perf_counter() - clock
    write_json(done, content)
    path.unlink(missing_ok=True)
    return results[0], results[1] if len(results) > 1 else None, content


def run(args: Namespace) -> dict[str, Any]:
    """All stages that are not done yet; returns the content of ``metrics.json``."""
    out = Path(args.out)
    say = print if args.progress_bar else (lambda *_: None)
    clock = time.perf_counter()
    data = load_data(
        args.data,
        args.data_dir,
        rows=args.rows,
        test_rows=args.test_rows,
        split=args.split,
    )
    outside = None
    if args.ood is not None:
        outside = load_outside(args.ood, data, args.data_dir, args.test_rows)
    data, network, model = make_model(args, data)
    if outside is not None:
        outside = for_network(args.network, outside)
    args.batch_size = min(args.batch_size, len(data.x_train))
    weights = networks.num_params(network, data.x_train[:1].shape)
    say(
        f"{data.name}: {len(data.x_train)} rows to train on, {len(data.x_test)} to "
        f"test; {args.network} with {weights} weights."
    )
    if (out / "map.npz").is_file():
        mode = load_mode(out / "map.npz", data, model)
        say("MAP: from its file.")
    else:
        if args.map is not None:
            mode = load_mode(args.map, data, model)
        else:
            mode = find_mode(args, data, network, model)
        mode.save(out / "part_map.npz")
        os.replace(out / "part_map.npz", out / "map.npz")
    point_draw = constrained(model, mode, data)
    point = predict(model, point_draw, data.x_test, data.y_test)
    content: dict[str, Any] = {
        "data": data.name,
        "network": args.network,
        "num_weights": weights,
        "map": in_units(score(point, data.y_test), data),
        "sampler": args.sampler,
    }
    if args.sampler == "map":
        prediction, sampling = point, dict[str, Any]()
        other = None if outside is None else predict(model, point_draw, outside)
    else:
        prediction, other, sampling = sampling_stage(
            args, data, model, mode, outside, say
        )
        content["posterior"] = in_units(score(prediction, data.y_test), data)
        content["sampling"] = sampling
    if other is not None and prediction.entropy is not None:
        assert other.entropy is not None
        content["ood"] = {
            "data": args.ood,
            "entropy": float(jnp.mean(other.entropy.total)),
            "auroc": float(
                metrics.auroc(prediction.entropy.total, other.entropy.total)
            ),
        }
    content["seconds"] = time.perf_counter() - clock
    if args.plots:
        from numpyro_pdmp.bnn.figures import draw_figures

        path = out / "draws.nc"
        draws = load_draws(path) if sampling else None
        draw_figures(out, args, data, model, point, prediction, other, sampling, draws)
    write_json(out / "metrics.json", content)
    return content
