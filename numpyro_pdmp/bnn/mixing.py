# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""How well the draws of a network's weights mix.

Weights have symmetries, so their own diagnostics say little. Better are those of what
the network computes, and of the directions in which the draws vary most and least.
"""

from typing import Any, NamedTuple
import warnings

import numpy as np

import jax

from numpyro.diagnostics import (
    autocorrelation as numpyro_autocorrelation,
    effective_sample_size,
    split_gelman_rubin,
)

#: below this many effective draws a chain's component is taken to drift. A
#: straight line has 2.9, a half wave of a cosine, which is the first component of a
#: random walk in many dimensions, has 2.7, and one random walk has 4 to 5.
DRIFT_ESS = 4.0

#: columns of the draws that are in double precision at a time
COLUMNS = 2**16


class Mixing(NamedTuple):
    """Diagnostics of some quantities, each of the shape of one draw of them."""

    ess: np.ndarray  # effective sample size, of all chains together
    r_hat: np.ndarray  # split R-hat


class Components(NamedTuple):
    """Principal components of draws."""

    scores: np.ndarray  # (chains, draws, components)
    variances: np.ndarray  # (components,) of the draws along them
    which: tuple[int, ...]  # from 0 for the largest variance
    mixing: Mixing
    drifts: bool  # whether one of them is, in a chain, at the floor of a trend


def _grouped(values: Any, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim < 2 or values.shape[1] < 4:
        raise ValueError(
            f"`{name}` must have shape (chains, draws, ...) with at least 4 draws, got "
            f"{values.shape}."
        )
    return values.astype(float)


def mixing(values: Any) -> Mixing:
    r"""Effective sample size and R-hat of each quantity.

    Of series that swing back and forth the estimator is at times negative or huge; as
    in Stan, no more than :math:`n \log_{10} n` of :math:`n` draws is given.

    :param values: shape ``(chains, draws, ...)``, such as the result of
        :func:`~numpyro_pdmp.bnn.function_values` with ``batch_ndims=2``.
    :return: NaN for what is constant.

    **Example**

    >>> import numpy as np
    >>> from numpyro_pdmp.bnn import mixing
    >>> found = mixing(np.random.default_rng(0).normal(size=(4, 500, 3)))
    >>> bool(found.ess.min() > 1000) and bool(found.r_hat.max() < 1.01)
    True
    """
    values = _grouped(values, "values")
    flat = values.reshape(*values.shape[:2], -1)
    ess, r_hat = np.full((2, flat.shape[-1]), np.nan)
    moves = np.ptp(flat, axis=(0, 1)) > 0
    if moves.any():
        found = np.atleast_1d(effective_sample_size(flat[..., moves]))
        num = flat.shape[0] * flat.shape[1]
        largest = num * np.log10(num)
        ess[moves] = np.where(found > 0, np.minimum(found, largest), largest)
        r_hat[moves] = split_gelman_rubin(flat[..., moves])
    shape = values.shape[2:]
    return Mixing(ess.reshape(shape), r_hat.reshape(shape))


def _matrix(samples: Any) -> np.ndarray:
    """Draws of all sites side by side, ``(chains, draws, weights)``."""
    leaves = [np.asarray(a) for a in jax.tree.leaves(samples)]
    return np.concatenate([a.reshape(*a.shape[:2], -1) for a in leaves], axis=-1)


def _scores(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores and variances of all components, by the smaller of two factorisations."""
    num, dim = x.shape
    mean = x.mean(0, dtype=float)
    if num > dim:
        left, sizes, _ = np.linalg.svd(x - mean, full_matrices=False)
        return left * sizes, sizes**2 / (num - 1)
    gram = np.zeros((num, num))
    for start in range(0, dim, COLUMNS):
        part = slice(start, start + COLUMNS)
        block = x[:, part] - mean[part]
        gram += block @ block.T
    values, vectors = np.linalg.eigh(gram)
    # The mean is taken out, so one of the values is zero.
    values, vectors = np.maximum(values[:0:-1], 0), vectors[:, :0:-1]
    return vectors * np.sqrt(values), values / (num - 1)


def principal_components(
    samples: Any, components: tuple[int, ...] = (0, 1, -1)
) -> Components:
    r"""Principal components of the weights, and how they mix.

    From the Gram matrix :math:`X X^T` of the :math:`n` centred draws, whose
    eigenvectors are the scores, or for more draws than weights from the singular values
    of :math:`X`; a covariance matrix of the weights is never formed. With fewer draws
    than weights the last component is the last one that the draws span.

    A warning is given if one of them has no more effective draws in a chain than a
    trend would: then the chain is still on its way, and all other numbers are too good.
    Note that a random walk in many dimensions looks just like that.

    :param samples: sites of shape ``(chains, draws, ...)``, as from
        ``mcmc.get_samples(group_by_chain=True)``, or one such array.
    :param components: which ones, from 0 for the largest variance; negative ones from
        the end.

    **Example**

    >>> import numpy as np
    >>> from numpyro_pdmp.bnn import principal_components
    >>> draws = np.random.default_rng(0).normal(size=(4, 100, 30))
    >>> principal_components(draws).drifts
    False
    """
    x = _grouped(_matrix(samples), "samples")
    chains, draws, dim = x.shape
    scores, variances = _scores(x.reshape(-1, dim))
    num = len(variances)
    if any(not -num <= i < num for i in components):
        raise ValueError(
            f"`components={components}` of {num}: {chains * draws} draws of {dim} "
            "weights have no more."
        )
    index = tuple(i % num for i in components)
    chosen = scores[:, list(index)].reshape(chains, draws, -1)
    of_chain = np.stack([mixing(c[None]).ess for c in chosen])
    least = np.nanmin(of_chain, axis=0)
    worst = int(np.nanargmin(least))
    drifts = bool(least[worst] < DRIFT_ESS)
    if drifts:
        warnings.warn(
            f"Principal component {index[worst]} has {least[worst]:.1f} effective "
            "draws in a chain, about as few as a straight line (2.9): the chain "
            "drifts. Draw more or farther apart, and do not rely on the effective "
            "sample sizes of other quantities.",
            stacklevel=2,
        )
    return Components(chosen, variances[list(index)], index, mixing(chosen), drifts)


def autocorrelation(values: Any, max_lag: int | None = None) -> np.ndarray:
    """Autocorrelation of each chain, averaged over chains.

    :param values: shape ``(chains, draws, ...)``.
    :param max_lag: largest lag. Default: a third of the draws.
    :return: shape ``(max_lag + 1, ...)``.

    **Example**

    >>> import numpy as np
    >>> from numpyro_pdmp.bnn import autocorrelation
    >>> autocorrelation(np.tile([1.0, -1.0], 50)[None], max_lag=2).round(1).tolist()
    [1.0, -1.0, 1.0]
    """
    values = _grouped(values, "values")
    lag = values.shape[1] // 3 if max_lag is None else max_lag
    if not 0 < lag < values.shape[1]:
        raise ValueError(
            f"`max_lag={max_lag}` must be positive and below the {values.shape[1]} "
            "draws of a chain."
        )
    correlations = numpyro_autocorrelation(values, axis=1, bias=True)
    return np.mean(correlations, axis=0)[: lag + 1]
