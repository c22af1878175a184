# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Where the time of an iteration goes: the figures of the page on the engine.

``--part loop``: the logistic regression, 1,000 rows and 25 coefficients, 4 chains of
Boomerang: pieces of code that an iteration and a draw start, from the compiled program,
and what they cost beside the gradient, from draws of different length; with
``--without-pieces`` when small operations are not gathered (``process/pieces.py``).
``flag``: the same with XLA's multi-output fusion, in a process of its own.
``products``: the gradient with chains as rows of its products, over the usual one.
``directional``: directional derivatives over gradients. ``chains``: the gradient for 1
to 64 chains.

Times are medians of turns in one process, in microseconds of the wall's clock or of all
threads; compare within a run only.

    python examples/benchmarks/engine.py --part loop --clock cpu
"""

import argparse
import os
import re
import subprocess
import sys
import time

from logistic import loop_iterations, model, slope
import numpy as np
from targets import make_data, network

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy
from numpyro_pdmp import Boomerang, products
from numpyro_pdmp.products import chains_first

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
FLAG = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true"
STRETCHES = (0.5, 1.0, 2.0, 4.0)
PIECE = re.compile(r" (fusion|call|copy|custom-call|dot|dynamic-update-slice)\(")


def in_turns(timed, turns, clock):
    """Microseconds of a step of each, by name: ``(loop, state, number of steps)``."""
    times = {name: [] for name in timed}
    for loop, state, _ in timed.values():
        jax.block_until_ready(loop(state, 1))
    for _ in range(turns):
        for name, (loop, state, num) in timed.items():
            times[name].append(1e6 * slope(loop, state, num // 5, num, clock))
    return {name: float(np.median(t)) for name, t in times.items()}


def stepping(fn):
    """A compiled loop that moves by ``fn``, so that nothing in it can be left out."""

    def loop(x, n):
        return lax.fori_loop(0, n, lambda _, x: x - 1e-6 * fn(x), x)

    return jax.jit(loop)


# The loop


def pieces(sample, state):
    """Of the loop's body, of them copies, and of all else that a draw does; seconds."""
    lowered, start = jax.jit(sample).lower(state), time.process_time()
    text = lowered.compile().as_text()
    seconds = time.process_time() - start

    def computation(name):
        start = re.search(rf"^(?:ENTRY )?%?{re.escape(name)} ", text, re.M).start()
        return PIECE.findall(text[start : text.index("\n}", start)])

    body = computation(re.search(r" while\(.*body=%?([\w.\-]+)", text).group(1))
    entry = computation(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M).group(1))
    return len(body), body.count("copy"), len(entry), seconds


def loop_part(args):
    data = make_data(1000, 25)
    kernel = Boomerang(model)
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data)
    state = mcmc.last_state

    def loop_of(kernel, energies=False):
        def body(_, carry):
            state, total = carry
            state = kernel.sample(state, data, {})
            return state, total + state.potential_energy if energies else total

        return jax.jit(lambda s, n: lax.fori_loop(0, n, body, (s, jnp.zeros(4))))

    loop, iterations, timed = loop_of(kernel), [], {}

    @jax.jit
    def gradients(state):
        def body(state, _):
            state = kernel.sample(state, data, {})
            return state, state.num_grad

        return lax.scan(body, state, None, 1000)[1]

    for stretch in STRETCHES:
        adapted = state.adapt_state
        adapted = adapted._replace(draw_time=adapted.draw_time * stretch)
        longer = state._replace(adapt_state=adapted)
        num = int(args.steps / stretch)
        timed[stretch] = loop, longer, num
        num_grad = np.asarray(gradients(longer))[100:].T
        iterations.append(loop_iterations(num_grad, 8))

    def grad(beta):
        return jax.grad(lambda b: potential_energy(model, data, {}, {"beta": b}))(beta)

    start = jnp.zeros((4, 25))
    timed["gradient"] = stepping(jax.vmap(grad)), start, 10 * args.steps
    turned = jax.vmap(chains_first(grad))
    timed["turned gradient"] = stepping(turned), start, 10 * args.steps
    timed["with energies"] = loop_of(kernel, energies=True), state, args.steps
    never = Boomerang(model, potential_energy=False)
    timed["never an energy"] = loop_of(never), state, args.steps
    times = in_turns(timed, args.turns, CLOCKS[args.clock])
    per_draw = [times[stretch] for stretch in STRETCHES]
    per_iteration, draw = np.polyfit(iterations, per_draw, 1)
    body, copies, rest, seconds = pieces(lambda s: kernel.sample(s, data, {}), state)
    at_one = STRETCHES.index(1.0)
    ratio = times[1.0] / iterations[at_one] / times["gradient"]
    print(f"pieces of code: {body} an iteration ({copies} copies), {rest} a draw")
    print(f"compiling them: {seconds:.2f} s of all threads")
    print(f"iterations a draw: {iterations[at_one]:.2f}")
    for name in ("gradient", "turned gradient"):
        print(f"{name}: {times[name]:.1f} us")
    print(f"a draw: {times[1.0]:.1f} us", end="; ")
    for name in ("with energies", "never an energy"):
        print(f"{name} {times[name]:.1f}", end="; ")
    beside = per_iteration - times["turned gradient"]
    print(f"iteration over gradient {ratio:.2f}")
    print(f"beside the gradient: {beside:.1f} us an iteration, {draw:.1f} us a draw")


def flag_part(args):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    command = [sys.executable, __file__, "--part", "loop", "--clock", args.clock]
    command += ["--turns", str(args.turns), "--steps", str(args.steps)]
    subprocess.run(command, check=True, env={**os.environ, "XLA_FLAGS": flags})


# The gradient


def chains_part(args):
    """The gradient of the logistic regression for more and more chains."""
    data = make_data(1000, 25)

    def grad(beta):
        return jax.grad(lambda b: potential_energy(model, data, {}, {"beta": b}))(beta)

    timed = {}
    for chains in (1, 4, 16, 64):
        start = jnp.zeros((chains, 25))
        for name, fn in (("usual", grad), ("turned", chains_first(grad))):
            loop = stepping(jax.vmap(fn))
            timed[chains, name] = loop, start, max(100, 10 * args.steps // chains)
    times = in_turns(timed, args.turns, CLOCKS[args.clock])
    print("| chains | gradient, us | with chains as rows |")
    print("|---|---|---|")
    for chains in (1, 4, 16, 64):
        cells = (f"{times[chains, name]:.1f}" for name in ("usual", "turned"))
        print(f"| {chains} | {' | '.join(cells)} |")


def products_part(args):
    """Over sizes, chains, and data as constants or arguments of the loop.

    Nothing is turned of 100 columns, or above 2^18 elements: that shows the noise.
    """
    products.MAX_COLUMNS = 50
    print("| columns | rows | chains | data as constants | as arguments |")
    print("|---|---|---|---|---|")
    for dim in (10, 25, 50, 100):
        for rows in (300, 1000, 3000, 10_000, 30_000):
            for chains in (4, 16):
                ratios = [
                    product_ratio(dim, rows, chains, constant, args)
                    for constant in (True, False)
                ]
                cells = " | ".join(f"{r:.2f}" for r in ratios)
                print(f"| {dim} | {rows} | {chains} | {cells} |", flush=True)


def product_ratio(dim, rows, chains, constant, args):
    x, y = make_data(rows, dim)

    def potential(beta, x, y):
        return potential_energy(model, (x, y), {}, {"beta": beta})

    def loop_of(turns):
        def loop(state, n):
            beta, *data = state if not constant else (state, x, y)
            grad = jax.grad(lambda b: potential(b, *data))
            fn = jax.vmap(chains_first(grad) if turns else grad)
            beta = lax.fori_loop(0, n, lambda _, b: b - 1e-6 * fn(b), beta)
            return beta if constant else (beta, *data)

        return jax.jit(loop)

    start = jnp.zeros((chains, dim))
    state = start if constant else (start, x, y)
    steps = max(10, int(args.steps * 2.5e6 / (dim * rows * chains)))
    timed = {turns: (loop_of(turns), state, steps) for turns in (True, False)}
    times = in_turns(timed, args.turns, CLOCKS[args.clock])
    return times[True] / times[False]


def directional_part(args):
    print("| target | 1 chain | 4 chains |")
    print("|---|---|---|")
    small = network()
    targets = {f"logistic regression, N={n:,}": n for n in (1000, 100_000)}
    for name, num in {**targets, "network 1-10-1, N=100": None}.items():
        potential, dim, work = small.potential, small.dim, 1000
        if num is not None:
            data = make_data(num, 25)

            def potential(beta, data=data):
                return potential_energy(model, data, {}, {"beta": beta})

            dim, work = 25, num
        cells = []
        for chains in (1, 4):

            def slopes(x, potential=potential):
                # A direction that no product of the loop is known for.
                return jax.jvp(potential, (x,), (x[::-1],))[1] * x

            start = jnp.ones((chains, dim)) / 10
            steps = max(20, int(10 * args.steps * 1000 / work))
            timed = {
                kind: (stepping(jax.vmap(fn)), start, steps)
                for kind, fn in (("gradient", jax.grad(potential)), ("slope", slopes))
            }
            times = in_turns(timed, args.turns, CLOCKS[args.clock])
            cells.append(f"{times['slope'] / times['gradient']:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


PARTS = {
    "loop": loop_part,
    "flag": flag_part,
    "products": products_part,
    "chains": chains_part,
    "directional": directional_part,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--without-pieces", action="store_true", help="see pieces.py")
    args = parser.parse_args()
    if args.without_pieces:
        os.environ["NUMPYRO_PDMP_PIECES"] = "0"
    PARTS[args.part](args)
