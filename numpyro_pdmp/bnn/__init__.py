# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian neural networks: networks, models, and settings of the paper.

Networks are written for Haiku, which the extra ``bnn`` installs.
"""

from typing import Any

from numpyro_pdmp.bnn import metrics
from numpyro_pdmp.bnn.mixing import autocorrelation, mixing, principal_components
from numpyro_pdmp.bnn.models import (
    binary,
    categorical,
    fan_in_prior,
    flat_prior,
    initial_params,
    normal_prior,
    regression,
)
from numpyro_pdmp.bnn.networks import (
    binary_mlp,
    digits_cnn,
    lenet5,
    num_params,
    regression_mlp,
    resnet20,
    uci_mlp,
)
from numpyro_pdmp.bnn.predict import function_values, predict, score
from numpyro_pdmp.bnn.presets import presets
from numpyro_pdmp.bnn.streaming import Prediction, StreamingPrediction

__all__ = [
    "FilterResponseNorm",
    "Prediction",
    "StreamingPrediction",
    "autocorrelation",
    "binary",
    "binary_mlp",
    "categorical",
    "digits_cnn",
    "fan_in_prior",
    "flat_prior",
    "function_values",
    "initial_params",
    "lenet5",
    "metrics",
    "mixing",
    "normal_prior",
    "num_params",
    "predict",
    "presets",
    "principal_components",
    "regression",
    "regression_mlp",
    "resnet20",
    "score",
    "uci_mlp",
]


def __getattr__(name: str) -> Any:
    # A Haiku module can only be defined where Haiku is.
    if name == "FilterResponseNorm":
        from numpyro_pdmp.bnn.layers import FilterResponseNorm

        return FilterResponseNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
