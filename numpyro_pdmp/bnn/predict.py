# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions of draws: at once, or draw by draw while a sampler runs.

The weights of a draw are put into the model, and the distribution of its observed site
is read off: nothing is drawn, and any NumPyro model will do whose observed site has one
row of the data per row of ``x``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro.distributions import Distribution
from numpyro.handlers import seed, substitute, trace
from numpyro_pdmp.all_data import full_data
from numpyro_pdmp.bnn import metrics
from numpyro_pdmp.options import require_count

#: entries of draws x rows x classes that quantiles look at together
BLOCK_ENTRIES = 2**24


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


class _Likelihood:
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


def _log_probs(fn: Distribution) -> Array | None:
    """Log probabilities of classes, last; None for other distributions."""
    if not fn.has_enumerate_support or fn.event_shape:
        return None
    return jnp.moveaxis(fn.log_prob(fn.enumerate_support(expand=True)), 0, -1)


def _summary(fn: Distribution, y: Array | None) -> tuple:
    """Mean, noise, entropy and log density."""
    log_density = None if y is None else fn.log_prob(y)
    log_probs = _log_probs(fn)
    if log_probs is None:
        return fn.mean, fn.variance, None, log_density
    probs = jnp.exp(log_probs)
    return probs, None, metrics.entropy(probs), log_density


def _blocks(tree: Any, size: int) -> Any:
    """Rows in blocks; the last row fills up the last of them."""

    def split(a):
        a = jnp.asarray(a)
        filled = jnp.minimum(jnp.arange(-(-len(a) // size) * size), len(a) - 1)
        return a[filled].reshape(-1, size, *a.shape[1:])

    return jax.tree.map(split, tree)


def _num_rows(x: Any) -> int:
    lengths = {np.shape(a)[:1] for a in jax.tree.leaves(x)}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise ValueError(
            "`x` must be arrays of rows, all with the same number of them, got shapes "
            f"{[np.shape(a) for a in jax.tree.leaves(x)]}."
        )
    return lengths.pop()[0]


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
    >>> from numpyro_pdmp.bnn.predict import StreamingPrediction
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
        rows = _num_rows(x)
        if y is not None and np.shape(y)[:1] != (rows,):
            raise ValueError(f"`y` has shape {np.shape(y)}, but `x` has {rows} rows.")
        size = min(batch_size, rows)
        self._rows, self._site, self._model = rows, site, model
        self._x = _blocks(x, size)
        self._y = None if y is None else _blocks(y, size)
        self._kwargs = kwargs
        self._likelihood: Any = None
        self._capacity = 0
        #: the running sums, to be saved or set; None before the first update
        self.sums: Sums | None = None

    def _init(self, one: dict) -> Sums:
        x, y = jax.tree.map(lambda a: a[0], (self._x, self._y))
        if self._likelihood is None:
            self._likelihood = _Likelihood(
                self._model, self._site, one, x, self._kwargs
            )
        likelihood = self._likelihood

        def first(draw, x, y):
            mean, noise, entropy, log_density = _summary(likelihood(draw, x), y)
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
                return _added(sums, _summary(self._likelihood(draw, x), y), weights[i])

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


def _flat(samples: Any, batch_ndims: int) -> tuple[Any, tuple[int, ...]]:
    shape = np.shape(jax.tree.leaves(samples)[0])[:batch_ndims]
    num = int(np.prod(shape))
    if num == 0:
        raise ValueError("`samples` has no draws.")
    return jax.tree.map(
        lambda a: jnp.reshape(a, (num, *np.shape(a)[batch_ndims:])), samples
    ), shape


def predict(
    model: Callable,
    samples: dict[str, Any],
    x: Any,
    y: Any = None,
    *,
    quantiles: tuple[float, ...] = (),
    site: str | None = None,
    batch_size: int = 512,
    weights: Any = None,
    batch_ndims: int = 1,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predictions of stored draws.

    As :class:`StreamingPrediction`, with all draws at hand; rows are predicted in
    batches, so that no array of all draws, rows and classes is formed.

    :param model: NumPyro model, called as ``model(x, **kwargs)``, without targets.
    :param samples: draws by site, as from ``mcmc.get_samples()``.
    :param x: array of rows to predict for, or a pytree of such arrays.
    :param y: targets, for the log predictive density.
    :param quantiles: levels, such as ``(0.05, 0.95)``, of credible intervals of the
        likelihood's mean (or probabilities), and, unless there are classes, of
        predictive intervals, which take one random observation a draw. Weights are not
        regarded.
    :param site: name of the observed site.
    :param batch_size: rows at once.
    :param weights: of the draws. Default: equal.
    :param batch_ndims: 1 for a first axis of draws; 2 for chains and draws.
    :param rng_key: for predictive intervals. Default: a fixed one.
    :param kwargs: keyword arguments of the model.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp.bnn import predict
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> predict(model, {"w": jnp.arange(3.0)}, jnp.ones(2)).mean.tolist()
    [1.0, 1.0]
    """
    levels = np.asarray(quantiles, float)
    if np.any((levels < 0) | (levels > 1)):
        raise ValueError(f"`quantiles` must be in 0 to 1, got {quantiles}.")
    streaming = StreamingPrediction(
        model, x, y, site=site, batch_size=batch_size, **kwargs
    )
    draws, _ = _flat(samples, batch_ndims)
    streaming.update(draws, weights)
    prediction = streaming.result()
    if not levels.size:
        return prediction
    likelihood = streaming._likelihood
    draws = {name: draws[name] for name in likelihood.names}
    num = len(jax.tree.leaves(draws)[0])
    width = int(np.prod(prediction.mean.shape[1:]))
    size = max(1, min(batch_size, BLOCK_ENTRIES // (num * width), _num_rows(x)))
    blocks = _blocks(x, size)
    key = random.key(0) if rng_key is None else rng_key
    keys = random.split(key, len(jax.tree.leaves(blocks)[0]))

    def of_draw(args, x):
        draw, key = args
        fn = likelihood(draw, x)
        log_probs = _log_probs(fn)
        if log_probs is None:
            return fn.mean, fn.sample(key)
        return jnp.exp(log_probs), None

    @jax.jit
    def every(draws, blocks, keys):
        def block(args):
            x, key = args
            pair = lax.map(lambda a: of_draw(a, x), (draws, random.split(key, num)))
            return jax.tree.map(lambda a: jnp.quantile(a, levels, axis=0), pair)

        return lax.map(block, (blocks, keys))

    def rows(a):
        a = jnp.moveaxis(a, 1, 0)
        return a.reshape(len(levels), -1, *a.shape[3:])[:, : _num_rows(x)]

    of_mean, of_y = jax.tree.map(rows, every(draws, blocks, keys))
    return prediction._replace(mean_quantiles=of_mean, y_quantiles=of_y)


def function_values(
    model: Callable,
    samples: dict[str, Any],
    x: Any,
    *,
    site: str | None = None,
    batch_ndims: int = 1,
    **kwargs: Any,
) -> Array:
    """What the weights of each draw say at a few inputs, to see how they mix.

    The likelihood's mean, or the logarithms of its probabilities, which unlike a
    network's logits are the same for weights that predict the same.

    :param model: as for :func:`predict`, like all other arguments.
    :param samples: draws by site.
    :param x: the inputs.
    :param site: name of the observed site.
    :param batch_ndims: 1 for a first axis of draws; 2 for chains and draws.
    :return: array of the axes of ``samples``, then rows, then classes if there are any.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp.bnn import function_values
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> function_values(model, {"w": jnp.arange(3.0)}, jnp.ones(2)).tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """
    draws, shape = _flat(samples, batch_ndims)
    _num_rows(x)
    one = jax.tree.map(lambda a: a[0], draws)
    x = jax.tree.map(jnp.asarray, x)
    likelihood = _Likelihood(model, site, one, x, kwargs)
    draws = {name: draws[name] for name in likelihood.names}

    @jax.jit
    def every(draws, x):
        def value(draw):
            fn = likelihood(draw, x)
            log_probs = _log_probs(fn)
            return fn.mean if log_probs is None else log_probs

        return lax.map(value, draws)

    values = every(draws, x)
    return values.reshape(*shape, *values.shape[1:])


def score(prediction: Prediction, y: Any) -> dict[str, float]:
    """The usual metrics of a prediction, as plain numbers.

    Of classes: accuracy, NLL, both kinds of ECE and what is left of it by chance, Brier
    score and mean entropies. Else: RMSE, NLL and the share of ``y`` within 1.645
    standard deviations, which should be 0.9 for a Gaussian prediction.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp.bnn import predict, score
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> x = jnp.ones(2)
    >>> sorted(score(predict(model, {"w": jnp.ones(3)}, x, x), x))
    ['coverage_90', 'nll', 'rmse']
    """
    y = jnp.asarray(y)
    scores: dict[str, Any] = {}
    if prediction.log_density is not None:
        scores["nll"] = metrics.nll(prediction.log_density)
    if prediction.entropy is None:
        within = jnp.abs(y - prediction.mean) <= 1.6448536 * prediction.sd
        scores["rmse"] = metrics.rmse(prediction.mean, y)
        scores["coverage_90"] = jnp.mean(within)
    else:
        probs = prediction.mean
        scores["accuracy"] = metrics.accuracy(probs, y)
        scores["ece"] = metrics.ece(probs, y)
        scores["ece_by_chance"] = metrics.ece_by_chance(probs)
        scores["ece_mass"] = metrics.ece(probs, y, mass="mass")
        scores["brier"] = metrics.brier(probs, y)
        for name, value in prediction.entropy._asdict().items():
            scores[f"entropy_{name}"] = jnp.mean(value)
    return {name: float(value) for name, value in scores.items()}
