# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions of a small Bayesian neural network against a long run of NUTS.

A network 1-25-10-1 with tanh, 100 observations with a gap. Every method gives draws of
the network's output on a grid; the table has the 1-Wasserstein distance of their
marginals to those of NUTS, averaged over the grid, and the errors of mean and standard
deviation. All runs but NUTS's start at the same MAP estimate, on all data, and have as
many gradients: a PDMP sampler that took far fewer than another has its draws raised.

``SGLD`` has the step size of the paper, 1e-5, falling to zero; ``SGLD-ND`` the same
without decay; ``SGLD whitened`` is this package's default, with the curvature at the
mode as preconditioner.

The truth takes long and is kept in a file.

    python examples/bnn_regression.py --truth truth.npz --seeds 0 1 --figure bnn.png
"""

import argparse
from pathlib import Path
import time

import numpy as np

import jax
from jax import random
import jax.numpy as jnp
import optax

from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from numpyro_pdmp import (
    BPS,
    SGLD,
    Boomerang,
    PDMPKernel,
    SigmaBPS,
    bnn,
    find_map,
)

GRID = np.linspace(-1.6, 1.6, 81)[:, None]


def make_data(num=100):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1, -0.2, num // 2), rng.uniform(0.3, 1, num // 2)])
    y = x**3 + 0.4 * np.sin(6 * x) + 0.1 * rng.normal(size=num)
    return jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y, jnp.float32)


def outputs(samples, network):
    """The network's output on the grid for every draw; chains as they are."""

    def one(draw):
        params = {}
        for name, value in draw.items():
            _, mlp, layer, entry = name.split(".")
            params.setdefault(f"{mlp}/~/{layer}", {})[entry] = value
        return network.apply(params, jnp.asarray(GRID, jnp.float32))[:, 0]

    return np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(samples))


def distance(draws, truth):
    """1-Wasserstein distance per grid point, by quantiles."""
    levels = (np.arange(500) + 0.5) / 500
    a, b = (np.quantile(d, levels, axis=0) for d in (draws, truth))
    return np.mean(np.abs(a - b), axis=0)


def sample(kernel, key, data, mode, args, num_warmup, num_samples):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    params = mode.init_params(args.num_chains)
    fields = ("num_grad",) if isinstance(kernel, PDMPKernel) else ()
    mcmc.run(key, *data, init_params=params, extra_fields=fields)
    return mcmc


def nuts(model, network, data, mode, args):
    # From places of their own: chains that start together agree too soon.
    keys = random.split(random.key(7), args.num_chains)
    start = jax.vmap(lambda key: bnn.initial_params(network, data[0], key))(keys)
    mcmc = MCMC(
        NUTS(model),
        num_warmup=args.nuts_warmup,
        num_samples=args.nuts_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=args.progress_bar,
    )
    mcmc.run(random.key(1), *data, init_params=start, extra_fields=("num_steps",))
    steps = np.asarray(mcmc.get_extra_fields()["num_steps"])
    draws = outputs(mcmc.get_samples(group_by_chain=True), network)
    return {"draws": draws, "num_steps": steps}


def variational(model, network, data, mode, args, seed):
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=mode.params))
    steps = args.svi_steps
    optimizer = Adam(optax.cosine_decay_schedule(0.01, steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=8))
    fit = svi.run(random.key(3 + seed), steps, *data, progress_bar=False)
    draws = guide.sample_posterior(
        random.key(4 + seed), fit.params, sample_shape=(1, 4000)
    )
    return outputs(draws, network), steps * 8


def compare(model, network, data, mode, args, seed):
    """Outputs and gradients of every method."""
    results, used = {}, {}
    key = random.key(2 + seed)
    kernels = {"BPS": (BPS, {}), "SigmaBPS": (SigmaBPS, {})}
    # Far from a Gaussian its paths turn often, and more refreshments pay.
    kernels["Boomerang"] = Boomerang, {"refresh_rate": args.refresh_rate}
    for name, (kernel, options) in kernels.items():
        num_warmup, num_samples = args.num_warmup, args.num_samples
        while True:
            mcmc = sample(
                kernel(model, potential_energy=False, **options),
                key,
                data,
                mode,
                args,
                num_warmup,
                num_samples,
            )
            spent = mcmc.get_extra_fields()["num_grad"].sum() / args.num_chains
            used[name] = float(spent)
            print(
                f"{name}: {num_samples} draws, {used[name]:.0f} gradients a chain "
                "after warm-up",
                flush=True,
            )
            # Draws of one sampler cost less than those of another: it has more of them.
            ratio = max(used.values()) / used[name]
            if ratio < 1.25:
                break
            num_warmup, num_samples = int(ratio * num_warmup), int(ratio * num_samples)
        results[name] = outputs(mcmc.get_samples(group_by_chain=True), network)
    budget = int(max(used.values()) * (1 + args.num_warmup / args.num_samples))
    num_steps = max(1, budget // (args.num_warmup + args.num_samples))
    total = num_steps * (args.num_warmup + args.num_samples)
    falling = optax.linear_schedule(1e-5, 0.0, total)
    for name, options in {
        "SGLD": {"step_size": falling},
        "SGLD-ND": {"step_size": 1e-5},
        "SGLD whitened": {},
    }.items():
        kernel = SGLD(model, num_steps=num_steps, **options)
        mcmc = sample(
            kernel,
            key,
            data,
            mode,
            args,
            args.num_warmup,
            args.num_samples,
        )
        results[name] = outputs(mcmc.get_samples(group_by_chain=True), network)
        used[name] = num_steps * args.num_samples
    results["AutoNormal"], used["AutoNormal"] = variational(
        model, network, data, mode, args, seed
    )
    return results, used


def main(args):
    data, network = make_data(), bnn.regression_mlp()
    model = bnn.regression(network, prior=args.prior, noise=0.1)
    start = bnn.initial_params(network, data[0], random.key(0))
    mode = find_map(
        model,
        random.key(0),
        *data,
        init_params=start,
        optimizer=optax.adam(optax.cosine_decay_schedule(0.01, 10_000)),
        num_steps=10_000,
        progress_bar=False,
    )
    print(f"MAP: potential energy {float(mode.potential_energy):.1f}", flush=True)
    if not Path(args.truth).exists():
        begin = time.perf_counter()
        truth = nuts(model, network, data, mode, args)
        np.savez(args.truth, **truth, seconds=time.perf_counter() - begin)
    with np.load(args.truth) as file:
        truth, steps = file["draws"], file["num_steps"]
    r_hat = split_gelman_rubin(truth)
    flat = truth.reshape(-1, len(GRID))
    halves = distance(
        truth[: len(truth) // 2].reshape(-1, len(GRID)),
        truth[len(truth) // 2 :].reshape(-1, len(GRID)),
    )
    print(
        f"NUTS: {truth.shape[0]} chains of {truth.shape[1]} draws, "
        f"{steps.mean():.0f} gradients a draw, R-hat of outputs {r_hat.max():.3f} at "
        f"most, distance between halves of its chains {halves.mean():.4f}",
        flush=True,
    )

    found = []
    for seed in args.seeds:
        results, used = compare(model, network, data, mode, args, seed)
        show(results, used, flat, seed)
        found.append({k: distance(pooled(d), flat).mean() for k, d in results.items()})
        if args.figure and seed == args.seeds[0]:
            plot(results, flat, data, args.figure)
    if len(found) > 1:
        print("W1, mean over seeds (range)")
        for name in found[0]:
            w = [f[name] for f in found]
            print(f"{name:14} {np.mean(w):.4f} ({min(w):.4f}-{max(w):.4f})")


def pooled(draws):
    return draws.reshape(-1, len(GRID))


def show(results, used, truth, seed):
    inside = np.abs(GRID[:, 0]) <= 1
    heads = ("W1", "inside", "mean", "sd ratio", "gradients")
    print(f"seed {seed:<9}" + " {:>7} {:>7} {:>7} {:>9} {:>10}".format(*heads))
    for name, draws in results.items():
        draws = pooled(draws)
        w = distance(draws, truth)
        error = np.abs(draws.mean(0) - truth.mean(0)).mean()
        ratio = np.exp(np.mean(np.log(draws.std(0) / truth.std(0))))
        print(
            f"{name:14} {w.mean():7.4f} {w[inside].mean():7.4f} {error:7.4f} "
            f"{ratio:9.3f} {used[name]:10.0f}",
            flush=True,
        )


def plot(results, truth, data, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in results if n != "SGLD whitened"]
    fig, axes = plt.subplots(2, 3, figsize=(10, 5.6), sharex=True, sharey=True)
    grid = GRID[:, 0]
    low, high = np.quantile(truth, [0.025, 0.975], axis=0)
    for axis, name in zip(axes.flat, names, strict=True):
        draws = results[name].reshape(-1, len(grid))
        axis.fill_between(grid, low, high, color="0.8", lw=0, label="NUTS")
        axis.plot(grid, truth.mean(0), color="0.5", lw=1)
        for edge in np.quantile(draws, [0.025, 0.975], axis=0):
            axis.plot(grid, edge, "C0--", lw=1)
        axis.plot(grid, draws.mean(0), "C0", lw=1.5)
        axis.plot(data[0][:, 0], data[1], "k.", ms=2)
        axis.set_title(name, fontsize=10)
        axis.set_ylim(low.min() - 1, high.max() + 1)
    axes[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
    fig.supxlabel("x", fontsize=9)
    fig.suptitle("Mean and 95 % interval of the network's output", fontsize=11)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", default="truth.npz")
    parser.add_argument("--figure", help="of the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of all runs")
    parser.add_argument("--prior", default="fan_in")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--nuts-warmup", type=int, default=1000)
    parser.add_argument("--nuts-samples", type=int, default=4000)
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=1000)
    parser.add_argument("--refresh-rate", type=float, default=3.0, help="of Boomerang")
    parser.add_argument("--svi-steps", type=int, default=10_000)
    parser.add_argument("--progress-bar", action="store_true")
    main(parser.parse_args())
