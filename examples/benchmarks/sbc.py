# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Simulation-based calibration: are ranks of true values among draws uniform?

A parameter is drawn from the prior, data from the likelihood, and the posterior of
these data is sampled. If the sampler is right, the rank of the parameter among
(independent) draws is uniform (Talts, Betancourt, Simpson, Vehtari, Gelman 2018).

python examples/benchmarks/sbc.py --dir sbc --output docs/images/sbc.png
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import chi2

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
from numpyro_pdmp import BPS, Boomerang, ZigZag

KERNELS = {"Boomerang": Boomerang, "BPS": BPS, "ZigZag": ZigZag}
NUM_DATA = 60
X = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_DATA, 3)), jnp.float32)
GROUP = jnp.arange(NUM_DATA) % 4


def rows(y, subsample_size):
    """The plate of the data, and what is taken from ``y`` in it."""
    plate = numpyro.plate("data", NUM_DATA, subsample_size=subsample_size)
    return plate, lambda: None if y is None else numpyro.subsample(y, event_dim=0)


def normal(y=None, subsample_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 0.5))
    plate, batch = rows(y, subsample_size)
    with plate:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=batch())


def logistic(y=None, subsample_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    plate, batch = rows(y, subsample_size)
    with plate as index:
        numpyro.sample("y", dist.Bernoulli(logits=X[index] @ beta), obs=batch())


def hierarchical(y=None, subsample_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(-1, 0.5))
    raw = numpyro.sample("raw", dist.Normal(0, 1).expand([4]).to_event(1))
    plate, batch = rows(y, subsample_size)
    with plate as index:
        rate = jnp.exp(mu + tau * raw[GROUP[index]])
        numpyro.sample("y", dist.Poisson(rate), obs=batch())


MODELS = {"normal": normal, "logistic": logistic, "hierarchical": hierarchical}


def make_run(kernel, subsample_size, num_warmup, num_draws, thinning):
    """From a key and data to thinned draws, ``(draws, dimension)``."""

    def run(key, y):
        args = (y, subsample_size)
        state = kernel.init(key, num_warmup, None, args, {})
        step = partial(kernel.sample, model_args=args, model_kwargs={})
        state = lax.fori_loop(0, num_warmup, lambda _, s: step(s), state)

        def draw(state, _):
            state = lax.fori_loop(0, thinning, lambda _, s: step(s), state)
            z = kernel.postprocess_fn(args, {})(state.z)
            counts = state.totals.num_violations, state.totals.num_proposals
            return state, ({k: z[k] for k in state.z}, counts)

        _, (draws, counts) = lax.scan(draw, state, length=num_draws)
        return draws, jax.tree.map(lambda a: a[-1], counts)

    return jax.jit(jax.vmap(run))


def ranks_of(name, kernel, subsample_size, args):
    """(simulations, parameters) ranks, and the share of violations."""
    model, key = MODELS[name], random.key(args.seed)
    prior = Predictive(model, num_samples=args.num_simulations)(key)
    run = make_run(
        kernel(model), subsample_size, args.num_warmup, args.num_draws, args.thinning
    )
    keys = random.split(random.fold_in(key, 1), args.num_simulations)
    found, counts = run(keys, prior["y"])
    ranks = []
    for site, draws in found.items():
        below = (np.asarray(draws) < np.asarray(prior[site])[:, None]).sum(1)
        ranks.append(below.reshape(len(below), -1))
    violations, proposals = (int(np.sum(count)) for count in counts)
    return np.concatenate(ranks, 1), violations / max(proposals, 1)


def kept_ranks(name, kernel, subsample_size, args):
    """The same in parts, from files in ``--dir`` if they have been done before."""
    parts = []
    num = args.num_simulations // args.parts
    for seed in range(args.seed, args.seed + args.parts):
        part = argparse.Namespace(**{**vars(args), "seed": seed})
        part.num_simulations = num
        numbers = (num, args.num_warmup, args.num_draws, args.thinning, seed)
        setting = "-".join(map(str, (name, kernel, subsample_size, *numbers)))
        path = Path(args.dir or ".") / f"{setting}.npz"
        if args.dir is None or not path.exists():
            parts.append(ranks_of(name, KERNELS[kernel], subsample_size, part))
            if args.dir is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                np.savez(path, ranks=parts[-1][0], share=parts[-1][1])
            continue
        with np.load(path) as file:
            parts.append((file["ranks"], float(file["share"])))
    ranks, shares = zip(*parts, strict=True)
    return np.concatenate(ranks), float(np.mean(shares))


def p_values(ranks, num_draws, num_bins):
    """Of chi-square tests of uniform ranks, one a parameter."""
    width = (num_draws + 1) // num_bins
    counts = np.stack([np.bincount(r // width, minlength=num_bins) for r in ranks.T])
    expected = len(ranks) / num_bins
    return chi2.sf(((counts - expected) ** 2 / expected).sum(1), num_bins - 1), counts


def main(args):
    print(
        "| model | rows | kernel | parameters | smallest p, times their number |",
        end="",
    )
    print(" violations |\n|---|---|---|---|---|---|")
    histograms = {}
    for name in args.models:
        for size in [None, args.subsample_size][args.skip_full :]:
            for kernel in args.kernels:
                ranks, share = kept_ranks(name, kernel, size, args)
                p, counts = p_values(ranks, args.num_draws, args.num_bins)
                label = "all" if size is None else f"batches of {size}"
                print(
                    f"| {name} | {label} | {kernel} | {len(p)} "
                    f"| {min(1, p.min() * len(p)):.3f} | {100 * share:.2f} % |",
                    flush=True,
                )
                histograms[name, label, kernel] = counts
    if args.output:
        plot(histograms, args)


def plot(histograms, args):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(dict.fromkeys(key[:2] for key in histograms))
    figure, axes = plt.subplots(
        len(rows),
        len(args.kernels),
        figsize=(3 * len(args.kernels), 1.35 * len(rows) + 0.6),
        sharex=True,
        squeeze=False,
    )
    expected = args.num_simulations / args.num_bins
    error = 3 * (expected * (1 - 1 / args.num_bins)) ** 0.5
    for (name, label, kernel), counts in histograms.items():
        axis = axes[rows.index((name, label)), args.kernels.index(kernel)]
        axis.axhspan(expected - error, expected + error, color="#DDDDDD")
        for count in counts:
            axis.stairs(count, lw=1.1)
        axis.set(ylim=(0, 2 * expected), yticks=[])
        axis.set_xticks([])
        if name == rows[0][0] and label == rows[0][1]:
            axis.set_title(kernel, fontsize=10)
        if kernel == args.kernels[0]:
            axis.set_ylabel(f"{name}\n{label}", fontsize=8)
    figure.supxlabel("rank of the true value; grey: three standard errors", fontsize=9)
    figure.tight_layout()
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-simulations", type=int, default=1000)
    parser.add_argument(
        "--parts", type=int, default=1, help="simulations, in so many parts"
    )
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-draws", type=int, default=99)
    parser.add_argument("--num-bins", type=int, default=20)
    parser.add_argument("--thinning", type=int, default=8)
    parser.add_argument("--subsample-size", type=int, default=12)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS))
    parser.add_argument("--skip-full", action="store_true", help="mini-batches only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="directory that keeps ranks that are done")
    parser.add_argument("--output")
    main(parser.parse_args())
