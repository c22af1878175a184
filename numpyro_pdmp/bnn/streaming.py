# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions that are updated draw by draw, while a sampler runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_pdmp.bnn import metrics
from numpyro_pdmp.bnn.likelihood import Likelihood, in_blocks, num_rows, summary
from numpyro_pdmp.options import require_count


class Sums(NamedTuple):
    """What is known of the predictions so far; rows in blocks, ``(blocks, rows)``."""

    weight: Array  # (blocks,) sum of the weights of the draws
    mean: Array  # mean over draws, of the likelihood's mean or probabilities
    spread: Array  # weighted sum of squared distances from it
    noise: Array | None  # mean of the likelihood's variance, unless there are classes
    entropy: Array | None  # mean of the likelihood's entropy, if there are classes
    log_density: Array | None  # log of the weighted sum of the density of `y`


class Prediction(NamedTuple):
    """Predictions for the rows of ``x``, averaged over draws."""

    mean: Array  # (rows, ...) predictive mean; probabilities if there are classes
    variance: Array  # of the likelihood's mean over draws: epistemic
    noise: Array  # mean of the likelihood's variance over draws: aleatoric
    entropy: metrics.Uncertainty | None  # of the classes, in nats
    log_density: Array | None  # (rows,) log predictive density of `y`
    mean_quantiles: Array | None = None  # (quantiles, rows, ...) of the mean over draws
    y_quantiles: Array | None = None  # (quantiles, rows, ...) of new observations

    @property
    def sd(self) -> Array:
        """Standard deviation of a new observation."""
        return jnp.sqrt(self.variance + self.noise)


class StreamingPrediction:
    r"""Predictions that are updated with every few draws.

    What is kept are means over draws, for every row: of the likelihood's mean or
    probabilities, of their squares, of the likelihood's variance or entropy, and of the
    density of ``y``. So memory grows neither with draws nor with weights.

    :param model: NumPyro model, called as ``model(x, **kwargs)``, without targets.
    :param x: array of rows to predict for, or a pytree of such arrays.
    :param y: targets, for the log predictive density.
    :param site: name of the observed site. Default: the model's only one that has no
        draws.
    :param batch_size: rows at once. One draw and so many rows are predicted at a time.
    :param kwargs: keyword arguments of the model.

    **Example**

    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp import Boomerang, run_chunks
    >>> from numpyro_pdmp.bnn import StreamingPrediction
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> x = jnp.linspace(0, 1, 20)
    >>> streaming = StreamingPrediction(model, x)
    >>> for chunk in run_chunks(Boomerang(model), random.key(0), x, 2 * x,
    ...                         num_warmup=100, num_samples=200, chunk=50):
    ...     streaming.update(chunk.samples, batch_ndims=2)
    >>> round(float(streaming.result().mean[-1]), 1)
    2.0
    """

    def __init__(
        self,
        model: Callable,
        x: Any,
        y: Any = None,
        *,
        site: str | None = None,
        batch_size: int = 512,
        **kwargs: Any,
    ):
        require_count("batch_size", batch_size)
        rows = num_rows(x)
        if y is not None and np.shape(y)[:1] != (rows,):
            raise ValueError(f"`y` has shape {np.shape(y)}, but `x` has {rows} rows.")
        size = min(batch_size, rows)
        self._rows, self._site, self._model = rows, site, model
        self._x = in_blocks(x, size)
        self._y = None if y is None else in_blocks(y, size)
        self._kwargs = kwargs
        self._likelihood: Any = None
        self._capacity = 0
        #: the running sums, to be saved or set; None before the first update
        self.sums: Sums | None = None

    def _init(self, one: dict) -> Sums:
        x, y = jax.tree.map(lambda a: a[0], (self._x, self._y))
        if self._likelihood is None:
            self._likelihood = Likelihood(self._model, self._site, one, x, self._kwargs)
        likelihood = self._likelihood

        def first(draw, x, y):
            mean, noise, entropy, log_density = summary(likelihood(draw, x), y)
            zero = jnp.zeros((), mean.dtype)
            return Sums(zero, mean, mean, noise, entropy, log_density)

        shapes = jax.eval_shape(first, one, x, y)
        num = len(jax.tree.leaves(self._x)[0])
        sums = jax.tree.map(lambda a: jnp.zeros((num, *a.shape), a.dtype), shapes)
        if sums.log_density is None:
            return sums
        return sums._replace(log_density=jnp.full_like(sums.log_density, -jnp.inf))

    def update(self, samples: Any, weights: Any = None, batch_ndims: int = 1) -> None:
        """Take in draws.

        :param samples: draws by site, as from ``mcmc.get_samples()`` or in a
            :class:`~numpyro_pdmp.Chunk`.
        :param weights: of the draws, such as the step sizes of SGLD. Default: equal.
        :param batch_ndims: 1 for a first axis of draws; 2 for chains and draws.
        """
        shape = np.shape(jax.tree.leaves(samples)[0])[:batch_ndims]
        num = int(np.prod(shape))
        if num == 0:
            return
        draws = jax.tree.map(
            lambda a: jnp.reshape(a, (num, *np.shape(a)[batch_ndims:])), samples
        )
        one = jax.tree.map(lambda a: a[0], draws)
        if self.sums is None:
            self.sums = self._init(one)
        elif self._likelihood is None:  # sums that were set
            self._init(one)
        weight = jnp.ones(num) if weights is None else jnp.ravel(jnp.asarray(weights))
        if weight.shape != (num,):
            raise ValueError(
                f"`weights` has shape {np.shape(weights)}, but there are {num} draws."
            )
        draws = {name: draws[name] for name in self._likelihood.names}
        # All updates are of one shape, so that they are compiled once.
        self._capacity = self._capacity or num
        for start in range(0, num, self._capacity):
            part = slice(start, start + self._capacity)
            some = jax.tree.map(lambda a, part=part: a[part], (draws, weight))
            length = len(some[1])
            short = self._capacity - length
            if short:
                some = jax.tree.map(
                    lambda a, short=short: jnp.pad(
                        a, [(0, short), *[(0, 0)] * (a.ndim - 1)]
                    ),
                    some,
                )
            self.sums = self._compiled(self.sums, *some, length, self._x, self._y)

    @property
    def _compiled(self):
        if not hasattr(self, "_update"):
            self._update = jax.jit(self._add, donate_argnums=0)
        return self._update

    def _add(self, sums, draws, weights, num, x, y):
        def block(args):
            sums, x, y = args

            def body(i, sums):
                draw = jax.tree.map(lambda a: a[i], draws)
                return _added(sums, summary(self._likelihood(draw, x), y), weights[i])

            return lax.fori_loop(0, num, body, sums)

        return lax.map(block, (sums, x, y))

    def result(self) -> Prediction:
        """The predictions of the draws so far."""
        if self.sums is None:
            raise ValueError("There are no draws to predict from; call `update` first.")
        total = self.sums.weight[0]
        sums = self.sums._replace(weight=self.sums.weight[:, None])
        sums = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: self._rows], sums)
        variance, entropy = sums.spread / total, None
        noise: Any = sums.noise
        if sums.entropy is not None:
            # Of the indicator of a class, given the weights: E p - E p^2.
            noise = sums.mean * (1 - sums.mean) - variance
            whole = metrics.entropy(sums.mean)
            entropy = metrics.Uncertainty(whole, sums.entropy, whole - sums.entropy)
        log_density = sums.log_density
        if log_density is not None:
            log_density = log_density - jnp.log(total)
        return Prediction(sums.mean, variance, noise, entropy, log_density)


def _added(sums: Sums, new: tuple, weight: Array) -> Sums:
    """Sums with one more draw, by the update of West (1979)."""
    mean, noise, entropy, log_density = new
    total = sums.weight + weight
    share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)

    def moved(old, new):
        return None if old is None else old + share * (new - old)

    center = moved(sums.mean, mean)
    log_sum = sums.log_density
    if log_sum is not None:
        log_sum = jnp.logaddexp(log_sum, jnp.log(weight) + log_density)
    return Sums(
        total,
        center,
        sums.spread + weight * (mean - sums.mean) * (mean - center),
        moved(sums.noise, noise),
        moved(sums.entropy, entropy),
        log_sum,
    )
