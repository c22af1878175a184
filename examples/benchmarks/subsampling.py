# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Subsampled logistic regression: speed, growth with the data, memory and bias.

``--part speed``: draws of our kernels from mini-batches against NUTS on all data and
against HMCECS with a Taylor proxy. Those two are given the mode and the covariance
there, so that they need to adapt nothing but a step size; ours find theirs. Times of a
draw are medians of turns within one run, compilation excluded; ``total`` is
``MCMC.run`` with compilation and warm-up, up to 400 effective draws. HMCECS has no
vectorised chains, so it runs one (two at once on two cores would at best double it).

``--part growth``: time of one iteration and memory at 10^6 over 10^4 rows.

``--part bias``: errors of means and standard deviations against rows of data used.

``--part covertype --dir DIR``: ``covertype.npz`` in that directory, type 2 against the
rest: arrays ``quant`` (10, N), ``wilderness``, ``soil``, ``cover_type`` (N,).

    python examples/benchmarks/subsampling.py --part speed --num-data 100000
"""

import argparse
import json
from pathlib import Path
import subprocess
import sys
import time

from logistic import make_data, seconds, slope
import numpy as np

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import HMCECS, MCMC, NUTS
from numpyro_pdmp import BPS, SGHMC, SGLD, Boomerang, ZigZag

KERNELS = {"Boomerang": Boomerang, "BPS": BPS, "ZigZag": ZigZag}


def model(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def laplace(x, y):
    """Mode and covariance there, in double precision."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    beta = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ beta))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(beta))
        step = np.linalg.solve(hessian, x.T @ (p - y) + beta)
        beta = beta - step
        if np.abs(step).max() < 1e-10:
            break
    return beta, np.linalg.inv(hessian)


def nuts(covariance):
    return NUTS(
        model,
        inverse_mass_matrix=jnp.asarray(covariance, jnp.float32),
        dense_mass=True,
        adapt_mass_matrix=False,
    )


def ecs(mode, covariance, num_blocks):
    proxy = HMCECS.taylor_proxy({"beta": mode})
    return HMCECS(nuts(covariance), num_blocks=num_blocks, proxy=proxy)


def min_ess(x):
    square = (x - x.mean((0, 1))) ** 2
    return min(float(effective_sample_size(a).min()) for a in (x, square))


def run(kernel, data, num_warmup, num_samples, num_chains=4, seed=0, **kwargs):
    """A run, its draws and its seconds, of which compilation is a part."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized" if num_chains > 1 else "sequential",
        progress_bar=False,
    )

    def finish():
        mcmc.run(random.key(seed), *data, **kwargs)
        return mcmc.last_state

    total = seconds(finish)
    beta = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    return mcmc, beta, total


def loop_of(kernel, data, state):
    def loop(state, n):
        return lax.fori_loop(0, n, lambda _, s: kernel.sample(s, data, {}), state)

    loop = jax.jit(loop)
    jax.block_until_ready(loop(state, 1))
    return loop


def errors(beta, mean, sd):
    """Ratios of standard deviations, mean and range, and the largest mean error."""
    ratio = beta.std((0, 1)) / sd
    error = np.abs(beta.mean((0, 1)) - mean) / sd
    return (
        f"{ratio.mean():.3f} ({ratio.min():.3f} to {ratio.max():.3f}) "
        f"| {error.max():.3f}"
    )


def speed(args):
    x, y = make_data(args.num_data, args.dim)
    mode, covariance = laplace(x, y)
    center = jnp.asarray(mode, jnp.float32)
    start = {"beta": jnp.broadcast_to(center, (args.num_chains, args.dim))}
    full, batch = (x, y, None), (x, y, args.subsample_size)
    jobs = {
        name: (KERNELS[name](model), batch, 1000, args.num_samples, {})
        for name in args.kernels
    }
    if "NUTS" in args.against:
        draws = args.nuts_samples
        jobs["NUTS"] = nuts(covariance), full, 50, draws, {"init_params": start}
    if "HMCECS" in args.against:
        kernel = ecs(center, covariance, args.num_blocks)
        one = {"init_params": {"beta": center}}
        jobs["HMCECS"] = kernel, batch, 500, args.num_samples, one
    found, loops = {}, {}
    for name, (kernel, data, num_warmup, num_samples, kwargs) in jobs.items():
        num_chains = 1 if name == "HMCECS" else args.num_chains
        mcmc, beta, total = run(
            kernel, data, num_warmup, num_samples, num_chains, **kwargs
        )
        found[name] = beta, total
        loops[name] = loop_of(kernel, data, mcmc.last_state), mcmc.last_state
        print(f"{name}: {total:.1f} s, min ESS {min_ess(beta):.0f}", file=sys.stderr)
    times = {name: [] for name in jobs}
    for _ in range(args.repeats):
        for name, (loop, state) in loops.items():
            short, long = (1, 6) if name == "NUTS" else (20, 20 + args.timed_draws)
            times[name].append(slope(loop, state, short, long))
    per_draw = {name: np.median(t) for name, t in times.items()}
    rate = {k: min_ess(b) / (b.shape[1] * per_draw[k]) for k, (b, _) in found.items()}
    print(
        f"N={args.num_data} d={args.dim} m={args.subsample_size}, {args.num_chains} "
        "vectorised chains"
    )
    print(
        "| kernel | min ESS(x, x^2) per second | over NUTS | over HMCECS | seconds to "
        "400 effective draws, in total | sd ratio, mean (range) | largest mean error, "
        "sd |"
    )
    print("|---|---|---|---|---|---|---|")
    mean, sd = mode, np.sqrt(np.diag(covariance))
    if args.truth_draws:
        mean, sd = weighted_truth(x, y, args.truth_draws, args.truth)
    for name, (beta, total) in found.items():
        over = [rate[name] / rate[k] if k in rate else np.nan for k in AGAINST]
        # What the run took, with another number of draws.
        missing = 400 / rate[name] - beta.shape[1] * per_draw[name]
        print(
            f"| {name} | {rate[name]:.3g} | {over[0]:.1f} | {over[1]:.1f} "
            f"| {total + missing:.1f} | {errors(beta, mean, sd)} |",
            flush=True,
        )


AGAINST = ("NUTS", "HMCECS")


def peak():
    """Largest resident memory so far, MiB (on Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def memory(args):
    """In a process of its own: peak above what the data and the imports take."""
    x, y = jax.block_until_ready(make_data(args.num_data, args.dim))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making them
    before = peak()
    run(Boomerang(model), (x, y, args.subsample_size), 1000, 1000, args.num_chains)
    print(json.dumps({"above": peak() - before}))


def growth(args):
    print(
        "| kernel | rows a batch | iteration at N=10^4, us | at 10^6, us "
        "| ratio (quartiles) |"
    )
    print("|---|---|---|---|---|")
    for name in args.kernels:
        for subsample_size in args.sizes:
            runs = {}
            for num in (10**4, 10**6):
                data = (*make_data(num, args.dim), subsample_size)
                kernel = KERNELS[name](
                    model, potential_energy=False, batching=args.batching
                )
                mcmc, _, _ = run(kernel, data, 1000, 10, args.num_chains)
                runs[num] = loop_of(kernel, data, mcmc.last_state), mcmc.last_state
            times = {num: [] for num in runs}
            for _ in range(4 * args.repeats):
                for num, (loop, state) in runs.items():
                    begin = time.perf_counter()
                    new = jax.block_until_ready(loop(state, args.timed_draws))
                    duration = time.perf_counter() - begin
                    ticks = new.totals.num_grad - state.totals.num_grad
                    # A vectorised draw waits for the chain with most iterations.
                    times[num].append(1e6 * duration / float(jnp.max(ticks)))
                    runs[num] = loop, new
            small, large = (np.asarray(t) for t in times.values())
            ratio = np.percentile(large / small, (25, 50, 75))
            print(
                f"| {name} | {subsample_size} | {np.median(small):.0f} "
                f"| {np.median(large):.0f} | {ratio[1]:.2f} "
                f"({ratio[0]:.2f} to {ratio[2]:.2f}) |",
                flush=True,
            )
    command = [sys.executable, __file__, "--part", "memory", "--num-data", "1000000"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    above = json.loads(out.splitlines()[-1])["above"]
    print(f"peak memory at N=10^6 above data and imports: {above:.0f} MiB")


def truth(data, mode, covariance, num_samples, num_chains=4):
    """Means and standard deviations by NUTS on all data, and its effective draws."""
    center = jnp.asarray(mode, jnp.float32)
    start = {"beta": jnp.broadcast_to(center, (num_chains, len(mode)))}
    kernel = nuts(covariance)
    _, beta, total = run(kernel, data, 100, num_samples, num_chains, init_params=start)
    print(
        f"NUTS on all data: {num_chains} x {num_samples} draws, min ESS "
        f"{min_ess(beta):.0f}, {total:.0f} s",
        flush=True,
    )
    return beta.mean((0, 1)), beta.std((0, 1))


def weighted_truth(x, y, num_draws, path=None, block=5000):
    """Means and standard deviations by importance sampling, in double precision.

    From a Student-t at the mode: where the posterior is so close to a Gaussian, each
    draw is worth about half an independent one, and all share a pass over the data.

    :param path: of a file in which they are kept.
    """
    if path is not None and path.exists():
        with np.load(path) as file:
            return file["mean"], file["sd"]
    mode, covariance = laplace(x, y)
    rng, nu, dim = np.random.default_rng(0), 30, len(mode)
    z = rng.normal(size=(num_draws, dim))
    z *= np.sqrt(nu / rng.chisquare(nu, size=(num_draws, 1)))
    draws = mode + z @ np.linalg.cholesky(covariance).T
    log_weight = 0.5 * (nu + dim) * np.log1p((z**2).sum(1) / nu)
    log_weight -= 0.5 * (draws**2).sum(1)
    for start in range(0, len(y), block):
        logits = np.asarray(x[start : start + block], float) @ draws.T
        log_weight += np.asarray(y[start : start + block], float) @ logits
        log_weight -= np.logaddexp(0, logits).sum(0)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = weight @ draws
    sd = np.sqrt(weight @ (draws - mean) ** 2)
    laplace_sd = np.sqrt(np.diag(covariance))
    print(
        f"importance sampling: {1 / (weight**2).sum():.0f} effective draws; Laplace's "
        f"sd over its {(laplace_sd / sd).min():.3f} to {(laplace_sd / sd).max():.3f}, "
        f"largest error of a mean {np.abs((mode - mean) / sd).max():.3f} sd",
        flush=True,
    )
    if path is not None:
        np.savez(path, mean=mean, sd=sd)
    return mean, sd


def bias(args):
    x, y = make_data(args.num_data, args.dim)
    mode, covariance = laplace(x, y)
    mean, sd = truth((x, y, None), mode, covariance, 4 * args.num_samples)
    print(f"N={args.num_data} d={args.dim}")
    print(
        "| method | rows a batch | rows used, passes over the data a draw | min ESS a "
        "draw | sd ratio, mean (range) | largest mean error, sd | violations |"
    )
    print("|---|---|---|---|---|---|---|")
    options = [(50, None), (500, None), (50, 1), (500, 1), (50, 2), (500, 2)]
    jobs = []
    for name in args.kernels:
        for size, order in options:
            jobs.append((name, size, order, None))
        for target in (0.1, 0.02, 0.005, 0.001):
            jobs.append((name, 500, 1, target))
    for name, size, order, target in jobs:
        label = f"{name}, order {order or 0}"
        if target is not None:
            label += f", target {target}"
        if args.only and f"{label}, {size} rows" not in args.only:
            continue
        kernel = KERNELS[name](model, control_variates=order, target_violation=target)
        fields = ("num_grad", "num_violations", "num_proposals")
        data = (x, y, size)
        mcmc, beta, _ = run(kernel, data, 1000, args.num_samples, extra_fields=fields)
        stats = {k: np.sum(v) for k, v in mcmc.get_extra_fields().items()}
        num_draws = beta.shape[0] * beta.shape[1]
        # A control variate looks at the batch twice.
        passes = stats["num_grad"] * size * (2 if order else 1) / len(y) / num_draws
        share = stats["num_violations"] / stats["num_proposals"]
        print(
            f"| {label} | {size} | {passes:.3f} | {min_ess(beta) / num_draws:.2f} "
            f"| {errors(beta, mean, sd)} | {100 * share:.2f} % |",
            flush=True,
        )
    if args.only:
        return
    center = jnp.asarray(mode, jnp.float32)
    for size in (50, 500):
        kernel = ecs(center, covariance, args.num_blocks)
        mcmc, beta, _ = run(
            kernel,
            (x, y, size),
            500,
            4 * args.num_samples,
            num_chains=1,
            init_params={"beta": center},
            extra_fields=("hmc_state.num_steps",),
        )
        num_draws = beta.shape[0] * beta.shape[1]
        steps = np.mean(mcmc.get_extra_fields()["hmc_state.num_steps"])
        print(
            f"| HMCECS | {size} | {steps * size / len(y):.3f} "
            f"| {min_ess(beta) / num_draws:.2f} | {errors(beta, mean, sd)} | |",
            flush=True,
        )
    for kernel_type in (SGLD, SGHMC):
        for size, order, step_size in SGMCMC_RUNS:
            kernel = kernel_type(
                model,
                step_size=step_size,
                precondition=True,
                control_variates=order,
                num_steps=20,
            )
            _, beta, _ = run(kernel, (x, y, size), 1000, args.num_samples)
            num_draws = beta.shape[0] * beta.shape[1]
            passes = 20 * size * (2 if order else 1) / len(y)
            print(
                f"| {kernel_type.__name__}, order {order or 0}, step {step_size} "
                f"| {size} | {passes:.3f} | {min_ess(beta) / num_draws:.2f} "
                f"| {errors(beta, mean, sd)} | |",
                flush=True,
            )


#: rows, order of control variates, step in units of the posterior
SGMCMC_RUNS = ((500, None, 0.1), (500, None, 0.01), (500, 1, 0.1), (500, 2, 0.1))


def covertype(args):
    path = args.dir / "covertype.npz" if args.dir else None
    if path is None or not path.exists():
        sys.exit("give the directory of covertype.npz with `--dir` (see --help)")
    with np.load(path) as file:
        quant = file["quant"].T.astype(np.float32)
        parts = [file["wilderness"], file["soil"]]
        y = (file["cover_type"] == 2).astype(np.float32)
    quant = (quant - quant.mean(0)) / quant.std(0)
    # The first of each group is the baseline: the intercept stands for it.
    dummies = [
        (part[:, None] == np.unique(part)[1:]).astype(np.float32) for part in parts
    ]
    x = np.concatenate([np.ones((len(y), 1), np.float32), quant, *dummies], 1)
    print(f"Covertype: {x.shape[0]} rows, {x.shape[1]} coefficients")
    mean, sd = weighted_truth(x, y, args.truth_draws, args.truth)
    x, y = jnp.asarray(x), jnp.asarray(y)
    print(
        "| kernel | gradients a draw | violations | min ESS a draw | seconds "
        "| sd ratio, mean (range) | largest mean error, sd |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in args.kernels:
        kernel = KERNELS[name](model)
        fields = ("num_grad", "num_violations", "num_proposals")
        data = (x, y, args.subsample_size)
        mcmc, beta, total = run(
            kernel, data, 1000, args.num_samples, extra_fields=fields
        )
        stats = {k: np.sum(v) for k, v in mcmc.get_extra_fields().items()}
        num_draws = beta.shape[0] * beta.shape[1]
        print(
            f"| {name} | {stats['num_grad'] / num_draws:.1f} "
            f"| {100 * stats['num_violations'] / stats['num_proposals']:.2f} % "
            f"| {min_ess(beta) / num_draws:.2f} | {total:.0f} "
            f"| {errors(beta, mean, sd)} |",
            flush=True,
        )


PARTS = {
    "speed": speed,
    "growth": growth,
    "memory": memory,
    "bias": bias,
    "covertype": covertype,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=25)
    parser.add_argument("--subsample-size", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="*", default=(100, 500))
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--nuts-samples", type=int, default=200)
    parser.add_argument(
        "--truth-draws", type=int, default=20_000, help="0: Laplace, if possible"
    )
    parser.add_argument("--truth", type=Path, help="file to keep the truth in")
    parser.add_argument("--num-blocks", type=int, default=10)
    parser.add_argument("--timed-draws", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", nargs="*", default=tuple(KERNELS))
    parser.add_argument("--against", nargs="*", default=AGAINST)
    parser.add_argument("--batching", default="auto", help="of --part growth")
    parser.add_argument(
        "--only", nargs="*", help="rows of --part bias, such as 'BPS, order 1, 50 rows'"
    )
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    PARTS[args.part](args)
