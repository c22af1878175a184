# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Many small operations as few pieces of compiled code.

XLA compiles a program for CPU into pieces, about one for each array that is computed,
and starts them one by one. On small models a tick is a hundred pieces that take longer
to start than to run, and longer to compile than all draws take. There is another
way, which XLA takes for small loops by itself: a call that is marked as small becomes
one function, whatever it computes. Here small operations are gathered into such calls.

What is large or no plain arithmetic (products with data, factorisations, loops) stays
as it is, between the pieces. An operation is in the last piece that is early enough for
all that need it, so that little is handed on from piece to piece. Slices and the like
are in every piece that needs them, and what they are of is handed on.

The mark is no public interface of XLA's, which fails on what it does not expect there.
So pieces are made only of operations that were seen to work, and only with the versions
of JAX in ``TESTED``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
import itertools
import math
import os
from typing import Any

import jax
from jax import lax, random
from jax.custom_batching import custom_vmap
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal

#: versions of JAX with which pieces are known to work
TESTED = ((0, 10),)
#: elements of a small array, and of one whose sum is small: XLA has a routine for more,
#: which is no part of a piece
SMALL, SMALL_SUM = 2**13, 2**11
#: fewer operations than this are left alone
FEW = 4
#: more operations than this are divided, since pieces are compiled side by side
MANY = 256

#: of a call that XLA makes one function of
_MARK = {"xla_cpu_small_call": "true", "inlineable": "false"}
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_PLAIN = frozenset(
    """abs add add_any and argmax argmin broadcast_in_dim ceil clamp concatenate
    convert_element_type cos div dot_general dynamic_slice eq erf_inv exp exp2 expm1
    floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg
    not or pow random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_sum rem reshape rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin slice split sqrt square squeeze stack stop_gradient
    sub tan tanh transpose xor""".split()
)
#: other looks at what is there
_VIEWS = frozenset("broadcast_in_dim iota reshape slice squeeze transpose".split())


@dataclass(eq=False)
class _Operation:
    """One operation; numbers stand for arrays."""

    eqn: Any
    inputs: list[Any]  # a number each, or a literal
    outputs: list[int]

    def arguments(self) -> list[int]:
        """Inputs that are no literals."""
        return [x for x in self.inputs if not isinstance(x, Literal)]

    def is_small(self) -> bool:
        avals = [x.aval for x in (*self.eqn.invars, *self.eqn.outvars)]
        name, size = self.eqn.primitive.name, max(math.prod(a.shape) for a in avals)
        if name == "dot_general":  # of vectors only
            (contracted, _), (batch, _) = self.eqn.params["dimension_numbers"]
            dims = len(contracted) + len(batch)
            vectors = all(len(a.shape) == dims for a in avals[:2])
            return vectors and size <= SMALL_SUM
        limit = SMALL_SUM if name.startswith(("reduce_", "arg")) else SMALL
        return name in _PLAIN and size <= limit

    def has_small_results(self) -> bool:
        return all(math.prod(x.aval.shape) <= SMALL for x in self.eqn.outvars)

    def is_on_mesh(self) -> bool:
        """Whether it is done by several devices, as can be while traced only."""
        return any(not x.aval.sharding.mesh.empty for x in self.eqn.outvars)

    def is_view(self) -> bool:
        return self.eqn.primitive.name in _VIEWS and self.is_small()


class _Program:
    """All operations of a function and of what it calls."""

    def __init__(self, closed, arguments):
        self.values: dict[int, Any] = {}  # known ones
        self.operations: list[_Operation] = []
        self._count = itertools.count()
        names = self._new([*closed.consts, *arguments])
        self.results = self._add(closed.jaxpr, names)
        needed = {x for x in self.results if not isinstance(x, Literal)}
        kept = []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.outputs):
                kept.append(operation)
                needed.update(operation.arguments())
        self.operations = kept[::-1]
        self._fold()

    def _fold(self):
        """Work out what depends on constants alone and would be between pieces.

        XLA does so anyway, and then fails on a piece with a constant as argument.
        """
        fixed = {x for x, value in self.values.items() if _is_constant(value)}
        makers: dict[int, _Operation] = {}
        for operation in self.operations:
            known = fixed.issuperset(operation.arguments())
            if known and not operation.is_on_mesh():
                fixed.update(operation.outputs)
                makers.update(dict.fromkeys(operation.outputs, operation))
        between = [o for o in self.operations if o.outputs[0] in makers]
        between = [o for o in between if o.has_small_results() and not o.is_small()]
        results = sorted(_made(between))
        with jax.ensure_compile_time_eval():
            found = _evaluate(_sufficient([], results, makers), self.values)
        self.values.update((x, found[x]) for x in results)
        self.operations = [o for o in self.operations if o not in between]

    def _new(self, values):
        names = [next(self._count) for _ in values]
        self.values.update(zip(names, values, strict=True))
        return names

    def _add(self, jaxpr, arguments):
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

        def read(x):
            return x if isinstance(x, Literal) else names[x]

        for eqn in jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            if eqn.primitive.name in _CALLS:
                inner = eqn.params[_CALLS[eqn.primitive.name]]
                outputs = self._add(inner.jaxpr, [*self._new(inner.consts), *inputs])
            else:
                outputs = [next(self._count) for _ in eqn.outvars]
                self.operations.append(_Operation(eqn, inputs, outputs))
            names.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def stages(self):
        """Operations in groups, and whether a group may be one piece."""
        large = [not operation.is_small() for operation in self.operations]
        both = list(zip(self.operations, large, strict=True))
        first: dict[int, int] = {}  # the stage from which on a value is there
        for operation, is_large in both:
            own = max((first.get(x, 0) for x in operation.arguments()), default=0)
            first.update(dict.fromkeys(operation.outputs, own + is_large))
        end = max(first.values(), default=0)
        last: dict[int, int] = {}  # the stage in which it is needed
        groups: dict[tuple[int, bool], list[_Operation]] = {}
        for operation, is_large in reversed(both):
            if is_large:  # after the piece of its stage
                stage = first[operation.outputs[0]] - 1
            else:
                stage = min(last.get(x, end) for x in operation.outputs)
            groups.setdefault((stage, is_large), []).append(operation)
            for x in operation.arguments():
                last[x] = min(last.get(x, end), stage)
        for stage, is_large in sorted(groups):
            group = groups[stage, is_large][::-1]
            if is_large:
                yield group, False
                continue
            for part in _divided(group):
                yield part, len(part) >= FEW

    def plan(self):
        """Groups of operations, and which results of a piece are handed on.

        These are None of operations that are no piece.
        """
        needed = {x for x in self.results if not isinstance(x, Literal)}
        views = {x: o for o in self.operations if o.is_view() for x in o.outputs}
        groups: list[tuple[list[_Operation], list[int] | None]] = []
        for operations, as_one in reversed(list(self.stages())):
            made, outputs = _made(operations), None
            if as_one:
                outputs = sorted(made & needed)
                operations = _sufficient(operations, outputs, views)
            needed = needed - made | _inputs(operations)
            groups.append((operations, outputs))
        return groups[::-1]

    def evaluate(self):
        """The results."""
        for operations, outputs in self.plan():
            if outputs is None:
                self.values = _evaluate(operations, self.values)
            else:
                self.values |= _evaluate_as_one(operations, self.values, outputs)
        return _read(self.values, self.results)


def _divided(operations):
    """In pieces that are quickly compiled.

    No piece has a sum of what it chose element by element: XLA would choose again
    within the sum, and LLVM copy the sum for every choice. What only puts the results
    together is the last piece: else XLA works them out anew for every place there.
    """
    used = {x for o in operations for x in o.arguments()}
    parts: list[list[_Operation]] = [[]]
    last: list[_Operation] = []
    chosen: dict[int, tuple] = {}  # shapes
    for operation in operations:
        name, shape = operation.eqn.primitive.name, operation.eqn.outvars[0].aval.shape
        if name == "stack" and used.isdisjoint(operation.outputs):
            last.append(operation)
            continue
        shapes = [chosen[x] for x in operation.arguments() if x in chosen]
        if shapes and name.startswith(("reduce_", "dot_")):
            parts.append([])
            chosen = {}
        elif name == "select_n" or shape in shapes:
            chosen[operation.outputs[0]] = shape
        parts[-1].append(operation)
    for part in (*parts, last):
        num = -(-len(part) // MANY)
        ends = [i * len(part) // num for i in range(num + 1)] if num else []
        yield from (part[a:b] for a, b in itertools.pairwise(ends))


def _made(operations):
    return {x for operation in operations for x in operation.outputs}


def _inputs(operations):
    return {x for o in operations for x in o.arguments()} - _made(operations)


def _sufficient(operations, outputs, views):
    """Those that the outputs need, with the views that they begin with."""
    makers = views | {x: o for o in operations for x in o.outputs}
    found: dict[int, _Operation] = {}
    missing = list(outputs)
    while missing:
        operation = makers.get(missing.pop())
        if operation is not None and operation.outputs[0] not in found:
            found[operation.outputs[0]] = operation
            missing += operation.arguments()
    return [found[x] for x in sorted(found)]  # numbers are in order of operations


def _is_constant(value):
    return not isinstance(value, jax.core.Tracer)


def _read(values, names):
    return [x.val if isinstance(x, Literal) else values[x] for x in names]


def _evaluate(operations, values):
    """Values, with those that the operations make."""
    values = dict(values)
    for operation in operations:
        primitive = operation.eqn.primitive
        params = primitive.get_bind_params(operation.eqn.params)
        arguments = _read(values, operation.inputs)
        if primitive.name == "dot_general" and operation.is_small():
            results = [_vector_product(*arguments, **params)]
        else:
            with operation.eqn.ctx.manager:
                results = primitive.bind(*arguments, **params)
            results = results if primitive.multiple_results else [results]
        values.update(zip(operation.outputs, results, strict=True))
    return values


def _vector_product(a, b, dimension_numbers, **params):
    """As a sum, since XLA has routines for products which are no part of a piece."""
    contracted, batch = dimension_numbers
    a, b = (
        lax.transpose(x, (*first, *last))
        for x, first, last in zip((a, b), batch, contracted, strict=True)
    )
    num = len(batch[0])
    return lax.reduce_sum(a * b, axes=tuple(range(num, a.ndim)))


def _evaluate_as_one(operations, values, outputs):
    """The values of ``outputs``."""
    # Constants are no arguments: XLA fails on those, too.
    needed = sorted(_inputs(operations))
    known = {x: values[x] for x in needed if _is_constant(values[x])}
    inputs = [x for x in needed if x not in known]

    def evaluate(arguments):
        given = dict(zip(inputs, arguments, strict=True))
        return _read(_evaluate(operations, known | given), outputs)

    @custom_vmap
    def piece(arguments):
        with set_xla_metadata(**_MARK):
            marked = jax.jit(lambda a: (evaluate(a), _witness(a)))
            return marked(arguments)[0]

    @piece.def_vmap
    def _batched(axis_size, in_batched, arguments):
        # More than it was made for: what is small now is not known any more.
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched[0])
        results = jax.vmap(evaluate, in_axes=(axes,), axis_size=axis_size)(arguments)
        return results, [True] * len(outputs)

    results = piece([values[x] for x in inputs])
    return dict(zip(outputs, results, strict=True))


def _witness(arguments):
    """Something of every argument: XLA fails on one that turns out to be unused."""
    kinds: dict[Any, list] = {}
    for x in (x for x in arguments if x.size):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = random.key_data(x)
        first = lax.slice(lax.reshape(x, (x.size,)), (0,), (1,))
        kinds.setdefault(x.dtype, []).append(first)
    # A sum is one loop; joined, they would be one for each.
    return [
        reduce(lax.bitwise_or if dtype.kind == "b" else lax.add, parts)
        for dtype, parts in kinds.items()
    ]


def makes_pieces() -> bool:
    """Whether small operations are gathered at all."""
    wanted = os.environ.get("NUMPYRO_PDMP_PIECES") != "0"
    tested = jax.__version_info__[:2] in TESTED
    return wanted and tested and jax.default_backend() == "cpu"


def in_pieces(fn: Callable) -> Callable:
    """The same function, compiled into few pieces on CPU.

    :param fn: of arrays; those of all chains, so that it can be told what is small.
    """
    if not makes_pieces():
        return fn

    def call(*args):
        flat, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *flat: fn(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*flat)
        if closed.effects:
            return fn(*args)
        results = _Program(closed, flat).evaluate()
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call
