# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""How good predictions are, and how well they know it.

``probs`` are predictive probabilities, shape ``(rows, classes)``, already averaged over
draws; ``labels`` are integers. For two classes ``probs`` has two columns. Logarithms
are natural. All functions are pure JAX and can be compiled.
"""

from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp, xlogy
from jax.typing import ArrayLike


def _rows(probs: ArrayLike, labels: ArrayLike | None = None) -> tuple[Array, Array]:
    probs = jnp.asarray(probs)
    if probs.ndim != 2:
        raise ValueError(
            f"`probs` must have shape (rows, classes), got {probs.shape}; average over "
            "draws first, and give both classes of a binary problem."
        )
    labels = jnp.zeros(len(probs), int) if labels is None else jnp.asarray(labels)
    if labels.shape != probs.shape[:1]:
        raise ValueError(
            f"`labels` has shape {labels.shape}; `probs` of shape {probs.shape} needs "
            f"{probs.shape[:1]}."
        )
    return probs, labels.astype(int)


def accuracy(probs: ArrayLike, labels: ArrayLike) -> Array:
    """Share of rows whose most probable class is the right one."""
    probs, labels = _rows(probs, labels)
    return jnp.mean(jnp.argmax(probs, -1) == labels)


def log_mean_exp(log_density: ArrayLike, axis: int = 0) -> Array:
    r""":math:`\log \frac1n \sum_i e^{\ell_i}`, without overflow."""
    log_density = jnp.asarray(log_density)
    count = jnp.asarray(log_density.shape[axis], log_density.dtype)
    return logsumexp(log_density, axis) - jnp.log(count)


def nll(log_density: ArrayLike) -> Array:
    r"""Negative log predictive density, mean over rows.

    .. math:: -\frac1m \sum_j \log \frac1n \sum_i p(y_j \mid x_j, w_i)

    :param log_density: :math:`\log p(y_j \mid x_j, w_i)`, shape ``(draws, rows)``; or
        ``(rows,)`` if averaged already, as by :func:`log_mean_exp`.
    """
    log_density = jnp.asarray(log_density)
    if log_density.ndim == 2:
        log_density = log_mean_exp(log_density)
    return -jnp.mean(log_density)


def rmse(mean: ArrayLike, y: ArrayLike) -> Array:
    """Root of the mean squared error of the predictive mean."""
    mean, y = jnp.asarray(mean), jnp.asarray(y)
    if mean.shape != y.shape:
        raise ValueError(
            f"`mean` has shape {mean.shape} and `y` has {y.shape}; they must agree."
        )
    return jnp.sqrt(jnp.mean(jnp.square(mean - y)))


def brier(probs: ArrayLike, labels: ArrayLike) -> Array:
    """Squared distance to the one-hot label, summed over classes, mean over rows.

    In 0 to 2; for two classes that is twice the definition with one probability.
    """
    probs, labels = _rows(probs, labels)
    right = jax.nn.one_hot(labels, probs.shape[-1], dtype=probs.dtype)
    return jnp.mean(jnp.sum(jnp.square(probs - right), -1))


class Reliability(NamedTuple):
    """Bins of a reliability diagram; NaN where a bin is empty."""

    confidence: Array  # (bins,) mean probability of the predicted class
    accuracy: Array  # (bins,) share of right predictions
    num_rows: Array  # (bins,)
    edges: Array  # (bins + 1,) of the confidence


def reliability(
    probs: ArrayLike, labels: ArrayLike, num_bins: int = 15, mass: str = "width"
) -> Reliability:
    """Confidence and accuracy of rows that are binned by confidence.

    :param probs: predictive probabilities, ``(rows, classes)``.
    :param labels: the right classes.
    :param num_bins: number of bins.
    :param mass: ``"width"``: bins of equal width over 0 to 1; ``"mass"``: bins with
        equally many rows, as far as that is possible. Ties are not split in the first,
        but may be in the second.
    """
    probs, labels = _rows(probs, labels)
    if mass not in ("width", "mass"):
        raise ValueError(f"`mass` must be 'width' or 'mass', got {mass!r}.")
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be positive, got {num_bins}.")
    confidence = jnp.max(probs, -1)
    hit = (jnp.argmax(probs, -1) == labels).astype(probs.dtype)
    edges = jnp.linspace(0, 1, num_bins + 1, dtype=probs.dtype)
    if mass == "width":
        # Right-closed, so that a confidence of 1 is in the last bin.
        bins = jnp.clip(jnp.searchsorted(edges, confidence) - 1, 0, num_bins - 1)
    else:
        rank = jnp.argsort(jnp.argsort(confidence))
        bins = rank * num_bins // len(confidence)
        edges = jnp.quantile(confidence, edges)
    count = jnp.bincount(bins, length=num_bins)

    def mean(x):
        total = jnp.bincount(bins, weights=x, length=num_bins)
        return jnp.where(count > 0, total / count, jnp.nan)

    return Reliability(mean(confidence), mean(hit), count, edges)


def ece(
    probs: ArrayLike, labels: ArrayLike, num_bins: int = 15, mass: str = "width"
) -> Array:
    r"""Expected calibration error.

    .. math:: \sum_b \frac{n_b}{n}\,|\mathrm{acc}_b - \mathrm{conf}_b|

    The arguments are those of :func:`reliability`. It is biased upwards, by chance
    differences in each bin, so compare values of equal numbers of rows and bins.
    """
    bins = reliability(probs, labels, num_bins, mass)
    gap = jnp.where(bins.num_rows > 0, jnp.abs(bins.accuracy - bins.confidence), 0)
    return jnp.sum(bins.num_rows * gap) / jnp.sum(bins.num_rows)


def ece_by_chance(
    probs: ArrayLike,
    rng_key: Array | None = None,
    num_bins: int = 15,
    num_draws: int = 200,
) -> Array:
    """ECE to expect of calibrated predictions with these confidences.

    The mean of :func:`ece`, with bins of equal width, over labels that are drawn from
    the predictions themselves: what is left by chance in so few rows. A prediction
    with an ECE near this number cannot be told from a calibrated one, and the number
    grows with the share of rows of which a prediction is not sure.

    :param probs: predictive probabilities, ``(rows, classes)``.
    :param rng_key: random key. Default: a fixed one.
    :param num_bins: as for :func:`ece`.
    :param num_draws: how many times labels are drawn.

    **Example**

    >>> import jax.numpy as jnp
    >>> from numpyro_pdmp.bnn import metrics
    >>> probs = jnp.array([[0.5, 0.5]])  # one row: right or wrong, 0.5 off in any case
    >>> float(metrics.ece_by_chance(probs))
    0.5
    """
    probs, _ = _rows(probs)
    rng_key = random.key(0) if rng_key is None else rng_key
    confidence = jnp.max(probs, -1)
    edges = jnp.linspace(0, 1, num_bins + 1, dtype=probs.dtype)
    bins = jnp.clip(jnp.searchsorted(edges, confidence) - 1, 0, num_bins - 1)

    def one(key):
        hit = random.uniform(key, confidence.shape, probs.dtype) < confidence
        gap = jnp.bincount(bins, weights=hit - confidence, length=num_bins)
        return jnp.sum(jnp.abs(gap)) / len(confidence)

    return jnp.mean(lax.map(one, random.split(rng_key, num_draws)))


def entropy(probs: ArrayLike) -> Array:
    r""":math:`-\sum_k p_k \log p_k` over the last axis."""
    probs = jnp.asarray(probs)
    return -jnp.sum(xlogy(probs, probs), -1)


class Uncertainty(NamedTuple):
    """Entropy of the prediction and its parts, in nats, shape ``(rows,)``."""

    total: Array  # entropy of the mean probabilities
    aleatoric: Array  # mean entropy of a draw: noise that more data leave
    epistemic: Array  # their difference: information of the label on the weights


def uncertainty(probs: ArrayLike) -> Uncertainty:
    r"""Predictive entropy, split.

    .. math:: \underbrace{H[\mathbb E_w\, p]}_{\text{total}} =
        \underbrace{\mathbb E_w H[p]}_{\text{aleatoric}} +
        \underbrace{I(y; w)}_{\text{epistemic}}

    :param probs: probabilities of each draw, ``(draws, rows, classes)``; for large ones
        see :func:`~numpyro_pdmp.bnn.predict`, which does not need them at once.

    **References:**

    1. *Decomposition of Uncertainty in Bayesian Deep Learning*, Stefan Depeweg, José
       Miguel Hernández-Lobato, Finale Doshi-Velez, Steffen Udluft (2018)
    """
    probs = jnp.asarray(probs)
    if probs.ndim != 3:
        raise ValueError(
            f"`probs` must have shape (draws, rows, classes), got {probs.shape}."
        )
    total, aleatoric = entropy(jnp.mean(probs, 0)), jnp.mean(entropy(probs), 0)
    return Uncertainty(total, aleatoric, total - aleatoric)


def auroc(inside: ArrayLike, outside: ArrayLike) -> Array:
    r"""Area under the ROC curve of a score that should be larger outside.

    The probability that a row from outside of the distribution scores higher than one
    from inside, ties counting half: :math:`\frac{U}{mn}` with the rank-sum statistic
    :math:`U` of Mann and Whitney.

    :param inside: scores of rows in the distribution, such as predictive entropies.
    :param outside: scores of rows out of it.
    """
    inside, outside = jnp.ravel(jnp.asarray(inside)), jnp.ravel(jnp.asarray(outside))
    if inside.size == 0 or outside.size == 0:
        raise ValueError(
            f"`inside` has {inside.size} and `outside` {outside.size} scores; both "
            "must have some."
        )
    ordered = jnp.sort(inside)
    below = jnp.searchsorted(ordered, outside, side="left")
    not_above = jnp.searchsorted(ordered, outside, side="right")
    # Means, not sums, since the number of pairs may exceed what floats can count.
    return jnp.mean(0.5 * (below / inside.size + not_above / inside.size))
