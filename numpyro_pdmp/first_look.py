# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A first look at a model with subsampled plates: is it one that can be run?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
import warnings

import numpy as np

import jax
import jax.numpy as jnp

from numpyro.distributions import biject_to
from numpyro.infer.util import helpful_support_errors
from numpyro.util import find_stack_level, not_jax_tracer
from numpyro_pdmp.batch import Plates
from numpyro_pdmp.pages import explained


def is_subsampled(site: dict) -> bool:
    if site["type"] != "plate":
        return False
    size, subsample_size = site["args"]
    return subsample_size is not None and subsample_size < size


def prototype_value(site: dict) -> Any:
    """Values for a first look at a model; any rows will do, and any numbers."""
    if site["type"] == "plate" and site["args"][1] is not None:
        size, subsample_size = site["args"]
        if subsample_size > size:
            raise ValueError(
                f"Plate '{site['name']}' has subsample_size={subsample_size}, but only "
                f"{size} rows. Give fewer, or leave `subsample_size` out for all rows."
            )
    if is_subsampled(site):
        with jax.ensure_compile_time_eval():  # NumPy data cannot be indexed by tracers
            return jnp.arange(site["args"][1], dtype=jnp.int32)
    latent = site["type"] == "sample" and not site["is_observed"]
    if not latent or site["fn"].support.is_discrete:
        return None
    # As `init_to_uniform`, but of NumPy, since JAX would compile its generator.
    with helpful_support_errors(site):
        transform = biject_to(site["fn"].support)
    shape = transform.inverse_shape(site["fn"].shape())
    shape = (*site["kwargs"].get("sample_shape", ()), *shape)
    values = np.random.default_rng(list(site["name"].encode())).uniform(-2, 2, shape)
    return transform(jnp.asarray(values, jnp.result_type(float)))


@contextmanager
def first_look() -> Iterator[Callable]:
    """Give :func:`prototype_value`, and explain errors of models with mini-batches.

    Most likely one array has all rows where the others have those of a batch.
    """
    seen: Plates = {}

    def value(site):
        if is_subsampled(site):
            seen[site["name"]] = site["args"]
        return prototype_value(site)

    try:
        yield value
    except (TypeError, ValueError, IndexError) as error:
        for name, (size, subsample_size) in seen.items():
            error.add_note(
                f"Plate '{name}' takes {subsample_size} of {size} rows. Inside of it "
                "take the same rows of every array that has them all, by "
                "`numpyro.subsample(array, event_dim=...)` or by the indices that "
                "`with numpyro.plate(...) as indices` gives. "
                "See the page docs/subsampling.md of the documentation."
            )
        raise


def look_at_shapes(look: Callable[[], tuple]) -> tuple:
    """Run a first look without computing anything, so that nothing is compiled.

    :param look: returns transforms, two flags, and a trace, as NumPyro's own does.
    :return: the same. If the model needs values of arrays, or some that it computes are
        needed later, all is computed.
    """
    found: list[tuple] = []
    # Of a model that needs values; other errors come again, and by themselves.
    with suppress(Exception):
        jax.eval_shape(lambda: found.append(look()))
    for transforms, *_, trace in found:
        kept = [s["value"] for s in trace.values() if s["type"] in ("param", "mutable")]
        if all(map(not_jax_tracer, jax.tree.leaves((transforms, kept)))):
            return found[0]
    return look()


def plate_frames(site: dict, plates: Plates) -> dict[str, int]:
    """Subsampled plates around a site, with their dimensions."""
    frames = site.get("cond_indep_stack", ())
    return {frame.name: frame.dim for frame in frames if frame.name in plates}


@explained("subsampling")
def validate_plates(trace: dict[str, Any], plates: Plates) -> None:
    for name, site in trace.items():
        latent = site["type"] == "sample" and not site["is_observed"]
        if plates and latent and site["fn"].support.is_discrete:
            # NumPyro scales the terms of such a sum instead of its logarithm.
            raise NotImplementedError(
                f"Discrete latent site '{name}' cannot be summed out in a model with "
                f"subsampled plates {sorted(plates)}. Write the sum into the model, "
                "for example as `MixtureSameFamily`, or drop `subsample_size`."
            )
        # A parameter with `event_dim` has one value for each row, too.
        if latent or (site["type"] == "param" and "event_dim" in site["kwargs"]):
            for plate in plate_frames(site, plates):
                size, subsample_size = plates[plate]
                raise ValueError(
                    f"Site '{name}' is inside of plate '{plate}' with subsample_size="
                    f"{subsample_size} of {size}: a mini-batch would leave most of its "
                    "entries without data. Move it outside of the plate (and index it "
                    "by the rows if each has its own), or drop `subsample_size`."
                )
        if site["type"] == "sample" and site["is_observed"]:
            _validate_rows(name, site, plates)


def _validate_rows(name: str, site: dict, plates: Plates) -> None:
    """Observations inside of a plate are those of a batch, or one for all rows."""
    shape = jnp.shape(site["value"])
    shape = shape[: len(shape) - site["fn"].event_dim]
    for frame in site.get("cond_indep_stack", ()):
        if frame.name not in plates or len(shape) < -frame.dim:
            continue
        num = shape[frame.dim]
        if num not in (1, frame.size):
            raise ValueError(
                f"Site '{name}' has {num} observations inside of plate '{frame.name}', "
                f"which takes {frame.size} rows at a time. Take those of the batch, by "
                f"`numpyro.subsample(obs, event_dim={site['fn'].event_dim})` or by the "
                "plate's indices."
            )


def warn_of_state(trace: dict[str, Any]) -> None:
    """Networks of Flax and Equinox say nothing themselves."""
    names = [name for name, site in trace.items() if site["type"] == "mutable"]
    if names:
        warnings.warn(
            f"The model has state, {names}, such as that of batch normalisation or of "
            "dropout: under MCMC it is frozen, so that a mask is the same for the "
            "whole run, and statistics of a mini-batch bias the posterior. Use a "
            "normalisation of each row by itself, such as LayerNorm or "
            "`numpyro_pdmp.bnn.FilterResponseNorm`, and no dropout.",
            stacklevel=find_stack_level(),
        )
