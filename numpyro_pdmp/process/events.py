# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Event-time schemes: from what is known of the signed rates to an envelope.

The simulation loop proposes event times from a Poisson process with rate
:math:`h_i(s) = \max(0, a_i + b_i s) + c`, the *envelope*, and accepts a proposal with
probability :math:`\max(0, g_i(s)) / h_i(s)` (thinning). Where :math:`h_i \ge g_i` the
result is exact; a proposal with :math:`g_i > h_i` is a *violation*, and is counted.

A scheme is a subclass of :class:`EventTime`: it says what it wants to be told
(``look_ahead``, ``uses_slope``) and turns that into an :class:`Envelope`.
"""

from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

#: share of the offset that is added even where the raised line is below zero
FLOOR = 0.25


class Envelope(NamedTuple):
    r"""Rates :math:`\max(0, a_i + b_i s) + c` for times ``s`` after this point."""

    value: Array  # (k,) a
    slope: Array  # (k,) b
    offset: Array  # () c
    horizon: Array  # () trusted up to here, then renewed


class Tuning(NamedTuple):
    """Numbers of a scheme that warm-up may set."""

    window: Array  # () how far an envelope reaches
    offset: Array  # () added to every clamped line


class Known(NamedTuple):
    """What the loop knows at the current point of the path."""

    position: Array  # (d,) sampled variable x
    direction: Array  # (d,) its time derivative
    speed: Array  # () root mean square of v, about 1
    rate: Array  # (k,) signed rates here
    slope: Array  # (k,) their time derivatives (if ``uses_slope``, else zeros)
    ahead: Array  # (k,) signed rates at the look-ahead point (if ``look_ahead``)
    ahead_time: Array  # () time from here to the look-ahead point
    last_rate: Array  # (k,) rates at the last point before this one
    last_time: Array  # () time from that point to here
    envelope: Envelope  # the envelope in force until here, as seen from the last point
    memory: Any = None  # of the scheme, if it has one


class Step(NamedTuple):
    """How the path came to the current point, for schemes with a memory."""

    elapsed: Array  # () time since the last point; 0 if the path did not move on
    rate: Array  # (k,) signed rates on arrival, before the velocity turned
    speed: Array  # () speed on arrival
    turned: Array  # () whether a segment begins here


@dataclass(frozen=True)
class EventTime:
    """Base of the schemes."""

    #: evaluate the rates at a point ahead before proposing
    look_ahead = False
    #: the gradient of the look-ahead point is valid at the envelope's horizon
    ends_ahead = False
    #: wants the time derivative of the rates (one Hessian-vector product a tick)
    uses_slope = False
    #: warm-up may set the window, to this many mean times between events
    tunes_window = False
    window_per_event = 1.0
    #: warm-up may set the offset
    tunes_offset = False
    #: its first value, in standard deviations of the rate of a mini-batch
    offset_per_noise = 2.0
    #: rates stay as they are over a window, and need no envelope
    frozen = False
    #: reject proposals whose ratio of rate to envelope exceeds this
    max_ratio = float("inf")

    def tuning(self, event_time: float, rate_size: float) -> Tuning:
        """Starting values of what warm-up may change.

        :param event_time: mean time between events to expect.
        :param rate_size: size of the signed rates to expect.
        """
        raise NotImplementedError

    def memory(
        self, num_rates: int, event_time: float, rate_size: float, dtype: Any
    ) -> Any:
        """What is to be carried along the path, to begin with; None for nothing.

        :param num_rates: number of signed rates.
        :param event_time: mean time between events to expect.
        :param rate_size: size of the signed rates to expect.
        :param dtype: of the path.
        """
        return None

    def remember(self, tuning: Tuning, known: Known, step: Step) -> Any:
        """The memory with what is known here; not called if there is none."""
        raise NotImplementedError

    def look(self, tuning: Tuning, speed: Array, t_refresh: Array) -> Array:
        """Time of the look-ahead evaluation."""
        raise NotImplementedError

    def open(self, tuning: Tuning, known: Known) -> Envelope:
        """Envelope at the start of a segment or of a new window."""
        raise NotImplementedError

    def reject(self, tuning: Tuning, known: Known) -> Envelope:
        """Envelope after a rejected proposal."""
        return self.open(tuning, known)


def _validate(alpha: float, R: float = 1.0, **times_and_offset: float | None) -> None:
    """Raise for parameters outside their range."""
    if not alpha >= 1:
        raise ValueError(f"`alpha` must be at least 1, got {alpha}.")
    if not R > 0:
        raise ValueError(f"`R` must be positive, got {R}.")
    for name, value in times_and_offset.items():
        if value is None:
            continue
        if name == "offset" and not 0 <= value < math.inf:
            raise ValueError(f"`offset` must not be negative, got {value}.")
        if name != "offset" and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be a positive time, got {value}.")


def _inflate(rate: Array, alpha: float, offset: Array) -> Array:
    r"""Raise a signed rate: :math:`\max(g, \alpha g) + c`."""
    return jnp.maximum(rate, alpha * rate) + offset


@dataclass(frozen=True)
class Interpolation(EventTime):
    r"""Lines through the signed rate at both ends of a look-ahead window.

    The paper's Algorithm 2, repaired. It interpolates the *signed* rate, so a rate
    that is zero now and positive soon is seen; it trusts a line only between two
    points at which the rate was evaluated, never beyond; and it stops at the
    refreshment. A rejected proposal becomes the new left end. Exact when the signed
    rate is linear along the path (BPS and ZigZag on Gaussians); otherwise violations
    happen where the rate is concave between its two ends, and the bias they leave is
    of second order in the window. Use :class:`PublishedInterpolation` for the
    algorithm exactly as printed.

    :param alpha: factor :math:`\alpha \ge 1` on positive rates (Equation 12).
    :param t_init: look-ahead window in process time; default about the time between
        events, refined during warm-up.
    :param R: proposals with a ratio above ``R`` are rejected (Section 3.2).
    :param offset: added to the clamped line, so that proposals are made, and violations
        noticed, everywhere; refined during warm-up.

    **Example**

    >>> from numpyro_pdmp import BPS, Interpolation
    >>> scheme = Interpolation(alpha=1.1)
    >>> kernel = BPS(potential_fn=lambda z: z**2 / 2, event_time=scheme)
    """

    alpha: float = 1.0
    t_init: float | None = None
    R: float = 2.0
    offset: float | None = None
    look_ahead = True
    ends_ahead = True
    window_per_event = 1.5

    def __post_init__(self):
        _validate(self.alpha, self.R, t_init=self.t_init, offset=self.offset)

    @property
    def max_ratio(self):  # type: ignore[override]
        return self.R

    @property
    def tunes_window(self):  # type: ignore[override]
        return self.t_init is None

    @property
    def tunes_offset(self):  # type: ignore[override]
        return self.offset is None

    def tuning(self, event_time, rate_size):
        window = self.t_init or self.window_per_event * event_time
        offset = 0.1 * rate_size if self.offset is None else self.offset
        return Tuning(jnp.asarray(window), jnp.asarray(offset))

    def look(self, tuning, speed, t_refresh):
        # Equal windows up to the refreshment, rather than a short last one.
        window = tuning.window / speed
        split = t_refresh / jnp.ceil(t_refresh / window)
        return jnp.where(jnp.isfinite(t_refresh), split, window)

    def open(self, tuning, known):
        offset = tuning.offset * known.speed
        left = _inflate(known.rate, self.alpha, offset)
        right = _inflate(known.ahead, self.alpha, offset)
        width = known.ahead_time
        slope = (right - left) / jnp.where(width > 0, width, 1)
        return Envelope(left, slope, FLOOR * offset, width)


@dataclass(frozen=True)
class PublishedInterpolation(EventTime):
    r"""The paper's Algorithm 2 as printed, with the corrected Equation 11.

    Interpolates the *clamped* rate between now and ``t_init``, discards the second
    point, and extends the line through the last two points after each rejection,
    without limit. For comparison only: two zero readings give a zero envelope, and a
    convex rate is cut off, so the result is biased even on Gaussians (see the bias
    table in the documentation). The printed algorithm simulates proposals past the
    refreshment and then takes the earlier of the two; stopping there, as here, has
    the same law.

    :param alpha: factor :math:`\alpha \ge 1` of Equation 12.
    :param t_init: second point of the first line.
    :param R: proposals with a ratio above ``R`` are rejected.

    **Example**

    >>> from numpyro_pdmp import BPS, PublishedInterpolation
    >>> scheme = PublishedInterpolation(alpha=1.2)
    >>> kernel = BPS(potential_fn=lambda z: z**2 / 2, event_time=scheme)
    """

    alpha: float = 1.0
    t_init: float = 1.0
    R: float = 2.0
    look_ahead = True

    def __post_init__(self):
        _validate(self.alpha, self.R, t_init=self.t_init)

    @property
    def max_ratio(self):  # type: ignore[override]
        return self.R

    def tuning(self, event_time, rate_size):
        return Tuning(jnp.asarray(self.t_init), jnp.asarray(0.0))

    def look(self, tuning, speed, t_refresh):
        return tuning.window

    def _line(self, earlier, later, width):
        slope = (later - earlier) / jnp.where(width > 0, width, 1)
        return self.alpha * slope

    def open(self, tuning, known):
        left, right = jnp.maximum(known.rate, 0), jnp.maximum(known.ahead, 0)
        slope = self._line(left, right, known.ahead_time)
        horizon = jnp.full_like(tuning.window, jnp.inf)
        return Envelope(self.alpha * left, slope, tuning.offset, horizon)

    def reject(self, tuning, known):
        left, right = jnp.maximum(known.last_rate, 0), jnp.maximum(known.rate, 0)
        slope = self._line(left, right, known.last_time)
        horizon = jnp.full_like(tuning.window, jnp.inf)
        return Envelope(self.alpha * right, slope, tuning.offset, horizon)


@dataclass(frozen=True)
class Tangent(EventTime):
    r"""Tangent lines: value and slope of the signed rate at the current point.

    The slope comes from a Hessian-vector product in forward mode over the gradient,
    so a tick costs about two gradients and needs no look-ahead. Exact when the
    signed rate is linear along the path; otherwise the line is trusted for a window
    only.

    :param alpha: factor on positive rates.
    :param window: how far a tangent is trusted; default about the time between
        events, refined during warm-up.
    :param offset: added to the clamped line, so that proposals are made, and violations
        noticed, everywhere; refined during warm-up.

    **Example**

    >>> from numpyro_pdmp import BPS, Tangent
    >>> kernel = BPS(potential_fn=lambda z: z**2 / 2, event_time=Tangent(window=0.5))
    """

    alpha: float = 1.0
    window: float | None = None
    offset: float | None = None
    uses_slope = True

    def __post_init__(self):
        _validate(self.alpha, window=self.window, offset=self.offset)

    @property
    def tunes_window(self):  # type: ignore[override]
        return self.window is None

    @property
    def tunes_offset(self):  # type: ignore[override]
        return self.offset is None

    def tuning(self, event_time, rate_size):
        window = self.window or event_time
        offset = 0.1 * rate_size if self.offset is None else self.offset
        return Tuning(jnp.asarray(window), jnp.asarray(offset))

    def open(self, tuning, known):
        window = tuning.window / known.speed
        offset = tuning.offset * known.speed
        left = _inflate(known.rate, self.alpha, offset)
        right = _inflate(known.rate + window * known.slope, self.alpha, offset)
        return Envelope(left, (right - left) / window, FLOOR * offset, window)


Bound = Callable[[Array, Array], tuple[Array, ...]]


@dataclass(frozen=True)
class ExactBound(EventTime):
    r"""The user's own upper bound on the rates: exact sampling.

    :param bound: function of the position :math:`x` and its time derivative
        :math:`\dot x` (both flat) at the start of a segment, returning ``(a, b)``
        with :math:`g_i(s) \le a_i + b_i s` for all :math:`s \ge 0` on the segment;
        scalars or vectors with one entry a rate. A constant bound has ``b = 0``.
        With a third item, a time, the bound is one up to there, and then renewed.
        A bound that is exceeded is counted as a violation, and
        :func:`numpyro_pdmp.check` calls it an error.
    :param renew: evaluate the bound anew at every rejected proposal. Else the one of
        the segment's start goes on.

    **Example**

    On a standard Gaussian in two dimensions the rate of BPS is a line:

    >>> from numpyro_pdmp import BPS, ExactBound
    >>> scheme = ExactBound(lambda x, v: (v @ x, v @ v))
    >>> kernel = BPS(potential_fn=lambda z: z @ z / 2, event_time=scheme)
    """

    bound: Bound
    renew: bool = False

    def tuning(self, event_time, rate_size):
        return Tuning(jnp.asarray(event_time), jnp.asarray(0.0))

    def open(self, tuning, known):
        a, b, *horizon = self.bound(known.position, known.direction)
        like = known.rate
        for array in (a, b):
            if jnp.shape(array) not in ((), like.shape):
                raise ValueError(
                    f"`bound` gave an array of shape {jnp.shape(array)}; the sampler "
                    f"has rates of shape {like.shape}."
                )
        return Envelope(
            jnp.broadcast_to(jnp.asarray(a, like.dtype), like.shape),
            jnp.broadcast_to(jnp.asarray(b, like.dtype), like.shape),
            tuning.offset,
            jnp.full_like(tuning.window, horizon[0] if horizon else jnp.inf),
        )

    def reject(self, tuning, known):
        if self.renew:
            return self.open(tuning, known)
        old = known.envelope
        return old._replace(
            value=old.value + old.slope * known.last_time,
            horizon=old.horizon - known.last_time,
        )


@dataclass(frozen=True)
class Euler(EventTime):
    r"""Rates that stay as they are for a step: no envelope, one gradient a step.

    For mini-batches whose rates cannot be bounded. Biased by :math:`O(\epsilon)` in the
    step, more so with noisy gradients; see
    :func:`~numpyro_pdmp.process.euler.make_euler_tick`.

    :param step: length of a step in process time; default a twentieth of the time
        between events on a Gaussian.

    **Example**

    >>> from numpyro_pdmp import BPS, Euler
    >>> kernel = BPS(potential_fn=lambda z: z**2 / 2, event_time=Euler(step=0.1))
    """

    step: float | None = None
    frozen = True

    def __post_init__(self):
        _validate(1.0, step=self.step)

    def tuning(self, event_time, rate_size):
        return Tuning(jnp.asarray(self.step or 0.05 * event_time), jnp.asarray(0.0))


_SCHEMES: dict[str, type[EventTime]] = {
    "euler": Euler,
    "interpolation": Interpolation,
    "published": PublishedInterpolation,
    "tangent": Tangent,
}


def event_time_scheme(event_time: str | EventTime) -> EventTime:
    """The scheme of the given name, with its default settings.

    :param event_time: ``"interpolation"``, ``"published"``, ``"tangent"``,
        ``"regression"``, ``"euler"``, or a scheme, which is returned as it is.

    **Example**

    >>> event_time_scheme("tangent")
    Tangent(alpha=1.0, window=None, offset=None)
    """
    # Here, since it builds on this module.
    from numpyro_pdmp.process.regression import RegressionBound

    schemes = _SCHEMES | {"regression": RegressionBound}
    if isinstance(event_time, EventTime):
        return event_time
    if isinstance(event_time, str) and event_time in schemes:
        return schemes[event_time]()
    names = ", ".join(f'"{name}"' for name in schemes)
    raise ValueError(
        f"event_time={event_time!r} is not an event-time scheme. Use one of {names}, "
        "or a scheme with settings of its own, such as Tangent(window=0.5)."
    )
