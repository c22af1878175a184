# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""One sampler on one target, in this process; ``bench.py`` starts it.

Prints one line of JSON, and writes the draws. The time of a draw is the slope between
two lengths of one compiled loop, so compilation is not in it. Samplers that adapt to
the target by themselves do so; those that cannot (pdmp-jax, and stochastic gradients of
BlackJAX) are given coordinates in which the target has mean 0 and covariance 1, from
the reference.

    python adapter.py --sampler boomerang --target logistic-1000 --out draws.npz
"""

import argparse
import importlib.metadata
import json
from pathlib import Path
import time

import numpy as np
from targets import TARGETS

import jax
from jax import lax, random
import jax.numpy as jnp

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def seconds(fn, *args):
    start = clock()
    out = jax.block_until_ready(fn(*args))
    return clock() - start, out


def per_draw(loop, state, budget):
    """Seconds a draw: the median of slopes of a compiled ``loop(state, n)``."""
    long = 5
    while seconds(loop, state, long)[0] < budget / 10:
        long *= 2
    short = long // 5
    slopes = []
    for _ in range(5 if long > 5 else 3):  # the latter: of passes over many rows
        times = [seconds(loop, state, n)[0] for n in (short, long)]
        slopes.append((times[1] - times[0]) / (long - short))
    return float(np.median(slopes))


def is_large(target):
    """Whether a pass over the data is long."""
    return target.rows is not None and len(target.rows.data[1]) >= 100_000


class Result(dict):
    """What a run has found; ``draws`` are (chain, draw, dim)."""


def sample(step, state, num_warmup, args, started):
    """Run ``step(state) -> state, (positions, gradients)``, with chains as first axis.

    One program is compiled, for any number of steps; of the draws that are kept it
    makes one at a time, which is not in the time of a draw.
    """

    def loop(state, n):
        return lax.fori_loop(0, n, lambda _, carry: step(carry[0]), (state, last))

    last = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(step, state)[1]
    )
    begin = clock()
    loop = jax.jit(loop).lower(state, 1).compile()
    compiled = clock() - begin
    state, _ = jax.block_until_ready(loop(state, num_warmup))
    warm = clock()
    time_of_draw = per_draw(loop, state, args.budget)
    draws, grads = [], []
    for _ in range(num_draws(time_of_draw, args)):
        state, (x, num_grad) = loop(state, 1)
        draws.append(np.asarray(x))
        grads.append(np.asarray(num_grad, float))
    return Result(
        draws=np.stack(draws, 1),
        seconds_a_draw=time_of_draw,
        gradients_a_draw=float(np.mean(grads)),
        compile_seconds=compiled,
        warmup_seconds=warm - started - compiled,
    )


def sample_steps(step, states, keys, args, started):
    """Run a peer's step: ``step(state, key) -> state, (position, gradients)``."""

    def of_all(carry):
        states, keys = carry
        split = jax.vmap(random.split)(keys)
        states, found = jax.vmap(step)(states, split[:, 0])
        return (states, split[:, 1]), found

    return sample(of_all, (states, keys), 0, args, started)


def num_draws(time_of_draw, args):
    return int(np.clip(args.budget / time_of_draw, args.min_draws, args.max_draws))


# NumPyro, and ours


def numpyro_kernel(name, target, args):
    """A kernel, what it is called with, and the field of its gradients."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMCECS, NUTS
    from numpyro_pdmp import BPS, Boomerang, ForwardBPS, ZigZag

    ours = {
        "boomerang": Boomerang,
        "bps": BPS,
        "forwardbps": ForwardBPS,
        "zigzag": ZigZag,
    }
    field = "num_grad" if name.split("-")[0] in ours else "num_steps"

    def model(x, y, subsample_size):
        prior = dist.Normal(0, 1).expand([x.shape[1]]).to_event(1)
        beta = numpyro.sample("beta", prior)
        with numpyro.plate("data", len(y), subsample_size=subsample_size):
            x = numpyro.subsample(x, event_dim=1)
            y = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    batches = name == "hmcecs" or name.endswith("-batches")
    if target.rows is not None:
        size = target.rows.subsample_size if batches else None
        of, data = (model,), (*target.rows.data, size)
    else:
        of, data = (None, target.potential), ()
    if name == "hmcecs":
        center = {"beta": jnp.asarray(args.mean, jnp.float32)}
        inner = NUTS(
            model,
            inverse_mass_matrix=jnp.asarray(args.covariance, jnp.float32),
            dense_mass=True,
            adapt_mass_matrix=False,
        )
        kernel = HMCECS(inner, num_blocks=10, proxy=HMCECS.taylor_proxy(center))
        return kernel, data, "hmc_state.num_steps", center
    if name.startswith("nuts"):
        given, center = {}, None
        if is_large(target):  # what warm-up would find, in many passes over all rows
            matrix = jnp.asarray(args.covariance, jnp.float32)
            given = {"inverse_mass_matrix": matrix, "adapt_mass_matrix": False}
            center = jnp.asarray(args.mean, jnp.float32)
            center = {"beta": jnp.tile(center, (args.num_chains, 1))}
        dense = name == "nuts-dense" or is_large(target)
        return NUTS(*of, dense_mass=dense, **given), data, field, center
    return ours[name.split("-")[0]](*of), data, field, None


def run_numpyro(name, target, args):
    from numpyro.util import nested_attrgetter

    started = clock()
    kernel, data, field, start = numpyro_kernel(name, target, args)
    num_chains = 1 if name == "hmcecs" else args.num_chains  # not vectorised
    if target.rows is None:
        start = 0.1 * random.normal(random.key(1), (num_chains, target.dim))
        start = start[0] if num_chains == 1 else start

    # As `MCMC` does, which would compile anew for every number of draws.
    keys = random.key(args.seed)
    keys = random.split(keys, num_chains) if num_chains > 1 else keys
    state = kernel.init(keys, args.num_warmup, start, data, {})

    def step(state):
        state = kernel.sample(state, data, {})
        z = state.z["beta"] if isinstance(state.z, dict) else state.z
        found = z, nested_attrgetter(field)(state)
        if num_chains == 1:
            found = jax.tree.map(lambda a: a[None], found)
        return state, found

    # Some states begin with weak types, for which the program would not be the same.
    state = jax.tree.map(lambda a: jnp.asarray(a, a.dtype), state)
    return sample(step, state, args.num_warmup, args, started)


# BlackJAX


def standard(args):
    """From coordinates of mean 0 and covariance 1 to the target's."""
    center = jnp.asarray(args.mean, jnp.float32)
    factor = jnp.asarray(np.linalg.cholesky(args.covariance), jnp.float32)
    return lambda z: center + factor @ z


def run_blackjax(name, target, args):
    import blackjax

    started = clock()
    keys = random.split(random.key(args.seed), args.num_chains)
    start = random.normal(random.key(1), (args.num_chains, target.dim))
    place, rough = (lambda z: z), None
    if is_large(target):
        place, rough = standard(args), lambda z: -0.5 * jnp.sum(z**2)
    else:
        start = 0.1 * start

    def log_density(z):
        return -target.potential(place(z))

    # On many rows warm-up is that of the Gaussian approximation, and costs nothing.
    tuned_on = log_density if rough is None else rough

    if name in ("bj-nuts", "bj-nuts-dense"):
        diagonal = name == "bj-nuts"
        adapt = blackjax.window_adaptation(
            blackjax.nuts, tuned_on, is_mass_matrix_diagonal=diagonal
        )

        def warm_up(key, x):
            (state, parameters), _ = adapt.run(key, x, num_steps=args.num_warmup)
            return blackjax.nuts.init(state.position, log_density), parameters

        states, parameters = jax.block_until_ready(
            jax.jit(jax.vmap(warm_up))(keys, start)
        )

        def step(carry, key):
            state, parameters = carry
            kernel = blackjax.nuts(log_density, **parameters)
            state, info = kernel.step(key, state)
            grads = info.num_integration_steps.astype(float)
            return (state, parameters), (place(state.position), grads)

        return sample_steps(step, (states, parameters), keys, args, started)

    if name == "bj-mclmc":
        kernel = blackjax.mclmc.build_kernel()
        first = blackjax.mclmc.init(start[0], tuned_on, keys[0])
        _, tuned, _ = blackjax.mclmc_find_L_and_step_size(
            kernel, 10 * args.num_warmup, first, keys[1], logdensity_fn=tuned_on
        )
        # A draw is half a decoherence length.
        thin = max(1, round(float(0.5 * tuned.L / tuned.step_size)))
        warm = 10 * args.num_warmup // thin if rough is None else 10

        def step(state, key):
            def one(i, state):
                new, _ = kernel(
                    random.fold_in(key, i),
                    state,
                    log_density,
                    tuned.inverse_mass_matrix,
                    tuned.L,
                    tuned.step_size,
                )
                return new

            state = lax.fori_loop(0, thin, one, state)
            return state, (place(state.position), 2.0 * thin)  # two gradients a step

        def begin(x, key):
            state = blackjax.mclmc.init(x, log_density, key)
            at = random.split(key, warm)
            return lax.scan(lambda s, k: (step(s, k)[0], None), state, at)[0]

        states = jax.block_until_ready(jax.jit(jax.vmap(begin))(start, keys))
        return sample_steps(step, states, keys, args, started)

    # Stochastic gradients, in coordinates in which the target is about N(0, 1).
    rows, place = target.rows, standard(args)
    size, num_rows = rows.subsample_size, len(rows.data[1])

    def log_likelihood(z, row):
        return rows.log_likelihood(place(z), row)

    grad = blackjax.sgmcmc.gradients.grad_estimator(
        lambda z: rows.log_prior(place(z)), log_likelihood, num_rows
    )
    if name.endswith("-cv"):
        zero = jnp.zeros(target.dim)
        grad = blackjax.sgmcmc.gradients.control_variates(grad, zero, rows.data)
    if name.startswith("bj-sgld"):
        kernel, num = blackjax.sgld(grad), 20
    else:
        kernel, num = blackjax.sghmc(grad, num_integration_steps=10), 2
    step_size = 0.05 if name.startswith("bj-sgld") else 0.1

    def step(z, key):
        def one(i, z):
            at = random.split(random.fold_in(key, i))
            index = random.randint(at[0], (size,), 0, num_rows)
            batch = jax.tree.map(lambda a: a[index], rows.data)
            return kernel.step(at[1], z, batch, step_size)

        z = lax.fori_loop(0, num, one, z)
        per_step = 1 if name.startswith("bj-sgld") else 10
        return z, (place(z), float(num * per_step))

    states = jax.vmap(lambda key: random.normal(key, (target.dim,)))(keys)
    return sample_steps(step, states, keys, args, started)


# pdmp-jax


def run_pdmp_jax(name, target, args):
    import pdmp_jax

    started = clock()
    dtype = jnp.float64 if args.x64 else jnp.float32
    center = jnp.asarray(args.mean, dtype)
    factor = np.linalg.cholesky(args.covariance)
    diagonal = np.array_equal(factor, np.diag(np.diag(factor)))
    factor = jnp.asarray(np.diag(factor) if diagonal else factor, dtype)

    def potential(z):
        return target.potential(center + (factor * z if diagonal else factor @ z))

    types = {
        "pj-zigzag": pdmp_jax.ZigZag,
        "pj-bps": pdmp_jax.BouncyParticle,
        "pj-boomerang": pdmp_jax.Boomerang,
    }
    grid_size = 10
    options = {} if name == "pj-zigzag" else {"refresh_rate": 1.0}
    sampler = types[name](
        target.dim, jax.grad(potential), grid_size=grid_size, **options
    )

    def chain(num, seed):
        key = random.key(seed)
        x = 0.1 * random.normal(key, (target.dim,), dtype)
        v = random.normal(random.fold_in(key, 1), (target.dim,), dtype)
        v = jnp.sign(v) if name == "pj-zigzag" else v
        path = sampler.sample_skeleton(num, x, v, seed, verbose=False)
        draws = sampler.sample_from_skeleton(num, path)
        bounds = 1 + path.hitting_horizon + path.error_bound
        proposals = 2 + path.rejected + path.error_bound  # and the jump
        grads = 2 * grid_size * bounds + proposals  # value and slope at each point
        return draws, jnp.sum(grads[1:])

    seeds = args.seed + jnp.arange(args.num_chains)

    def runner(num, mapped):
        over = jax.vmap if mapped else (lambda fn: lambda s: lax.map(fn, s))
        return jax.jit(over(lambda seed: chain(num, seed)))

    # Chains together or one after the other, whichever is faster.
    pilot, num = {}, 20 if is_large(target) else 300
    for mapped in (True, False):
        fn = runner(num, mapped).lower(seeds).compile()
        pilot[mapped] = min(seconds(fn, seeds)[0] for _ in range(2)) / num
    mapped = min(pilot, key=pilot.get)
    num = int(np.clip(args.budget / pilot[mapped], args.min_draws, 200_000))
    begin = clock()
    lengths = num // 5, num
    fns = [runner(n, mapped).lower(seeds).compile() for n in lengths]
    compiled = (clock() - begin) / 2
    slopes = []
    for _ in range(3):
        times = [seconds(fn, seeds)[0] for fn in fns]
        slopes.append((times[1] - times[0]) / (lengths[1] - lengths[0]))
    time_of_event, burn = float(np.median(slopes)), num // 10
    z, grads = jax.block_until_ready(fns[1](seeds))
    keep = np.asarray(z)[:, burn:]
    # As many draws as the others have; events are close to each other.
    thin = max(1, keep.shape[1] // args.max_draws)
    keep, factor = keep[:, ::thin], np.asarray(factor)
    x = np.asarray(center) + (keep * factor if diagonal else keep @ factor.T)
    return Result(
        draws=x,
        seconds_a_draw=time_of_event * thin,
        gradients_a_draw=float(jnp.mean(grads)) / num * thin,
        compile_seconds=compiled,
        warmup_seconds=begin - started,
    )


RUNS = {"bj": run_blackjax, "pj": run_pdmp_jax}


def in_batches(sampler):
    return sampler.endswith(("-batches", "hmcecs")) or "-sg" in sampler


def peak_mib():
    """Largest resident memory so far (on Linux)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024


def main(args):
    global clock
    clock = CLOCKS[args.clock]
    if args.x64:
        jax.config.update("jax_enable_x64", True)
    args.mean = args.covariance = None
    if args.reference is not None:
        with np.load(args.reference) as file:
            args.mean, args.covariance = file["center"], file["covariance"]
    target = TARGETS[args.target]()
    if is_large(target) and not in_batches(args.sampler):
        args.min_draws = 50
        if args.sampler == "nuts":  # of the step size, by passes over all rows
            args.num_warmup = 100 if len(target.rows.data[1]) < 1_000_000 else 30
    run = RUNS.get(args.sampler.split("-")[0], run_numpyro)
    result = run(args.sampler, target, args)
    draws = result.pop("draws")
    quantities = target.quantities(jnp.asarray(draws))
    raw = {"raw": draws} if args.raw else {}
    np.savez(args.out, x=np.asarray(quantities, np.float32), **raw)
    rows = 0
    if target.rows is not None:
        rows = len(target.rows.data[1])
        if in_batches(args.sampler):
            rows = target.rows.subsample_size
        # A control variate looks at the batch twice.
        twice = args.sampler.endswith("-batches") or args.sampler.endswith("-cv")
        rows *= 2 if twice else 1
    names = ("jax", "numpyro", "blackjax", "pdmp-jax")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    print(
        json.dumps(
            {
                "sampler": args.sampler,
                "target": args.target,
                "chains": int(draws.shape[0]),
                "draws": int(draws.shape[1]),
                "rows_a_gradient": rows,
                "peak_mib": peak_mib(),
                "versions": versions,
                **result,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", required=True)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reference", type=Path, help="mean and covariance, as npz")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of sampling")
    parser.add_argument("--min-draws", type=int, default=200)
    parser.add_argument("--max-draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--raw", action="store_true", help="write draws, too")
    main(parser.parse_args())
