# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What an iteration of the loop costs on LeNet5, over the gradient that it contains.

The gradient is that of the model's potential for a batch that lies ready, compiled by
itself. An iteration also draws and gathers a batch, and moves 44,426 weights. Times are
medians of turns, taken in one process, so only their ratio means something; that of CPU
times, of all threads together, suffers less from other processes.

``--data-dir DIR``: with ``mnist.npz`` (arrays ``x_train`` and ``y_train``); without it,
random pixels of the same shape.

    python examples/benchmarks/bnn_loop.py
"""

import argparse
from pathlib import Path
import time

import numpy as np

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.infer.util import log_density
from numpyro_pdmp import BPS, Boomerang, Scale, SigmaBPS, bnn


def load(data_dir, num_rows):
    if data_dir is None:
        rng = np.random.default_rng(0)
        x = rng.uniform(size=(num_rows, 28, 28, 1))
        return jnp.asarray(x, jnp.float32), jnp.asarray(rng.integers(0, 10, num_rows))
    with np.load(Path(data_dir) / "mnist.npz") as data:
        x, y = data["x_train"][:num_rows], data["y_train"][:num_rows]
    return jnp.asarray(x[..., None] / 255, jnp.float32), jnp.asarray(y, int)


def kernels(model, reference, batching):
    fixed = {"reference": reference, "control_variates": None, "batching": batching}
    # A draw need not be complete for its iterations to be timed.
    fixed |= {"potential_energy": False, "max_grad": 5}
    return {
        "Boomerang": Boomerang(model, **fixed),
        "BPS": BPS(model, **fixed),
        "SigmaBPS": SigmaBPS(model, **fixed),
    }


def main(args):
    x, y = load(args.data_dir, args.num_rows)
    network = bnn.lenet5()
    model = bnn.categorical(network, prior=bnn.normal_prior(1.0))
    params = bnn.initial_params(network, x, random.key(0))
    flat, unravel = ravel_pytree(params)

    one_batch = (x[: args.batch], y[: args.batch])

    def potential(flat, x, y):
        return -log_density(model, (x, y), {}, unravel(flat))[0]

    grad = jax.jit(jax.grad(potential))
    jax.block_until_ready(grad(flat, *one_batch))

    def raw():
        jax.block_until_ready(grad(flat, *one_batch))
        return 1

    timed = {"gradient": raw}
    reference = Scale(flat, jnp.full(flat.shape, args.scale))
    for name, kernel in kernels(model, reference, args.batching).items():
        if args.only and name not in args.only:
            continue
        data = (x, y, args.batch)
        state = kernel.init(random.key(1), 0, None, data, {})
        start = time.perf_counter()
        step = jax.jit(
            lambda state, x, y, kernel=kernel: kernel.sample(
                state, (x, y, args.batch), {}
            )
        )
        compiled = step.lower(state, x, y).compile()
        print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
        states = {name: compiled(state, x, y)}

        def turn(name=name, compiled=compiled, states=states):
            states[name] = jax.block_until_ready(compiled(states[name], x, y))
            return int(states[name].num_grad)

        timed[name] = turn

    times = {name: [] for name in timed}
    for _ in range(args.turns):
        for name, run in timed.items():
            start, num = np.array([time.perf_counter(), time.process_time()]), 0
            while num < args.per_turn:
                num += run()
            stop = np.array([time.perf_counter(), time.process_time()])
            times[name].append((stop - start) / num)
    base = np.median(times["gradient"], axis=0)
    print(f"{'':10} {'ms':>8} {'ratio':>6} {'CPU ms':>8} {'ratio':>6}")
    for name, values in times.items():
        wall, cpu = np.median(values, axis=0)
        print(
            f"{name:10} {1e3 * wall:8.2f} {wall / base[0]:6.3f} {1e3 * cpu:8.2f} "
            f"{cpu / base[1]:6.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--num-rows", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batching", default="without_replacement")
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--per-turn", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    main(parser.parse_args())
