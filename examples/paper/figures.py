# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw the figures of the paper from the JSON files.

python examples/paper/figures.py --figures docs/images/paper
"""

import argparse
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from methods import TITLES
import numpy as np
from runner import HERE, load
import supplement_d
from synthetic import LINE, SIDE, make_data

from numpyro_pdmp.bnn import plots
from numpyro_pdmp.bnn.mixing import autocorrelation

COLUMNS = ["nuts", "bps", "sigma-bps", "boomerang", "boomerang-3", "sgld", "sgld-nd"]
IMAGE_COLUMNS = ["bps", "sigma-bps", "boomerang", "sgld", "sgld-nd", "sghmc"]
STYLE = dict(
    zip(
        ["boomerang", "sigma-bps", "bps", "sgld", "sgld-nd", "sghmc", "nuts"],
        zip([*plots.COLOURS, plots.GREY], [*plots.STYLES, "-"], strict=True),
        strict=True,
    )
)


def new(rows, columns, width=2.1, height=1.9, **kwargs):
    """Not by pyplot, which would choose a backend for the whole process."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def legend(ax, size=6):
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=size)


def below(figure, ax):
    """The legend of one panel for all, where it hides none of them."""
    handles, labels = ax.get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": len(labels)}
    figure.legend(handles, labels, fontsize=7, frameon=False, **place)


def by(results, *names):
    return {tuple(r[n] for n in names): r for r in results}


def regression(results):
    """Figure 4 and supplement B: draws of the predictive mean."""
    found = by([r for r in results if "curves" in r], "data", "method")
    names = [n for n in ("gap", "cosine") if any(k[0] == n for k in found)]
    if not names:
        return None
    figure, axes = new(len(names), len(COLUMNS), sharex=True, sharey="row")
    for row, name in zip(axes, names, strict=True):
        x, y = make_data(name)
        truth = found.get((name, "nuts"))
        for ax, method in zip(row, COLUMNS, strict=True):
            ax.set_title(TITLES[method], fontsize=8)
            one = found.get((name, method))
            if one is None:
                continue
            if truth is not None:
                mean, sd = np.asarray(truth["mean"]), np.asarray(truth["sd"])
                band = mean - 2 * sd, mean + 2 * sd
                ax.fill_between(LINE[:, 0], *band, color="0.85", lw=0)
            ax.plot(LINE[:, 0], np.transpose(one["curves"]), color="k", lw=0.4)
            ax.plot(x[:, 0], y, ".", color=plots.BLUE, ms=2)
            ax.set_xlim(-2, 2)
        if truth is not None:
            row[0].set_ylim((mean - 3 * sd).min(), (mean + 3 * sd).max())
    figure.supxlabel("grey: mean ± 2 sd of NUTS; lines: draws", fontsize=8)
    return figure


def binary(results, name):
    """Figure 5 and supplement B: mean above, standard deviation below."""
    found = by([r for r in results if "mean" in r], "data", "method")
    if not any(k[0] == name for k in found):
        return None
    columns = [m for m in COLUMNS if (name, m) in found]
    figure, axes = new(2, len(columns), 1.9, 1.8, sharex=True, sharey=True)
    x, y = make_data(name)
    for column, method in enumerate(columns):
        axes[0, column].set_title(TITLES[method], fontsize=8)
        one = found[name, method]
        for row, (key, top) in enumerate((("mean", 1.0), ("sd", 0.5))):
            ax = axes[row, column]
            values = np.reshape(one[key], (len(SIDE), len(SIDE)))
            mesh = ax.pcolormesh(
                SIDE, SIDE, values, cmap="cividis", vmin=0, vmax=top, rasterized=True
            )
            for label, colour in ((0, "white"), (1, "k")):
                ax.plot(*x[y == label].T, ".", color=colour, ms=1.5)
            if column == len(columns) - 1:
                figure.colorbar(mesh, ax=ax)
    axes[0, 0].set_ylabel("mean")
    axes[1, 0].set_ylabel("sd of draws")
    return figure


def correlations(results):
    """Figure 1: predictions, correlations in the first layer, one weight."""
    found = by([r for r in results if r["data"] == "gap"], "method", "seed")
    one = found.get(("sigma-bps", 0))
    if one is None:
        return None
    figure, axes = new(1, 3, 3.3, 2.8)
    x, y = make_data("gap")
    axes[0, 0].plot(LINE[:, 0], np.transpose(one["curves"]), color="k", lw=0.5)
    axes[0, 0].plot(x[:, 0], y, ".", color=plots.BLUE, ms=3)
    axes[0, 0].set(xlabel="x", title="draws of σBPS", ylim=(-3, 3))
    values = np.array(one["correlations"], float)
    np.fill_diagonal(values, np.nan)
    mesh = axes[0, 1].imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(mesh, ax=axes[0, 1])
    axes[0, 1].set_title("correlations, first layer")
    draws = {
        TITLES[m]: found[m, 0]["weight"]
        for m in ("nuts", "sigma-bps", "boomerang-3", "sgld")
        if (m, 0) in found
    }
    plots.marginal_density(draws, axes[0, 2])
    axes[0, 2].set_title("one weight")
    for ax in axes[0]:
        ax.title.set_fontsize(9)
    return figure


def acceptance(results):
    """The figure of supplement A: rate over envelope."""
    found = by(results, "scheme", "method", "alpha")
    if not found:
        return None
    alphas = sorted({k[2] for k in found})
    figure, axes = new(2, len(alphas), 3, 2.3, sharex=True, sharey="row")
    edges = np.append(0.1 * np.arange(21), 2.1)
    for row, scheme in zip(axes, ("published", "repaired"), strict=True):
        for ax, alpha in zip(row, alphas, strict=True):
            for method in ("bps", "sigma-bps", "boomerang"):
                one = found.get((scheme, method, alpha))
                if one is None:
                    continue
                counts = np.asarray(one["ratio_histogram"], float)
                colour, line = STYLE[method]
                above = 100 * counts[10:].sum() / max(counts.sum(), 1)
                label = f"{TITLES[method]}: {above:.1f} % above 1"
                share = counts / max(counts.sum(), 1)
                ax.stairs(share, edges, color=colour, ls=line, label=label)
            ax.axvline(1, color="0.5", lw=0.8)
            ax.set_title(f"{scheme}, α = {alpha:g}", fontsize=9)
            legend(ax)
    figure.supxlabel("rate / envelope (last bin: above 2)", fontsize=8)
    figure.supylabel("share of proposals", fontsize=8)
    return figure


def image_names(results):
    known = ("mnist", "fashion_mnist", "svhn", "cifar10", "cifar100")
    return [n for n in known if any(r["data"] == n for r in results)]


def traces(results, component):
    """Supplement C: autocorrelation and trace of a principal component."""
    found = by([r for r in results if "component_scores" in r], "data", "method")
    names = image_names([r for r in results if "component_scores" in r])
    if not names:
        return None
    figure, axes = new(2, len(names), 3, 2.1)
    for column, name in enumerate(names):
        for method in IMAGE_COLUMNS:
            one = found.get((name, method))
            if one is None:
                continue
            scores = np.asarray(one["component_scores"], float)[component]
            if np.ptp(scores) == 0:
                continue
            colour, line = STYLE[method]
            style = {"color": colour, "ls": line, "lw": 1}
            lags = autocorrelation(scores[None, :, None])[:, 0]
            axes[0, column].plot(lags, label=TITLES[method], **style)
            axes[1, column].plot(scores / scores.std(), **style)
        axes[0, column].set(title=name, ylim=(-1, 1.05), xlabel="lag, draws")
        axes[1, column].set(xlabel="draw")
    axes[0, 0].set_ylabel("autocorrelation")
    axes[1, 0].set_ylabel("score / its sd")
    below(figure, axes[0, 0])
    return figure


def weights(results):
    """Supplement C: traces of a weight of the first and of the last layer."""
    found = by([r for r in results if "weights" in r], "data", "method")
    names = image_names([r for r in results if "weights" in r])
    if not names:
        return None
    figure, axes = new(2, len(names), 3, 2.1)
    for column, name in enumerate(names):
        for row in range(2):
            for method in IMAGE_COLUMNS:
                one = found.get((name, method))
                if one is not None:
                    colour, line = STYLE[method]
                    style = {"color": colour, "ls": line, "lw": 1}
                    ax = axes[row, column]
                    ax.plot(one["weights"][row], label=TITLES[method], **style)
        axes[0, column].set_title(name, fontsize=9)
    axes[0, 0].set_ylabel("first layer")
    axes[1, 0].set_ylabel("last layer")
    below(figure, axes[0, 0])
    return figure


def entropies(results):
    """Supplement G: entropies in and out of the distribution."""
    results = [r for r in results if "entropy_outside" in r]
    names = image_names(results)
    columns = ["bps", "sigma-bps", "boomerang", "sgld"]
    if not names:
        return None
    figure, axes = new(len(names), len(columns), 2.4, 1.7, sharex=True, sharey="row")
    for row, name in zip(axes, names, strict=True):
        for ax, method in zip(row, columns, strict=True):
            some = [r for r in results if (r["data"], r["method"]) == (name, method)]
            if not some:
                continue
            edges = np.linspace(0, np.log(10), len(some[0]["entropy_inside"]) + 1)
            for key, colour, line in (
                ("inside", plots.BLUE, "-"),
                ("outside", plots.RED, "--"),
            ):
                counts = np.sum([r[f"entropy_{key}"] for r in some], axis=0)
                share = counts / counts.sum()
                ax.stairs(share, edges, fill=True, color=colour, alpha=0.25)
                ax.stairs(share, edges, color=colour, ls=line, label=key)
            auroc = np.mean([r["ood"]["auroc"] for r in some])
            title = f"{TITLES[method]}, AUROC {auroc:.3f}"
            ax.set_title(title, fontsize=8)
        row[0].set_ylabel(name, fontsize=8)
    legend(axes[0, 0])
    figure.supxlabel("predictive entropy, nats", fontsize=8)
    return figure


def hard(results):
    """Figure 7 and supplement H: probabilities of images that are hard."""
    found = by(results, "data", "method", "seed")
    names = [
        n for n in image_names(results) if "hard_images" in found.get((n, "map", 0), {})
    ]
    names = [n for n in names if n != "cifar100"]
    if not names:
        return None
    columns = ["boomerang", "sigma-bps", "bps", "sgld"]
    figure, axes = new(2 * len(names), 1 + len(columns), 2.0, 1.5)
    for ax in axes.flat:
        ax.set_axis_off()
    for place, name in enumerate(names):
        truth = found[name, "map", 0]
        for k in range(2):
            row = axes[2 * place + k]
            image = np.squeeze(np.asarray(truth["hard_images"][k]))
            row[0].imshow(image, cmap="gray" if image.ndim == 2 else None)
            label = truth["hard_labels"][k]
            row[0].set_title(f"{name}: {label}", fontsize=8)
            for ax, method in zip(row[1:], columns, strict=True):
                one = found.get((name, method, 0), {}).get("hard")
                if one is None:
                    continue
                ax.set_axis_on()
                mean, low, high = (
                    np.asarray(one[q][k]) for q in ("mean", "low", "high")
                )
                classes = np.arange(len(mean))
                ax.vlines(classes, low, high, color=plots.SKY, lw=3)
                ax.plot(classes, mean, "o", color=plots.BLACK, ms=3)
                ax.axvline(label, color=plots.RED, lw=0.8, ls="--")
                ax.set(ylim=(-0.03, 1.03), xticks=classes[:: max(1, len(mean) // 10)])
                ax.tick_params(labelsize=6)
                ax.set_title(TITLES[method], fontsize=8)
    return figure


def sensitivity(results, figure):
    """Supplement D: a velocity scale, or a rate of refreshment, that is wrong."""
    found = by([r for r in results if r["figure"] == figure], "scheme", "setting")
    if not found:
        return None
    kind = {"velocity": "variance × {:g}", "refreshment": "refreshment rate {:g}"}
    drawn, axes = new(2, 3, 3, 2.3, sharex=True, sharey=True)
    x, y = supplement_d.make_data()
    for row, scheme in zip(axes, supplement_d.SCHEMES, strict=True):
        for ax, (name, value) in zip(
            row, supplement_d.SETTINGS[figure].items(), strict=True
        ):
            tuned = scheme == "repaired" and name == "right"
            title = "tuned by warm-up" if tuned else kind[figure].format(value)
            one = found.get((scheme, name))
            if one is None:
                continue
            mean, sd = np.asarray(one["mean"]), np.asarray(one["sd"])
            band = mean - 2 * sd, mean + 2 * sd
            ax.fill_between(supplement_d.GRID, *band, color=plots.SKY, alpha=0.4, lw=0)
            ax.plot(supplement_d.GRID, np.transpose(one["curves"]), color="k", lw=0.4)
            ax.plot(x, y, ".", color=plots.RED, ms=3)
            ax.set_title(f"{scheme}, {title}: RMSE {one['rmse']:.2f}", fontsize=8)
            ax.set(xlim=(-2, 2), ylim=(-4, 4))
    drawn.supxlabel("band: mean ± 2 sd; lines: draws", fontsize=8)
    return drawn


def ablation(results):
    """Standard deviations over the truth, with one error at a time."""
    rows = [r for r in results if "sd_ratio" in r]
    names = list(dict.fromkeys(r["method"] for r in rows))
    if not names:
        return None
    figure, axes = new(1, 1, 6, 0.6 + 0.25 * len(names))
    ax = axes[0, 0]
    for place, name in enumerate(names):
        some = [r for r in rows if r["method"] == name]
        right = name in ("bps", "boomerang", "boomerang-tight", "sgld")
        colour = plots.BLUE if right else plots.RED
        low = min(r["sd_ratio_range"][0] for r in some)
        high = max(r["sd_ratio_range"][1] for r in some)
        ax.hlines(place, low, high, color=colour, lw=1)
        ax.plot([r["sd_ratio"] for r in some], [place] * len(some), "o", color=colour)
    ax.axvline(1, color="0.5", lw=0.8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xscale("log")
    ax.set_xlabel("posterior sd / truth: mean over coordinates (dots), range (lines)")
    ax.invert_yaxis()
    return figure


def draw_all(results, out):
    """All figures that there are results for; their names."""
    out.mkdir(parents=True, exist_ok=True)
    synthetic, images = load(results, "synthetic"), load(results, "images")
    made = {
        "regression": regression(synthetic),
        "moons": binary(synthetic, "moons"),
        "rings": binary(synthetic, "rings"),
        "figure_1": correlations(synthetic),
        "acceptance": acceptance(load(results, "supplement_a")),
        "velocity": sensitivity(load(results, "supplement_d"), "velocity"),
        "refreshment": sensitivity(load(results, "supplement_d"), "refreshment"),
        "component_1": traces(images, 0),
        "component_2": traces(images, 1),
        "component_last": traces(images, 2),
        "weights": weights(images),
        "entropies": entropies(images),
        "hard": hard(images),
        "ablation": ablation(load(results, "ablation")),
    }
    for name, figure in made.items():
        if figure is not None:
            figure.savefig(out / f"{name}.png", dpi=80)
    return [name for name, figure in made.items() if figure is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--figures", type=Path, default=Path("docs/images/paper"))
    args = parser.parse_args()
    print(*draw_all(args.results, args.figures))
