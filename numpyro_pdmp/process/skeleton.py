# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""A recorded path, and exact integrals along it."""

from dataclasses import dataclass
from functools import partial
import math

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_pdmp.process.motion import elliptic_flow, linear_flow


def _one_minus_sinc(x: Array) -> Array:
    r""":math:`1 - \sin(x) / x`, without cancellation at short times."""
    small = jnp.where(jnp.abs(x) < 1, x, 0) ** 2
    series = jnp.ones_like(small)
    for k in (210, 156, 110, 72, 42, 20):
        series = 1 - small / k * series
    return jnp.where(jnp.abs(x) < 1, small / 6 * series, 1 - jnp.sinc(x / jnp.pi))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["durations", "positions", "velocities", "kinds", "center", "frozen"],
    meta_fields=["flow_name"],
)
@dataclass(frozen=True, eq=False)
class Skeleton:
    r"""Events of a path of the sampled variable :math:`x`.

    Entry 0 is the start, entry ``n`` the end, and all between them are events. A path
    that is shorter than the arrays repeats its end, with durations of zero. Moments
    are time averages over the path, without discretisation. For several paths at
    once, as ``vmap`` gives them, apply the methods under ``vmap``.

    :param durations: ``(n,)`` times from each entry to the next; kept instead of the
        times of the events because those lose digits on long paths.
    :param positions: ``(n + 1, d)``.
    :param velocities: ``(n + 1, d)`` :math:`\dot x` just after each event.
    :param kinds: ``(n + 1,)`` ``BOUNCE``, ``REFRESH``, ``REVERSAL`` or ``STICKY``;
        ``NO_EVENT`` at the start, and at an end that is not an event.
    :param center: ``(d,)`` centre :math:`c` of the ellipses.
    :param flow_name: ``"linear"`` for :math:`x + t \dot x` or ``"elliptic"`` for
        :math:`c + (x - c) \cos t + \dot x \sin t`.
    :param frozen: ``(n + 1, d)`` which coordinates do not move from there on; None for
        a path that is not sticky.

    **Example**

    >>> x, v = jnp.array([[0.0], [1.0]]), jnp.ones((2, 1))
    >>> path = Skeleton(jnp.ones(1), x, v, jnp.zeros(2, int), jnp.zeros(1))
    >>> float(path.mean()[0]), round(float(path.variance()[0]), 4)
    (0.5, 0.0833)
    """

    durations: Array
    positions: Array
    velocities: Array
    kinds: Array
    center: Array
    flow_name: str = "linear"
    frozen: Array | None = None

    @property
    @jax.jit
    def times(self) -> Array:
        """``(n + 1,)`` times of the entries; the first is 0."""
        times = lax.cummax(jnp.cumsum(self.durations))  # rounding may break the order
        return jnp.pad(times, (1, 0))

    def _locate(self, time: Array) -> tuple[Array, Array]:
        """Segments that contain the given times, and times since their starts."""
        times = self.times
        index = jnp.searchsorted(times, time, side="right") - 1
        index = jnp.clip(index, 0, self.durations.size)
        length = jnp.pad(self.durations, (0, 1))
        return index, jnp.clip(time - times[index], 0, length[index])

    @jax.jit
    def position_at(self, time: Array) -> Array:
        """Positions at the given times, shape ``time.shape + (d,)``.

        :param time: times between 0 and the end of the path; others are moved there.
        """
        index, t = self._locate(jnp.asarray(time, self.durations.dtype))
        x, v, t = self.positions[index], self.velocities[index], t[..., None]
        if self.flow_name == "linear":
            end = linear_flow(x, v, t)[0]
        else:
            end = self.center + elliptic_flow(x - self.center, v, t)[0]
        return end if self.frozen is None else jnp.where(self.frozen[index], x, end)

    @partial(jax.jit, static_argnames="num")
    def discretize(self, num: int) -> Array:
        r"""Positions at the times :math:`T/n, 2T/n, \dots, T` of a path of length
        :math:`T`, shape ``(num, d)``."""
        steps = jnp.arange(1, num + 1, dtype=self.durations.dtype)
        return self.position_at(self.times[-1] * (steps / num))

    def _pieces(self, index, time, origin):
        """Time averages over the first ``time`` of segments: the mean of
        ``x - origin``, and two vectors whose outer products add up to the covariance.
        """
        mean, *spreads = self._moving_pieces(index, time, origin)
        if self.frozen is not None:
            frozen = self.frozen[index]
            mean = jnp.where(frozen, self.positions[index] - origin, mean)
            spreads = [jnp.where(frozen, 0, a) for a in spreads]
        return mean, *spreads

    def _moving_pieces(self, index, time, origin):
        """Written from the midpoint, about which the odd terms vanish."""
        x, v, t = self.positions[index], self.velocities[index], time[:, None]
        if self.flow_name == "linear":
            x, v = linear_flow(x - origin, v, t / 2)
            return x, v * t / 12**0.5, jnp.zeros_like(x)
        x, v = elliptic_flow(x - self.center, v, t / 2)
        half, full = _one_minus_sinc(t / 2), _one_minus_sinc(t)
        mean = self.center - origin + x * (1 - half)
        cos_var = jnp.maximum(2 * half - half**2 - full / 2, 0)
        return mean, v * jnp.sqrt(full / 2), x * jnp.sqrt(cos_var)

    def _segments(self, origin):
        return self._pieces(jnp.arange(self.durations.size), self.durations, origin)

    def _average(self, values):
        weights = self.durations / jnp.sum(self.durations)
        return jnp.sum(weights[:, None] * values, 0)

    @jax.jit
    def mean(self) -> Array:
        """Time average of each coordinate."""
        origin = self._average(self.positions[:-1])  # keeps the sums small
        return origin + self._average(self._segments(origin)[0])

    @jax.jit
    def inclusion(self) -> Array:
        """Share of time in which each coordinate of a sticky path moves."""
        if self.frozen is None:
            return jnp.ones_like(self.center)
        return self._average((~self.frozen[:-1]).astype(self.durations.dtype))

    @jax.jit
    def variance(self) -> Array:
        """Variance of each coordinate over time."""
        return self._average(sum(a**2 for a in self._segments(self.mean())))

    @jax.jit
    def covariance(self) -> Array:
        """Covariance matrix of the coordinates over time."""
        weights = jnp.sqrt(self.durations / jnp.sum(self.durations))[:, None]
        a = jnp.concatenate([weights * a for a in self._segments(self.mean())])
        return jnp.matmul(a.T, a, precision=lax.Precision.HIGHEST)

    def _batch_errors(self, num_batches, power):
        """Averages over batches of equal length, less that of the whole path."""
        if power not in (1, 2):
            raise ValueError(f"power={power!r}: use 1 (mean) or 2 (variance).")
        if num_batches is None:
            num_batches = max(2, math.isqrt(self.durations.size))
        elif num_batches < 2:
            raise ValueError(f"num_batches={num_batches}: use at least 2.")
        origin = self.mean()

        def integrals(index, time):
            mean, *spreads = self._pieces(index, time, origin)
            if power == 2:
                mean = mean**2 + sum(a**2 for a in spreads) - self.variance()
            return time[:, None] * mean

        whole = integrals(jnp.arange(self.durations.size), self.durations)
        before = jnp.pad(jnp.cumsum(whole, 0), ((1, 0), (0, 0)))
        width = self.times[-1] / num_batches
        index, time = self._locate(width * jnp.arange(num_batches + 1))
        return jnp.diff(before[index] + integrals(index, time), axis=0) / width

    @partial(jax.jit, static_argnames=("num_batches", "power"))
    def standard_error(self, num_batches: int | None = None, power: int = 1) -> Array:
        """Monte Carlo standard error of :meth:`mean` or :meth:`variance`.

        :param num_batches: number of batches of equal length, which should be much
            longer than the path takes to forget its past; default the root of ``n``.
        :param power: 1 for the mean, 2 for the variance.
        """
        errors = self._batch_errors(num_batches, power)
        count = len(errors)
        return jnp.sqrt(jnp.sum(errors**2, 0) / (count * (count - 1)))

    @partial(jax.jit, static_argnames="num_batches")
    def ess(self, num_batches: int | None = None) -> Array:
        """Effective sample size of each coordinate, by batch means.

        The number of independent draws whose mean is as precise as the path's.

        :param num_batches: as in :meth:`standard_error`.
        """
        return self.variance() / self.standard_error(num_batches) ** 2
