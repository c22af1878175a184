# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a data set to scored predictions, in stages whose results are files."""

from argparse import Namespace
from collections.abc import Callable
import json
import os
from pathlib import Path
import time
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array, random
import jax.numpy as jnp
import optax

import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro_pdmp.bnn import metrics, models, networks
from numpyro_pdmp.bnn.data import Data, load_data, load_outside
from numpyro_pdmp.bnn.mixing import mixing, principal_components
from numpyro_pdmp.bnn.predict import (
    Prediction,
    StreamingPrediction,
    function_values,
    predict,
    score,
)
from numpyro_pdmp.bnn.progress import Progress, joined
from numpyro_pdmp.boomerang import Boomerang
from numpyro_pdmp.bps import BPS
from numpyro_pdmp.chunks import first_state, run_chunks
from numpyro_pdmp.diagnostics import report_run
from numpyro_pdmp.find_map import MAP, find_map
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.reference import laplace_reference
from numpyro_pdmp.sghmc import SGHMC
from numpyro_pdmp.sgld import SGLD
from numpyro_pdmp.sigma_bps import SigmaBPS
from numpyro_pdmp.storage import read_arrays, read_json, require_names
from numpyro_pdmp.subsample import SubsampledModel
from numpyro_pdmp.zigzag import ZigZag

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
#: process time between draws of a PDMP before it is tuned
FIRST_DRAW_TIME = 0.001
#: refreshments of Boomerang a unit of time: paths that bounce often forget nothing of
#: their energy but by these, and the kernel's own rate is for references that fit
REFRESH_RATE = 3.0
#: inputs at which function values are compared
NUM_PROBES = 20
#: files of a run
FILES = (
    "config.json",
    "map.npz",
    "progress.npz",
    "draws.nc",
    "prediction.npz",
    "outside.npz",
    "sampling.json",
    "metrics.json",
)


def defaults(data: str) -> dict[str, Any]:
    """What is not given on the command line, by data set."""
    small = {"batch_size": 200, "map_steps": 2000, "num_warmup": 100}
    if data == "digits":
        return {"network": "lenet5", "num_samples": 200, **small}
    if data in ("mnist", "fashion_mnist"):
        many = {"batch_size": 500, "map_steps": 2000, "num_warmup": 60}
        return {"network": "lenet5", "num_samples": 100, **many}
    if data in ("svhn", "cifar10", "cifar100"):
        many = {"batch_size": 256, "map_steps": 3000, "num_warmup": 50}
        return {"network": "resnet20", "num_samples": 100, **many}
    return {"network": "regression_mlp", "num_samples": 500, **small}


ANEW = "Delete it, or give --force to make all results anew."


def write_json(path: Path, content: Any) -> None:
    """Write all of a file or nothing."""
    new = path.with_suffix(".part")
    new.write_text(json.dumps(content, indent=2, default=float) + "\n")
    os.replace(new, path)


def write_arrays(path: Path, **arrays: Any) -> None:
    new = path.with_name(f"part_{path.name}")
    np.savez(new, **arrays)
    os.replace(new, path)


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
        return data, network, models.regression(network, prior, dist.HalfNormal(1.0))
    return data, network, models.categorical(network, prior)


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


def make_kernel(args: Namespace, model: Callable, mode: MAP, x: Array, y: Array) -> Any:
    """The kernel, around the mode and scaled by the curvature there."""
    if args.temperature != 1:
        model = scale(model, scale=1 / args.temperature)
    data = {"subsample_size": args.batch_size}
    reference: Any = laplace_reference(
        model,
        mode,
        x,
        y,
        kind=args.reference,
        gamma=args.gamma,
        damping=args.damping,
        num_probes=64,
        **data,
    )
    if args.sampler == "bps":
        # As in the literature: one scale for all coordinates.
        one = jnp.exp(jnp.mean(jnp.log(reference.factor)))
        reference = Scale(reference.center, jnp.full_like(reference.factor, one))
    kernels = {
        "boomerang": Boomerang,
        "bps": BPS,
        "sigma-bps": SigmaBPS,
        "zigzag": ZigZag,
    }
    if args.sampler in kernels:
        draw_time = FIRST_DRAW_TIME if args.draw_time is None else args.draw_time
        settings: dict[str, Any] = {"draw_time": draw_time, "potential_energy": False}
        if args.sampler == "boomerang":
            settings |= {"refresh_rate": REFRESH_RATE, "target": args.target}
        if args.refresh_rate is not None:
            settings["refresh_rate"] = args.refresh_rate
        return kernels[args.sampler](model, reference=reference, **settings)
    kind: Any = SGHMC if args.sampler == "sghmc" else SGLD
    settings = {"reference": reference, "num_steps": args.gradients_per_draw}
    size: Any = "auto" if args.step_size is None else args.step_size
    if args.sampler == "sgld":
        if args.step_size is None:
            first = kind(model, **settings).init(
                random.key(0), 0, model_args=(x, y), model_kwargs=data
            )
            # Half of it on average, so that the noise is the same.
            size = 2 * float(first.adapt_state.step_size)
        steps = args.gradients_per_draw * (args.num_warmup + args.num_samples)
        size = optax.linear_schedule(size, 0.0, steps)
    return kind(model, step_size=size, **settings)


def _tuned(state: Any, spent: float, wanted: float) -> Any:
    """A state with draws as far apart as the wanted gradients reach."""
    ratio = np.clip(wanted / max(spent, 1e-9), 0.2, 5.0)
    adapted = state.adapt_state
    # Not beyond a quarter turn: draws that far apart are about independent.
    draw_time = jnp.minimum(adapted.draw_time * ratio, np.pi / 2)
    draw_time = draw_time.astype(adapted.draw_time.dtype)
    return state._replace(adapt_state=adapted._replace(draw_time=draw_time))


def sample(args, data, kernel, streams, kept_draws, path):
    """Sample and predict; draws that are to be kept are moved to the host.

    :param streams: predictions to be updated.
    :param kept_draws: how many draws to keep, of each chain.
    :param path: of the file from which an interrupted run goes on.
    :return: the kept draws, the last state, and the fields of all draws.
    """
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    key = random.fold_in(random.key(args.seed), 1)
    pdmp = isinstance(kernel, PDMPKernel)
    total = args.num_samples // args.thinning
    chunk = int(np.clip(args.num_warmup // (10 * args.thinning), 1, 10))
    every = max(1, total // kept_draws)
    fields = ["num_grad", *(["num_violations", "num_proposals"] if pdmp else [])]
    fields += [] if pdmp else ["step_size"]
    progress = Progress(path, streams)
    if path.is_file():
        keys = key if args.num_chains == 1 else random.split(key, args.num_chains)
        rows = {"subsample_size": args.batch_size}
        progress.load(
            first_state(kernel, keys, args.num_warmup, None, (x, y), rows, None)
        )
    runs = run_chunks(
        kernel,
        key,
        x,
        y,
        subsample_size=args.batch_size,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
        chunk=chunk,
        extra_fields=tuple(fields),
        state=progress.state,
        step=progress.step,
        yield_warmup=True,
        progress_bar=args.progress_bar,
    )
    send: Any = None
    spent = 0.0
    if pdmp and progress.step:
        spent = float(np.mean(progress.state.totals.num_grad))
    while True:
        try:
            part = runs.send(send)
        except StopIteration:
            break
        send, steps = None, part.step - progress.step
        progress.state, progress.step = part.state, part.step
        num = next(iter(part.samples.values())).shape[1]
        if num == 0 and pdmp and args.draw_time is None:
            grads = float(np.mean(part.state.totals.num_grad))
            send = _tuned(part.state, (grads - spent) / steps, args.gradients_per_draw)
            spent, progress.state = grads, send
        if num:
            _take(args, part, streams, progress, every)
        progress.save()
    kept, extra = joined(progress.kept), joined(progress.extra)
    return kept, progress.state, extra, every


def _take(args, part, streams, progress, every):
    """Predict with the draws of a chunk, and keep some of them."""
    progress.extra.append(jax.tree.map(np.asarray, part.extra_fields))
    weights = None
    if args.sampler == "sgld":  # steps that fall, as Welling and Teh weigh them
        weights = part.extra_fields["step_size"]
    for stream in streams:
        stream.update(part.samples, weights, batch_ndims=2)
    num = next(iter(part.samples.values())).shape[1]
    chosen = [k for k in range(num) if (progress.done + k + 1) % every == 0]
    if chosen:
        progress.kept.append(
            {k: np.asarray(a[:, chosen]) for k, a in part.samples.items()}
        )
    progress.done += num


def describe(kernel: Any, state: Any, kept: Any, extra: Any, thinning: int) -> dict:
    """What is to be said of a run, as plain numbers, and the report of a PDMP."""
    result: dict[str, Any] = {"gradients_per_draw": extra["num_grad"].mean()}
    result["diverging"] = int(extra["diverging"].sum())
    if not isinstance(kernel, PDMPKernel):
        result["step_size"] = float(np.mean(extra["step_size"]))
        return result
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = report_run(kernel, state, kept, extra["diverging"], thinning)
    result.update(
        violation_rate=report.violation_rate,
        acceptance=report.acceptance,
        draw_time=report.draw_time,
        ratio_histogram=np.asarray(report.ratio_histogram).tolist(),
        report=str(report),
    )
    return result


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


def _load_prediction(path: Path) -> Prediction:
    file = read_arrays(path, ANEW)
    require_names(file, ("mean", "variance", "noise"), path, ANEW)
    entropy = None
    if "total" in file:
        names = metrics.Uncertainty._fields
        require_names(file, names, path, ANEW)
        entropy = metrics.Uncertainty(*(file[k] for k in names))
    mean, variance, noise = (file[k] for k in ("mean", "variance", "noise"))
    return Prediction(mean, variance, noise, entropy, file.get("log_density"))


def _save_prediction(path: Path, prediction: Prediction) -> None:
    fields = {k: v for k, v in prediction._asdict().items() if v is not None}
    entropy = fields.pop("entropy", None)
    write_arrays(path, **fields, **({} if entropy is None else entropy._asdict()))


def _load_draws(path: Path) -> dict[str, np.ndarray]:
    import arviz as az

    try:
        posterior = az.from_netcdf(path).posterior.load()
    # HDF5 raises whatever the bytes make it stumble over.
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or has no draws ({type(error).__name__}). {ANEW}"
        ) from error
    return {str(name): posterior[name].values for name in posterior}


def _save_draws(path: Path, kept: Any, extra: Any, every: int, args: Namespace) -> None:
    import arviz as az

    index = slice(every - 1, None, every)
    num = next(iter(kept.values())).shape[1]
    stats = {k: v[:, index][:, :num] for k, v in extra.items()}
    attrs = {"sampler": args.sampler, "network": args.network, "data": args.data}
    # A dimension of one, as of a scale, has no name in common with any other.
    tree = az.from_dict(posterior=kept, sample_stats=stats, posterior_attrs=attrs)
    new = path.with_name(f"part_{path.name}")
    tree.to_netcdf(str(new), engine="h5netcdf")
    os.replace(new, path)


def sampling_stage(
    args: Namespace, data: Data, model: Callable, mode: MAP, outside: Any, say: Callable
) -> tuple[Prediction, Prediction | None, dict[str, Any]]:
    """Sample, or read what was sampled: predictions and what is to be said of it."""
    out = Path(args.out)
    files = [out / "prediction.npz", out / "outside.npz"]
    done = out / "sampling.json"
    if done.is_file():
        say("Draws: from their files.")
        other = _load_prediction(files[1]) if outside is not None else None
        return _load_prediction(files[0]), other, read_json(done, ANEW)
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
        _save_prediction(file, result)
    _save_draws(out / "draws.nc", kept, extra, every, args)
    content = describe(kernel, state, kept, extra, args.thinning * every)
    content["mixing"] = _mixing(model, kept, data)
    content["seconds"] = time.perf_counter() - clock
    write_json(done, content)
    path.unlink(missing_ok=True)
    return results[0], results[1] if len(results) > 1 else None, content


def _mixing(model: Callable, kept: Any, data: Data) -> dict[str, Any]:
    """Effective sizes of the kept draws, as far as there are enough."""
    if next(iter(kept.values())).shape[1] < 8:
        return {}
    probes = jnp.asarray(data.x_test[:NUM_PROBES])
    values = mixing(function_values(model, kept, probes, batch_ndims=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result says whether it drifts
        components = principal_components(kept)
    return {
        "num_draws": int(np.prod(next(iter(kept.values())).shape[:2])),
        "function_ess_median": float(np.nanmedian(values.ess)),
        "function_ess_min": float(np.nanmin(values.ess)),
        "function_r_hat_max": float(np.nanmax(values.r_hat)),
        "component_ess": components.mixing.ess.tolist(),
        "component_r_hat": components.mixing.r_hat.tolist(),
        "drifts": components.drifts,
    }


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
        draws = _load_draws(path) if sampling else None
        draw_figures(out, args, data, model, point, prediction, other, sampling, draws)
    write_json(out / "metrics.json", content)
    return content
