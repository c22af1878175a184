# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From a NumPyro model to its potential energy, for given arguments.

Everything is built anew from ``(model, args, kwargs)`` at every call and nothing is
kept, so a kernel can never hold on to the data of an earlier run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.util import (
    _get_model_transforms,
    _prepare_model_for_potential,
    get_potential_fn,
    transform_fn,
)


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
        if site["type"] == "plate":
            size, subsample_size = site["args"]
            if subsample_size is not None and subsample_size < size:
                raise NotImplementedError(
                    f"Plate '{name}' has subsample_size={subsample_size} of {size}: "
                    "subsampling is not supported; drop `subsample_size`."
                )
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


def model_functions(
    model: Callable, model_args: tuple, model_kwargs: dict | None
) -> ModelFunctions:
    """Potential energy and postprocessing of a model for these arguments.

    Discrete latent sites are summed out as in NumPyro's HMC.
    """
    kwargs = {} if model_kwargs is None else model_kwargs
    # The prototype only yields supports and shapes, so its key does not matter.
    prototype = substitute(seed(model, random.key(0)), substitute_fn=init_to_uniform)
    transforms, replay, enum, trace = _get_model_transforms(
        prototype, model_args, kwargs
    )
    _validate(trace)
    potential_fn, postprocess_fn = get_potential_fn(
        _prepare_model_for_potential(model, trace, enum=enum),
        transforms,
        replay_model=replay,
        enum=enum,
        model_args=model_args,
        model_kwargs=kwargs,
    )
    sites = latent_sites(trace)
    transforms = {name: transforms[name] for name in sites}
    constrain_fn = partial(transform_fn, transforms)
    values = {name: trace[name]["value"] for name in sites}
    shapes = jax.eval_shape(partial(transform_fn, transforms, invert=True), values)
    return ModelFunctions(potential_fn, postprocess_fn, constrain_fn, sites, shapes)


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
