# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Exact event times for generalised linear models from mini-batches.

The potential is :math:`U(x) = P(x) + \sum_j \phi_j(f_j\cdot x)` with N rows of features
:math:`f_j` and bounded derivatives of :math:`\phi_j`. In whitened coordinates,
:math:`x = c + A z`, a row is :math:`w_j = A^T f_j`. By the mean value theorem

.. math:: \phi_j'(f_j\cdot x) - \phi_j'(f_j\cdot c) = \theta_j\,w_j\cdot z

with :math:`\theta_j` a mean of :math:`\phi_j''` between the two points. So the gradient
that a batch B of m rows gives with a control variate at c is a linear function which is
known, plus a *remainder* :math:`\frac{N}{m}\sum_{j\in B} r_j\,(w_j\cdot z)\,w_j` where

================ =========================================== =====================
control variates known part                                  remainder
================ =========================================== =====================
order 1          :math:`A^T\nabla U(c) + Q z`                :math:`r_j = \theta_j`
order 2          :math:`A^T\nabla U(c) + A^T\nabla^2U(c)A z` :math:`r_j = \theta_j -
                                                             \phi_j''(f_j\cdot c)`
================ =========================================== =====================

and :math:`Q = A^T \nabla^2 P A` for a Gaussian prior. If
:math:`l_j \le \phi_j'' \le u_j`, then :math:`|r_j| \le \kappa_j`, which is
:math:`\max(-l_j, u_j)` for order 1 and :math:`u_j - l_j` for order 2. Coordinate i of
the remainder is at most N times the average over the batch of

.. math:: \kappa_j |w_{ji}| |w_j\cdot z| \le \kappa_j |w_{ji}|
    \min\left(\|w_j\|_2 \|z\|_2,\ \|w_j\|_1 \|z\|_\infty,\
    \textstyle\sum_k |w_{jk}| |z_k|\right).

The average over any m different rows is at most that over the m largest, which is taken
factor by factor before sampling begins. If also
:math:`|\phi_j'''| \le \tau_j`, then
:math:`|r_j| \le \frac12 \tau_j |w_j\cdot z|` for order 2, and

.. math:: \tfrac12 \tau_j |w_{ji}| (w_j\cdot z)^2 \le \tfrac12 \tau_j |w_{ji}|
    \min\left(\|w_j\|_2^2 \|z\|_2^2,\ \|w_j\|_1^2 \|z\|_\infty^2\right)

are two more bounds. Whitened rows are of size :math:`N^{-1/2}`, so that the remainder
is O(1) in N by the first three, and :math:`O(N^{-1/2})` by these. For BPS the rate is
:math:`v\cdot A^T\nabla U`, and :math:`|w_j\cdot v|` takes the place of
:math:`|w_{ji}|`.

Each bound is convex along a straight line :math:`z + v s`, hence below its chord over
:math:`0 \le s \le h`: with the known part, which is linear there, it makes a line above
the rate up to the horizon h.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.glm_checks import (
    check_prior,
    check_rows,
    curvature_limits,
    flat_features,
    look_at,
    off_zeros,
    per_row,
)
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.pages import explained
from numpyro_pdmp.process.events import ExactBound
from numpyro_pdmp.process.generalised import (
    ForwardBouncyParticle,
    GeneralisedBouncyParticle,
)
from numpyro_pdmp.process.samplers import BouncyParticle, ZigZagProcess
from numpyro_pdmp.reference import reference_scale
from numpyro_pdmp.subsample import SubsampledModel, as_jax_rows
from numpyro_pdmp.zigzag import ZigZag

#: the constants are raised by this times the rounding unit
ROUNDING = 8
#: processes on straight lines whose rates are bounded here
LINEAR = (
    ZigZagProcess,
    BouncyParticle,
    GeneralisedBouncyParticle,
    ForwardBouncyParticle,
)
#: a draw is not cut off: where it ends would depend on the rates
MAX_GRAD = 2**20


class Constants(NamedTuple):
    """Factors of the bounds on the remainder; N is in them."""

    norms: Any  # (2 or 4, k) of norm and largest entry of z, and of their squares
    entries: Any  # (d, d) of its entries


def _constants(
    rows: np.ndarray,
    bound: np.ndarray,
    third: np.ndarray | None,
    size: int,
    by_coordinate: bool,
) -> Constants:
    """Maxima over rows, or means over as many of the largest as are in a batch.

    :param rows: (N, d) whitened features.
    :param bound: (N,) of the absolute value of the remainder's factor.
    :param third: (N,) of the third derivative; None for order 1.
    :param size: different rows in a batch.
    :param by_coordinate: one rate a coordinate, else one in all.
    """
    columns = np.ascontiguousarray(np.abs(rows).T)
    num_rows = columns.shape[1]
    duals = np.sqrt(np.square(columns).sum(0)), columns.sum(0)

    def largest(values):
        values = np.stack(values)
        if size == 1:
            return num_rows * values.max(1)
        values.partition(num_rows - size, axis=1)
        return num_rows * values[:, num_rows - size :].mean(1)

    def of_norms(*sizes):
        pairs = list(zip(sizes, duals, strict=True))
        values = [bound * size * dual for size, dual in pairs]
        if third is not None:
            values += [0.5 * third * size * dual**2 for size, dual in pairs]
        return largest(values)

    # One coordinate at a time: this takes no more memory than the features.
    entries = np.stack([largest(bound * column * columns) for column in columns])
    if by_coordinate:
        norms = np.stack([of_norms(column, column) for column in columns], 1)
    else:
        norms = of_norms(*duals)[:, None]
    return Constants(norms, entries)


def _remainders(constants: Constants, z: Array, v: Array, by_coordinate: bool) -> Array:
    """All bounds on the remainder at ``z``, in the rates for the velocity ``v``.

    :return: (number of bounds, k).
    """
    norms, entries = constants

    def both(y):
        return jnp.stack([jnp.linalg.norm(y), jnp.max(jnp.abs(y))])[:, None]

    powers = jnp.concatenate([both(z), both(z) ** 2])[: len(norms)]
    by_entry = entries @ jnp.abs(z)
    if by_coordinate:
        return jnp.abs(v) * jnp.concatenate([norms * powers, by_entry[None]])
    speeds = jnp.concatenate([both(v), both(v)])[: len(norms)]
    by_entry = (jnp.abs(v) @ by_entry)[None, None]
    return jnp.concatenate([norms * powers * speeds, by_entry])


@explained("subsampling")
def glm_bound(
    model: Callable,
    reference: Any,
    *model_args: Any,
    features: Any,
    curvature: Any,
    third_derivative: Any = None,
    prior_curvature: Any = None,
    kernel: type[PDMPKernel] = ZigZag,
    **model_kwargs: Any,
) -> dict[str, Any]:
    r"""Options with which a kernel is exact on a subsampled generalised linear model.

    The potential is :math:`P(x) + \sum_j \phi_j(f_j\cdot x)`: the prior, and a function
    of a linear predictor for each row of the one subsampled plate. A bound on
    :math:`\phi_j''` bounds the rate of every mini-batch with control variates around
    the reference, so that thinning is exact: ZigZag with control variates of Bierkens,
    Fearnhead and Roberts (2019). With a bound on :math:`\phi_j'''` control variates are
    of order 2, and proposals in vain become rare as the data grow. The module's
    docstring has the mathematics.

    Some rows of the model are compared with what is said of them. That finds mistakes,
    but is no proof.

    ================= ==================== ================================
    likelihood        ``curvature``        ``third_derivative``
    ================= ==================== ================================
    logistic          1/4                  :math:`1/(6\sqrt 3) < 0.09623`
    binomial, n tries n/4, one a row       0.09623 n
    probit            1                    0.2958
    normal            :math:`1/\sigma^2`   0
    ================= ==================== ================================

    :param model: Python callable containing NumPyro primitives, with one subsampled
        plate.
    :param reference: the scale, kept as it is, whose centre is that of the control
        variates: see :func:`~numpyro_pdmp.laplace_reference`. The closer it is to the
        posterior, the tighter is the bound.
    :param model_args: arguments of the model.
    :param features: (N, d) the :math:`f_j`, in the order of the flat unconstrained
        vector (sites by name); or a dict with an array of shape (N, \*shape) for each
        site, such as ones for an intercept.
    :param curvature: upper bound on all :math:`\phi_j''`, which are not negative; else
        a pair of a lower and an upper bound. Numbers, or arrays with one a row.
    :param third_derivative: bound on all :math:`|\phi_j'''|`, for control variates of
        order 2. None: order 1.
    :param prior_curvature: bound on the absolute second derivatives of a prior of
        independent coordinates; a number, or one a coordinate. None: the prior is
        Gaussian.
    :param kernel: :class:`~numpyro_pdmp.ZigZag`, or a kernel of the bouncy particle
        sampler.
    :param model_kwargs: keyword arguments of the model.
    :return: options of the kernel.

    **Example**

    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_pdmp import Scale, ZigZag, check, glm_bound
    >>> def model(x, y):
    ...     b = numpyro.sample("b", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(y), subsample_size=10):
    ...         x, y = (numpyro.subsample(a, event_dim=0) for a in (x, y))
    ...         numpyro.sample("y", dist.Bernoulli(logits=b * x), obs=y)
    >>> x = random.normal(random.key(0), (1000,))
    >>> y = random.bernoulli(random.key(1), 0.5, (1000,)).astype(float)
    >>> scale = Scale(jnp.zeros(1), jnp.full(1, 0.06))
    >>> options = glm_bound(model, scale, x, y, features={"b": x}, curvature=0.25)
    >>> mcmc = MCMC(ZigZag(model, **options), num_warmup=100, num_samples=500,
    ...             progress_bar=False)
    >>> mcmc.run(random.key(2), x, y)
    >>> float(check(mcmc).violation_rate)
    0.0
    """
    process = getattr(kernel, "process", None)
    if process not in LINEAR:
        raise ValueError(
            f"`kernel` must be ZigZag, BPS or one of its kin, got {kernel!r}: the "
            "bound is one along straight lines."
        )
    if reference is None:
        raise ValueError(
            "`reference` is missing: the bound is one around its centre, in its "
            "coordinates. See `laplace_reference`."
        )
    subsampled = SubsampledModel(model, model_args, model_kwargs)
    if len(subsampled.plates) != 1:
        raise ValueError(
            "`glm_bound` needs a model with one subsampled plate; this one has "
            f"{sorted(subsampled.plates) or 'none'}."
        )
    ((plate, (num_rows, size)),) = subsampled.plates.items()
    args, kwargs = as_jax_rows((model_args, model_kwargs), subsampled.plates)
    scale = reference_scale(reference, subsampled.shapes)
    dim, dtype = scale.center.size, scale.center.dtype
    matrix = flat_features(features, subsampled)
    scale = off_zeros(scale, matrix)
    lower, upper = curvature_limits(curvature, num_rows)
    third, order = None, 1
    if third_derivative is not None:
        third, order = per_row("third_derivative", third_derivative, num_rows), 2
        if np.any(third < 0):
            raise ValueError(
                f"`third_derivative` must not be negative, got {third_derivative!r}."
            )
    found = look_at(model, args, kwargs, plate, scale, order, matrix)
    check_rows(found, lower, upper, third)
    prior_limits = check_prior(found, prior_curvature, dim)

    rows = np.asarray(jax.jit(jax.vmap(scale.gradient))(jnp.asarray(matrix, dtype)))
    by_coordinate = process is ZigZagProcess
    limit = np.maximum(upper, -lower) if order == 1 else upper - lower
    constants = _constants(rows, limit, third, size, by_coordinate)
    constants = Constants(*(jnp.asarray(a, dtype) for a in constants))
    linear = found.prior[0] if found.curvature is None else found.curvature
    if prior_limits is not None:  # then nothing is known of the prior but its bound
        linear = linear - found.prior[0]
    # Rounding in the gradients of rows and in their sum over all data.
    predictor = np.max(np.abs(matrix) @ np.abs(np.asarray(scale.center)))
    derivative = float(np.max(np.abs(found.first), initial=0))
    error = ROUNDING * jnp.finfo(dtype).eps * num_rows * np.abs(rows).max(0)
    error = jnp.asarray(error * (derivative + limit.max() * predictor), dtype)
    longest = 2 * process().event_time(dim)
    gradient, origin = found.gradient, scale._replace(center=jnp.zeros(dim, dtype))

    def rates(v, g):
        return v * g if by_coordinate else (v @ g)[None]

    def prior_part(z, v):
        if prior_limits is None:
            return 0.0
        force = prior_limits * jnp.abs(origin.direction(z))
        if not by_coordinate:
            return (jnp.abs(origin.direction(v)) @ force)[None]
        factor = jax.vmap(origin.direction, out_axes=1)(jnp.eye(dim, dtype=dtype))
        return jnp.abs(v) * (force @ jnp.abs(factor))

    def remainders(z, v):
        return _remainders(constants, z, v, by_coordinate) + prior_part(z, v)

    def bound(x, direction):
        z, v = scale.whiten(x), origin.whiten(direction)
        value, slope = rates(v, gradient + linear @ z), rates(v, linear @ v)
        start = remainders(z, v)
        # As a rule a proposal comes before the horizon: an end costs a gradient, too.
        total = jnp.sum(jnp.maximum(value + jnp.min(start, 0), 0))
        horizon = longest / (1 + total * longest / 3)
        end = remainders(z + horizon * v, v)
        best = jnp.argmin(start + end, 0)[None]
        start, end = (jnp.take_along_axis(a, best, 0)[0] for a in (start, end))
        value = value + start + rates(jnp.abs(v), error)
        return value, slope + (end - start) / horizon, horizon

    return {
        "event_time": ExactBound(bound, renew=True),
        "reference": scale,
        "adapt_mass_matrix": False,
        "control_variates": order,
        "batching": "without_replacement",
        "max_grad": MAX_GRAD,
    }
