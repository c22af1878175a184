# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Is the posterior of a network calibrated? HMC on scikit-learn's digits.

    python examples/benchmarks/bnn_calibration.py --network digits_cnn --scale 2

HMC on all rows, in coordinates that are scaled by the curvature at the mode, from the
mode: trajectories of about a quarter turn, as many leapfrog steps as 80 % acceptance
need. No mini-batches, no approximation: what it says of a prior is what any correct
sampler would say. Printed for every split: scores of the mode and of the average over
draws, and the latter's halves, which differ if the chain has not arrived.
"""

import argparse
import itertools
import json
import math
import time

import numpy as np

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

from numpyro_pdmp.bnn import metrics, networks
from numpyro_pdmp.bnn.data import load_data
from numpyro_pdmp.bnn.pipeline import for_network

NAMES = ("accuracy", "nll", "ece", "ece_by_chance", "ece_mass", "confidence")


def potential(network, x, y, unravel, prior_sd, temperature):
    """Energy of a flat vector of weights; the prior's standard deviations by weight."""

    def energy(w):
        logits = network.apply(unravel(w), x)
        fit = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(fit) / temperature + 0.5 * jnp.sum((w / prior_sd) ** 2)

    return energy


def prior_scales(network, scales, x):
    """Standard deviation of every weight: of hidden layers, of the last, of offsets."""
    params = network.init(random.key(0), x[:1])
    hidden, output, offset = scales
    last = list(params)[-1]

    def scale(path, leaf):
        if leaf.ndim == 1:
            return jnp.full(leaf.shape, offset)
        of_layer = output if path[0].key == last else hidden
        return jnp.full(leaf.shape, of_layer / math.prod(leaf.shape[:-1]) ** 0.5)

    return jax.tree_util.tree_map_with_path(scale, params)


def find_mode(energy, start, steps, rate=0.01):
    """Adam on all rows."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    @jax.jit
    def step(w, state):
        updates, state = optimizer.update(jax.grad(energy)(w), state)
        return optax.apply_updates(w, updates), state

    w, state = start, optimizer.init(start)
    for _ in range(steps):
        w, state = step(w, state)
    return w


def curvature(energy, w, key, num_probes=64):
    """Diagonal of the Hessian by random signs, and its standard error added."""

    @jax.jit
    def probe(w, key):
        v = random.rademacher(key, w.shape, w.dtype)
        return v * jax.jvp(jax.grad(energy), (w,), (v,))[1]

    values = jnp.stack([probe(w, k) for k in random.split(key, num_probes)])
    return jnp.abs(values.mean(0)) + values.std(0) / num_probes**0.5


def hmc(energy, mode, factor, key, num_draws, length, step_size, max_steps):
    """Yield (draw, acceptance, leapfrog steps); the first half tunes the step."""
    value_and_grad = jax.jit(
        lambda z: jax.value_and_grad(lambda z: energy(mode + factor * z))(z)
    )

    @jax.jit
    def leapfrog(z, v, gradient, size):
        v = v - 0.5 * size * gradient
        z = z + size * v
        value, gradient = value_and_grad(z)
        return z, v - 0.5 * size * gradient, value, gradient

    z = jnp.zeros_like(mode)
    value, gradient = value_and_grad(z)
    rng = np.random.default_rng(int(random.bits(key)))
    for i in range(num_draws):
        key, sub = random.split(key)
        v = random.normal(sub, z.shape, z.dtype)
        steps = int(np.clip(length * rng.uniform(0.8, 1.2) / step_size, 1, max_steps))
        new, w, e, g = z, v, value, gradient
        for _ in range(steps):
            new, w, e, g = leapfrog(new, w, g, step_size)
        change = float(value - e) + 0.5 * float(v @ v - w @ w)
        accept = float(np.exp(min(0.0, change))) if np.isfinite(change) else 0.0
        if rng.uniform() < accept:
            z, value, gradient = new, e, g
        if i < num_draws // 2:
            step_size *= np.exp(0.15 * (accept - 0.8) * (3 if i < 10 else 1))
        yield mode + factor * z, accept, steps


def scores(probs, y):
    probs = jnp.asarray(probs)
    values = (
        metrics.accuracy(probs, y),
        metrics.nll(jnp.log(probs[jnp.arange(len(y)), y])),
        metrics.ece(probs, y),
        metrics.ece_by_chance(probs),
        metrics.ece(probs, y, mass="mass"),
        jnp.mean(jnp.max(probs, -1)),
    )
    return {k: round(float(v), 4) for k, v in zip(NAMES, values, strict=True)}


def run(args, scale, temperature, split):
    data = load_data("digits", split=split)
    x, x_test = (
        jnp.asarray(for_network(args.network, a)) for a in (data.x_train, data.x_test)
    )
    y, y_test = jnp.asarray(data.y_train), jnp.asarray(data.y_test)
    network = getattr(networks, args.network)(10)
    scales = [scale, args.output_scale or scale, args.offset_scale or scale]
    key = random.key(split)
    start, unravel = ravel_pytree(network.init(random.fold_in(key, 0), x[:1]))
    prior_sd = ravel_pytree(prior_scales(network, scales, x))[0]
    energy = potential(network, x, y, unravel, prior_sd, temperature)
    clock = time.perf_counter()
    mode = find_mode(energy, start, args.map_steps)
    factor = curvature(energy, mode, random.fold_in(key, 1)) ** -0.5
    predict = jax.jit(lambda w: jax.nn.softmax(network.apply(unravel(w), x_test)))
    result = {"network": args.network, "scales": scales}
    result |= {"temperature": temperature, "split": split}
    result["map"] = scores(predict(mode), y_test)
    print(json.dumps(result), f"{time.perf_counter() - clock:.0f} s", flush=True)
    drawn, accepted, num = [], [], 0
    draws = hmc(
        energy,
        mode,
        factor,
        random.fold_in(key, 2),
        args.draws,
        args.length,
        args.step_size,
        args.max_steps,
    )
    for i, (w, accept, steps) in enumerate(draws):
        drawn.append(np.asarray(predict(w)))
        accepted.append(accept)
        num += steps
        if (i + 1) % 10 == 0:
            late = drawn[len(drawn) // 2 :]
            print(
                i + 1,
                f"steps {steps} acceptance {np.mean(accepted[-10:]):.2f} energy "
                f"{float(energy(w)):.0f} {time.perf_counter() - clock:.0f} s",
                scores(np.mean(late, 0), y_test),
                flush=True,
            )
    half = len(drawn) // 2
    late = np.asarray(drawn[half:])
    result["posterior"] = scores(late.mean(0), y_test)
    result["halves"] = [
        scores(part.mean(0), y_test) for part in np.array_split(late, 2)
    ]
    result["draw"] = {
        k: round(float(np.mean([scores(d, y_test)[k] for d in late[::5]])), 4)
        for k in NAMES
    }
    result["acceptance"] = round(float(np.mean(accepted[half:])), 3)
    result["gradients"] = num
    print(json.dumps(result), f"{time.perf_counter() - clock:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--network", default="digits_cnn", choices=("digits_cnn", "lenet5"))
    add("--scale", type=float, nargs="+", default=[2.0], help="of hidden layers")
    add("--output-scale", type=float, help="of the last layer; default: the same")
    add("--offset-scale", type=float, help="of offsets; default: as of hidden layers")
    add("--temperature", type=float, nargs="+", default=[1.0], help="of the labels")
    add("--split", type=int, nargs="+", default=[0])
    add("--map-steps", type=int, default=600)
    add("--draws", type=int, default=80, help="of which the first half is warm-up")
    add("--length", type=float, default=1.57, help="of a trajectory")
    add("--step-size", type=float, default=0.02, help="to begin with")
    add("--max-steps", type=int, default=400)
    args = parser.parse_args()
    for split in args.split:
        for scale, temperature in itertools.product(args.scale, args.temperature):
            run(args, scale, temperature, split)


if __name__ == "__main__":
    main()
