# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Functions with some of their operations replaced, for XLA:CPU."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

#: primitives whose operations are as good in the place of the call
CALLS = ("jit", "pjit", "closed_call")


def _called(eqn: Any) -> ClosedJaxpr | None:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    is_call = eqn.primitive.name in CALLS and isinstance(inner, ClosedJaxpr)
    return inner if is_call else None


def _concerned(jaxpr: Jaxpr, new: dict) -> bool:
    def concerns(eqn):
        inner = _called(eqn)
        if inner is not None:
            return _concerned(inner.jaxpr, new)
        return eqn.primitive in new

    return any(map(concerns, jaxpr.eqns))


def _evaluate(closed: ClosedJaxpr, args: Any, new: dict) -> list:
    """The values of a function from its operations, with some of them replaced."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}

    def read(var):
        return var.val if isinstance(var, Literal) else values[var]

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        given = [read(var) for var in eqn.invars]
        inner = _called(eqn)
        if inner is not None and _concerned(inner.jaxpr, new):
            found = _evaluate(inner, given, new)
        elif eqn.primitive in new:
            found = [new[eqn.primitive](eqn, *given)]
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            # Before JAX 0.10 functions come apart.
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            found = eqn.primitive.bind(*functions, *given, **params)
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def with_replaced(fn: Callable, new: dict) -> Callable:
    """The same function by other operations, on CPU; elsewhere the function itself.

    What is inside of its loops, conditions or checkpoints stays as it is.

    :param fn: a function of arrays.
    :param new: by primitive, a function of the equation and its operands.
    """

    def wrapped(*args):
        if jax.default_backend() != "cpu":
            return fn(*args)
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        if _concerned(closed.jaxpr, new):
            out = _evaluate(closed, leaves, new)
        else:
            out = jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return wrapped
