# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Event times from a regression of the rates that a segment has shown so far."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_pdmp.process.events import FLOOR, Envelope, EventTime, Tuning, _validate

#: weight of the last segment in what is known of slopes before a segment begins
LEARNING = 0.05


class Readings(NamedTuple):
    """What a segment has shown of its rates, as sums; times are relative to here."""

    times: Array  # (3,) their number, mean time, and sum of squares about it
    rates: Array  # (2, k) mean rate, and sum of products of time and rate
    slopes: Array  # (2, k) mean and variance of slopes of segments, at speed 1


def _add(times: Array, rates: Array, rate: Array) -> tuple[Array, Array]:
    """One more reading, here (Welford's sums)."""
    num = times[0] + 1
    delta, gap = -times[1], rate - rates[0]
    share = (num - 1) / num
    squares = jnp.stack([num, times[1] + delta / num, times[2] + share * delta**2])
    return squares, rates + jnp.stack([gap / num, share * delta * gap])


@dataclass(frozen=True)
class RegressionBound(EventTime):
    r"""Upper confidence line of a Bayesian linear regression of the rates.

    On a segment the signed rate is taken to be a line with noise,
    :math:`g(s) = \beta_0 + \beta_1 s + \varepsilon` with
    :math:`\varepsilon \sim N(0, \sigma^2)`, a flat prior of :math:`\beta_0` and
    :math:`\beta_1 \sim N(\mu, \tau^2)`. Readings :math:`(s_i, g_i)` are the rates at
    all points of the segment where the gradient was evaluated: its start, rejected
    proposals, ends of windows. With n readings of mean :math:`(\bar s, \bar g)`,
    :math:`S = \sum (s_i - \bar s)^2` and :math:`\lambda = \sigma^2/\tau^2`,

    .. math:: \hat\beta_1 = \frac{\sum (s_i - \bar s)(g_i - \bar g) + \lambda\mu}
        {S + \lambda}, \qquad
        \rho^2(s) = \sigma^2\left(1 + \frac1n + \frac{(s - \bar s)^2}
        {S + \lambda}\right)

    are the posterior mean of the slope and the predictive variance, and events are
    proposed from :math:`\gamma(s) = \bar g + \hat\beta_1 (s - \bar s) + k\,\rho(s)`. As
    :math:`\gamma` is convex, its chord over a window lies above it: that is the
    envelope. A proposal costs one gradient, and there is no look-ahead.

    :math:`\mu` and :math:`\tau^2` are learned on the way, for each rate, by a step of
    the EM algorithm with every segment that ends. :math:`\sigma` is the noise of a
    mini-batch and, on full data, how far rates are from lines.

    The envelope depends on the past of the path alone, so where it lies above the rate
    the event times are exact, whatever the regression. It is no bound, though: beyond
    k standard deviations, and where rates are not lines, it is exceeded. That is
    counted, and warm-up sets :math:`\sigma` by it.

    Where this differs from the paper: there :math:`\sigma^2` is the variance within the
    last mini-batch; here it is one number, in units of the speed, which takes no
    second gradient.

    **References:**

    1. *Stochastic Bouncy Particle Sampler*, Ari Pakman, Dar Gilboa, David Carlson,
       Liam Paninski (2017)

    :param width: :math:`k`, standard deviations between prediction and envelope.
    :param window: how far a prediction is trusted; default about the time between
        events, refined during warm-up.
    :param noise: :math:`\sigma` at speed 1; refined during warm-up, so that the share
        ``target_violation`` of proposals exceeds the envelope.

    **Example**

    >>> from numpyro_pdmp import ZigZag, RegressionBound
    >>> scheme = RegressionBound(width=4.0)
    >>> kernel = ZigZag(potential_fn=lambda z: z**2 / 2, event_time=scheme)
    """

    width: float = 3.0
    window: float | None = None
    noise: float | None = None

    def __post_init__(self):
        _validate(1.0, width=self.width, window=self.window, noise=self.noise)

    @property
    def tunes_window(self):  # type: ignore[override]
        return self.window is None

    @property
    def tunes_offset(self):  # type: ignore[override]
        return self.noise is None

    @property
    def offset_per_noise(self):  # type: ignore[override]
        return 2 / self.width

    def tuning(self, event_time, rate_size):
        window = self.window or event_time
        noise = self.noise or 0.1 * rate_size / self.width
        return Tuning(jnp.asarray(window), jnp.asarray(noise))

    def memory(self, num_rates, event_time, rate_size, dtype):
        # Of slopes only the size is known, and that roughly.
        slopes = jnp.zeros((2, num_rates), dtype)
        slopes = slopes.at[1].set((2.5 * rate_size / event_time) ** 2)
        return Readings(jnp.zeros(3, dtype), jnp.zeros((2, num_rates), dtype), slopes)

    def _slope(self, tuning, memory, speed):
        """Posterior mean of the slope, and of its variance over the noise's."""
        mean, variance = memory.slopes
        ridge = (tuning.offset / speed) ** 2 / variance
        total = memory.times[2] + ridge
        return (memory.rates[1] + ridge * mean * speed**2) / total, 1 / total

    def remember(self, tuning, known, step):
        times, rates, slopes = known.memory
        speed, turned, moved = step.speed, step.turned, step.elapsed > 0
        times = times - jnp.array([0, 1, 0], times.dtype) * step.elapsed
        added = _add(times, rates, step.rate)
        times, rates = (
            jnp.where(moved, new, old)
            for new, old in zip(added, (times, rates), strict=True)
        )
        # A segment that ends tells its slope, up to an error.
        slope, spread = self._slope(tuning, Readings(times, rates, slopes), speed)
        gap = slope / speed**2 - slopes[0]
        error = (tuning.offset / speed) ** 2 * spread
        mean = slopes[0] + LEARNING * gap
        variance = slopes[1] + LEARNING * (gap**2 + error - slopes[1])
        variance = jnp.maximum(variance, 1e-6 * mean**2 + 1e-12)
        new = _add(jnp.zeros_like(times), jnp.zeros_like(rates), known.rate)
        return Readings(
            jnp.where(turned, new[0], times),
            jnp.where(turned, new[1], rates),
            jnp.where(turned & moved, jnp.stack([mean, variance]), slopes),
        )

    def open(self, tuning, known):
        window = tuning.window / known.speed
        noise = tuning.offset * known.speed
        num, middle, _ = known.memory.times
        slope, spread = self._slope(tuning, known.memory, known.speed)

        def upper(s):
            variance = 1 + 1 / num + (s - middle) ** 2 * spread
            line = known.memory.rates[0] + slope * (s - middle)
            return line + self.width * noise * jnp.sqrt(variance)

        left, right = upper(0.0), upper(window)
        return Envelope(left, (right - left) / window, FLOOR * noise, window)
