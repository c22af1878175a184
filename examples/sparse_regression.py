# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""
Example: Variable selection with a spike-and-slab prior
=======================================================

A logistic regression of 2,000 rows with 200 candidate variables, of which 10 have an
effect. The model gives every coefficient its slab, a normal prior; the kernel's
argument `sticky` adds a spike at zero, so that draws have exact zeros and posterior
inclusion probabilities are shares of draws. It runs once on all data and once on
mini-batches, prints the inclusion probabilities and what they cost, and saves a figure.
"""

import argparse
import time

import matplotlib.pyplot as plt
import numpy as np

import jax
import jax.numpy as jnp
import jax.random as random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import numpyro_pdmp
from numpyro_pdmp import check, inclusion_probabilities

plt.switch_backend("Agg")

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#999999"  # Okabe and Ito


def make_data(args):
    rng = np.random.default_rng(args.seed)
    x = rng.normal(size=(args.num_rows, args.num_variables))
    beta = np.zeros(args.num_variables)
    places = rng.choice(args.num_variables, args.num_effects, replace=False)
    sizes = np.linspace(0.3, 1.0, args.num_effects)
    beta[places] = sizes * rng.choice([-1, 1], args.num_effects)
    y = rng.random(args.num_rows) < 1 / (1 + np.exp(-x @ beta))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), beta


def model(x, y, subsample_size=None):
    num_rows, num_variables = x.shape
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    slab = dist.Normal(0, 1).expand([num_variables]).to_event(1)
    beta = numpyro.sample("beta", slab)
    with numpyro.plate("data", num_rows, subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def run_inference(args, x, y, subsample_size):
    kernel = getattr(numpyro_pdmp, args.kernel)
    mcmc = MCMC(
        kernel(model, sticky={"beta": args.weight}, potential_energy=False),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(
        random.PRNGKey(args.seed), x, y, subsample_size, extra_fields=("num_grad",)
    )
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def report(name, mcmc, seconds, truth):
    found = inclusion_probabilities(mcmc)["beta"]
    effects = truth != 0
    selected = found.probability > 0.5
    result, draws = check(mcmc), np.asarray(mcmc.get_samples()["beta"])
    print(f"\n{name}: {seconds:.0f} s with compilation and warm-up, ", end="")
    print(f"{result.num_grad:.1f} gradients a draw, ", end="")
    print(f"{100 * result.violation_rate:.2f} % violations")
    print(
        f"selected (probability above 1/2): {np.sum(selected & effects)} of "
        f"{effects.sum()} effects, {np.sum(selected & ~effects)} of "
        f"{np.sum(~effects)} others"
    )
    size = (draws != 0).sum(1)
    print(f"coefficients in the model: {size.mean():.1f} +- {size.std():.1f}")
    others = np.argsort(-np.where(effects, -1, found.probability))[:5]
    print("  effect   inclusion     MCSE   eff. draws")
    for i in [*np.flatnonzero(effects), *others]:
        row = "{:8.2f} {:11.4f} {:8.4f} {:12.0f}".format(
            truth[i], *(a[i] for a in found)
        )
        print(row.replace("nan", "  -"))  # all draws agree
    return found.probability, found.mcse, draws.mean(0), draws.std(0)


def plot(results, truth, path):
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    effects = truth != 0
    markers = zip(results.items(), (BLUE, VERMILION), "ox", (-0.5, 0.5), strict=False)
    for (name, found), colour, marker, shift in markers:
        probability, _, mean, sd = found
        style = dict(marker=marker, color=colour, linestyle="none", markersize=5)
        if marker == "o":
            style["fillstyle"] = "none"
        axes[0].plot(np.arange(len(truth)), probability, label=name, **style)
        axes[1].errorbar(
            truth[effects] + 0.008 * shift,
            mean[effects],
            sd[effects],
            elinewidth=1,
            label=name,
            **style,
        )
    for i in np.flatnonzero(effects):
        axes[0].axvline(i, color=GREY, linewidth=0.6, zorder=0)
    axes[0].set_xlabel("variable (lines: those with an effect)")
    axes[0].set_ylabel("posterior inclusion probability")
    axes[0].legend(loc="center right")
    ends = np.array([truth.min() - 0.1, truth.max() + 0.1])
    axes[1].plot(ends, ends, color=GREY, linewidth=0.8, zorder=0)
    axes[1].set_xlabel("true coefficient")
    axes[1].set_ylabel("posterior mean and standard deviation")
    fig.savefig(path, dpi=150)


def main(args):
    x, y, truth = make_data(args)
    results = {}
    for name, size in (("all data", None), ("mini-batches", args.subsample_size)):
        mcmc, seconds = run_inference(args, x, y, size)
        name = name if size is None else f"{name} of {size}"
        results[name] = report(name, mcmc, seconds, truth)
    (one, error, *_), (other, other_error, *_) = results.values()
    varies = np.isfinite(error + other_error)
    gap = np.abs(one - other)[varies] / np.hypot(error, other_error)[varies]
    print(
        f"\nLargest difference of the two runs: {np.abs(one - other).max():.4f}; in "
        f"units of its Monte-Carlo error {np.sqrt(np.mean(gap**2)):.2f} (root mean "
        f"square) and {gap.max():.1f} (maximum) over {varies.sum()} variables."
    )
    plot(results, truth, args.output)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--kernel", default="ZigZag", help="name of a kernel")
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--num-variables", type=int, default=200)
    parser.add_argument("--num-effects", type=int, default=10)
    parser.add_argument("--weight", type=float, default=0.05, help="prior inclusion")
    parser.add_argument("--subsample-size", type=int, default=200)
    parser.add_argument("--num-warmup", type=int, default=300)
    parser.add_argument("--num-samples", type=int, default=1000)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="sparse_regression.png")
    main(parser.parse_args())
