# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The mode of the unconstrained posterior, by L-BFGS or stochastic gradients."""

from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple
import warnings

import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

from numpyro.infer import init_to_uniform
from numpyro.optim import Minimize, _NumPyroOptim
from numpyro_pdmp.convolutions import fast_in_loops
from numpyro_pdmp.hessian import (
    DENSE_DIMENSIONS,
    dense_factor,
    fill_zeros,
    hessian_dense,
    hutchinson_diagonal,
)
from numpyro_pdmp.initialize import check_sites, jit_arrays, strategy_params
from numpyro_pdmp.pages import explained
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.shards import plain
from numpyro_pdmp.storage import read_arrays, require_names
from numpyro_pdmp.subsample import (
    SubsampledModel,
    as_jax_rows,
    batch_potential,
    is_random,
    model_layout,
)

#: batches over which the energy of a subsampled model is averaged at start and end
EVALUATION_BATCHES = 128

#: steps of L-BFGS in the first coordinates, and then in each new ones
FIRST_ROUND, ROUND = 20, 100

#: new coordinates in a row without progress after which L-BFGS gives up
MAX_IDLE = 3


#: before the names of sites in a file
_PARAM = "param:"


NOT_A_MODE = "Give a file that `MAP.save` has written."


class MAP(NamedTuple):
    """A mode of the unconstrained posterior and how it was found.

    As ``reference`` of a kernel it stands for the Gaussian with the curvature there,
    :func:`~numpyro_pdmp.laplace_reference`. For the start alone see
    :meth:`init_params`.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp import find_map
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> mode = find_map(model, random.key(0), progress_bar=False)
    >>> round(float(mode.params["x"]), 3)
    3.0
    """

    params: dict[str, Array]  # unconstrained value per site
    potential_energy: Array  # at params; averaged over batches if subsampled
    losses: np.ndarray  # (num_steps,) potential energy at each step
    num_steps: int  # steps made
    gradient_norm: float  # of the potential at params, relative to that at the start
    converged: bool | None  # None with an optimizer that has no test for it

    def init_params(self, num_chains: int = 1) -> dict[str, Array]:
        """The mode as ``init_params`` of ``MCMC.run``.

        :param num_chains: as given to ``MCMC``; with several chains every value gets a
            leading axis of this size.
        """
        if num_chains == 1:
            return self.params
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_chains, *x.shape)), self.params
        )

    def save(self, path: str | PathLike) -> None:
        """Write it to a file of NumPy's format ``.npz``; see :meth:`load`.

        :param path: of the file; the ending ``.npz`` is added if it has none.
        """
        rest = {f: getattr(self, f) for f in self._fields if f != "params"}
        if self.converged is None:
            del rest["converged"]
        arrays = {_PARAM + k: np.asarray(v) for k, v in self.params.items()}
        np.savez(path, **{**rest, **arrays})

    @classmethod
    def load(cls, path: str | PathLike) -> "MAP":
        """Read what :meth:`save` has written; nothing in the file is executed.

        :param path: of the file.
        """
        file = read_arrays(path, NOT_A_MODE)
        names = ("potential_energy", "losses", "num_steps", "gradient_norm")
        require_names(file, names, path, NOT_A_MODE)
        sizes = [file[k].size for k in ("potential_energy", *names[2:])]
        if sizes != [1, 1, 1] or any(a.dtype.kind not in "fiub" for a in file.values()):
            raise ValueError(f"`path`: {path} has other arrays. {NOT_A_MODE}")
        params = {
            k.removeprefix(_PARAM): jnp.asarray(a)
            for k, a in file.items()
            if k.startswith(_PARAM)
        }
        return cls(
            params,
            jnp.asarray(file["potential_energy"]),
            file["losses"],
            int(file["num_steps"]),
            float(file["gradient_norm"]),
            bool(np.all(file["converged"])) if "converged" in file else None,
        )


class _Loop(NamedTuple):
    step: Array
    params: Any  # in the optimizer's coordinates
    opt_state: Any
    best: Any  # lowest so far; the last finite ones if subsampled
    best_value: Array
    losses: Array
    converged: Array
    failed: Array
    stalled: Array


class _Optimizer(NamedTuple):
    """One form for L-BFGS, Optax and NumPyro optimizers."""

    init: Callable  # params -> state
    evaluate: Callable  # fn, params, state -> value, gradient
    update: Callable  # fn, params, state, value, gradient -> params, state, decrease


def _evaluate(fn: Callable, params: Any, state: Any) -> tuple:
    return fast_in_loops(jax.value_and_grad(fn))(params)


def _lbfgs() -> _Optimizer:
    optimizer = optax.lbfgs()

    def evaluate(fn, x, state):
        # The line search has evaluated the point that it took.
        search = state[-1]
        return lax.cond(
            jnp.isfinite(search.value),
            lambda: (search.value, search.grad),
            lambda: jax.value_and_grad(fn)(x),
        )

    def update(fn, x, state, value, grad):
        move, state = optimizer.update(
            grad, state, x, value=value, grad=grad, value_fn=fn
        )
        # Minus half the slope along the whole quasi-Newton step is what that step
        # gains on a quadratic potential. A step length of zero gives NaN.
        decrease = -0.5 * jnp.vdot(move, grad) / state[-1].learning_rate
        return x + move, state, decrease

    return _Optimizer(optimizer.init, evaluate, update)


def _as_optimizer(optimizer: Any) -> _Optimizer:
    if isinstance(optimizer, _NumPyroOptim) and not isinstance(optimizer, Minimize):

        def update_numpyro(fn, params, state, value, grad):
            state = optimizer.update(grad, state, value=value)
            return optimizer.get_params(state), state, jnp.inf

        return _Optimizer(optimizer.init, _evaluate, update_numpyro)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "`optimizer` must be an Optax gradient transformation or an optimizer of "
            f"`numpyro.optim` other than `Minimize`, got {optimizer!r}."
        )
    extended = optax.with_extra_args_support(optimizer)

    def update(fn, params, state, value, grad):
        move, state = extended.update(
            grad, state, params, value=value, grad=grad, value_fn=fn
        )
        return optax.apply_updates(params, move), state, jnp.inf

    return _Optimizer(extended.init, _evaluate, update)


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.isfinite(ravel_pytree(tree)[0]))


def _run(
    potential_fn: Callable,
    optimizer: _Optimizer,
    subsampled: bool,
    tol: float,
    rng_key: Array,
    loop: _Loop,
    stop: Array,
) -> _Loop:
    """Steps until ``stop`` or until there is nothing more to gain."""

    def body(loop):
        batch_key = random.fold_in(rng_key, loop.step)

        def fn(params):
            return potential_fn(params, batch_key)

        value, grad = optimizer.evaluate(fn, loop.params, loop.opt_state)
        finite = _all_finite((value, grad))
        params, opt_state, decrease = optimizer.update(
            fn, loop.params, loop.opt_state, value, grad
        )
        better = finite & (subsampled | (value <= loop.best_value))
        return _Loop(
            step=loop.step + 1,
            params=params,
            opt_state=opt_state,
            best=jax.tree.map(
                lambda new, old: jnp.where(better, new, old), loop.params, loop.best
            ),
            best_value=jnp.where(better, value, loop.best_value),
            losses=loop.losses.at[loop.step].set(value),
            converged=finite & (decrease <= tol),
            failed=~finite,
            stalled=finite & jnp.isnan(decrease),
        )

    def go_on(loop):
        done = loop.converged | loop.failed | loop.stalled
        return (loop.step < stop) & ~done

    return lax.while_loop(go_on, body, loop)


def _curvature_factor(potential_fn: Callable, x: Array) -> tuple[Array, Array]:
    """Factor of the inverse Hessian, dense or diagonal according to the dimension.

    :return: the factor, and which coordinates have no curvature at all.
    """
    if x.size <= DENSE_DIMENSIONS:
        hessian = hessian_dense(potential_fn, x)
        return dense_factor(hessian), jnp.diagonal(hessian) == 0
    # A rough diagonal will do here, at the price of a few steps.
    mean, error = hutchinson_diagonal(
        lambda x, _: potential_fn(x), x, random.key(0), num_probes=32
    )
    curvature = jnp.hypot(mean, error)
    return 1 / jnp.sqrt(fill_zeros(curvature)), curvature == 0


@explained("warmup")
def find_map(
    model: Callable,
    rng_key: Array,
    *model_args: Any,
    optimizer: Any = None,
    num_steps: int | None = None,
    batch: int | None = None,
    init_params: dict | None = None,
    init_strategy: Callable = init_to_uniform,
    tol: float = 1e-4,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> MAP:
    r"""Find a mode of the posterior in unconstrained space.

    That is the minimum of the potential energy which the kernels use, Jacobians of the
    constraints included. (NumPyro's ``AutoDelta`` leaves them out, so its answer is
    another one for constrained sites.)

    L-BFGS is the default for models of all data. It stops when a Newton step is
    expected to lower the potential by less than ``tol``; near the mode that is half the
    squared distance to it in posterior standard deviations. The Hessian for this test,
    or an estimate of its diagonal above 256 dimensions, also gives new coordinates in
    which to go on if the test fails. For models with subsampled plates every step draws
    a fresh batch, and the default is Adam with a cosine schedule from 0.01 to zero.

    :param model: Python callable containing NumPyro primitives.
    :param rng_key: for the start and for the batches.
    :param model_args: arguments of the model.
    :param optimizer: an Optax gradient transformation or a NumPyro optimizer. It makes
        all ``num_steps``, on the dict of unconstrained sites.
    :param num_steps: bound on the steps. Default: 1000 for L-BFGS, else 10000.
    :param batch: batch size in place of the ``subsample_size`` of the model's only
        subsampled plate; the size of the plate for all data.
    :param init_params: unconstrained values to start from.
    :param init_strategy: a per-site initialization function, without ``init_params``.
    :param tol: tolerance of L-BFGS.
    :param progress_bar: whether to show one.
    :param model_kwargs: keyword arguments of the model.
    :return: the mode; with ``converged=False`` and a warning if L-BFGS did not reach
        ``tol``. After a value that is not finite, the best point before it (the last
        one if subsampled), with a warning.

    **Example**

    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp.find_map import find_map
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> result = find_map(model, random.key(0), jnp.ones(3), progress_bar=False)
    >>> round(float(result.params["mu"]), 3)
    0.75
    """
    shapes, plates = model_layout(model, model_args, model_kwargs, batch)
    subsampled = is_random(plates)
    data = as_jax_rows((model_args, model_kwargs), plates)
    newton = optimizer is None and not subsampled
    if num_steps is None:
        num_steps = 1000 if newton else 10_000
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be at least 1, got {num_steps}.")
    if newton:
        steps = _lbfgs()
    elif optimizer is None:
        steps = _as_optimizer(optax.adam(optax.cosine_decay_schedule(0.01, num_steps)))
    else:
        steps = _as_optimizer(optimizer)
    key_start, key_steps, key_value = random.split(rng_key, 3)

    def compiled(fn: Callable) -> Callable:
        inner = jit_arrays(fn, *data)
        return lambda *rest: plain(inner(*rest))

    @compiled
    def draw_start(args, kwargs):
        whole = SubsampledModel(model, args, kwargs)
        start = whole.start_model(whole.random_batch(key_value, plates))
        return strategy_params(
            key_start, start, init_strategy, False, lambda f: f, args, kwargs
        )[0]

    if init_params is None:
        params = draw_start()
    else:
        params = check_sites(init_params, shapes, "init_params")
    x, unravel = ravel_pytree(params)

    @compiled
    def evaluate(args, kwargs, params):
        potential_fn = batch_potential(model, args, kwargs, plates)
        keys = random.split(key_value, EVALUATION_BATCHES if subsampled else 1)
        every = lax.map(
            lambda key: fast_in_loops(jax.value_and_grad(potential_fn))(params, key),
            keys,
        )
        value, grad = jax.tree.map(lambda x: jnp.mean(x, axis=0), every)
        return value, ravel_pytree(grad)[0]

    @compiled
    def run(args, kwargs, scale, loop, stop):
        potential_fn = batch_potential(model, args, kwargs, plates)

        def whitened(z, key):
            return potential_fn(unravel(scale.position(z)), key)

        fn = whitened if newton else potential_fn
        return _run(fn, steps, subsampled, tol, key_steps, loop, stop)

    @compiled
    def curvature(args, kwargs, x):
        potential_fn = batch_potential(model, args, kwargs, plates)
        return _curvature_factor(lambda x: potential_fn(unravel(x), key_value), x)

    energy, grad = evaluate(params)
    if not _all_finite((energy, grad)):
        argument = "init_strategy" if init_params is None else "init_params"
        raise ValueError(
            f"`{argument}`: the potential energy ({energy}) or its gradient is not "
            "finite at the start; give `init_params`, another `init_strategy`, or "
            "check the model."
        )
    start_norm = float(jnp.linalg.norm(grad))

    unit = jnp.eye(x.size) if x.size <= DENSE_DIMENSIONS else jnp.ones(x.size)
    scale = Scale(x, unit.astype(x.dtype))
    no = jnp.zeros((), bool)

    def begin(params, energy, step, losses):
        state = steps.init(params)
        return _Loop(step, params, state, params, energy, losses, no, no, no)

    def settle(loop):
        """The last point or the best one, with energy and gradient."""
        points = [loop.params, loop.best]
        if newton:
            points = [unravel(scale.position(z)) for z in points]
        energy, grad = evaluate(points[0])
        worse = not subsampled and energy > loop.best_value
        if worse or not _all_finite((energy, grad)):
            return points[1], *evaluate(points[1])
        return points[0], energy, grad

    loop = begin(
        jnp.zeros_like(x) if newton else params,
        energy,
        jnp.zeros((), int),
        jnp.zeros(num_steps, energy.dtype),
    )
    chunk = max(1, num_steps // 50) if progress_bar else num_steps
    converged, idle, made = False, 0, 0
    round_end = FIRST_ROUND if newton else num_steps
    with tqdm(total=num_steps, desc="MAP", disable=not progress_bar) as bar:
        while made < num_steps and not converged and idle < MAX_IDLE:
            stop = min(made + chunk, round_end, num_steps)
            loop = run(scale, loop, jnp.asarray(stop))
            made = int(loop.step)
            bar.update(made - bar.n)
            bar.set_postfix_str(f"potential energy {loop.losses[made - 1]:.6g}")
            if loop.failed:
                break
            if newton and (made == round_end or loop.converged or loop.stalled):
                # L-BFGS knows nothing of directions that it never moved in: its own
                # verdict is not enough, and in other coordinates it may find them.
                before = energy
                params, energy, grad = settle(loop)
                idle = 0 if energy < before else idle + 1
                x = ravel_pytree(params)[0]
                factor, straight = curvature(x)
                if _all_finite(factor):
                    scale = Scale(x, factor)
                    gain = 0.5 * jnp.sum(jnp.square(scale.gradient(grad)))
                    # A slope without curvature leads on for ever; in which units is
                    # not known, so that its own are taken.
                    gain += jnp.sum(jnp.abs(jnp.where(straight, grad, 0)))
                    converged = bool(gain <= tol)
                else:
                    scale = Scale(x, scale.factor)
                loop = begin(jnp.zeros_like(x), energy, loop.step, loop.losses)
                round_end = made + ROUND
    params, energy, grad = settle(loop)

    relative = float(jnp.linalg.norm(grad)) / start_norm if start_norm > 0 else 0.0
    if loop.failed:
        warnings.warn(
            f"The potential energy or its gradient is not finite at step {made} of "
            "`find_map`; an earlier point is returned. Lower the learning rate of "
            "`optimizer`, or check the model.",
            stacklevel=2,
        )
    elif newton and not converged:
        warnings.warn(
            f"L-BFGS did not reach `tol={tol}` in {made} steps; the gradient is "
            f"{relative:.1e} of that at the start. Give more `num_steps`, use double "
            "precision, or check that the posterior has a mode.",
            stacklevel=2,
        )
    return MAP(
        params,
        energy,
        np.asarray(loop.losses[:made]),
        made,
        relative,
        converged if newton else None,
    )
