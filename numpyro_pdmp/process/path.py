# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""State of a simulated path, what is counted along it, and how draws are read off."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_pdmp.process.batches import Batches
from numpyro_pdmp.process.events import Envelope, EventTime
from numpyro_pdmp.process.samplers import Sampler
from numpyro_pdmp.process.sticky import MovingPart, Stuck

START, AHEAD, PROPOSAL, END, KNOWN_END, WALL = range(6)
NO_EVENT, BOUNCE, REFRESH, REVERSAL, STICKY = range(5)

#: counts beside the bins
NUM_COUNTS = 8
#: bins of the acceptance ratio: twenty over 0..2 and one above
RATIO_BINS = 21


class Stats(NamedTuple):
    """Counts since the last :func:`reset_stats`.

    Kept in two arrays, since on CPU every array of the loop's state costs time.
    """

    counts: Array  # (NUM_COUNTS + RATIO_BINS,)
    sums: Array  # (2,)

    @property
    def num_grad(self) -> Array:
        """Gradient evaluations; a Hessian-vector product counts as one more."""
        return self.counts[..., 0]

    @property
    def num_bounces(self) -> Array:
        """Accepted proposals."""
        return self.counts[..., 1]

    @property
    def num_refreshments(self) -> Array:
        """Refreshments of the velocity."""
        return self.counts[..., 2]

    @property
    def num_proposals(self) -> Array:
        """Proposed event times."""
        return self.counts[..., 3]

    @property
    def num_violations(self) -> Array:
        """Proposals with a rate above the envelope."""
        return self.counts[..., 4]

    @property
    def num_horizons(self) -> Array:
        """Envelopes that ended without a proposal."""
        return self.counts[..., 5]

    @property
    def num_nonfinite(self) -> Array:
        """Evaluations that were not finite."""
        return self.counts[..., 6]

    @property
    def num_cut_off(self) -> Array:
        """Draws that took too many gradients."""
        return self.counts[..., 7]

    @property
    def ratio_histogram(self) -> Array:
        """Counts of rate / envelope in ``RATIO_BINS`` bins."""
        return self.counts[..., NUM_COUNTS:]

    @property
    def sum_ratio(self) -> Array:
        """Sum of min(1, rate / envelope) over proposals."""
        return self.sums[..., 0]

    @property
    def sum_excess(self) -> Array:
        """Sum of rate / envelope - 1 over violations."""
        return self.sums[..., 1]

    def with_cut_off(self, cut_off: Array) -> "Stats":
        """With a draw that was cut off, or not."""
        here = jnp.arange(self.counts.size) == 7
        return self._replace(counts=self.counts + (here & cut_off))


class Path(NamedTuple):
    """State of a simulated path; times are measured from the anchor.

    Except for ``t_output``: that is measured from the start of the last stretch.
    """

    rng_key: Array
    z: Array  # (d,) anchor
    v: Array  # (d,) velocity there
    rate: Array  # (k,) signed rates there
    envelope: Envelope
    ahead_rate: Array  # (k,) signed rates at the look-ahead point
    ahead_grad: Array  # (d,) gradient there
    kind: Array  # () what waits at t_next
    t_next: Array  # ()
    which: Array  # () index of the rate that proposes
    t_refresh: Array  # () next refreshment
    z_from: Array  # (d,) start of the last stretch, which ended at the anchor
    v_from: Array  # (d,) velocity there
    t_from: Array  # () its duration
    t_output: Array  # () next draw
    t_wall: Array  # () where the gradient was not finite; negative: just turned back
    event: Array  # () what the last tick did to the velocity
    batches: Batches | None  # None on full data
    stuck: Stuck | None  # None if not sticky
    stats: Stats
    memory: Any = None  # of the event-time scheme


def reset_stats(path: Path) -> Path:
    """Set all counts to zero."""
    return path._replace(stats=jax.tree.map(jnp.zeros_like, path.stats))


def has_output(path: Path) -> Array:
    """Whether the next draw lies on the last stretch."""
    return path.t_output <= path.t_from


def _on_stretch(path: Path, sampler: Sampler, time: Array) -> tuple[Array, Array]:
    """Position and velocity after ``time`` on the last stretch."""
    if path.stuck is None:
        return sampler.flow(path.z_from, path.v_from, time)
    part = MovingPart(sampler, path.stuck.frozen_from, path.z_from)
    return part.flow(path.z_from, path.v_from, time)


def read_output(
    path: Path, sampler: Sampler, draw_time: ArrayLike
) -> tuple[Path, Array]:
    """The next draw, and wait for another.

    Where that is not settled, the anchor, and go on waiting: draws are at times that do
    not depend on the path.
    """
    time = jnp.minimum(path.t_output, path.t_from)
    z, _ = _on_stretch(path, sampler, time)
    later = path.t_output + jnp.asarray(draw_time, time.dtype)
    return path._replace(t_output=jnp.where(has_output(path), later, path.t_output)), z


def start_path(
    rng_key: Array,
    z: Array,
    v: Array,
    sampler: Sampler,
    t_refresh: ArrayLike,
    t_output: ArrayLike,
    batches: Batches | None = None,
    scheme: EventTime | None = None,
    stuck: Stuck | None = None,
) -> Path:
    """A path at ``(z, v)`` about which nothing is known yet; no evaluation.

    ``scheme`` is needed of those that remember what they have seen.
    """
    dtype, k = z.dtype, sampler.num_rates(z.size)
    zero, zeros, count = jnp.zeros((), dtype), jnp.zeros(k, dtype), jnp.zeros((), int)
    stats = Stats(jnp.zeros(NUM_COUNTS + RATIO_BINS, int), jnp.zeros(2, dtype))
    memory = None
    if scheme is not None:
        sizes = sampler.event_time(z.size), sampler.rate_size(z.size)
        memory = scheme.memory(k, *sizes, dtype)
    return Path(
        rng_key=rng_key,
        z=z,
        v=v,
        rate=zeros,
        envelope=Envelope(zeros, zeros, zero, zero),
        ahead_rate=zeros,
        ahead_grad=jnp.zeros_like(z),
        kind=jnp.full((), START),
        t_next=zero,
        which=count,
        t_refresh=jnp.asarray(t_refresh, dtype),
        z_from=z,
        v_from=v,
        t_from=zero,
        t_output=jnp.asarray(t_output, dtype),
        t_wall=zero,
        event=jnp.full((), NO_EVENT),
        batches=batches,
        stuck=stuck,
        stats=stats,
        memory=memory,
    )


def restart_path(path: Path, z: Array) -> Path:
    """Go on from ``z``, in new coordinates or for a new target: nothing is known."""
    zero = jnp.zeros_like(path.t_next)
    return path._replace(
        z=z,
        kind=jnp.full_like(path.kind, START),
        t_next=zero,
        z_from=z,
        v_from=path.v,
        t_from=zero,
        t_output=jnp.maximum(path.t_output - path.t_from, 0),
    )


def continue_from_output(path: Path, sampler: Sampler, draw_time: ArrayLike) -> Path:
    """Go on from the last draw, for a new target: forget all that came after it."""
    time = path.t_output - jnp.asarray(draw_time, path.t_output.dtype)
    z, v = _on_stretch(path, sampler, time)
    rest = path.t_from - time  # to the anchor, which is where a refreshment would be
    t_refresh = jnp.where(path.event == REFRESH, rest, path.t_refresh + rest)
    path = restart_path(path._replace(v=v, t_refresh=t_refresh), z)
    if path.stuck is not None:
        stuck = path.stuck._replace(frozen=path.stuck.frozen_from)
        path = path._replace(stuck=stuck)
    return path._replace(t_output=jnp.full_like(time, draw_time))
