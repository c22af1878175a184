# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What a path is simulated for: a gradient, exact or from mini-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro.handlers import seed, substitute, trace
from numpyro_pdmp import batch as batches
from numpyro_pdmp.control_variates import (
    ControlVariate,
    control_variate,
    gradient,
    value,
)
from numpyro_pdmp.descent import find_start, laplace_scale
from numpyro_pdmp.hessian import dense_factor
from numpyro_pdmp.moments import AnyScale
from numpyro_pdmp.potential import ModelFunctions, gradient_fn, model_functions
from numpyro_pdmp.process.batches import (
    BatchSource,
)
from numpyro_pdmp.subsample import (
    SubsampledModel,
    prototype_value,
    subsampled_plates,
    with_batch,
)

#: rows of each plate on which a start is looked for
PILOT_ROWS = 2**12


class Target(NamedTuple):
    """Potential energy of a flat vector; ``batch`` is absent on full data."""

    gradient: Callable[..., Array]  # x, *batch, *later batches -> gradient
    energy: Callable[..., Array]  # x, *batch -> potential energy, or an estimate
    source: BatchSource | None


def pilot_batch(plates: batches.Plates, num_rows: int) -> batches.Batch:
    """A fixed batch, evenly spread over the data, of at least so many rows if any."""
    rows = {}
    for name, (size, subsample_size) in plates.items():
        num = min(size, max(subsample_size, num_rows))
        rows[name] = (jnp.arange(num) * (size / num)).astype(jnp.int32)
    return rows


def target_functions(
    model: Callable, model_args: tuple, model_kwargs: dict | None
) -> ModelFunctions:
    """As :func:`~numpyro_pdmp.potential.model_functions`, also for subsampled plates.

    Then ``potential_fn`` is that of a fixed batch of rows, good enough to find where to
    start; ``subsampled`` gives everything else.
    """
    kwargs = {} if model_kwargs is None else model_kwargs
    probe = substitute(seed(model, jax.random.key(0)), substitute_fn=prototype_value)
    plates = subsampled_plates(trace(probe).get_trace(*model_args, **kwargs))
    if not plates:
        return model_functions(model, model_args, kwargs)
    subsampled = SubsampledModel(model, model_args, kwargs)
    rows = pilot_batch(subsampled.plates, PILOT_ROWS)
    return ModelFunctions(
        potential_fn=partial(subsampled.potential_fn, batch=rows),
        postprocess_fn=subsampled.postprocess_fn,
        constrain_fn=subsampled.constrain_fn,
        sites=subsampled.sites,
        shapes=subsampled.shapes,
        model=with_batch(model, rows),
        subsampled=subsampled,
    )


def make_target(
    functions: ModelFunctions,
    unravel: Callable,
    control: ControlVariate | None,
    batching: str,
    forward_mode: bool,
    hard_walls: bool,
) -> Target:
    """Target of a flat vector.

    :param functions: of the model and its arguments.
    :param unravel: from a flat vector to sites.
    :param control: control variate of a subsampled model.
    :param batching: how its batches are drawn.
    :param forward_mode: by forward-mode differentiation.
    :param hard_walls: look at the potential with every gradient (full data only).
    """
    model: Any = functions.subsampled
    if model is None:

        def potential_fn(x):
            return functions.potential_fn(unravel(x))

        grad_fn = gradient_fn(potential_fn, forward_mode, hard_walls)
        return Target(grad_fn, potential_fn, None)
    grad = jax.jacfwd if forward_mode else jax.grad
    plates = model.plates
    source = BatchSource(
        batches.num_words(plates, batching),
        lambda words: batches.start_batches(words, plates, batching),
        lambda state, words: batches.next_batch(state, words, plates, batching),
        max((r.prefetch for rows in model.host_rows.values() for r in rows), default=0),
    )
    return Target(
        lambda x, batch, *ahead: gradient(model, x, batch, control, grad, ahead),
        lambda x, batch: value(model, x, batch, control),
        source,
    )


def find_start_subsampled(
    functions: ModelFunctions, unravel: Callable, x: Array, scale: AnyScale, mask: Any
) -> tuple[AnyScale, ControlVariate]:
    """Mode and curvature of all data, from a few passes over them.

    Newton's descent on the pilot rows, then two Newton steps on all data.

    :param functions: of a subsampled model.
    :param unravel: from a flat vector to sites.
    :param x: where to begin.
    :param scale: decides what kind of metric is made.
    :param mask: sparsity of a block metric, or None.
    :return: a scale with the mode as its centre, and a control variate there.
    """
    model = functions.subsampled

    def pilot(x):
        return functions.potential_fn(unravel(x))

    mode = find_start(pilot, x, scale, mask)[0].center

    def curvature_root(control):
        assert control.hessian_full is not None
        return dense_factor(control.hessian_full)

    def newton(_, x):
        control = control_variate(model, x, order=2)
        root = curvature_root(control)
        step = control.grad_full @ root
        # In whitened coordinates a good start is within a few units.
        step = step / jnp.maximum(1, jnp.linalg.norm(step) / (3 * x.size**0.5))
        new = x - root @ step
        return jnp.where(jnp.all(jnp.isfinite(new)), new, x)

    mode = lax.fori_loop(0, 2, newton, mode)
    control = control_variate(model, mode, order=2)
    return laplace_scale(mode, curvature_root(control), scale, mask), control
