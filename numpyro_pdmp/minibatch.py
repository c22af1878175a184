# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Potential energy of models whose plates may be subsampled.

A plate with ``subsample_size`` weighs its batch by ``size / subsample_size``, so the
potential of a random batch, its gradient and its Hessian are unbiased estimates of
those of all data.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.util import (
    _get_model_transforms,
    _prepare_model_for_potential,
    potential_energy,
)
from numpyro.primitives import Messenger
from numpyro_pdmp.initialize import _NOT_CONCRETE
from numpyro_pdmp.potential import _validate, latent_sites, model_functions


class Layout(NamedTuple):
    """What of a model does not depend on the values of its sites."""

    shapes: dict[str, tuple[int, ...]]  # unconstrained shape of each latent site
    plates: dict[str, tuple[int, int]]  # subsampled plates: size and batch size


class Batches(Messenger):
    """Handler that draws the indices of subsampled plates from one key.

    :param fn: the model.
    :param rng_key: decides the batch.
    :param plates: size and batch size of the plates concerned. A batch as large as the
        plate means all data in their order.
    """

    def __init__(
        self, fn: Callable, rng_key: Array, plates: dict[str, tuple[int, int]]
    ):
        self.rng_key = rng_key
        self.plates = plates
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] != "plate" or msg["name"] not in self.plates:
            return
        size, batch = self.plates[msg["name"]]
        key = random.fold_in(self.rng_key, sorted(self.plates).index(msg["name"]))
        msg["args"] = (size, batch)
        if batch == size:
            msg["value"] = jnp.arange(size)
        else:
            msg["value"] = msg["fn"](size, batch, rng_key=key)


def jit_data(fn: Callable, args: tuple, kwargs: dict) -> Callable:
    """Compile ``fn(args, kwargs, *rest)`` as a function of ``rest``, for many calls.

    As in :func:`~numpyro_pdmp.initialize.jit_arrays`, JAX arrays among the data are
    passed on, unless the model needs their values, and all else is built in.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

    @jax.jit
    def of_arrays(arrays, *rest):
        both = zip(arrays, leaves, strict=True)
        merged = [b if a is None else a for a, b in both]
        return fn(*jax.tree.unflatten(treedef, merged), *rest)

    def call(*rest):
        try:
            return of_arrays(arrays, *rest)
        except _NOT_CONCRETE:
            arrays[:] = [None] * len(arrays)
            return of_arrays(arrays, *rest)

    return call


def _prototype(model: Callable, args: tuple, kwargs: dict) -> tuple:
    # It only yields supports and shapes, so its key does not matter.
    prototype = substitute(seed(model, random.key(0)), substitute_fn=init_to_uniform)
    return _get_model_transforms(prototype, args, kwargs)


def model_layout(
    model: Callable, args: tuple, kwargs: dict, batch: int | None = None
) -> Layout:
    """Shapes of the latent sites, and the subsampled plates.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param batch: batch size in place of that of the only subsampled plate.
    """
    plates: dict[str, tuple[int, int]] = {}

    def unconstrained():
        transforms, _, _, trace = _prototype(model, args, kwargs)
        _validate({k: site for k, site in trace.items() if site["type"] != "plate"})
        for name, site in trace.items():
            if site["type"] == "plate":
                size, subsample_size = site["args"]
                if subsample_size is not None and subsample_size < size:
                    plates[name] = (size, subsample_size)
        sites = latent_sites(trace)
        for name in sites:
            local = [f.name for f in trace[name]["cond_indep_stack"]]
            local = sorted(set(local) & set(plates))
            if local:
                raise ValueError(
                    f"Site '{name}' is in the subsampled plate '{local[0]}': latent "
                    "sites of a batch are not supported; drop `subsample_size`."
                )
        return {name: transforms[name].inv(trace[name]["value"]) for name in sites}

    shapes = {k: v.shape for k, v in jax.eval_shape(unconstrained).items()}
    if batch is None:
        return Layout(shapes, plates)
    if len(plates) != 1:
        raise ValueError(
            f"`batch={batch}` replaces the `subsample_size` of a model with one "
            f"subsampled plate; this one has {sorted(plates) or 'none'}. Set "
            "`subsample_size` in the model."
        )
    ((name, (size, _)),) = plates.items()
    if not 1 <= batch <= size:
        raise ValueError(f"`batch` must be from 1 to {size} (the data), got {batch}.")
    return Layout(shapes, {name: (size, batch)})


def is_subsampled(layout: Layout) -> bool:
    """Whether the potential depends on a random batch."""
    return any(batch < size for size, batch in layout.plates.values())


def batch_potential(
    model: Callable, args: tuple, kwargs: dict, layout: Layout
) -> Callable[[Any, Array], Array]:
    """Potential energy as a function of unconstrained sites and the batch's key.

    For a model without subsampled plates it is the kernels' potential, whatever the
    key.
    """
    if not is_subsampled(layout):
        full = Batches(model, random.key(0), layout.plates)
        energy = model_functions(full, args, kwargs).potential_fn
        return lambda z, rng_key: energy(z)
    first = Batches(model, random.key(0), layout.plates)
    _, _, enum, trace = _prototype(first, args, kwargs)

    def potential_fn(z, rng_key):
        batches = Batches(model, rng_key, layout.plates)
        prepared = _prepare_model_for_potential(batches, trace, enum=enum)
        return potential_energy(prepared, args, kwargs, z, enum=enum)

    return potential_fn


def check_sites(params: Any, layout: Layout, argument: str) -> dict[str, Array]:
    """Unconstrained values as float arrays, checked against the model."""
    if not isinstance(params, dict):
        raise TypeError(
            f"`{argument}` must be a dict of unconstrained values for the sites "
            f"{sorted(layout.shapes)}, got {type(params).__name__}."
        )
    shapes = {name: jnp.shape(params[name]) for name in sorted(params)}
    expected = dict(sorted(layout.shapes.items()))
    if shapes != expected:
        raise ValueError(
            f"`{argument}` has sites of shapes {shapes}; the model's unconstrained "
            f"sites are {expected}."
        )
    return {k: jnp.asarray(v, jnp.result_type(v, float)) for k, v in params.items()}
