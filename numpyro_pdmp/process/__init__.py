# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The processes on their own: paths of a potential function, without NumPyro."""

from numpyro_pdmp.process.events import (
    Envelope,
    Euler,
    EventTime,
    ExactBound,
    Interpolation,
    Known,
    PublishedInterpolation,
    Step,
    Tangent,
    Tuning,
    event_time_scheme,
)
from numpyro_pdmp.process.generalised import (
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
)
from numpyro_pdmp.process.hazard import line_arrival
from numpyro_pdmp.process.loop import (
    make_tick,
)
from numpyro_pdmp.process.path import (
    AHEAD,
    BOUNCE,
    END,
    KNOWN_END,
    NO_EVENT,
    PROPOSAL,
    REFRESH,
    REVERSAL,
    START,
    STICKY,
    Path,
    Stats,
    start_path,
)
from numpyro_pdmp.process.regression import RegressionBound
from numpyro_pdmp.process.samplers import (
    BoomerangProcess,
    BouncyParticle,
    Sampler,
    ZigZagProcess,
)
from numpyro_pdmp.process.scale import LowRankScale, Scale, identity_scale
from numpyro_pdmp.process.simulate import simulate
from numpyro_pdmp.process.skeleton import Skeleton

__all__ = [
    "AHEAD",
    "BOUNCE",
    "END",
    "KNOWN_END",
    "NO_EVENT",
    "PROPOSAL",
    "REFRESH",
    "REVERSAL",
    "START",
    "STICKY",
    "BoomerangProcess",
    "BouncyParticle",
    "Envelope",
    "Euler",
    "EventTime",
    "ExactBound",
    "ForwardBouncyParticle",
    "GeneralisedBouncyParticle",
    "Interpolation",
    "Known",
    "LowRankScale",
    "Path",
    "PublishedInterpolation",
    "RegressionBound",
    "Sampler",
    "Scale",
    "Skeleton",
    "Stats",
    "Step",
    "Tangent",
    "Tuning",
    "ZigZagProcess",
    "event_time_scheme",
    "identity_scale",
    "line_arrival",
    "make_tick",
    "simulate",
    "start_path",
]
