# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Total time of Boomerang to 400 effective draws, over that of NUTS.

The time is that of ``MCMC.run`` in a fresh process: compilation, 1,000 draws of warm-up
and as many draws as are needed. A first process per kernel tells how many those are,
from the smallest effective sample size over x and x^2, and a tenth more is taken. Then
both kernels run with their numbers in turns, each time in a process of its own, in the
order ABBA. A run that has fewer effective draws than asked for, by its own estimate, is
made again with more, and only the time of the last one counts. Imports and the making
of data are not counted.

With ``--cache`` JAX's persistent compilation cache is in use, and filled: the time of
the second start of a script, in which programs are traced but not compiled.

With ``--clock cpu`` the time is that of the processor, of all threads, which does not
depend on what else the machine does.

With ``--dir`` (see ``posteriordb.py``) also on reference posteriors.

    python examples/benchmarks/time_to_ess.py --dir DIR --posteriors NAME NAME
"""

import argparse
import json
import math
import os
from pathlib import Path
import subprocess
import sys
import time

import numpy as np

LOGISTIC = "logistic"
#: draws, over those that a first run says are needed
MARGIN = 1.1
POSTERIORS = (
    "arK-arK",
    "eight_schools-eight_schools_noncentered",
    "hmm_example-hmm_example",
    "kidiq-kidscore_interaction",
    "nes1980-nes",
)


def problem(args):
    """Model, its arguments, and a function from a run to (chain, draw, quantity)."""
    import jax

    if args.worker == LOGISTIC:
        from logistic import make_data, model

        data = make_data(1000, 25)
        return model, data, lambda mcmc: mcmc.get_samples(group_by_chain=True)["beta"]
    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(args.dir))
    import models
    from posteriordb import flat_samples

    data, ref = models.load(args.worker)
    model = models.MODELS[args.worker]

    def quantities(mcmc):
        return flat_samples(mcmc, model, data, ref["names"], models.flatten_samples)

    return model, (data,), quantities


def work(args):
    """One run, in this process; prints seconds and the smallest effective size."""
    import jax

    from numpyro.diagnostics import effective_sample_size
    from numpyro.infer import MCMC, NUTS
    from numpyro_pdmp import Boomerang

    model, data, quantities = problem(args)
    jax.block_until_ready(jax.numpy.ones(1) + 1)  # the backend is there
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    start = clock()
    mcmc = MCMC(
        {"NUTS": NUTS, "Boomerang": Boomerang}[args.kernel](model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(args.seed), *data)
    jax.block_until_ready(mcmc.get_samples())
    seconds = clock() - start
    x = np.asarray(quantities(mcmc), float)
    x = x[..., np.ptp(x, (0, 1)) > 0]
    square = np.square(x - x.mean((0, 1)))
    ess = min(float(effective_sample_size(a).min()) for a in (x, square))
    print(json.dumps({"seconds": seconds, "ess": ess}))


def fresh(args, target, kernel, num_samples, seed):
    """The same in a fresh process, without compiled programs unless asked for."""
    command = [sys.executable, __file__, "--worker", target, "--kernel", kernel]
    for name, value in (
        ("num-samples", num_samples),
        ("num-warmup", args.num_warmup),
        ("num-chains", args.num_chains),
        ("seed", seed),
        ("clock", args.clock),
    ):
        command += [f"--{name}", str(value)]
    if args.dir is not None:
        command += ["--dir", str(args.dir)]
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if args.cache is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(args.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def reaching(args, target, kernel, needed, seed):
    """A run that has the effective draws, with as many draws as that takes."""
    while True:
        result = fresh(args, target, kernel, needed[kernel], seed)
        if result["ess"] >= args.ess:
            return result
        more = MARGIN * args.ess / result["ess"]
        needed[kernel] = math.ceil(needed[kernel] * more)


def main(args):
    targets = [] if args.only_posteriors else [LOGISTIC]
    if args.dir is not None:
        targets += args.posteriors or POSTERIORS
    kernels = ("Boomerang", "NUTS")
    print(
        "| target | draws a chain, Boomerang | NUTS | seconds, Boomerang | NUTS | "
        "time over NUTS (median, range) | fewest effective draws, Boomerang | NUTS |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for target in targets:
        needed = {}
        for kernel in kernels:
            ess = fresh(args, target, kernel, args.pilot, args.seed)["ess"]
            needed[kernel] = max(4, math.ceil(MARGIN * args.ess * args.pilot / ess))
        if args.cache is not None:  # the number of draws is part of the program
            for kernel in kernels:
                fresh(args, target, kernel, needed[kernel], args.seed)
        found = {kernel: [] for kernel in kernels}
        for turn in range(args.repeats):
            order = kernels if turn % 2 == 0 else kernels[::-1]
            for kernel in order:
                result = reaching(args, target, kernel, needed, args.seed + turn)
                found[kernel].append((result["seconds"], result["ess"]))
        seconds = {k: np.asarray(v)[:, 0] for k, v in found.items()}
        reached = {k: np.min(v, axis=0)[1] for k, v in found.items()}
        ratio = seconds["Boomerang"] / seconds["NUTS"]
        print(
            f"| {target} | {needed['Boomerang']} | {needed['NUTS']} | "
            f"{np.median(seconds['Boomerang']):.1f} | "
            f"{np.median(seconds['NUTS']):.1f} | "
            f"{np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f}) | "
            f"{reached['Boomerang']:.0f} | {reached['NUTS']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--posteriors", nargs="*")
    parser.add_argument("--only-posteriors", action="store_true")
    parser.add_argument("--ess", type=float, default=400)
    parser.add_argument("--pilot", type=int, default=1000, help="draws of the first")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--cache", type=Path, help="an empty directory")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    # Of one run in a process of its own.
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--kernel", help=argparse.SUPPRESS)
    parser.add_argument("--num-samples", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    work(args) if args.worker else main(args)
