# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw the figures of the page on concepts: growing paths, and thinning.

python examples/concepts.py --output docs/images
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process import (
    BOUNCE,
    PROPOSAL,
    BoomerangProcess,
    BouncyParticle,
    Interpolation,
    PublishedInterpolation,
    Scale,
    ZigZagProcess,
    identity_scale,
    make_tick,
    simulate,
    start_path,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Of the Okabe-Ito palette
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"


def bent(x):
    """A bent Gaussian."""
    return 0.5 * x[0] ** 2 + 0.5 * ((x[1] - 0.4 * (x[0] ** 2 - 1)) / 0.6) ** 2


def two_modes(x):
    """A mixture of two Gaussians."""
    m = jnp.array([1.5, 0.8])
    return -jnp.logaddexp(-0.5 * jnp.sum((x - m) ** 2), -0.5 * jnp.sum((x + m) ** 2))


def paths(output):
    grid = np.linspace(-2.7, 2.7, 200)
    a, b = np.meshgrid(grid, grid)
    density = np.exp(-np.asarray(bent(jnp.stack([jnp.asarray(a), jnp.asarray(b)]))))
    samplers = {
        "Boomerang": BoomerangProcess(refresh_rate=0.3),
        "BPS": BouncyParticle(refresh_rate=0.3),
        "ZigZag": ZigZagProcess(),
    }
    times = (3, 10, 40)
    figure, axes = plt.subplots(3, 3, figsize=(8.5, 7.2), sharex=True, sharey=True)
    for row, (name, sampler) in zip(axes, samplers.items(), strict=True):
        path, _ = simulate(
            bent,
            sampler,
            random.key(1),
            position=jnp.array([1.0, 0.2]),
            num_events=150,
            event_time=Interpolation(t_init=0.2, offset=0.5),
            scale=Scale(jnp.zeros(2), jnp.array([1.0, 0.82])),
        )
        ends = np.asarray(path.times)
        line = np.asarray(path.discretize(20_000))
        when = np.linspace(ends[0], ends[-1], len(line))
        for axis, time in zip(row, times, strict=True):
            axis.contourf(a, b, density, levels=8, cmap="Greys", alpha=0.6)
            axis.plot(*line[when <= time].T, color=BLUE, lw=1)
            events = np.asarray(path.positions)[(ends > 0) & (ends <= time)]
            axis.plot(*events.T, "o", color=ORANGE, ms=3)
            axis.set(aspect="equal", xlim=(-2.7, 2.7), ylim=(-2.2, 2.2))
        row[0].set_ylabel(name)
    for axis, time in zip(axes[0], times, strict=True):
        axis.set_title(f"after {time} units of time")
    figure.tight_layout()
    figure.savefig(output / "concepts_paths.png", dpi=110)


def follow(scheme, num_ticks=120):
    """The rate along a path, and the envelopes and proposals of it."""
    sampler, scale = BouncyParticle(refresh_rate=0.2), identity_scale(jnp.zeros(2))
    tuning = scheme.tuning(0.5, 0.6)
    grad_fn = jax.grad(two_modes)
    tick = jax.jit(make_tick(grad_fn, sampler, scheme, scale, tuning))
    v = jnp.array([1.2, 0.3])
    path = start_path(random.key(3), jnp.array([-1.5, 0.2]), v, sampler, 2.0, 1e6)
    now, rate, envelopes, proposals = 0.0, [], [], []
    for _ in range(num_ticks):
        new = tick(path)
        duration = float(new.t_from)
        if duration > 0:
            t = jnp.linspace(0, duration, 40)
            z, v = jax.vmap(lambda t, p=new: sampler.flow(p.z_from, p.v_from, t))(t)
            values = jax.vmap(lambda z, v: v @ grad_fn(z))(z, v)
            rate.append((now + np.asarray(t), np.maximum(values, 0)))
            e = path.envelope
            line = np.maximum(e.value[0] + e.slope[0] * np.asarray(t), 0) + e.offset
            envelopes.append((now + np.asarray(t), line))
        if int(path.kind) == PROPOSAL:
            true = rate[-1][1][-1]
            accepted = int(new.event) == BOUNCE
            missed = true > envelopes[-1][1][-1] * 1.001
            proposals.append((now + duration, true, accepted, missed))
        now, path = now + duration, new
    return rate, envelopes, proposals


def thinning(output):
    schemes = {
        "interpolation with a look ahead (default)": Interpolation(offset=0.25),
        "as published": PublishedInterpolation(),
    }
    figure, axes = plt.subplots(2, 1, figsize=(8.5, 5.2), sharex=True, sharey=True)
    for axis, (name, scheme) in zip(axes, schemes.items(), strict=True):
        rate, envelopes, proposals = follow(scheme)
        for i, (t, values) in enumerate(rate):
            axis.plot(t, values, color=BLUE, lw=1.8, label=None if i else "event rate")
        for i, (t, values) in enumerate(envelopes):
            label = None if i else "envelope"
            axis.fill_between(t, values, color=GREY, alpha=0.25, lw=0)
            axis.plot(t, values, color=GREY, lw=1, label=label)
        kinds = {
            "rejected proposal": ("o", "white", lambda p: not p[2] and not p[3]),
            "event": ("o", GREEN, lambda p: p[2] and not p[3]),
            "violation": ("X", ORANGE, lambda p: p[3]),
        }
        for label, (marker, color, belongs) in kinds.items():
            points = np.array([p[:2] for p in proposals if belongs(p)]).reshape(-1, 2)
            axis.plot(
                *points.T, marker, mfc=color, mec="black", ms=6, lw=0, label=label
            )
        axis.set(title=name, ylabel="rate", xlim=(0, 12), ylim=(0, 5))
    axes[1].set_xlabel("process time")
    axes[0].legend(loc="upper left", frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(output / "concepts_thinning.png", dpi=110)


def main(args):
    args.output.mkdir(parents=True, exist_ok=True)
    paths(args.output)
    thinning(args.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("."))
    main(parser.parse_args())
