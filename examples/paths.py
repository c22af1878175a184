# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw paths of the three samplers on a two-dimensional target.

python examples/paths.py --output docs/images/paths.png
"""

import argparse

import matplotlib
import numpy as np

from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process import (
    BoomerangProcess,
    BouncyParticle,
    Interpolation,
    Scale,
    ZigZagProcess,
    simulate,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BLUE, ORANGE = "#0072B2", "#D55E00"  # of the Okabe-Ito palette


def potential(x):
    """A bent Gaussian."""
    return 0.5 * x[0] ** 2 + 0.5 * ((x[1] - 0.4 * (x[0] ** 2 - 1)) / 0.6) ** 2


def main(args):
    grid = np.linspace(-2.7, 2.7, 200)
    a, b = np.meshgrid(grid, grid)
    density = np.exp(
        -np.asarray(potential(jnp.stack([jnp.asarray(a), jnp.asarray(b)])))
    )
    samplers = {
        "Boomerang": BoomerangProcess(refresh_rate=0.3),
        "BPS": BouncyParticle(refresh_rate=0.3),
        "ZigZag": ZigZagProcess(),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3), sharey=True)
    scale = Scale(jnp.zeros(2), jnp.array([1.0, 0.82]))
    for axis, (name, sampler) in zip(axes, samplers.items(), strict=True):
        path, _ = simulate(
            potential,
            sampler,
            random.key(args.seed),
            position=jnp.array([1.0, 0.2]),
            num_events=40,
            event_time=Interpolation(t_init=0.2, offset=0.5),
            scale=scale,
        )
        line = np.asarray(path.discretize(4000))
        events = np.asarray(path.positions)
        axis.contourf(a, b, density, levels=8, cmap="Greys", alpha=0.6)
        axis.plot(*line.T, color=BLUE, lw=1, label="path")
        axis.plot(*events.T, "o", color=ORANGE, ms=3, label="events")
        axis.set(title=name, xlabel="$x_1$", aspect="equal")
        axis.set(xlim=(-2.7, 2.7), ylim=(-2.2, 2.2))
    axes[0].set_ylabel("$x_2$")
    axes[2].legend(loc="upper center", frameon=False)
    figure.tight_layout()
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="paths.png")
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
