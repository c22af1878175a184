# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Piecewise deterministic Markov process samplers as NumPyro kernels."""

from numpyro_pdmp.all_data import full_data, full_potential
from numpyro_pdmp.boomerang import Boomerang
from numpyro_pdmp.bps import BPS
from numpyro_pdmp.checkpoint import run_checkpointed
from numpyro_pdmp.chunks import Chunk, run_chunks
from numpyro_pdmp.diagnostics import Report, check
from numpyro_pdmp.find_map import MAP, find_map
from numpyro_pdmp.generalised_bps import ForwardBPS, GeneralisedBPS
from numpyro_pdmp.glm import glm_bound
from numpyro_pdmp.haiku import haiku_init, haiku_module, random_haiku_module
from numpyro_pdmp.host_rows import HostRows
from numpyro_pdmp.inclusion import inclusion_probabilities
from numpyro_pdmp.inference_data import ALL_STATS, to_inference_data
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.events import (
    Euler,
    ExactBound,
    Interpolation,
    PublishedInterpolation,
    Tangent,
)
from numpyro_pdmp.process.regression import RegressionBound
from numpyro_pdmp.process.scale import LowRankScale, Scale
from numpyro_pdmp.psgld import PSGLD
from numpyro_pdmp.reference import laplace_reference
from numpyro_pdmp.sbps import SBPS
from numpyro_pdmp.sghmc import SGHMC
from numpyro_pdmp.sgld import SGLD
from numpyro_pdmp.sgmcmc import SGMCMCKernel, SGMCMCState
from numpyro_pdmp.sigma_bps import SigmaBPS
from numpyro_pdmp.state import PDMPState
from numpyro_pdmp.version import __version__
from numpyro_pdmp.zigzag import ZigZag

__all__ = [
    "ALL_STATS",
    "BPS",
    "MAP",
    "PSGLD",
    "SBPS",
    "SGHMC",
    "SGLD",
    "Boomerang",
    "Chunk",
    "Euler",
    "ExactBound",
    "ForwardBPS",
    "GeneralisedBPS",
    "HostRows",
    "Interpolation",
    "LowRankScale",
    "PDMPKernel",
    "PDMPState",
    "PublishedInterpolation",
    "RegressionBound",
    "Report",
    "SGMCMCKernel",
    "SGMCMCState",
    "Scale",
    "SigmaBPS",
    "Tangent",
    "ZigZag",
    "__version__",
    "check",
    "find_map",
    "full_data",
    "full_potential",
    "glm_bound",
    "haiku_init",
    "haiku_module",
    "inclusion_probabilities",
    "laplace_reference",
    "random_haiku_module",
    "run_checkpointed",
    "run_chunks",
    "to_inference_data",
]
