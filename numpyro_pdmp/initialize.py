# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Where a chain starts."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
import gc
from typing import Any

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.handlers import seed
from numpyro.infer import init_to_uniform
from numpyro.infer.util import ParamInfo, initialize_model, unconstrain_fn
from numpyro.util import not_jax_tracer
from numpyro_pdmp.potential import ModelFunctions

ParamsEnergy = tuple[Any, Array]

_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python looks for no garbage: tracing makes many objects, and hardly any."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def jit_arrays(
    fn: Callable,
    *data: Any,
    compiler_options: dict | None = None,
    meanwhile: Callable | None = None,
) -> Callable:
    """Compile ``fn(*data, *rest)`` as a function of ``rest``.

    Large data embedded as constants are slow to compile, so JAX arrays among them are
    passed on. But a model may use its arguments for shapes and control flow: NumPy
    arrays and numbers always stay as they are, and if the model needs the values of JAX
    arrays, so do they.

    :param compiler_options: of XLA; if this version does not know them, none is used.
    :param meanwhile: function of the shapes of the result, for the time that XLA takes
        to compile, which it does without Python; called at most once.
    """
    leaves, treedef = jax.tree.flatten(data)
    arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

    @partial(jax.jit, compiler_options=compiler_options)
    def of_arrays(arrays, *rest):
        both = zip(arrays, leaves, strict=True)
        merged = [b if a is None else a for a, b in both]
        return fn(*jax.tree.unflatten(treedef, merged), *rest)

    def run(*rest):
        if meanwhile is None or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return of_arrays(arrays, *rest)
        traced = of_arrays.trace(arrays, *rest)
        lowered = traced.lower()
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(lowered.compile)
            meanwhile(traced.out_info)
            return compiled.result()(arrays, *rest)

    def call(*rest):
        try:
            return run(*rest)
        except _NOT_CONCRETE:
            arrays[:] = [None] * len(arrays)
            return run(*rest)
        except jax.errors.JaxRuntimeError as error:
            if not compiler_options or "No such compile option" not in str(error):
                raise
            return jit_arrays(fn, *data)(*rest)

    return call


def check_sites(params: Any, shapes: dict, argument: str) -> dict[str, Array]:
    """Unconstrained values as float arrays, checked against the model's shapes."""
    if not isinstance(params, dict):
        raise TypeError(
            f"`{argument}` must be a dict of unconstrained values for the sites "
            f"{sorted(shapes)}, got {type(params).__name__}."
        )
    given = {name: jnp.shape(params[name]) for name in sorted(params)}
    expected = {name: shapes[name].shape for name in sorted(shapes)}
    if given != expected:
        raise ValueError(
            f"`{argument}` has sites of shapes {given}; the model's unconstrained "
            f"sites are {expected}."
        )
    return {k: jnp.asarray(v, jnp.result_type(v, float)) for k, v in params.items()}


def checked_energy(potential_fn: Callable, grad_fn: Callable, z: Any) -> Array:
    """Potential energy; NaN where its gradient is not finite."""
    return jnp.where(_all_finite(grad_fn(z)), potential_fn(z), jnp.nan)


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.isfinite(ravel_pytree(tree)[0]))


def uniform_radius(init_strategy: Callable) -> float | None:
    """How far NumPyro's default strategy goes; None if the strategy is another one."""
    strategy = init_strategy if isinstance(init_strategy, partial) else init_strategy()
    if strategy.func is not init_to_uniform:
        return None
    return strategy.keywords["radius"]


def uniform_params(functions: ModelFunctions, radius: float, uniform: Array) -> Any:
    """As NumPyro's default strategy, without compiling its search.

    :param uniform: (d,) in [0, 1).
    :return: unconstrained values of one chain.
    """
    shapes, values, start = functions.shapes or {}, {}, 0
    for name in functions.sites or ():
        part = uniform[start : start + shapes[name].size].reshape(shapes[name].shape)
        values[name] = (radius * (2 * part - 1)).astype(shapes[name].dtype)
        start += shapes[name].size
    return values


def strategy_params(
    rng_key: Array,
    model: Callable | None,
    init_strategy: Callable,
    forward_mode: bool,
    vmap: Callable,
    args: tuple,
    kwargs: dict,
) -> ParamsEnergy:
    """Where the initialization strategy starts, and the potential energy there.

    The energy is NaN where the gradient is not finite.
    """
    info = initialize_model(
        rng_key,
        model,
        init_strategy=init_strategy,
        dynamic_args=True,
        model_args=args,
        model_kwargs=kwargs,
        forward_mode_differentiation=forward_mode,
    ).param_info
    finite = vmap(_all_finite)(info.z_grad)
    return info.z, jnp.where(finite, info.potential_energy, jnp.nan)


def given_params(
    rng_key: Array,
    functions: ModelFunctions,
    model: Callable | None,
    init_params: Any,
    args: tuple,
    kwargs: dict,
    evaluate: Callable,
) -> ParamsEnergy | None:
    """The start that the user asks for, if any, and the potential energy there.

    :param evaluate: from sites to potential energy and gradient, of all chains.
    """
    if init_params is None:
        if model is None:
            raise ValueError(
                "Valid value of `init_params` must be provided with `potential_fn`."
            )
        return None
    sites = functions.sites
    z = init_params.z if isinstance(init_params, ParamInfo) else init_params
    if "_gibbs_sites" in kwargs:
        # NumPyro's Gibbs starts blocks other than HMC at constrained values.
        z = unconstrain_fn(seed(model, rng_key), args, kwargs, z)
        z = {name: z[name] for name in sites or ()}
    if sites is not None and (not isinstance(z, dict) or set(z) != set(sites)):
        given = sorted(z) if isinstance(z, dict) else z
        raise ValueError(
            f"`init_params` must be a dict of unconstrained values for the sites "
            f"{sorted(sites)}, got {given}."
        )
    z = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x, float)), z)
    if ravel_pytree(z)[0].size == 0:
        raise ValueError(f"`init_params` has no entries to sample: {z}.")
    energy, grad = evaluate(z)
    finite = _all_finite((energy, grad))
    if not_jax_tracer(finite) and not finite:
        raise ValueError(
            f"`init_params`: the potential energy ({energy}) or its gradient is "
            "not finite at the start; give another start, or check the model."
        )
    return z, energy
