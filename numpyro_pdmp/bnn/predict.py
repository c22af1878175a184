# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions of stored draws, and their scores."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_pdmp.bnn import metrics
from numpyro_pdmp.bnn.likelihood import (
    Likelihood,
    in_blocks,
    log_probabilities,
    num_rows,
)
from numpyro_pdmp.bnn.streaming import Prediction, StreamingPrediction

#: entries of draws x rows x classes that quantiles look at together
BLOCK_ENTRIES = 2**24


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
    size = max(1, min(batch_size, BLOCK_ENTRIES // (num * width), num_rows(x)))
    blocks = in_blocks(x, size)
    key = random.key(0) if rng_key is None else rng_key
    keys = random.split(key, len(jax.tree.leaves(blocks)[0]))

    def of_draw(args, x):
        draw, key = args
        fn = likelihood(draw, x)
        log_probs = log_probabilities(fn)
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
        return a.reshape(len(levels), -1, *a.shape[3:])[:, : num_rows(x)]

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
    num_rows(x)
    one = jax.tree.map(lambda a: a[0], draws)
    x = jax.tree.map(jnp.asarray, x)
    likelihood = Likelihood(model, site, one, x, kwargs)
    draws = {name: draws[name] for name in likelihood.names}

    @jax.jit
    def every(draws, x):
        def value(draw):
            fn = likelihood(draw, x)
            log_probs = log_probabilities(fn)
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
