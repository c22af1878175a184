# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Boomerang, BPS and ZigZag against NUTS on a logistic regression, as ratios.

NumPyro compiles anew at every ``MCMC.run`` without a progress bar, so the time of a
draw is the slope between two lengths of one compiled loop over ``kernel.sample``.
Everything that is compared is timed in turns within one run of this script.

    python examples/benchmarks/logistic.py --num-data 1000 --dim 25
"""

import argparse
import time

import numpy as np
from targets import make_data

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy
from numpyro_pdmp import BPS, Boomerang, ZigZag


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def seconds(fn, *args, clock=time.perf_counter):
    start = clock()
    jax.block_until_ready(fn(*args))
    return clock() - start


def slope(loop, state, short, long, clock=time.perf_counter):
    """Seconds per step of a compiled loop, compilation excluded."""
    times = (seconds(loop, state, n, clock=clock) for n in (long, short))
    return -np.diff(list(times))[0] / (long - short)


def compile_seconds(kernel, keys, args):
    """Seconds to initialise, trace and compile one kernel's sampling loop."""
    start = time.perf_counter()
    state = kernel.init(keys, 1000, None, args, {})
    jax.jit(lambda s: kernel.sample(s, args, {})).lower(state).compile()
    return time.perf_counter() - start


def loop_iterations(num_grad, ahead):
    """Iterations a draw of a vectorised loop, from the gradients of every draw.

    :param num_grad: (chains, draws).
    :param ahead: how many draws a chain may be ahead; 0: all wait for the slowest.
    """
    if ahead == 0:
        return float(num_grad.max(0).mean())
    num_chains, num_draws = num_grad.shape
    total, ready = 0, np.zeros(num_chains, int)
    made, left = np.zeros(num_chains, int), num_grad[:, 0].copy()
    for _ in range(num_draws):
        while (ready == 0).any():
            total += 1
            busy = (ready < ahead) & (made < num_draws)
            left -= busy
            done = busy & (left <= 0)
            ready, made = ready + done, made + done
            following = np.minimum(made, num_draws - 1)
            left = np.where(done, num_grad[np.arange(num_chains), following], left)
        ready -= 1
    return total / num_draws


def main(args):
    data = make_data(args.num_data, args.dim)
    keys = random.split(random.key(1), args.num_chains)
    kernels = {
        "NUTS": lambda: NUTS(model),
        "NUTS dense": lambda: NUTS(model, dense_mass=True),
        "Boomerang": lambda: Boomerang(model, dense_mass=True),
        "BPS": lambda: BPS(model, dense_mass=True),
        "ZigZag": lambda: ZigZag(model, dense_mass=True),
        "Boomerang without energies": lambda: Boomerang(
            model, dense_mass=True, potential_energy=False
        ),
    }
    if args.kernels:  # and those that all are compared with
        names = {"NUTS", "NUTS dense", *args.kernels}
        kernels = {k: v for k, v in kernels.items() if k in names}
    # Twice, since the first of all pays for what all share.
    compiling = {}
    for _ in range(2):
        compiling = {k: compile_seconds(v(), keys, data) for k, v in kernels.items()}

    def raw_gradient(beta, n):
        grad = jax.vmap(
            jax.grad(lambda b: potential_energy(model, data, {}, {"beta": b}))
        )
        return lax.fori_loop(0, n, lambda _, b: b - 1e-6 * grad(b), beta)

    raw = jax.jit(raw_gradient)
    start = jnp.zeros((args.num_chains, args.dim))
    raw(start, 1)

    runs = {}
    for name, new_kernel in kernels.items():
        kernel = new_kernel()
        mcmc = MCMC(
            kernel,
            num_warmup=1000,
            num_samples=args.num_samples,
            num_chains=args.num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        field = "num_steps" if name.startswith("NUTS") else "num_grad"
        mcmc.run(random.key(0), *data, extra_fields=(field,))
        beta = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
        ess = effective_sample_size(beta).min()
        ess_square = effective_sample_size((beta - beta.mean((0, 1))) ** 2).min()
        steps = np.asarray(mcmc.get_extra_fields(group_by_chain=True)[field])
        loop = jax.jit(
            lambda s, n, kernel=kernel: lax.fori_loop(
                0, n, lambda _, s: kernel.sample(s, data, {}), s
            )
        )
        jax.block_until_ready(loop(mcmc.last_state, 1))
        runs[name] = beta, min(ess, ess_square), steps, loop, mcmc.last_state

    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    # In turns, so that a busy machine disturbs all alike; the median of the turns.
    times = {name: [] for name in [*runs, "raw"]}
    for _ in range(args.repeats):
        for name, (*_, loop, state) in runs.items():
            long = 100 + args.timed_draws
            times[name].append(slope(loop, state, 100, long, clock))
        times["raw"].append(slope(raw, start, 100, 10 * long, clock))
    median = {name: np.median(t) for name, t in times.items()}

    reference = runs["NUTS dense"][0]
    sd = reference.std((0, 1))
    print(
        f"logistic regression N={args.num_data} d={args.dim}, {args.num_chains} "
        f"vectorised chains; raw gradient {1e6 * median['raw']:.0f} us"
    )
    print(
        "| kernel | gradients a draw | min ESS(x, x^2) per gradient, over NUTS | ... "
        "over dense NUTS | min ESS per second, over NUTS | ... over dense NUTS | "
        "iteration over raw gradient | compile time over dense NUTS | "
        "largest mean error, sd | sd ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    per_grad = {k: r[1] / r[2].sum() for k, r in runs.items()}
    per_second = {k: r[1] / (r[0].shape[1] * median[k]) for k, r in runs.items()}
    for name, (beta, _, steps, *_) in runs.items():
        iterations = loop_iterations(steps, 0 if name.startswith("NUTS") else 8)
        error = np.abs((beta.mean((0, 1)) - reference.mean((0, 1))) / sd).max()
        print(
            f"| {name} | {steps.mean():.2f} "
            f"| {per_grad[name] / per_grad['NUTS']:.2f} "
            f"| {per_grad[name] / per_grad['NUTS dense']:.2f} "
            f"| {per_second[name] / per_second['NUTS']:.2f} "
            f"| {per_second[name] / per_second['NUTS dense']:.2f} "
            f"| {median[name] / iterations / median['raw']:.2f} "
            f"| {compiling[name] / compiling['NUTS dense']:.2f} "
            f"| {error:.3f} | {(beta.std((0, 1)) / sd).mean():.4f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="*", help="beside NUTS; default all")
    parser.add_argument("--num-data", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=25)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--timed-draws", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    main(parser.parse_args())
