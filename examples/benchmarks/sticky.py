# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""
Inclusion probabilities against sums over all models
====================================================

A linear regression with known noise and ten candidate variables, two pairs of them
correlated: the evidence of each of its 1,024 models has a closed form, and with it the
posterior inclusion probabilities under a spike-and-slab prior. Prints a table of what
the kernels find with `sticky`, the table of docs/sticky.md.
"""

import argparse
import itertools

import numpy as np

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, SigmaBPS, ZigZag, inclusion_probabilities

ROWS, DIM, NOISE, SLAB, WEIGHT = 60, 10, 1.0, 1.5, 0.3
RUNS = {
    "ZigZag": (ZigZag, None, {}),
    "BPS": (BPS, None, {}),
    "SigmaBPS": (SigmaBPS, None, {}),
    "Boomerang": (Boomerang, None, {}),
    "ZigZag, tangents": (ZigZag, None, {"event_time": "tangent"}),
    "ZigZag, batches of 20": (ZigZag, 20, {}),
    "BPS, batches of 20": (BPS, 20, {}),
    "Boomerang, batches of 20": (Boomerang, 20, {}),
}


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, DIM))
    x[:, 1] = 0.7 * x[:, 0] + 0.7 * x[:, 1]
    x[:, 4] = 0.6 * x[:, 3] + 0.8 * x[:, 4]
    beta = np.zeros(DIM)
    beta[[0, 3, 5, 7]] = [0.8, -0.5, 0.3, 0.25]
    return x, x @ beta + NOISE * rng.normal(size=ROWS)


def enumerate_models(x, y):
    models = np.array(list(itertools.product([False, True], repeat=DIM)))
    logs = []
    for model in models:
        design = x[:, model]
        cov = NOISE**2 * np.eye(ROWS) + SLAB**2 * design @ design.T
        log = -0.5 * (np.linalg.slogdet(cov)[1] + y @ np.linalg.solve(cov, y))
        logs.append(log + model.sum() * np.log(WEIGHT / (1 - WEIGHT)))
    weights = np.exp(np.array(logs) - max(logs))
    return weights @ models / weights.sum()


def model(x, y, size):
    slab = dist.Normal(0, SLAB).expand([DIM]).to_event(1)
    beta = numpyro.sample("beta", slab)
    with numpyro.plate("rows", ROWS, subsample_size=size):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


def main(args):
    x, y = make_data()
    exact = enumerate_models(x, y)
    cells = " | ".join(f"{p:.3f}" for p in exact)
    print("| | " + " | ".join(f"{i}" for i in range(DIM)) + " | rms | gradients |")
    print("| --- |" + " --- |" * (DIM + 2))
    print(f"| all models | {cells} | | |", flush=True)
    for name in args.runs or RUNS:
        kernel, size, options = RUNS[name]
        mcmc = MCMC(
            kernel(model, sticky={"beta": WEIGHT}, **options),
            num_warmup=300,
            num_samples=args.num_samples,
            num_chains=args.num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        mcmc.run(random.PRNGKey(args.seed), *data, size, extra_fields=("num_grad",))
        found = inclusion_probabilities(mcmc)["beta"]
        deviation = (found.probability - exact) / found.mcse
        cells = " | ".join(f"{p:.3f}" for p in found.probability)
        num_grad = np.mean(mcmc.get_extra_fields()["num_grad"])
        per_draw = num_grad * args.num_samples * args.num_chains / found.ess.min()
        rms = np.sqrt(np.mean(deviation**2))
        print(f"| {name} | {cells} | {rms:.2f} | {per_draw:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("runs", nargs="*", help=f"some of {', '.join(RUNS)}")
    parser.add_argument("--num-samples", type=int, default=500)
    parser.add_argument("--num-chains", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
