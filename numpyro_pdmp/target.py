# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What a path is simulated for: a gradient, exact or from mini-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_pdmp import batch as batches
from numpyro_pdmp.control_variates import (
    ControlVariate,
    control_variate,
    gradient,
    value,
)
from numpyro_pdmp.convolutions import fast_in_loops
from numpyro_pdmp.descent import find_start, laplace_scale
from numpyro_pdmp.hessian import dense_factor
from numpyro_pdmp.importance import RUNS, Importance, weighted_plates, weighted_rows
from numpyro_pdmp.moments import AnyScale
from numpyro_pdmp.potential import ModelFunctions, gradient_fn
from numpyro_pdmp.process.batches import (
    BatchSource,
)
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.products import chains_first
from numpyro_pdmp.shards import shard_draws
from numpyro_pdmp.subsample import (
    SubsampledModel,
    is_small,
)

#: rows of each plate on which a start is looked for
PILOT_ROWS = 2**12
#: steps on all data end when one is shorter than this, in units of the posterior, or
#: after so many
NEWTON_STEP, NEWTON_STEPS = 0.3, 20


class Target(NamedTuple):
    """Potential energy of a flat vector; ``batch`` is absent on full data."""

    gradient: Callable[..., Array]  # x, *batch, *later batches -> gradient
    energy: Callable[..., Array]  # x, *batch -> potential energy, or an estimate
    source: BatchSource | None


def target_functions(
    model: Callable, model_args: tuple, model_kwargs: dict | None
) -> ModelFunctions:
    """Potential energy and postprocessing of a model for these arguments.

    Discrete latent sites are summed out as in NumPyro's HMC. With subsampled plates
    ``potential_fn`` is that of a fixed batch of rows, good enough to find where to
    start; ``subsampled`` gives everything else.
    """
    subsampled = SubsampledModel(model, model_args, model_kwargs)
    # The start of a large model is not looked for: any batch tells if it is valid.
    rows = subsampled.pilot_batch(PILOT_ROWS if subsampled.is_small else 1)
    potential_fn: Callable = partial(subsampled.potential_fn, batch=rows)
    if not rows:
        # The model is run once; its derivatives are those of what it did.
        potential_fn = jax.jit(potential_fn, inline=True)
    return ModelFunctions(
        potential_fn=potential_fn,
        postprocess_fn=subsampled.postprocess_fn,
        constrain_fn=subsampled.constrain_fn,
        sites=subsampled.sites,
        shapes=subsampled.shapes,
        model=subsampled.start_model(rows) if rows else model,
        subsampled=subsampled if rows else None,
    )


def make_target(
    functions: ModelFunctions,
    unravel: Callable,
    control: ControlVariate | None,
    importance: dict[str, Importance] | None,
    batching: str,
    forward_mode: bool,
    hard_walls: bool,
) -> Target:
    """Target of a flat vector.

    :param functions: of the model and its arguments.
    :param unravel: from a flat vector to sites.
    :param control: control variate of a subsampled model.
    :param importance: probabilities of its rows; None for equal ones, and ``RUNS``.
    :param batching: how its batches are drawn.
    :param forward_mode: by forward-mode differentiation.
    :param hard_walls: look at the potential with every gradient (full data only).
    """
    model: Any = functions.subsampled
    if model is None:

        def potential_fn(x):
            return functions.potential_fn(unravel(x))

        grad_fn = gradient_fn(potential_fn, forward_mode, hard_walls)
        if functions.shapes is not None and not is_small(functions.shapes):
            grad_fn = fast_in_loops(grad_fn)
        return Target(chains_first(grad_fn), potential_fn, None)
    grad = jax.jacfwd if forward_mode else jax.grad
    plates = model.draw_plates()
    if model.shards is not None and batching == "epoch":
        raise ValueError(
            "`batching='epoch'` is not possible with rows that are spread over "
            "devices; use 'without_replacement', 'with_replacement' or 'contiguous'."
        )
    if importance == RUNS:
        importance, batching = None, "contiguous"
    if importance is not None:
        plates = weighted_plates(plates)

    def next_batch(state, words):
        if model.shards is not None:
            return state, shard_draws(words, plates, model.sharded, batching)
        state, batch = batches.next_batch(state, words, plates, batching)
        if importance is None:
            return state, batch
        return state, weighted_rows(importance, batch)

    source = BatchSource(
        batches.num_words(plates, batching),
        lambda words: batches.start_batches(words, plates, batching),
        next_batch,
        max((r.prefetch for rows in model.host_rows.values() for r in rows), default=0),
    )

    def batch_gradient(x, batch, *ahead):
        return gradient(model, x, batch, control, grad, ahead)

    return Target(
        batch_gradient if model.is_small else fast_in_loops(batch_gradient),
        lambda x, batch: value(model, x, batch, control),
        source,
    )


def find_start_subsampled(
    functions: ModelFunctions, unravel: Callable, x: Array, scale: AnyScale, mask: Any
) -> tuple[AnyScale, Scale, ControlVariate]:
    """Mode and curvature of all data, from a few passes over them.

    Newton's descent on the pilot rows, then a few steps on all data.

    :param functions: of a subsampled model.
    :param unravel: from a flat vector to sites.
    :param x: where to begin.
    :param scale: decides what kind of metric is made.
    :param mask: sparsity of a block metric, or None.
    :return: a scale with the mode as its centre, the mode's Gaussian with all of the
        curvature, and a control variate there.
    """
    model = functions.subsampled

    def pilot(x):
        return functions.potential_fn(unravel(x))

    mode = find_start(pilot, x, scale, mask)[0].center

    def curvature_root(control):
        assert control.hessian_full is not None
        return dense_factor(control.hessian_full)

    def newton(carry):
        x, energy, new, radius, _, num = carry
        control = control_variate(model, new, order=2)
        root = curvature_root(control)
        step = control.grad_full @ root
        length = jnp.linalg.norm(step)
        tolerance = jnp.finfo(x.dtype).eps * 10 * jnp.abs(energy)
        better = (control.energy_full <= energy + tolerance) & jnp.isfinite(length)
        radius = jnp.where(better, 4 * radius, radius / 8)
        ahead = new - root @ (step / jnp.maximum(1, length / radius))
        back = x + (new - x) / 8
        # There is no way back from the first point.
        rest = jnp.where(better, length, jnp.where(num > 0, jnp.inf, 0))
        x, energy = (
            jnp.where(better, *pair)
            for pair in ((new, x), (control.energy_full, energy))
        )
        return x, energy, jnp.where(better, ahead, back), radius, rest, num + 1

    # What the pilot rows do not tell, such as rare categories or outliers, may be far
    # off. In whitened coordinates a good start is within a few units; longer steps have
    # to prove themselves.
    inf = jnp.full((), jnp.inf, mode.dtype)
    radius = jnp.full((), 0.75 * mode.size**0.5, mode.dtype)
    x, _, new, _, length, _ = lax.while_loop(
        lambda carry: (carry[-2] > NEWTON_STEP) & (carry[-1] < NEWTON_STEPS),
        newton,
        (mode, inf, mode, radius, inf, 0),
    )
    arrived = (length <= NEWTON_STEP) & jnp.all(jnp.isfinite(new))
    mode = jnp.where(arrived, new, x)
    control = control_variate(model, mode, order=2)
    gaussian = Scale(mode, curvature_root(control))
    return laplace_scale(gaussian, scale, mask), gaussian, control
