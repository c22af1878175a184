# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Rows of unequal influence: how noisy mini-batches are, and how to make them less so.

With :math:`g_j` the directional derivative of row j (less its control variate), the
estimate from m rows, drawn with probabilities :math:`p_j` and weighed by
:math:`1 / (m p_j)`, has the variance
:math:`(\sum_j g_j^2 / p_j - (\sum_j g_j)^2) / m`, which is least for
:math:`p_j \propto |g_j|`. Half of the probability stays uniform, so that no
row counts more than twice as much as it would otherwise. As for the Zig-Zag process on
imbalanced data (Sen, Sachs, Lu, Dunson 2020).

If the rows are in random order, m consecutive ones from a random row on are as good as
m random ones, and come faster from memory that does not fit into a cache. Whether they
are is seen from the sums of :math:`g_j` over such runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_pdmp.batch import Batch, Plates
from numpyro_pdmp.control_variates import ControlVariate, of_order, taylor
from numpyro_pdmp.moments import AnyScale
from numpyro_pdmp.rows import WeightedRows
from numpyro_pdmp.subsample import SubsampledModel

#: cost of a gradient with control variates of order 0, 1 and 2, and how many more
#: gradients a unit of noise in the rates takes: both rough
GRADIENT_COSTS, NOISE_COST = (1.0, 1.5, 2.5), 2.5
#: what unequal probabilities of rows cost, as a factor
UNEQUAL_COST = 1.2
#: runs of consecutive rows are taken from so many rows on, if they are many times as
#: long as a run, and if they have hardly more noise
MANY_ROWS, MANY_RUNS, MORE_NOISE = 2**16, 64, 1.25
#: a large model's path begins at the centre: its first envelope is for places that are
#: so much nearer to it than typical ones, where a network's gradients can be enormous
NEAR = 0.1
#: rows of the other plates, while the rows of one are looked at
OTHER_ROWS = 256


#: in place of probabilities: all rows have the same, in runs of consecutive ones
RUNS: dict = {}


class Importance(NamedTuple):
    """Probabilities of the rows of a plate, as the shares they have in a table."""

    table: Array  # (2N,) rows, each at least once
    weights: Array  # (N,) inverse of their probabilities, 1 for equal ones


def _corners(scale: AnyScale) -> Array:
    """Pairs of corners of a cube about the centre, whitened: (4, 2, d)."""
    corners = np.random.default_rng(0).choice([-1.0, 1.0], (4, 2, scale.center.size))
    return jnp.asarray(corners, scale.center.dtype)


def _derivatives(
    model: SubsampledModel,
    plate: str,
    scale: AnyScale,
    control_variates: Sequence[ControlVariate | None],
    batch: Batch,
    corners: Array,
) -> Array:
    """Each row's part in the rate: (corners, control variates, rows of the batch)."""
    size, num = model.plates[plate][0], len(batch[plate])

    def derivatives(pair):
        x, direction = scale.position(pair[0]), scale.direction(pair[1])

        def energies(x):
            return model.row_energies(x, batch)[1][plate]

        def derivative(x):
            return jax.jvp(energies, (x,), (direction,))[1]

        def known(cv):
            return 0 if cv is None else taylor(derivative, x, cv)

        here = derivative(x)
        found = jnp.stack([here - known(cv) for cv in control_variates])
        return found * (num / size)  # rows of a batch are scaled up to all data

    return lax.map(derivatives, corners).astype(scale.center.dtype)


def row_variance(
    model: SubsampledModel,
    plate: str,
    scale: AnyScale,
    control_variates: Sequence[ControlVariate | None],
) -> Array:
    """Variance over rows of a row's part in the rate, from one batch of them.

    As :func:`row_spreads` would tell for all rows, for models that are too large for
    passes over all data.

    :return: (2, control variates); first at typical places, then near the centre.
    """
    batch = model.pilot_batch(64)
    corners = _corners(scale)
    nearer = corners * jnp.array([[NEAR], [1.0]], corners.dtype)
    corners = jnp.concatenate([corners, nearer])
    found = _derivatives(model, plate, scale, control_variates, batch, corners)
    return jnp.mean(jnp.var(found, axis=-1, ddof=1).reshape(2, 4, -1), axis=1)


def row_spreads(
    model: SubsampledModel,
    plate: str,
    scale: AnyScale,
    control_variates: Sequence[ControlVariate | None],
    chunk_size: int | None = None,
) -> tuple[Array, Array, Array]:
    r"""Typical size of each row's part in the rate :math:`v \cdot \nabla U`.

    At corners of a cube about the centre of ``scale``, as far from it as draws of a
    Gaussian, in directions to other corners. One forward-mode pass over the data for
    each.

    :param model: the model.
    :param plate: name of the plate.
    :param scale: centre and scale of the posterior.
    :param control_variates: what is compared, with flat centres.
    :param chunk_size: rows evaluated at once.
    :return: (control variates, rows) root mean squares, and (control variates,) those
        of the sum over rows and of runs of consecutive rows as an estimate of it.
    """
    (size, length), dtype = model.plates[plate], scale.center.dtype
    chunk_size = model.chunk_size if chunk_size is None else chunk_size
    num = min(max(chunk_size, length), size)
    num_runs = num // length  # in a block
    corners = _corners(scale)
    others = model.pilot_batch(OTHER_ROWS)

    def block(carry, start):
        spreads, sums, runs, count = carry
        first = jnp.minimum(start, size - num)  # the last block may overlap
        rows = first + jnp.arange(num, dtype=jnp.int32)
        batch = {**others, plate: rows}
        found = _derivatives(model, plate, scale, control_variates, batch, corners)
        new = jnp.sqrt(jnp.mean(found**2, 0))
        spreads = lax.dynamic_update_slice(spreads, new, (0, first))
        sums += jnp.sum(found, -1, where=rows >= start)
        run = found[..., : num_runs * length].reshape(4, -1, num_runs, length).sum(-1)
        fresh = rows[: num_runs * length : length] >= start
        runs += jnp.sum(run**2, (0, 2), where=fresh) / 4
        return (spreads, sums, runs, count + jnp.sum(fresh)), None

    kinds = len(control_variates)
    zero = (
        jnp.zeros((kinds, size), dtype),
        jnp.zeros((4, kinds), dtype),
        jnp.zeros(kinds, dtype),
        jnp.zeros((), int),
    )
    carry, _ = lax.scan(block, zero, jnp.arange(0, size, num))
    spreads, sums, runs, count = carry
    runs = size / length * jnp.sqrt(runs / count)
    return spreads, jnp.sqrt(jnp.mean(sums**2, 0)), runs


def make_importance(spreads: Array) -> Importance:
    """Probabilities that are half uniform and half as ``spreads``, to whole entries."""
    num = spreads.size
    spreads = jnp.where(jnp.isfinite(spreads), spreads, 0)
    share = spreads / jnp.maximum(jnp.sum(spreads), jnp.finfo(spreads.dtype).tiny)
    counts = 1 + jnp.floor(num * share).astype(jnp.int32)
    used = jnp.sum(counts)
    rows = jnp.arange(num, dtype=jnp.int32)
    entries = jnp.arange(2 * num, dtype=jnp.int32)
    table = jnp.repeat(rows, counts, total_repeat_length=2 * num)
    # What rounding has left over goes to the first rows, one each.
    table = jnp.where(entries < used, table, entries - used)
    counts += rows < 2 * num - used
    return Importance(table, (2 / counts).astype(spreads.dtype))


class Plan(NamedTuple):
    """How batches are best drawn and used."""

    order: Array  # () of the control variates
    kind: Array  # () of rows: 0 any, 1 those of unequal probabilities, 2 runs
    importance: dict[str, Importance] | None  # those probabilities
    noise: Array  # () standard deviation of the rate over batches, at typical places
    near: Array  # () the same where a path begins: near the centre of a large model


def plan_batches(
    model: SubsampledModel,
    scale: AnyScale,
    control: ControlVariate | None,
    orders: tuple[int, ...],
    batching: str,
) -> Plan:
    """Least cost, from the noise of every row, or of a batch's if the model is large.

    :param model: the model.
    :param scale: centre and scale of the posterior.
    :param control: control variate of the highest order.
    :param orders: orders to choose from.
    :param batching: as of the kernels.
    """
    controls = [of_order(control, k) for k in orders]
    repeats = batching in ("with_replacement", "contiguous")
    equal, unequal, runs, near = (jnp.zeros(()) for _ in range(4))
    tables, many = {}, True
    # Nor is there a place for a number of each row, if they are on many devices.
    all_rows = model.is_small and model.shards is None
    if model.shards is not None and batching == "importance":
        raise ValueError(
            "`batching='importance'` is not possible with rows that are spread over "
            "devices; use 'without_replacement', 'with_replacement' or 'contiguous'."
        )
    if not all_rows and batching == "auto":
        batching = "without_replacement"
    for name, (size, subsample_size) in model.plates.items():
        # Rows that are not drawn twice leave less to chance.
        left = 1.0 if repeats else (size - subsample_size) / (size - 1)
        left = left / subsample_size
        if not all_rows and batching != "importance":
            variances = row_variance(model, name, scale, controls)
            equal += left * size**2 * variances[0]
            near += left * size**2 * variances[1]
            unequal += jnp.inf
            continue
        spreads, total, run = row_spreads(model, name, scale, controls)
        tables[name] = jax.vmap(make_importance)(spreads)
        squares, square = size * spreads**2, total**2
        weighted = tables[name].weights * squares
        equal += left * jnp.maximum(jnp.sum(squares, -1) - square, 0)
        unequal += jnp.maximum(jnp.sum(weighted, -1) - square, 0) / subsample_size
        runs += jnp.maximum(run**2 - square, 0)
        many &= size >= max(MANY_ROWS, MANY_RUNS * subsample_size)
    equal, unequal, runs = jnp.sqrt(equal), jnp.sqrt(unequal), jnp.sqrt(runs)
    if batching == "contiguous" and all_rows:
        equal = runs
    factor = 1 + NOISE_COST * equal
    other = UNEQUAL_COST * (1 + NOISE_COST * unequal)
    kind = jnp.full(len(orders), int(batching == "importance"))
    if batching == "auto":
        shuffled = jnp.less_equal(runs, MORE_NOISE * equal) & many
        kind = jnp.where(other < factor, 1, jnp.where(shuffled, 2, 0))
    noise = jnp.select([kind == 1, kind == 2], [unequal, runs], equal)
    near = jnp.sqrt(near) if near.ndim and not model.is_small else noise
    costs = jnp.asarray([GRADIENT_COSTS[k] for k in orders])
    costs *= jnp.where(kind == 1, other, factor)
    best = jnp.argmin(jnp.where(jnp.isfinite(costs), costs, jnp.inf))
    importance = None
    if batching in ("auto", "importance"):
        importance = jax.tree.map(lambda a: a[best], tables)
    order = jnp.asarray(orders)[best]
    return Plan(order, kind[best], importance, noise[best], near[best])


def weighted_plates(plates: Plates) -> Plates:
    """Sizes of the tables of importance, from which entries are drawn as rows are."""
    return {name: (2 * size, num) for name, (size, num) in plates.items()}


def weighted_rows(
    importance: dict[str, Importance], entries: dict[str, Array]
) -> dict[str, WeightedRows]:
    """The rows at these entries of the tables."""
    batch = {}
    for name, (table, weights) in importance.items():
        rows = table[entries[name]]
        batch[name] = WeightedRows(rows, weights[rows])
    return batch
