# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The distribution of a model's observed site, given a draw.

The weights of a draw are put into the model, and the distribution of its observed site
is read off: nothing is drawn, and any NumPyro model will do whose observed site has one
row of the data per row of ``x``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro.distributions import Distribution
from numpyro.handlers import seed, substitute, trace
from numpyro_pdmp.all_data import full_data
from numpyro_pdmp.bnn import metrics


class Likelihood:
    """The distribution of the observed site, given a draw and rows of data."""

    def __init__(self, model: Callable, site: str | None, draw: Any, x: Any, kwargs):
        if not isinstance(draw, dict):
            raise TypeError(
                "`samples` must be a dict of sites, as from `mcmc.get_samples()`, got "
                f"{type(draw).__name__}."
            )
        self._model, self._kwargs = full_data(model), kwargs
        self._site = site
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), draw)
        found: dict[str, bool] = {}

        def look(draw, x):
            for name, msg in self._trace(draw, x).items():
                if msg["type"] == "sample":
                    found[name] = msg["is_observed"]

        jax.eval_shape(look, {}, x)
        new = [name for name in found if name not in draw]
        if site is None:
            observed = [name for name in found if found[name]]
            candidates = observed if len(observed) == 1 else new
            if len(candidates) != 1:
                raise ValueError(
                    f"`site` is missing: the sites {candidates} of the model are not "
                    "in `samples`. Name the observed one; all others must have draws."
                )
            self._site = candidates[0]
        elif site not in found:
            raise ValueError(f"`site={site!r}` is not one of {sorted(found)}.")
        missing = [name for name in new if name != self._site]
        if missing:
            raise ValueError(f"`samples` has no draws of the sites {missing}.")
        # Deterministic sites follow from these, for the rows at hand.
        self.names = [name for name in found if name in draw and name != self._site]
        shape = jax.eval_shape(lambda d, x: self(d, x).mean, shapes, x).shape
        rows = len(jax.tree.leaves(x)[0])
        if shape[:1] != (rows,):
            raise ValueError(
                f"`x` has {rows} rows, but site '{self._site}' has a distribution of "
                f"shape {shape}; its first dimension must be the rows."
            )

    def _trace(self, draw, x):
        # Only the first look needs a key, and no random number is ever used.
        model = seed(substitute(self._model, draw), random.key(0))
        return trace(model).get_trace(x, **self._kwargs)

    def __call__(self, draw: dict, x: Any) -> Distribution:
        draw = {name: draw[name] for name in self.names}
        return self._trace(draw, x)[self._site]["fn"]


def log_probabilities(fn: Distribution) -> Array | None:
    """Log probabilities of classes, last; None for other distributions."""
    if not fn.has_enumerate_support or fn.event_shape:
        return None
    return jnp.moveaxis(fn.log_prob(fn.enumerate_support(expand=True)), 0, -1)


def summary(fn: Distribution, y: Array | None) -> tuple:
    """Mean, noise, entropy and log density."""
    log_density = None if y is None else fn.log_prob(y)
    log_probs = log_probabilities(fn)
    if log_probs is None:
        return fn.mean, fn.variance, None, log_density
    probs = jnp.exp(log_probs)
    return probs, None, metrics.entropy(probs), log_density


def in_blocks(tree: Any, size: int) -> Any:
    """Rows in blocks; the last row fills up the last of them."""

    def split(a):
        a = jnp.asarray(a)
        filled = jnp.minimum(jnp.arange(-(-len(a) // size) * size), len(a) - 1)
        return a[filled].reshape(-1, size, *a.shape[1:])

    return jax.tree.map(split, tree)


def num_rows(x: Any) -> int:
    lengths = {np.shape(a)[:1] for a in jax.tree.leaves(x)}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise ValueError(
            "`x` must be arrays of rows, all with the same number of them, got shapes "
            f"{[np.shape(a) for a in jax.tree.leaves(x)]}."
        )
    return lengths.pop()[0]
