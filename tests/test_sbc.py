# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A small part of `examples/benchmarks/sbc.py`."""

from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

from numpyro_pdmp import BPS

PATH = Path(__file__).parent.parent / "examples" / "benchmarks" / "sbc.py"
NUM_DRAWS, NUM_BINS = 19, 5


def load():
    spec = spec_from_file_location("sbc", PATH)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_from_batches_are_uniform():
    sbc = load()
    args = Namespace(
        seed=0,
        num_simulations=150,
        num_warmup=150,
        num_draws=NUM_DRAWS,
        thinning=8,
    )
    ranks, _ = sbc.ranks_of("normal", BPS, 12, args)
    assert ranks.shape == (150, 2)
    p, _ = sbc.p_values(ranks, NUM_DRAWS, NUM_BINS)
    assert p.min() * len(p) > 0.001, p


def test_other_ranks_are_noticed():
    """Those of draws that are too narrow, too wide, or a little shifted."""
    sbc, rng = load(), np.random.default_rng(0)
    truth, draws = rng.normal(size=(150, 1, 1)), rng.normal(size=(150, NUM_DRAWS, 4))
    draws *= [1, 0.6, 1.8, 1]
    draws += [0, 0, 0, 0.5]
    ranks = (draws < truth).sum(1)
    p, _ = sbc.p_values(ranks, NUM_DRAWS, NUM_BINS)
    assert p[0] > 0.01 and np.all(p[1:] < 0.001), p
