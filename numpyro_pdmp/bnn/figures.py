# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The figures of a run of the command line."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
import warnings

import numpy as np

import jax.numpy as jnp

from numpyro_pdmp.bnn import metrics, plots
from numpyro_pdmp.bnn.data import Data
from numpyro_pdmp.bnn.mixing import principal_components
from numpyro_pdmp.bnn.predict import function_values
from numpyro_pdmp.bnn.streaming import Prediction


def draw_figures(
    out: Path,
    args: Namespace,
    data: Data,
    model: Callable,
    point: Prediction,
    prediction: Prediction,
    other: Prediction | None,
    sampling: dict[str, Any],
    draws: dict[str, np.ndarray] | None,
) -> None:
    """Write the figures that the results allow, as ``*.png``.

    :param draws: the kept draws, ``(chains, draws, ...)``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def figure(num: int = 1, **kwargs: Any) -> tuple[Any, Any]:
        # Not by pyplot, which would choose a backend for the whole process.
        drawn = Figure(figsize=(4.5 * num, 3.6), layout="constrained")
        FigureCanvasAgg(drawn)
        return drawn, drawn.subplots(1, num, **kwargs)

    def save(drawn: Any, name: str) -> None:
        drawn.savefig(out / f"{name}.png", dpi=100)

    if prediction.entropy is not None:
        bins = {"MAP": metrics.reliability(point.mean, data.y_test)}
        if draws is not None:
            bins[args.sampler] = metrics.reliability(prediction.mean, data.y_test)
        drawn, ax = figure()
        plots.reliability_diagram(bins, ax)
        save(drawn, "reliability")
        entropies = {data.name: prediction.entropy.total}
        if other is not None and other.entropy is not None:
            entropies[args.ood] = other.entropy.total
        drawn, ax = figure()
        plots.entropy_histogram(entropies, ax)
        save(drawn, "entropy")
    else:
        drawn, ax = figure()
        order = np.argsort(np.asarray(data.y_test))
        sd = prediction.variance[order] ** 0.5, prediction.sd[order]
        plots.predictive_band(
            np.arange(len(order)),
            prediction.mean[order],
            *sd,
            ax,
            data=(np.arange(len(order)), data.y_test[order]),
        )
        ax.set(xlabel="test rows, by target", ylabel="target, standardised")
        save(drawn, "prediction")
    if "ratio_histogram" in sampling:
        drawn, ax = figure()
        plots.ratio_histogram(sampling["ratio_histogram"], ax)
        save(drawn, "ratios")
    if draws is None:
        return
    first = next(iter(draws.values()))
    if first.shape[1] >= 8:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `metrics.json` says whether it drifts
            components = principal_components(draws)
        drawn, axes = figure(2)
        plots.component_traces(components, axes[0])
        labels = [f"component {i + 1}" for i in components.which]
        plots.acf(components.scores, axes[1], labels=labels)
        save(drawn, "components")
    if data.x_test.ndim == 4 and prediction.entropy is not None:
        # The image that the network knows least about.
        row = int(jnp.argmax(prediction.entropy.total))
        x = jnp.asarray(data.x_test[row : row + 1])
        probs = np.exp(function_values(model, draws, x, batch_ndims=2))
        drawn, axes = figure(2)
        plots.class_intervals(
            data.x_test[row],
            probs.reshape(-1, probs.shape[-1]),
            axes,
            label=int(data.y_test[row]),
        )
        save(drawn, "classes")
