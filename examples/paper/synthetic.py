# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Regression and binary classification on synthetic data, against NUTS.

Figures 1, 4 and 5 of the paper and supplement B: networks of its supplement E (25 and
10 units with tanh and noise variance 0.01; three layers of 100 with ReLU), two data
sets each, of our own, since the paper does not give its own. All methods but NUTS start
at the same MAP estimate and see all data at every step.

    python examples/paper/synthetic.py
"""

from methods import Settings, mixing, mode_of, sample
import numpy as np
from runner import job_path, jobs, load, main, parse, run_jobs

import jax
import jax.numpy as jnp

from numpyro_pdmp import bnn

METHODS = [
    "nuts",
    "bps",
    "sigma-bps",
    "boomerang",
    "boomerang-3",
    "sgld",
    "sgld-nd",
    "sgld-white",
]
DATA = ["gap", "cosine", "moons", "rings"]
LEVELS = (np.arange(20) + 0.5) / 20
LINE = np.linspace(-2, 2, 81, dtype=np.float32)[:, None]
SIDE = np.linspace(-3, 3, 21, dtype=np.float32)
PLANE = np.stack([a.ravel() for a in np.meshgrid(SIDE, SIDE)], -1)
NOISE = 0.1

SETTINGS = {
    "regression": {
        "full": Settings(500, 1000, 100, nuts=(500, 500, 4, 10)),
        "quick": Settings(200, 200, 20, map_steps=2000, nuts=(200, 200, 2, 7)),
        "tiny": Settings(10, 16, 2, map_steps=50, nuts=(4, 8, 1, 3)),
    },
    "binary": {
        "full": Settings(100, 150, 50, 1e-2, 1500, nuts=(150, 150, 2, 7), max_grad=300),
        "quick": Settings(60, 100, 20, 1e-2, 1000, nuts=(50, 50, 1, 6)),
        "tiny": Settings(10, 16, 2, 1e-2, 50, nuts=(4, 8, 1, 3)),
    },
}


def make_data(name, num=100):
    """Inputs and targets; the same for every seed."""
    rng = np.random.default_rng(0)
    if name == "gap":
        half = num // 2
        x = np.concatenate([rng.uniform(-1, -0.2, half), rng.uniform(0.3, 1, half)])
        y = x**3 + 0.4 * np.sin(6 * x) + NOISE * rng.normal(size=num)
        return x[:, None].astype("f4"), y.astype("f4")
    if name == "cosine":
        x = rng.uniform(0.25, 1.1, num) * rng.choice([-1, 1], num)
        y = np.cos(4 * x + 0.8) + NOISE * rng.normal(size=num)
        return x[:, None].astype("f4"), y.astype("f4")
    y = np.arange(num) % 2
    angle = np.pi * rng.uniform(size=num)
    if name == "moons":
        x = np.stack([np.cos(angle) - 0.5, np.sin(angle) - 0.25], -1)
        x = np.where(y[:, None] == 1, -x, x)
    else:
        radius = 0.4 + 0.9 * y
        x = radius[:, None] * np.stack([np.cos(2 * angle), np.sin(2 * angle)], -1)
    x = x + 0.15 * rng.normal(size=x.shape)
    return x.astype("f4"), y.astype("i4")


def problem(name, mode="full"):
    """Kind, network, model, data, and the inputs to predict at."""
    x, y = (jnp.asarray(a) for a in make_data(name))
    if name in ("gap", "cosine"):
        network = bnn.regression_mlp()
        return "regression", network, bnn.regression(network, "fan_in", NOISE), x, y
    network = bnn.regression_mlp() if mode == "tiny" else bnn.binary_mlp()
    return "binary", network, bnn.binary(network, "fan_in"), x, y


def outputs(kind, model, samples):
    """Mean of the likelihood at every input of the grid, (chains, draws, inputs)."""
    grid = LINE if kind == "regression" else PLANE
    values = bnn.function_values(model, samples, jnp.asarray(grid), batch_ndims=2)
    values = np.asarray(values, float)
    return values if kind == "regression" else np.exp(values[..., 1])


def distance(values, quantiles, weights=None):
    """1-Wasserstein distance of each marginal to the truth, by quantiles."""
    flat = values.reshape(-1, values.shape[-1])
    if weights is not None:  # as often as they weigh
        share = np.ravel(weights) / np.sum(weights)
        index = np.searchsorted(np.cumsum(share), (np.arange(2000) + 0.5) / 2000)
        flat = flat[np.minimum(index, len(flat) - 1)]
    found = np.quantile(flat, LEVELS, axis=0)
    return np.mean(np.abs(found - quantiles), axis=0)


def inside(kind, x):
    """Which inputs of the grid are among the data."""
    if kind == "regression":
        return np.abs(LINE[:, 0]) <= 1
    near = np.linalg.norm(PLANE[:, None] - np.asarray(x)[None], axis=-1).min(1)
    return near < 0.4


def run(job, args):
    name, method, seed = job.values()
    kind, network, model, x, y = problem(name, args.mode)
    settings = SETTINGS[kind][args.mode]
    mode = None
    if method != "nuts":
        mode = mode_of(model, network, x, y, seed, settings)
    draws = sample(method, model, network, mode, x, y, seed, settings)
    values = outputs(kind, model, draws.samples)
    flat = values.reshape(-1, values.shape[-1])
    probes = jnp.asarray((LINE if kind == "regression" else PLANE)[::20])
    among = inside(kind, x)
    w = None if draws.weights is None else np.ravel(draws.weights)
    mean = np.average(flat, axis=0, weights=w)
    sd = np.sqrt(np.average((flat - mean) ** 2, axis=0, weights=w))
    content = {
        **draws.info,
        "settings": settings._asdict(),
        "mixing": mixing(model, draws.samples, probes),
        "sd_inside": sd[among].mean(),
        "sd_outside": sd[~among].mean(),
    }
    if seed == 0:
        content.update(mean=mean, sd=sd)
        if kind == "regression":
            content["curves"] = flat[:: max(1, len(flat) // 12)][:12]
            first = draws.samples["net.mlp.linear_0.w"].reshape(len(flat), -1)
            offsets = draws.samples["net.mlp.linear_0.b"].reshape(len(flat), -1)
            both = np.concatenate([first, offsets], -1)
            content["correlations"] = np.round(np.corrcoef(both.T), 2)
            content["weight"] = both[:: max(1, len(flat) // 400), 0]
    if method == "nuts":
        content["r_hat"] = float(np.nanmax(bnn.mixing(values).r_hat))
        content["quantiles"] = np.quantile(flat, LEVELS, axis=0)
        return content
    path = job_path(args.results, "synthetic", {**job, "method": "nuts", "seed": 0})
    if path.is_file():
        truth = next(
            r
            for r in load(args.results, "synthetic")
            if r["data"] == name and r["method"] == "nuts" and r["seed"] == 0
        )
        far = distance(values, np.asarray(truth["quantiles"], float), draws.weights)
        content["w1"] = far.mean()
        content["w1_inside"] = far[among].mean()
        true_sd = np.asarray(truth["sd"], float)
        ratio = np.log(np.maximum(sd, 1e-6) / np.maximum(true_sd, 1e-6))
        content["sd_ratio_inside"] = np.exp(ratio[among].mean())
        content["sd_ratio_outside"] = np.exp(ratio[~among].mean())
    return content


def script(argv=None):
    args = parse(__doc__, argv, data=DATA, methods=METHODS)
    todo = jobs(args)
    # The truth first, and once.
    truth = [j for j in todo if j["method"] == "nuts" and j["seed"] == 0]
    rest = [j for j in todo if j["method"] != "nuts"]
    code = run_jobs("synthetic", truth + rest, run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
