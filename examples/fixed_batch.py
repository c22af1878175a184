# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw the posterior of all data next to what mini-batches make of it.

python examples/fixed_batch.py --output docs/images/fixed_batch.png
"""

import argparse
import warnings

import matplotlib
import numpy as np
from scipy.stats import gaussian_kde

from jax import random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import BPS, full_data

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NUM_ROWS, BATCH_SIZE = 1000, 100
COEFFICIENTS = {"intercept": -0.5, "slope": 1.0}
# Of the Okabe-Ito palette.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#D9D9D9"


def model(x, y):
    """Logistic regression, a mini-batch at a time."""
    logits = linear()
    with numpyro.plate("data", len(y), subsample_size=BATCH_SIZE):
        x, y = (numpyro.subsample(a, event_dim=0) for a in (x, y))
        numpyro.sample("y", dist.Bernoulli(logits=logits(x)), obs=y)


def fixed_batch(x, y):
    """The same on one batch, which counts as if it were all the data."""
    logits = linear()
    scale = numpyro.handlers.scale(scale=NUM_ROWS / len(y))
    with numpyro.plate("data", len(y)), scale:
        numpyro.sample("y", dist.Bernoulli(logits=logits(x)), obs=y)


def linear():
    a = numpyro.sample("intercept", dist.Normal(0, 2))
    b = numpyro.sample("slope", dist.Normal(0, 2))
    return lambda x: a + b * x


def make_data(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=NUM_ROWS).astype("f4")
    logits = COEFFICIENTS["intercept"] + COEFFICIENTS["slope"] * x
    return x, (rng.random(NUM_ROWS) < 1 / (1 + np.exp(-logits))).astype("f4")


def run(kernel, data, args):
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=args.num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(args.seed), *data)
    return mcmc.get_samples()


def main(args):
    x, y = make_data(args.seed)
    # Without control variates, which would make the noise of a batch small here.
    plain = {"control_variates": None}
    all_data = run(NUTS(full_data(model)), (x, y), args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`batch='event'`")
        per_event = run(BPS(model, batch="event", **plain), (x, y), args)
    fresh = run(BPS(model, **plain), (x, y), args)
    batches = [slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE) for i in range(3)]
    fixed = [run(NUTS(fixed_batch), (x[rows], y[rows]), args) for rows in batches]

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, site in zip(axes, COEFFICIENTS, strict=True):
        curves = [
            ("all data (NUTS)", all_data, None),
            ('fresh batches (BPS, batch="proposal")', fresh, (BLUE, "-", 2)),
            ("one fixed batch, three examples (NUTS)", fixed[0], (ORANGE, "-", 1)),
            (None, fixed[1], (ORANGE, "-", 1)),
            (None, fixed[2], (ORANGE, "-", 1)),
            ('one batch per event (BPS, batch="event")', per_event, (GREEN, "--", 2)),
        ]
        values = [np.asarray(draws[site], float) for _, draws, _ in curves]
        ends = np.quantile(np.concatenate(values), [0.0005, 0.9995])
        grid = np.linspace(*ends, 400)
        for (name, _, style), draws in zip(curves, values, strict=True):
            print(f"{site:9} {name or '':40} {draws.mean():6.3f} +- {draws.std():.3f}")
            density = gaussian_kde(draws, bw_method=0.2)(grid)
            if style is None:
                axis.fill_between(grid, density, color=GREY, lw=0, label=name)
            else:
                color, dashes, width = style
                axis.plot(grid, density, color=color, ls=dashes, lw=width, label=name)
        axis.set(xlabel=site, xlim=ends, ylim=(0, None), yticks=[])
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("posterior density")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.84))
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="fixed_batch.png")
    parser.add_argument("--num-samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
