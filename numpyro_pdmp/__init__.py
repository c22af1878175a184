# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Piecewise deterministic Markov process samplers as NumPyro kernels."""

from numpyro_pdmp.boomerang import Boomerang
from numpyro_pdmp.bps import BPS
from numpyro_pdmp.diagnostics import Report, check
from numpyro_pdmp.inference_data import ALL_STATS, to_inference_data
from numpyro_pdmp.kernel import PDMPKernel, PDMPState
from numpyro_pdmp.process.events import (
    ExactBound,
    Interpolation,
    PublishedInterpolation,
    Tangent,
)
from numpyro_pdmp.version import __version__
from numpyro_pdmp.zigzag import ZigZag

__all__ = [
    "ALL_STATS",
    "BPS",
    "Boomerang",
    "ExactBound",
    "Interpolation",
    "PDMPKernel",
    "PDMPState",
    "PublishedInterpolation",
    "Report",
    "Tangent",
    "ZigZag",
    "__version__",
    "check",
    "to_inference_data",
]
