# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Models with subsampled plates on all of their data, for finished draws."""

from collections.abc import Callable, Iterator
from itertools import product
import math
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro.primitives import Messenger
from numpyro_pdmp.first_look import plate_frames
from numpyro_pdmp.initialize import jit_arrays
from numpyro_pdmp.subsample import SubsampledModel

#: entries computed at once, before they are moved to the result
BLOCK_ENTRIES = 2**22

#: size in bytes from which on a pointwise log likelihood is warned of
LARGE = 2**30


class full_data(Messenger):
    """Run a model on all rows of its subsampled plates, in order.

    Without subsampled plates the model runs as it is. Use it wherever NumPyro would
    draw a mini-batch, or refuse to: ``Predictive(full_data(model), samples)``,
    ``log_likelihood(full_data(model), samples, x, y)``, ``NUTS(full_data(model))``.

    :param fn: the model.

    **Example**

    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import Predictive
    >>> from numpyro_pdmp import full_data
    >>> def model(x):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x), subsample_size=2):
    ...         numpyro.sample("y", dist.Normal(w * numpyro.subsample(x, 0), 1))
    >>> draws = {"w": jnp.ones(3)}
    >>> Predictive(full_data(model), draws)(random.key(0), jnp.arange(5.0))["y"].shape
    (3, 5)
    """

    def process_message(self, msg):
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        # New data may have fewer rows than a batch: then it is larger than the plate.
        if subsample_size is None or subsample_size == size:
            return
        with jax.ensure_compile_time_eval():  # NumPy data cannot be indexed by tracers
            msg["value"] = jnp.arange(size)
        msg["args"] = (size, size)


def _draws_of(model: SubsampledModel, samples: dict[str, Any]) -> dict[str, Array]:
    """Draws of the latent sites alone: other sites follow from them."""
    missing = sorted(set(model.sites) - set(samples))
    if missing:
        raise ValueError(
            f"`samples` has no draws of the sites {missing}; give those of all latent "
            f"sites {sorted(model.sites)}, as from `mcmc.get_samples()`."
        )
    draws = {name: jnp.asarray(samples[name]) for name in model.sites}
    shapes = {name: value.shape for name, value in draws.items()}
    if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
        raise ValueError(
            f"`samples` has sites of shapes {shapes}; the first dimension must be the "
            "draws, as in `mcmc.get_samples()`."
        )
    return draws


def full_potential(
    model: Callable, samples: dict[str, Any], *args: Any, **kwargs: Any
) -> Array:
    """Potential energy of all data at given draws.

    The ``potential_energy`` of a run with subsampled plates is an estimate from one
    mini-batch; this one is exact. Every draw takes a pass over the data, in blocks that
    fit into memory.

    :param model: the model.
    :param samples: draws as from ``mcmc.get_samples()``.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :return: an array with one entry for each draw.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp import full_potential
    >>> def model(y):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(y), subsample_size=2):
    ...         numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, 0))
    >>> full_potential(model, {"mean": jnp.zeros(3)}, jnp.ones(10)).shape
    (3,)
    """
    whole = SubsampledModel(model, args, kwargs)

    def energies(args, kwargs, draws):
        whole = SubsampledModel(model, args, kwargs)

        def energy(values):
            return whole.full_potential_fn(whole.unconstrain_fn(values))

        return lax.map(energy, draws)

    compiled = jit_arrays(energies, whole._args, whole._kwargs)
    return compiled(_draws_of(whole, samples))


def _starts(size: int, length: int) -> Iterator[int]:
    """Where blocks of one length begin; the last ones overlap rather than be short."""
    return (min(start, size - length) for start in range(0, size, length))


def pointwise_log_likelihood(
    model: Callable,
    samples: dict[str, Any],
    args: tuple,
    kwargs: dict,
    chunk_size: int | None = None,
) -> dict[str, np.ndarray]:
    """Log likelihood of each observation at each draw, from blocks of both.

    What :func:`numpyro.infer.log_likelihood` gives for all data, with little memory
    besides the result.

    :param model: the model.
    :param samples: draws as from ``mcmc.get_samples()``.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :param chunk_size: rows of data, times draws, evaluated at once.
    """
    whole = SubsampledModel(model, args, kwargs)
    chunk_size = whole.chunk_size if chunk_size is None else chunk_size
    plates, draws = whole.plates, _draws_of(whole, samples)
    num_draws = len(next(iter(draws.values())))
    one = jax.tree.map(lambda a: a[0], draws)
    rows = {
        name: jax.ShapeDtypeStruct((size,), jnp.int32)
        for name, (size, _) in plates.items()
    }
    shapes = jax.eval_shape(whole.log_likelihoods, one, rows)
    nbytes = num_draws * sum(a.size * a.dtype.itemsize for a in shapes.values())
    if nbytes > LARGE:
        num = sum(a.size for a in shapes.values())
        warnings.warn(
            f"`log_likelihood` of {num_draws} draws at {num} observations takes "
            f"{nbytes / 2**30:.1f} GiB. Keep fewer draws, with `thinning` of `MCMC`, "
            "or leave it out.",
            stacklevel=3,
        )
    result = {k: np.empty((num_draws, *a.shape), a.dtype) for k, a in shapes.items()}
    for nest in whole._nests() or [[]]:
        _fill(result, model, whole, draws, nest, chunk_size)
    return result


def _fill(
    result: dict[str, np.ndarray],
    model: Callable,
    whole: SubsampledModel,
    draws: dict[str, Array],
    nest: list[str],
    chunk_size: int,
) -> None:
    """Fill in the sites inside of the given plates, and those outside of all."""
    frames = {name: plate_frames(whole._trace[name], whole.plates) for name in result}
    sites = [k for k in result if not frames[k] or set(frames[k]) & set(nest)]
    if not sites:
        return
    longest = max(1, int(chunk_size ** (1 / max(1, len(nest)))))
    lengths = {name: min(longest, whole.plates[name][0]) for name in nest}
    num_rows = math.prod(lengths.values())
    together = max(1, chunk_size // num_rows)

    def block(args, kwargs, draws, batch):
        whole = SubsampledModel(model, args, kwargs)

        def of_draw(draw):
            every = whole.log_likelihoods(draw, batch)
            return {name: every[name] for name in sites}

        return lax.map(of_draw, draws, batch_size=together)

    compiled = jit_arrays(block, whole._args, whole._kwargs)
    num_draws = len(result[sites[0]])
    num = min(num_draws, max(together, BLOCK_ENTRIES // num_rows))
    starts = [_starts(whole.plates[name][0], lengths[name]) for name in nest]
    for first in product(*starts):
        # Of the other plates one row is enough: their sites are not looked at.
        batch = {name: jnp.zeros(1, jnp.int32) for name in whole.plates}
        rows = {}
        for name, start in zip(nest, first, strict=True):
            rows[name] = slice(start, start + lengths[name])
            batch[name] = jnp.arange(start, start + lengths[name], dtype=jnp.int32)
        for start in _starts(num_draws, num):
            part = slice(start, start + num)
            values = compiled({k: v[part] for k, v in draws.items()}, batch)
            for site in sites:
                index = [slice(None)] * values[site].ndim
                index[0] = part
                for plate, dim in frames[site].items():
                    index[dim] = rows[plate]
                result[site][tuple(index)] = values[site]
