# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of a kernel's arguments, before anything is compiled."""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from numpyro_pdmp.batch import BATCHING
from numpyro_pdmp.pages import explained
from numpyro_pdmp.process.samplers import Sampler


def require_positive(name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive finite number."""
    try:
        fine = 0 < value < math.inf
    except TypeError:
        fine = False
    if not fine:
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def require_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive integer."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (is_integer and 0 < value < 2**31):
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")


def check_step_size(step_size: Any) -> None:
    """Raise unless it is a positive number, 'auto', or a schedule of such numbers."""
    if isinstance(step_size, str):
        if step_size != "auto":
            raise ValueError(
                "`step_size` must be a positive number, a function of the number of "
                f"steps, or 'auto', got {step_size!r}."
            )
    elif callable(step_size):
        first = step_size(0)
        try:
            fine = np.ndim(first) == 0 and 0 <= float(first) < math.inf
        except TypeError:
            fine = False
        if not fine:
            raise ValueError(
                "`step_size` must give a finite number that is not negative for every "
                f"number of steps, such as an Optax schedule; for 0 it gave {first!r}."
            )
    else:
        require_positive("step_size", step_size)


def check_target(model: Callable | None, potential_fn: Callable | None) -> None:
    """Raise unless exactly one callable is given."""
    if not (model is None) ^ (potential_fn is None):
        raise ValueError("Only one of `model` or `potential_fn` must be specified.")
    for name, fn in (("model", model), ("potential_fn", potential_fn)):
        if fn is not None and not callable(fn):
            raise TypeError(f"`{name}` must be callable, got {fn!r}.")


@explained("warmup")
def check_refreshment(sampler: Sampler, required: str | None) -> None:
    """Raise for refreshments out of range.

    :param sampler: the process.
    :param required: what goes wrong without refreshment; None if nothing does.
    """
    rate = sampler.refresh_rate
    if isinstance(rate, str) or not 0 <= rate < math.inf:
        raise ValueError(
            f"`refresh_rate` must be finite and not negative, or 'auto', got {rate!r}; "
            "it is the rate of refreshments per unit of process time."
        )
    if required and rate == 0:
        raise ValueError(f"`refresh_rate` must be positive, got {rate}: {required}.")
    if not 0 <= sampler.refresh_mix < 1:
        raise ValueError(
            f"`refresh_mix` must be in [0, 1), got {sampler.refresh_mix}; 0 is full "
            "refreshment."
        )
    if sampler.refresh_law not in ("exponential", "regular"):
        raise ValueError(
            f"`refresh_law` must be 'exponential' or 'regular', got "
            f"{sampler.refresh_law!r}."
        )


@explained("warmup")
def check_metric(
    dense_mass: Any,
    low_rank: Any,
    reference: Any,
    inverse_mass_matrix: Any,
    center: Any,
) -> None:
    """Raise for arguments that contradict each other or are of the wrong kind."""
    if not (dense_mass is None or isinstance(dense_mass, (bool, list))):
        raise ValueError(
            f"`dense_mass` must be a bool or a list of tuples of site names, got "
            f"{dense_mass!r}."
        )
    if low_rank is not None:
        if isinstance(low_rank, bool) or not isinstance(low_rank, (int, np.integer)):
            raise TypeError(f"`low_rank` must be an integer, got {low_rank!r}.")
        if low_rank < 1:
            raise ValueError(f"`low_rank` must be positive, got {low_rank}.")
        if dense_mass:
            raise ValueError(
                f"`low_rank={low_rank}` and `dense_mass={dense_mass}` exclude each "
                "other; give one."
            )
        if inverse_mass_matrix is not None and np.ndim(inverse_mass_matrix) == 2:
            raise ValueError(
                "`inverse_mass_matrix` is a matrix but `low_rank` is given; give the "
                "diagonal, or `reference=LowRankScale(...)`."
            )
    if reference is not None:
        for name, value in (
            ("inverse_mass_matrix", inverse_mass_matrix),
            ("center", center),
            ("dense_mass", dense_mass),
            ("low_rank", low_rank),
        ):
            if value is not None:
                raise ValueError(
                    f"`reference` and `{name}` are both given; the reference sets "
                    "centre and scale, so give one of them."
                )


def check_simulation(record: str, max_grad: Any, target_violation: Any) -> None:
    """Raise for settings of the simulation out of range."""
    if record not in ("time", "events"):
        raise ValueError(f"`record` must be 'time' or 'events', got {record!r}.")
    if not (isinstance(max_grad, (int, np.integer)) and 0 < max_grad < 2**31):
        raise ValueError(f"`max_grad` must be a positive integer, got {max_grad}.")
    if target_violation is not None and not 0 < target_violation < 1:
        raise ValueError(
            f"`target_violation` must be between 0 and 1, got {target_violation}; it "
            "is the share of proposed events that may exceed their envelope."
        )


@explained("subsampling")
def check_subsampling(batch: Any, batching: Any, control_variates: Any) -> None:
    """Raise for unknown ways to subsample."""
    if batch not in ("proposal", "event", "euler"):
        raise ValueError(
            "`batch` must be 'proposal' (a fresh batch for every evaluation), 'event' "
            "(one until the next event) or 'euler' (one for every step), got "
            f"{batch!r}."
        )
    known = ("auto", "importance", *BATCHING)
    if batching not in known:
        raise ValueError(f"`batching` must be one of {known}, got {batching!r}.")
    if batch == "event" and batching == "importance":
        raise ValueError(
            "`batching='importance'` is not possible with `batch='event'`: use "
            "`batch='proposal'`, or another `batching`."
        )
    if control_variates not in ("auto", None, 1, 2):
        raise ValueError(
            f"`control_variates` must be 'auto', None, 1 or 2 (their order), got "
            f"{control_variates!r}."
        )
