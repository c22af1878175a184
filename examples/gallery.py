# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw every plot of ``numpyro_pdmp.bnn.plots``, from made-up numbers.

python examples/gallery.py --output docs/images
"""

import argparse
from pathlib import Path
import warnings

import matplotlib
import numpy as np

from numpyro_pdmp.bnn import metrics, plots
from numpyro_pdmp.bnn.mixing import principal_components

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def probabilities(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def band(rng):
    figure, ax = plt.subplots(figsize=(5, 3.2))
    x, inside = np.linspace(-2, 2, 200), rng.uniform(-1, 1, 30)
    epistemic = 0.05 + 0.35 * np.maximum(np.abs(x) - 1, 0) ** 1.3
    total = np.hypot(epistemic, 0.15)
    y = np.sin(3 * inside) + 0.15 * rng.normal(size=30)
    plots.predictive_band(x, np.sin(3 * x), epistemic, total, ax, data=(inside, y))
    return figure


def maps(rng):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    grid = np.meshgrid(np.linspace(-3, 3, 80), np.linspace(-3, 3, 80))
    points = rng.normal(size=(60, 2)) + np.repeat([[-1.0, -1], [1, 1]], 30, axis=0)
    labels = np.repeat([0, 1], 30)
    slopes = rng.normal([1.5, 1.5], 0.6, size=(100, 2))
    draws = 1 / (1 + np.exp(-np.einsum("kij,nk->nij", np.stack(grid), slopes)))
    mean = plots.input_map(
        grid, draws.mean(0), axes[0], limits=(0, 1), data=(points, labels)
    )
    mean.set_title("mean")
    label = "variance over draws"
    plots.input_map(grid, draws.var(0), axes[1], label=label).set_title("variance")
    return figure


def reliability(rng):
    figure, ax = plt.subplots(figsize=(3.8, 3.8))
    logits = rng.normal(size=(4000, 10)) * 2
    probs = probabilities(logits)
    labels = (probs.cumsum(-1) < rng.uniform(size=(4000, 1))).sum(-1)
    bins = {
        "point estimate": metrics.reliability(probabilities(1.8 * logits), labels),
        "posterior": metrics.reliability(probs, labels),
    }
    plots.reliability_diagram(bins, ax)
    return figure


def entropies(rng):
    figure, ax = plt.subplots(figsize=(5, 3.2))
    near = metrics.entropy(probabilities(rng.normal(size=(2000, 10)) * 5))
    far = metrics.entropy(probabilities(rng.normal(size=(2000, 10)) * 1.5))
    plots.entropy_histogram({"in distribution": near, "out of it": far}, ax)
    ax.set_title(f"AUROC {metrics.auroc(near, far):.2f}", fontsize=10)
    return figure


def ratios(rng):
    figure, ax = plt.subplots(figsize=(5, 3.2))
    values = np.minimum(rng.gamma(6, 0.07, size=5000), 2.05)
    plots.ratio_histogram(np.histogram(values, 0.1 * np.arange(22))[0], ax)
    return figure


def traces(rng):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    steps = rng.normal(size=(2, 300, 20))
    scale = np.geomspace(3, 0.3, 20)
    values, pull = np.zeros((2, 300, 20)), np.linspace(0.93, 0.1, 20)
    for i in range(1, 300):
        values[:, i] = pull * values[:, i - 1] + np.sqrt(1 - pull**2) * steps[:, i]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the first component's drift
        components = principal_components(scale * values)
    plots.component_traces(components, axes[0])
    labels = [f"component {i + 1}" for i in components.which]
    plots.acf(components.scores, axes[1], labels=labels, max_lag=60)
    return figure


def classes(rng):
    figure, axes = plt.subplots(
        1, 2, figsize=(6, 2.8), width_ratios=(1, 1.4), layout="constrained"
    )
    image = np.zeros((28, 28))
    rows, columns = np.mgrid[:28, :28]
    image[(rows > 4) & (rows < 8) & (columns > 7) & (columns < 21)] = 1
    image[np.abs(columns - (24 - rows * 0.6)) * (rows >= 7) * (rows < 25) < 1.5] = 1
    image[(rows < 5) | (rows > 24) | (columns < 6) | (columns > 21)] = 0
    logits = np.array([-4, 1, -1, -3, -4, -4, -5, 3.2, -4, 0.5])
    probs = probabilities(logits + rng.normal(size=(200, 10)))
    plots.class_intervals(image, probs, axes, label=7)
    return figure


def weights(rng):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    factor = np.eye(25) + 0.6 * rng.normal(size=(25, 2)) @ rng.normal(size=(2, 25))
    draws = rng.normal(size=(400, 25)) @ factor
    plots.correlation_matrix(draws, axes[0])
    plots.marginal_density(
        {
            "Boomerang": draws[:, 0],
            "BPS": draws[::2, 0] + 0.05,
            "SGLD": 0.4 * draws[:, 0] + 0.3,
        },
        axes[1],
    )
    return figure


FIGURES = {
    "band": band,
    "maps": maps,
    "reliability": reliability,
    "entropies": entropies,
    "ratios": ratios,
    "traces": traces,
    "classes": classes,
    "weights": weights,
}


def main(args):
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw(np.random.default_rng(0))
        if not figure.get_constrained_layout():
            figure.tight_layout()
        path = directory / f"gallery_{name}.png"
        figure.savefig(path, dpi=args.dpi)
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="docs/images", help="directory")
    parser.add_argument("--dpi", default=90, type=int, help="dots per inch")
    main(parser.parse_args())
