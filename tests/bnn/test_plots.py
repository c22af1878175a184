# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Every plot is drawn, and shows the numbers that it is given."""

import importlib.util
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
import numpy as np
from numpy.testing import assert_allclose
import pytest

from numpyro_pdmp.bnn import metrics, plots, principal_components

RNG = np.random.default_rng(0)


@pytest.fixture
def axes():
    figure = Figure(figsize=(8, 3))
    canvas = FigureCanvasAgg(figure)
    yield figure.subplots(1, 2)
    canvas.draw()  # which raises what the plotting calls put off


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_predictive_band(axes):
    x = np.linspace(-1, 1, 20)
    ax = plots.predictive_band(x, x**2, 0.1 + 0 * x, 0.3 + 0 * x, axes[0], data=(x, x))
    wide = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert_allclose([wide.min(), wide.max()], [np.min(x**2) - 0.6, 1.6])
    assert ax is axes[0] and "data" in labels(ax)


def test_input_map(axes):
    grid = np.meshgrid(np.linspace(0, 1, 5), np.linspace(0, 2, 7))
    data = RNG.uniform(size=(6, 2)), np.repeat([0, 1], 3)
    ax = plots.input_map(grid, np.arange(35.0), axes[0], data=data, limits=(0, 50))
    assert ax.collections[0].get_clim() == (0, 50)
    assert labels(ax) == ["class 0", "class 1"]


def test_reliability_diagram(axes):
    probs, right = RNG.dirichlet(np.ones(3), size=200), RNG.integers(3, size=200)
    bins = metrics.reliability(probs, right)
    percent = f"ECE {100 * metrics.ece(probs, right):.1f} %"
    plots.reliability_diagram(bins, axes[0])
    assert labels(axes[0]) == ["calibrated", percent]
    plots.reliability_diagram({"a": bins, "b": bins}, axes[1])
    assert labels(axes[1])[1:] == [f"a {percent}", f"b {percent}"]


def test_entropy_histogram(axes):
    entropies = {"in": RNG.uniform(size=50), "out": 1 + RNG.uniform(size=50)}
    ax = plots.entropy_histogram(entropies, axes[0])
    assert labels(ax)[0] == f"in, mean {entropies['in'].mean():.2f}"


def test_ratio_histogram(axes):
    counts = np.zeros(21)
    counts[[3, 9, 10, 20]] = 50, 48, 1, 1  # two of a hundred at 1 or above
    plots.ratio_histogram(counts, axes[0])
    assert "above it: 2 %" in labels(axes[0])
    plots.ratio_histogram(np.stack([counts, counts]), axes[1])  # of two chains
    assert "above it: 2 %" in labels(axes[1])
    with pytest.raises(ValueError, match="must have 21 bins"):
        plots.ratio_histogram(counts[:20], axes[0])


def test_components(axes):
    components = principal_components(RNG.normal(size=(2, 40, 9)))
    ax = plots.component_traces(components, axes[0])
    assert len(ax.lines) == 6
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "2", "9"]
    ax = plots.acf(components.scores, axes[1], labels=["a", "b", "c"], max_lag=5)
    assert_allclose([line.get_ydata()[0] for line in ax.lines[:3]], 1)
    assert labels(ax) == ["a", "b", "c"]


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8, 3)])
def test_class_intervals(axes, shape):
    probs = RNG.dirichlet(np.ones(4), size=50)
    image, bars = plots.class_intervals(RNG.normal(size=shape), probs, axes, label=2)
    assert len(image.images) == 1
    assert_allclose([bar.get_width() for bar in bars.patches], probs.mean(0))
    assert [t.get_text() for t in bars.get_yticklabels()] == ["0", "1", "▶ 2", "3"]


def test_weights(axes):
    draws = RNG.normal(size=(50, 2, 3))
    ax = plots.correlation_matrix(draws, axes[0])
    expected = np.corrcoef(draws.reshape(50, 6).T)
    assert_allclose(ax.images[0].get_array(), expected)
    ax = plots.marginal_density({"a": draws[:, 0, 0], "b": draws[:, 0, 1]}, axes[1])
    x, density = ax.lines[0].get_data()
    assert abs(np.sum(density) * (x[1] - x[0]) - 1) < 0.05
    assert labels(ax) == ["a", "b"]


def test_gallery_has_every_plot(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery", path)
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    source, shown = path.read_text(), gallery.FIGURES
    functions = [
        name
        for name, value in vars(plots).items()
        if callable(value) and value.__module__ == plots.__name__
    ]
    assert len(functions) == 10
    assert all(f"plots.{name}(" in source for name in functions)
    page = (path.parents[1] / "docs" / "gallery.md").read_text()
    assert all(f"images/gallery_{name}.png" in page for name in shown)
