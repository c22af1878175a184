# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Exact bounds against interpolated envelopes on a subsampled logistic regression.

Prints a Markdown table: proposals an event, evaluations of the gradient (a pair of
batch gradients, at the position and at the centre) for an effective draw of the worst
coefficient or its square, and the moments of the draws against Laplace's approximation.
The number behind the scheme's name is the order of the control variates.

    python examples/benchmarks/glm_bound.py --dim 5 25 --batch 1 100 --kernels ZigZag
"""

import argparse
import time

import numpy as np
from subsampling import laplace, model

import jax
from jax import random
import jax.numpy as jnp

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Scale, ZigZag, glm_bound

CURVATURE, THIRD = 0.25, 0.09623
KERNELS = {"ZigZag": ZigZag, "BPS": BPS}
SCHEMES = ["interpolation 1", "interpolation 2", "exact 1", "exact 2"]


def make_data(num_data, dim):
    """Gaussian features, and a linear predictor of variance 1."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_data, dim))
    y = rng.random(num_data) < 1 / (1 + np.exp(-x.sum(1) / dim**0.5))
    mode, covariance = laplace(x, y)
    factor = np.linalg.cholesky(covariance)
    scale = Scale(jnp.asarray(mode, "f4"), jnp.asarray(factor, "f4"))
    return jnp.asarray(x, "f4"), jnp.asarray(y, "f4"), scale


def run(kernel, args, num_warmup, seconds):
    """Draws of at least this many seconds, and the state after them."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=100,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(random.key(0), *args)
    draws, start = [], time.perf_counter()
    # A hundred draws may take a tenth of a second or a minute.
    while len(draws) < 40 and (time.perf_counter() - start < seconds or len(draws) < 3):
        mcmc.run(random.key(len(draws)), *args)
        draws.append(np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float))
        mcmc.post_warmup_state = mcmc.last_state
    return np.concatenate(draws, 1), mcmc.last_state


def settings(name, kernel, x, y, size, scale):
    order = int(name[-1])
    if name.startswith("interpolation"):
        return {"reference": scale, "control_variates": order}
    return glm_bound(
        model,
        scale,
        *(x, y, size),
        features=x,
        curvature=CURVATURE,
        third_derivative=THIRD if order == 2 else None,
        kernel=kernel,
    )


def row(name, kernel, x, y, size, scale, seconds):
    """One line of the table."""
    options = settings(name, kernel, x, y, size, scale)
    num_warmup = 100 if name.startswith("exact") else 300  # nothing to tune, or much
    draws, state = run(kernel(model, **options), (x, y, size), num_warmup, seconds)
    total = jax.tree.map(lambda a: np.asarray(a).sum(0), state.totals)
    sd = np.sqrt(np.asarray(scale.variance()))
    draws = (draws - np.asarray(scale.center)) / sd
    ess = min(effective_sample_size(a).min() for a in (draws, draws**2))
    length = draws.shape[0] * draws.shape[1] * float(state.adapt_state.draw_time)
    return (
        f"| {len(x):,} | {x.shape[1]} | {size} | {kernel.__name__} | {name} "
        f"| {total.num_proposals / max(total.num_bounces, 1):.1f} "
        f"| {total.num_bounces / length:.1f} | {total.num_grad / length:.0f} "
        f"| {total.num_grad / ess:.0f} | {total.num_violations} of "
        f"{total.num_proposals} | {np.abs(draws.mean((0, 1))).max():.2f} "
        f"| {np.sqrt((draws**2).mean((0, 1))).mean():.3f} | {ess:.0f} |"
    )


def main(options):
    print(
        "| rows | coefficients | batch | kernel | event times | proposals an event | "
        "events a unit of time | gradient pairs a unit of time | gradient pairs an "
        "effective draw | violations | largest error of a mean, sd | sd ratio | "
        "effective draws |"
    )
    print("|---" * 13 + "|")
    for num_data in options.num_data:
        for dim in options.dim:
            x, y, scale = make_data(num_data, dim)
            for size in options.batch:
                for kernel in options.kernels:
                    for name in options.schemes:
                        args = KERNELS[kernel], x, y, size, scale, options.seconds
                        print(row(name, *args), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dim", type=int, nargs="+", default=[5, 25])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["ZigZag"])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--seconds", type=float, default=12)
    main(parser.parse_args())
