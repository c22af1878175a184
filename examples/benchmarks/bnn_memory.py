# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Peak memory of predictions that are streamed from a ResNet20 while it is sampled.

python examples/benchmarks/bnn_memory.py
python examples/benchmarks/bnn_memory.py --store  # keep all draws, as MCMC would

Data are noise, and draws are close together: neither matters for memory. Stored
2,000 draws of the 274,042 weights would take 2.0 GiB, besides what computes them.
"""

import argparse
import resource
import time

import numpy as np

from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_pdmp import Boomerang, Scale, bnn, run_chunks


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(args):
    rng = np.random.default_rng(0)
    shape = (args.size, args.size, 3)
    x = jnp.asarray(rng.normal(size=(args.rows, *shape)), jnp.float32)
    y = jnp.asarray(rng.integers(10, size=args.rows))
    network = bnn.resnet20()
    model = bnn.categorical(network, "fan_in")
    start = bnn.initial_params(network, x, random.key(0))
    flat = ravel_pytree(start)[0]
    # Small turns from the start, at about a gradient each.
    reference = Scale(flat, jnp.full_like(flat, 1e-3))
    kernel = Boomerang(
        model,
        reference=reference,
        draw_time=args.draw_time,
        potential_energy=False,
        control_variates=None,
        batching="with_replacement",
    )
    streaming = bnn.StreamingPrediction(model, x[: args.test], y[: args.test])
    print(f"{flat.size} weights; {peak():.2f} GiB before sampling", flush=True)
    clock, stored = time.perf_counter(), []
    thinning = 1 if args.store else args.thinning
    for chunk in run_chunks(
        kernel,
        random.key(1),
        x,
        y,
        subsample_size=args.batch_size,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        thinning=thinning,
        chunk=10,
    ):
        if args.store:
            stored.append(chunk.samples)
        else:
            streaming.update(chunk.samples, batch_ndims=2)
    grads = float(chunk.state.totals.num_grad) / args.num_samples
    print(
        f"{args.num_samples} draws thinned by {thinning}, {grads:.1f} gradients each, "
        f"images of {args.size} x {args.size}, batches of {args.batch_size}, "
        f"{args.test} test rows, {time.perf_counter() - clock:.0f} s: "
        f"peak {peak():.2f} GiB"
    )
    if not args.store:
        print(bnn.score(streaming.result(), y[: args.test]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--num-warmup", type=int, default=20)
    parser.add_argument("--thinning", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--test", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=16, help="of images, in pixels")
    parser.add_argument("--draw-time", type=float, default=0.1)
    parser.add_argument("--store", action="store_true", help="keep all draws")
    main(parser.parse_args())
