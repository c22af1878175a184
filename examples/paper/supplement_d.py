# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Velocity scale and refreshment rate that are wrong, as in the paper's supplement D.

A regression network of the paper's size (hidden layers of 25 and 10 units, tanh, noise
variance 0.01) on synthetic data of our own. The target is the posterior with standard
normal priors in all panels, and every run starts at the mode (MAP). The
upper row of each figure has the paper's event times (``event_time="published"``) and
draws at events; the lower row has this package's envelopes and draws at equal times.

Section D.1, ``velocity.png``: Boomerang with a reference variance that is too small or
too large. Section D.2, ``refreshment.png``: BPS with refreshment rates 0.01 and 10.
The last column has what warm-up finds: in the upper row, which has none, the
curvature at the mode and a rate of 1.

    python examples/paper/supplement_d.py --out figures
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, find_map, laplace_reference

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BLUE, ORANGE = "#0072B2", "#D55E00"  # of the Okabe-Ito palette
LAYERS = (1, 25, 10, 1)
NOISE = 0.1
GRID = np.linspace(-2, 2, 201)
FIELDS = ("num_grad", "num_violations", "num_proposals")


def curve(x):
    return np.cos(4 * x + 0.8)


def make_data(num=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.25, 1.1, num) * rng.choice([-1, 1], num)
    y = curve(x) + NOISE * rng.normal(size=num)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def network(weights, x):
    hidden = x[:, None]
    for i, (w, b) in enumerate(weights):
        hidden = hidden @ w + b
        if i < len(weights) - 1:
            hidden = jnp.tanh(hidden)
    return hidden[:, 0]


def layer_weights(sites):
    return [(sites[f"w{i}"], sites[f"b{i}"]) for i in range(len(LAYERS) - 1)]


def model(x, y):
    sites = {}
    for i, (n, m) in enumerate(zip(LAYERS[:-1], LAYERS[1:], strict=True)):
        unit = dist.Normal(0, 1)
        sites[f"w{i}"] = numpyro.sample(f"w{i}", unit.expand([n, m]).to_event(2))
        sites[f"b{i}"] = numpyro.sample(f"b{i}", unit.expand([m]).to_event(1))
    numpyro.sample("y", dist.Normal(network(layer_weights(sites), x), NOISE), obs=y)


def sample(kernel, mode, data, args, warmup):
    """Predictions on the grid, (draw, place), and a line about the run."""
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup if warmup else 0,
        num_samples=args.num_samples,
        progress_bar=False,
    )
    mcmc.run(random.key(args.seed), *data, init_params=mode.params, extra_fields=FIELDS)
    grid = jnp.asarray(GRID, jnp.float32)
    predict = jax.jit(jax.vmap(lambda s: network(layer_weights(s), grid)))
    totals = {k: np.sum(v) for k, v in mcmc.get_extra_fields().items()}
    violations = totals["num_violations"] / max(totals["num_proposals"], 1)
    return (
        np.asarray(predict(mcmc.get_samples()), float),
        totals["num_grad"] / args.num_samples,
        violations,
    )


def draw_panel(axis, predictions, data, title):
    mean, sd = predictions.mean(0), predictions.std(0)
    axis.fill_between(GRID, mean - 2 * sd, mean + 2 * sd, color=BLUE, alpha=0.25, lw=0)
    axis.plot(GRID, predictions[:: max(1, len(predictions) // 8)].T, color=BLUE, lw=0.4)
    axis.plot(GRID, mean, color=BLUE, lw=1.5)
    axis.plot(*data, "o", color=ORANGE, ms=2.5)
    axis.set(title=title, xlim=(GRID[0], GRID[-1]), ylim=(-4, 4))
    axis.title.set_fontsize(9)


def draw_figure(rows, data, path, mode, args):
    """One panel for each kernel; ``rows`` is a list of lists of (title, kernel)."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), sharex=True, sharey=True)
    x, y = data
    for row, panels in enumerate(rows):
        for axis, (title, kernel) in zip(axes[row], panels, strict=True):
            found, num_grad, violations = sample(kernel, mode, data, args, row == 1)
            fitted = np.interp(x, GRID, found.mean(0))
            error = np.sqrt(np.mean(np.square(fitted - np.asarray(y))))
            places = np.abs(GRID) < 1.1
            inside, outside = (found.std(0)[p].mean() for p in (places, ~places))
            print(
                f"| {path.stem} | {('paper', 'package')[row]} | {title} | "
                f"{num_grad:.1f} | {100 * violations:.1f} % | {error:.3f} | "
                f"{inside:.3f} | {outside:.3f} |",
                flush=True,
            )
            draw_panel(axis, found, data, f"{title}\nRMSE {error:.2f}")
    axes[0, 0].set_ylabel("paper's event times")
    axes[1, 0].set_ylabel("this package")
    for axis in axes[1]:
        axis.set_xlabel("x")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(args):
    args.out.mkdir(parents=True, exist_ok=True)
    data = make_data()
    mode = find_map(
        model, random.key(1), *data, num_steps=args.map_steps, progress_bar=False
    )

    def reference(gamma):
        # Damped by the precision of the prior: no weight is freer than before.
        return laplace_reference(
            model, mode, *data, kind="diagonal", gamma=gamma, damping=1.0
        )

    published = {"event_time": "published", "record": "events"}
    cut = {"max_grad": args.max_grad}
    small, large = args.gamma
    print(
        "| figure | event times | setting | gradients a draw | violations | RMSE | "
        "sd within the data | sd beyond |"
    )
    print("|---|---|---|---|---|---|---|---|")

    def boomerang(gamma, **options):
        return Boomerang(model, reference=reference(gamma), **cut, **options)

    names = [f"variance x {small:g}", f"variance x {large:g}"]
    rows = [
        [
            (names[0], boomerang(small, **published)),
            (names[1], boomerang(large, **published)),
            ("curvature at the mode", boomerang(1.0, **published)),
        ],
        [
            (names[0], boomerang(small)),
            (names[1], boomerang(large)),
            ("tuned by warm-up", boomerang(1.0, adapt_mass_matrix=True)),
        ],
    ]
    draw_figure(rows, data, args.out / "velocity.png", mode, args)

    def bps(rate, **options):
        return BPS(model, reference=reference(1.0), refresh_rate=rate, **cut, **options)

    names = [f"refreshment rate {rate:g}" for rate in (0.01, 10)]
    rows = [
        [
            (names[0], bps(0.01, **published)),
            (names[1], bps(10.0, **published)),
            ("refreshment rate 1", bps(1.0, **published)),
        ],
        [
            (names[0], bps(0.01)),
            (names[1], bps(10.0)),
            ("tuned by warm-up", bps("auto", adapt_mass_matrix=True)),
        ],
    ]
    draw_figure(rows, data, args.out / "refreshment.png", mode, args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--gamma", type=float, nargs=2, default=[1e-3, 100.0])
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--map-steps", type=int, default=2000)
    parser.add_argument("--max-grad", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.num_warmup, args.num_samples = 60, 100
        args.map_steps, args.max_grad = 300, 200
    main(args)
