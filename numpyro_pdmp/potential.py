# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a NumPyro model to its potential energy, for given arguments.

Everything is built anew from ``(model, args, kwargs)`` at every call and nothing is
kept, so a kernel can never hold on to the data of an earlier run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import numpyro.distributions as dist


class ModelFunctions(NamedTuple):
    """What a kernel needs of a model with its arguments."""

    potential_fn: Callable  # unconstrained sites -> potential energy
    postprocess_fn: Callable  # unconstrained sites -> constrained and deterministic
    constrain_fn: Callable  # as postprocess_fn, by transforms alone
    sites: list[str] | None  # names of the continuous latent sites, if a model
    shapes: dict[str, Any] | None  # shapes and dtypes of their unconstrained values
    model: Callable | None = None  # the model, on a fixed batch if it subsamples
    subsampled: Any = None  # SubsampledModel, if plates are subsampled


def latent_sites(trace: dict[str, Any]) -> list[str]:
    """Names of the continuous latent sites of a model trace."""
    return [
        name
        for name, site in trace.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not site["fn"].support.is_discrete
    ]


def _validate(trace: dict[str, Any]) -> None:
    for name, site in trace.items():
        latent = site["type"] == "sample" and not site["is_observed"]
        if latent and isinstance(site["fn"], dist.Delta):
            raise ValueError(
                f"Sample site '{name}' has a delta distribution; use "
                "`numpyro.deterministic` to add this value to the trace instead."
            )
    if not latent_sites(trace):
        raise ValueError(
            f"The model has no continuous latent sites (its sites are {list(trace)}); "
            "there is nothing to sample. Use `numpyro.infer.Predictive` to run it."
        )


def gradient_fn(
    potential_fn: Callable, forward_mode: bool = False, check_value: bool = False
) -> Callable:
    """Gradient of a potential.

    :param potential_fn: the potential.
    :param forward_mode: by forward-mode differentiation.
    :param check_value: make the gradient NaN where the potential is not finite. A hard
        constraint such as ``factor(where(x > 1, -inf, 0))`` has a finite gradient on
        its wrong side, so the gradient alone does not notice. The value costs extra.
    """
    grad_fn = (jax.jacfwd if forward_mode else jax.grad)(potential_fn)
    if not check_value:
        return grad_fn

    def gradient(x):
        finite = jnp.isfinite(potential_fn(x))
        return jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grad_fn(x))

    return gradient
