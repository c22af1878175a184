# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What an effective draw costs as a logistic regression grows: four curves.

``--part dim``: number of coefficients. ``rows``: rows of data, in batches of 500.
``batch``: rows a batch. ``chains``: vectorised chains. An effective draw is one of the
smallest effective sample size over x and x^2; time is the slope between two lengths of
one compiled loop. Writes ``growth.json`` and one picture a curve to ``--output``.

    python examples/benchmarks/growth.py --part chains --output docs/images
"""

import argparse
import json
from pathlib import Path
import time

from logistic import loop_iterations, slope
import numpy as np
from subsampling import laplace, loop_of, min_ess, model, nuts, run
from targets import make_data

from numpyro.infer import NUTS
from numpyro_pdmp import BPS, Boomerang, ZigZag


def dense_nuts(model):
    return NUTS(model, dense_mass=True)


KERNELS = {"Boomerang": Boomerang, "BPS": BPS, "ZigZag": ZigZag, "NUTS": dense_nuts}
CLOCK = time.perf_counter
PARTS = {
    "dim": ("coefficients", (5, 10, 25, 50, 100, 200)),
    "rows": ("rows", (1000, 10_000, 100_000, 1_000_000)),
    "batch": ("rows a batch", (50, 100, 200, 500, 1000, 2000)),
    "chains": ("chains", (1, 4, 16, 64, 256)),
}


def measure(name, kernel, data, num_chains, num_samples, num_warmup=1000, **kwargs):
    """Gradients and seconds an effective draw, of all chains together."""
    field = "num_steps" if name == "NUTS" else "num_grad"
    mcmc, beta, _ = run(
        kernel,
        data,
        num_warmup,
        num_samples,
        num_chains,
        extra_fields=(field,),
        **kwargs,
    )
    beta = beta.reshape(num_chains, -1, beta.shape[-1])
    grads = np.asarray(mcmc.get_extra_fields(group_by_chain=True)[field])
    loop, state = loop_of(kernel, data, mcmc.last_state), mcmc.last_state
    long = max(20, min(400, num_samples))
    times = [slope(loop, state, long // 10, long, CLOCK) for _ in range(5)]
    per_draw, ess = float(np.median(times)), min_ess(beta)
    ahead = 0 if name == "NUTS" or num_chains == 1 else 8
    return {
        "kernel": name,
        "chains": num_chains,
        "seconds_a_draw": per_draw,
        "gradients_a_draw": float(grads.mean()),
        "iterations_a_draw": loop_iterations(grads, ahead),
        "iterations_if_waiting": float(grads.max(0).mean()),
        "seconds_an_effective_draw": per_draw * beta.shape[1] / ess,
        "gradients_an_effective_draw": float(grads.sum() / ess),
    }


def without_nuts(args):
    return [name for name in args.kernels if name != "NUTS"]


def dim(args, d):
    data = (*make_data(2000, d), None)
    for name in args.kernels:
        kernel = KERNELS[name](model)
        yield measure(name, kernel, data, args.num_chains, args.num_samples)


def rows(args, num_rows):
    x, y = make_data(num_rows, args.dim)
    for name in without_nuts(args):
        kernel, data = KERNELS[name](model), (x, y, 500)
        yield measure(name, kernel, data, args.num_chains, args.num_samples)
    if "NUTS" not in args.kernels:
        return
    # NUTS is given what it would learn, in many passes over all rows.
    mode, covariance = laplace(x, y)
    start = {"beta": np.tile(np.asarray(mode, np.float32), (args.num_chains, 1))}
    num = min(args.num_samples, max(50, 10**7 // num_rows))
    kernel, data = nuts(covariance), (x, y, None)
    kwargs = {"num_warmup": 50, "init_params": start}
    yield measure("NUTS", kernel, data, args.num_chains, num, **kwargs)


def batch(args, size):
    data = (*make_data(100_000, args.dim), size)
    for name in without_nuts(args):
        kernel = KERNELS[name](model)
        yield measure(name, kernel, data, args.num_chains, args.num_samples)


def chains(args, num_chains):
    data = (*make_data(1000, args.dim), None)
    num = max(200, args.num_samples // num_chains)
    for name in args.kernels:
        yield measure(name, KERNELS[name](model), data, num_chains, num)


def picture(part, found, path):
    from matplotlib.figure import Figure

    label, _ = PARTS[part]
    keys = {
        "gradients_an_effective_draw": "gradients an effective draw",
        "seconds_an_effective_draw": "seconds an effective draw",
    }
    if part == "chains":
        keys = {
            "seconds_a_draw": "seconds a draw of all chains, over one chain",
            "iterations_a_draw": "iterations a draw",
        }
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 2), keys.items(), strict=True):
        for name in dict.fromkeys(r["kernel"] for r in found):
            mine = [r for r in found if r["kernel"] == name]
            x, y = [r["at"] for r in mine], np.asarray([r[key] for r in mine])
            if key == "seconds_a_draw":
                y = y / y[0]
            (line,) = axes.plot(x, y, "o-", label=name)
            if key == "iterations_a_draw" and name != "NUTS":
                waiting = [r["iterations_if_waiting"] for r in mine]
                axes.plot(x, waiting, ":", color=line.get_color())
        axes.set(xscale="log", xlabel=label, title=title)
        if key.startswith("seconds"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.title.set_size("medium")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(args):
    global CLOCK
    if args.clock == "cpu":
        CLOCK = time.process_time
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "growth.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for part in args.part or PARTS:
        _, values = PARTS[part]
        values = args.values or values
        if args.render:
            values = ()
        results = [
            r
            for r in found.get(part, [])
            if r["at"] not in values or r["kernel"] not in args.kernels
        ]
        for value in values:
            for result in globals()[part](args, value):
                results.append({"at": value, **result})
                print(part, json.dumps(results[-1]), flush=True)
                found[part] = sorted(results, key=lambda r: r["at"])
                file.write_text(json.dumps(found, indent=1) + "\n")
        picture(part, found[part], args.output / f"growth_{part}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", choices=PARTS)
    parser.add_argument("--values", nargs="*", type=int, help="instead of the usual")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=tuple(KERNELS))
    parser.add_argument("--dim", type=int, default=25)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--render", action="store_true", help="only draw the pictures")
    main(parser.parse_args())
