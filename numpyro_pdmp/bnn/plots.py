# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Pictures of predictions, calibration and mixing, each drawn into given axes.

Colours are of the palette of Okabe and Ito, and of maps that colour-blind people can
read; what matters never hangs on colour alone. It takes Matplotlib (the extra
``analysis``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_pdmp.bnn.metrics import Reliability
from numpyro_pdmp.bnn.mixing import Components, autocorrelation

BLACK, GREY = "#000000", "#999999"
BLUE, ORANGE, GREEN, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00"
#: in the order in which series get them, with a line style for each
COLOURS = (BLUE, RED, GREEN, ORANGE, SKY, BLACK)
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))


def predictive_band(
    x: Any,
    mean: Any,
    epistemic: Any,
    total: Any,
    ax: Any,
    *,
    data: tuple[Any, Any] | None = None,
    width: float = 2.0,
) -> Any:
    """Predictive mean of a regression with two bands: ignorance, and noise with it.

    :param x: inputs, in order.
    :param mean: predictive mean.
    :param epistemic: standard deviation of the mean over draws,
        ``prediction.variance ** 0.5``.
    :param total: standard deviation of a new observation, ``prediction.sd``.
    :param ax: axes to draw into.
    :param data: inputs and targets of the training data.
    :param width: half the width of the bands, in standard deviations.
    """
    x, mean = np.ravel(x), np.ravel(mean)
    for sd, colour, label in (
        (total, "#CFE4F2", "new observation"),
        (epistemic, SKY, "mean of a draw"),
    ):
        sd = width * np.ravel(sd)
        ax.fill_between(
            x, mean - sd, mean + sd, color=colour, lw=0, label=f"{label}, ±{width:g} sd"
        )
    ax.plot(x, mean, color=BLUE, label="predictive mean")
    if data is not None:
        ax.plot(*map(np.ravel, data), ".", color=BLACK, ms=4, label="data")
    ax.set(xlabel="x", ylabel="y")
    # Above the axes: the bands may be anywhere in them.
    ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return ax


def input_map(
    grid: tuple[Any, Any],
    values: Any,
    ax: Any,
    *,
    label: str = "probability of class 1",
    limits: tuple[float | None, float | None] = (None, None),
    data: tuple[Any, Any] | None = None,
) -> Any:
    """A number for each point of a plane, such as mean or variance of a prediction.

    :param grid: two matrices of coordinates, as from ``np.meshgrid``.
    :param values: a number for each of its points.
    :param ax: axes to draw into.
    :param label: of the colour bar.
    :param limits: of the colours; None is that of the values.
    :param data: points of shape ``(rows, 2)`` and their labels, to be drawn on top.
    """
    first, second = map(np.asarray, grid)
    mesh = ax.pcolormesh(
        first,
        second,
        np.reshape(values, first.shape),
        shading="auto",
        cmap="cividis",
        vmin=limits[0],
        vmax=limits[1],
        rasterized=True,
    )
    ax.figure.colorbar(mesh, ax=ax, label=label)
    if data is not None:
        points, labels = map(np.asarray, data)
        for k, marker in zip(np.unique(labels), "o^sDvP*X", strict=False):
            face = "white" if k % 2 else BLACK
            edge = BLACK if k % 2 else "white"
            style = {"marker": marker, "color": face, "mec": edge, "mew": 0.5}
            ax.plot(*points[labels == k].T, ls="", ms=4, label=f"class {k}", **style)
        ax.legend(fontsize=8)
    ax.set(xlim=(first.min(), first.max()), ylim=(second.min(), second.max()))
    ax.set(xlabel="$x_1$", ylabel="$x_2$")
    return ax


def reliability_diagram(bins: Mapping[str, Reliability] | Reliability, ax: Any) -> Any:
    """Accuracy against confidence; below the diagonal is overconfident.

    :param bins: result of :func:`~numpyro_pdmp.bnn.metrics.reliability`, or several by
        name.
    :param ax: axes to draw into.
    """
    several = {"": bins} if isinstance(bins, Reliability) else dict(bins)
    ax.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="calibrated")
    for (name, one), colour, style in zip(
        several.items(), COLOURS, STYLES, strict=False
    ):
        count = np.asarray(one.num_rows)
        filled = count > 0
        sizes = 8 + 90 * np.sqrt(count / count.sum())[filled]
        points = np.asarray(one.confidence)[filled], np.asarray(one.accuracy)[filled]
        error = np.sum(count[filled] * np.abs(points[0] - points[1])) / count.sum()
        label = f"{name} ".lstrip() + f"ECE {100 * error:.1f} %"
        ax.plot(*points, color=colour, ls=style, lw=1)
        ax.scatter(*points, s=sizes, color=colour, alpha=0.7, label=label)
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    ax.set_aspect("equal")
    ax.legend(fontsize=8)
    return ax


def entropy_histogram(
    entropies: Mapping[str, Any], ax: Any, *, num_bins: int = 30
) -> Any:
    """Densities of predictive entropies, such as in and out of the distribution.

    :param entropies: entropies by name.
    :param ax: axes to draw into.
    :param num_bins: bins, from 0 to the largest entropy.
    """
    values = {name: np.ravel(v) for name, v in entropies.items()}
    largest = max(v.max() for v in values.values())
    edges = np.linspace(0, largest, num_bins + 1)
    for (name, v), colour, style in zip(values.items(), COLOURS, STYLES, strict=False):
        common = {"bins": edges, "density": True}
        ax.hist(v, color=colour, alpha=0.25, **common)
        ax.hist(v, histtype="step", color=colour, ls=style, lw=1.5, **common)
        ax.plot([], [], color=colour, ls=style, label=f"{name}, mean {v.mean():.2f}")
    ax.set(xlabel="predictive entropy, nats", ylabel="density", xlim=(0, largest))
    ax.legend(fontsize=8)
    return ax


def ratio_histogram(counts: Any, ax: Any) -> Any:
    """Rate over envelope of the proposed events; above 1 the envelope was exceeded.

    :param counts: ``check(mcmc).ratio_histogram``, or the field of that name of
        ``mcmc.last_state.totals``: 20 bins over 0 to 2, and one above.
    :param ax: axes to draw into.
    """
    counts = np.asarray(counts, float)
    counts = counts.reshape(-1, counts.shape[-1]).sum(0)
    if counts.shape != (21,):
        raise ValueError(
            f"`counts` must have 21 bins, as of `check(mcmc).ratio_histogram`, got "
            f"{counts.size}."
        )
    share = counts / max(counts.sum(), 1)
    left = 0.1 * np.arange(21)
    above = left > 0.95
    style = {"width": 0.09, "align": "edge"}
    ax.bar(left[~above], share[~above], color=BLUE, label="below the envelope", **style)
    ax.bar(
        left[above],
        share[above],
        color=RED,
        hatch="///",
        edgecolor="white",
        label=f"above it: {100 * share[above].sum():.2g} %",
        **style,
    )
    ax.axvline(1, color=BLACK, lw=1, ls="--")
    ax.set_xticks([0, 0.5, 1, 1.5, 2.05], ["0", "0.5", "1", "1.5", "> 2"])
    ax.set(xlabel="rate / envelope", ylabel="share of proposals")
    ax.legend(fontsize=8)
    return ax


def component_traces(components: Components, ax: Any) -> Any:
    """Scores of principal components draw by draw, in units of their spread.

    :param components: result of :func:`~numpyro_pdmp.bnn.principal_components`.
    :param ax: axes to draw into.
    """
    scores = components.scores / np.sqrt(np.maximum(components.variances, 1e-300))
    shift = 7.5
    for k, index in enumerate(components.which):
        for chain in scores[..., k]:
            ax.plot(chain - shift * k, color=COLOURS[k % 6], lw=0.8, alpha=0.8)
        ess = components.mixing.ess[k]
        ax.text(0, 3.2 - shift * k, f"component {index + 1}: ESS {ess:.1f}", fontsize=8)
    ax.set_yticks([-shift * k for k in range(len(components.which))])
    ax.set_yticklabels([f"{i + 1}" for i in components.which])
    ax.set(xlabel="draw", ylabel="principal component")
    ax.set_ylim(-shift * (len(components.which) - 1) - 3.5, 4.6)
    return ax


def acf(
    values: Any, ax: Any, *, labels: Sequence[str] = (), max_lag: int | None = None
) -> Any:
    """Autocorrelation of a few quantities.

    :param values: shape ``(chains, draws, quantities)``, such as the ``scores`` of
        :func:`~numpyro_pdmp.bnn.principal_components`.
    :param ax: axes to draw into.
    :param labels: names of the quantities.
    :param max_lag: largest lag.
    """
    values = np.asarray(values)
    correlations = autocorrelation(values, max_lag)
    labels = labels or [f"quantity {k + 1}" for k in range(values.shape[-1])]
    for k, (line, label) in enumerate(zip(correlations.T, labels, strict=True)):
        ax.plot(line, color=COLOURS[k % 6], ls=STYLES[k % 6], label=label)
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set(xlabel="lag, draws", ylabel="autocorrelation", ylim=(-1.05, 1.05))
    ax.set_xlim(0, len(correlations) - 1)
    ax.legend(fontsize=8)
    return ax


def class_intervals(
    image: Any,
    probs: Any,
    axes: tuple[Any, Any],
    *,
    label: int | None = None,
    classes: Sequence[str] | None = None,
    level: float = 0.9,
) -> tuple[Any, Any]:
    """An image, and the probabilities of its classes with credible intervals.

    :param image: shape ``(height, width)`` or with channels last.
    :param probs: probabilities of each draw, ``(draws, classes)``.
    :param axes: those of the image and of the probabilities.
    :param label: the right class.
    :param classes: names of the classes.
    :param level: probability of an interval.
    """
    image, probs = np.squeeze(np.asarray(image)), np.asarray(probs)
    left, right = axes
    low, high = image.min(), image.max()
    scaled = (image - low) / max(high - low, 1e-12)
    left.imshow(scaled, cmap="gray" if image.ndim == 2 else None)
    left.set_axis_off()
    mean = probs.mean(0)
    ends = np.quantile(probs, [(1 - level) / 2, (1 + level) / 2], axis=0)
    rows = np.arange(len(mean))
    names = [str(k) for k in rows] if classes is None else list(classes)
    right.barh(rows, mean, color="#CFE4F2", edgecolor=BLUE, lw=0.8)
    right.hlines(rows, *ends, color=BLACK, lw=2)
    right.plot(ends, [rows, rows], "|", color=BLACK, ms=6)
    if label is not None:
        names[label] = f"▶ {names[label]}"
    right.set_yticks(rows, names, fontsize=8)
    right.invert_yaxis()
    right.set(xlim=(0, 1), xlabel=f"probability, {100 * level:.0f} % interval")
    return axes


def correlation_matrix(draws: Any, ax: Any) -> Any:
    """Posterior correlations between weights, such as those of the first layer.

    :param draws: shape ``(draws, weights)``, or with more axes, which are flattened.
    :param ax: axes to draw into.
    """
    draws = np.asarray(draws)
    draws = draws.reshape(len(draws), -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = np.atleast_2d(np.corrcoef(draws.T))
    mesh = ax.imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1)
    ax.figure.colorbar(mesh, ax=ax, label="correlation")
    ax.set(xlabel="weight", ylabel="weight")
    return ax


def marginal_density(
    draws: Mapping[str, Any], ax: Any, *, num_points: int = 200
) -> Any:
    """Kernel estimates of the density of a weight, one line for each sampler.

    :param draws: draws of one weight, by name of the sampler.
    :param ax: axes to draw into.
    :param num_points: points of a line.
    """
    values = {name: np.ravel(v).astype(float) for name, v in draws.items()}
    low = min(v.min() for v in values.values())
    high = max(v.max() for v in values.values())
    points = np.linspace(
        low - 0.2 * (high - low), high + 0.2 * (high - low), num_points
    )
    for (name, v), colour, style in zip(values.items(), COLOURS, STYLES, strict=False):
        # Silverman's rule.
        width = max(1.06 * v.std() * len(v) ** -0.2, 1e-12)
        kernels = np.exp(-0.5 * ((points[:, None] - v) / width) ** 2)
        density = kernels.mean(-1) / (width * np.sqrt(2 * np.pi))
        ax.plot(points, density, color=colour, ls=style, label=name)
    ax.set(xlabel="weight", ylabel="posterior density", ylim=(0, None))
    ax.legend(fontsize=8)
    return ax
