# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic-gradient MCMC: one base class for its kernels.

The updates are written out rather than taken from a library: a NumPyro kernel draws its
batches inside of the compiled loop, and a step that is not finite must not be made.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.infer import init_to_uniform
from numpyro.util import is_prng_key
from numpyro_pdmp.control_variates import ControlVariate
from numpyro_pdmp.importance import Importance
from numpyro_pdmp.model_kernel import ModelKernel
from numpyro_pdmp.moments import AnyScale
from numpyro_pdmp.options import (
    check_metric,
    check_step_size,
    check_subsampling,
    check_target,
    require_count,
)
from numpyro_pdmp.process.batches import batch_arguments, start_batches
from numpyro_pdmp.process.randomness import draw_uniform, normal
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.start import first_chain
from numpyro_pdmp.warmup import DENSE_LIMIT

#: relative error of a Gaussian's variances for which ``step_size="auto"`` is chosen
TARGET_BIAS = 0.025

SGMCMCState = namedtuple(
    "SGMCMCState",
    [
        "i",
        "z",
        "potential_energy",
        "num_grad",
        "num_rejected",
        "diverging",
        "step_size",
        "adapt_state",
        "whitened",
        "last",
        "memory",
        "batches",
        "rng_key",
    ],
)
"""
State of a stochastic-gradient kernel. All counts are of one draw.

 - **i** - number of draws so far, warm-up included.
 - **z** - the draw: unconstrained values of the latent sites.
 - **potential_energy** - its estimate from one batch (NaN when not asked for).
 - **num_grad** - evaluations of the gradient estimate.
 - **num_rejected** - steps that were not made since they were not finite.
 - **diverging** - whether there were any.
 - **step_size** - of the last step.
 - **adapt_state** - what ``init`` found; shared by vectorised chains.
 - **whitened** - position of the chain, in whitened coordinates.
 - **last** - the one before, at which the gradient was finite: that is the draw.
 - **memory** - what else a sampler remembers, such as a momentum.
 - **batches** - state of the mini-batches; None on full data.
 - **rng_key** - random number generator key.
"""


class Found(NamedTuple):
    """What ``init`` finds, and nothing changes afterwards."""

    scale: AnyScale
    control: ControlVariate | None
    importance: dict[str, Importance] | None
    step_size: Array  # NaN if there is a schedule
    gradient_variance: Array  # over batches, whitened, mean over coordinates
    num_warmup: Array


class Step(NamedTuple):
    """What a step is told besides position and gradient."""

    size: Array
    number: Array  # since the start, warm-up included
    first: Array  # whether it is the first of a draw
    warmup: Array  # whether it is in warm-up
    gradient_variance: Array


class SGMCMCKernel(ModelKernel):
    """Base of the kernels; a subclass says what a step is.

    See :class:`~numpyro_pdmp.SGLD` for the arguments.
    """

    _batch: ClassVar[str] = "proposal"
    _cross_chain_adapt: ClassVar[bool] = True
    _dense_mass: ClassVar[None] = None
    _low_rank: ClassVar[None] = None
    _hard_walls: ClassVar[bool] = False

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        step_size: float | str | Callable = "auto",
        num_steps: int = 10,
        precondition: bool | None = None,
        reference: Any = None,
        inverse_mass_matrix: Any = None,
        center: Any = None,
        find_mode: bool = True,
        control_variates: int | str | None = "auto",
        batching: str = "auto",
        init_strategy: Callable = init_to_uniform,
        forward_mode_differentiation: bool = False,
        potential_energy: bool = False,
    ):
        check_target(model, potential_fn)
        check_step_size(step_size)
        require_count("num_steps", num_steps)
        check_metric(None, None, reference, inverse_mass_matrix, center)
        check_subsampling(self._batch, batching, control_variates)
        given = reference is not None or inverse_mass_matrix is not None
        if precondition is False and given:
            raise ValueError(
                "`precondition=False`, but `reference` or `inverse_mass_matrix` is "
                "given; for the point alone give `center` and `init_params`."
            )
        auto = isinstance(step_size, str)
        self._model = model
        self._potential_fn = potential_fn
        self._step_size = step_size
        self._num_steps = int(num_steps)
        self._precondition = (given or auto) if precondition is None else precondition
        self._reference = reference
        self._inverse_mass_matrix = inverse_mass_matrix
        self._center = center
        self._adapt_mass_matrix = find_mode
        self._control_variates = control_variates
        self._batching = batching
        self._init_strategy = init_strategy
        self._forward_mode_differentiation = forward_mode_differentiation
        self._potential_energy = potential_energy

    def get_diagnostics_str(self, state):
        rejected = ", step rejected" if state.diverging else ""
        return f"step size {float(state.step_size):.2e}{rejected}"

    def __repr__(self):
        target = self._model if self._model is not None else self._potential_fn
        name = getattr(target, "__name__", repr(target))
        return f"{type(self).__name__}({name}, step_size={self._step_size})"

    # What a subclass provides

    def _first_memory(self, noise: Array) -> Any:
        """What the sampler remembers before its first step."""
        return ()

    def _update(
        self, z: Array, memory: Any, grad: Array, noise: Array, step: Step
    ) -> tuple[Array, Any]:
        """The next position and memory, all in whitened coordinates."""
        raise NotImplementedError

    def _turned(self, memory: Any) -> Any:
        """Memory after a step that was not made."""
        return memory

    def _auto_step_size(self, variance: Array) -> Array:
        """Step size for a bias of ``TARGET_BIAS``, given the gradient's variance."""
        raise NotImplementedError

    # The start

    def init(
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        kwargs = {} if model_kwargs is None else model_kwargs
        state = super().init(rng_key, num_warmup, init_params, model_args, kwargs)
        single, found = is_prng_key(rng_key), state.adapt_state
        one = state.z if single else first_chain(state.z)
        self._check_found(one, subsampled=state.batches is not None)
        if not self._precondition:
            state = self._in_own_units(state, single)
            found = state.adapt_state
        size: Any = jnp.nan if callable(self._step_size) else self._step_size
        if isinstance(self._step_size, str):
            size = self._auto_step_size(found.gradient_variance)
        size = jnp.asarray(size, found.gradient_variance.dtype)
        return state._replace(adapt_state=found._replace(step_size=size))

    def _descends(self, z, num_warmup):
        """A mode is worth as much without warm-up."""
        return super()._descends(z, num_warmup=1)

    def _finds_mode(self, z, subsampled):
        small = not subsampled or ravel_pytree(z)[0].size <= DENSE_LIMIT
        return small and self._descends(z, 0)

    def _check_found(self, z, subsampled):
        given = self._reference is not None or self._inverse_mass_matrix is not None
        dim = ravel_pytree(z)[0].size
        if self._precondition and not given and not self._finds_mode(z, subsampled):
            name = "step_size" if isinstance(self._step_size, str) else "precondition"
            value = getattr(self, f"_{name}")
            raise ValueError(
                f"`{name}={value!r}` needs a metric, and none is looked for with "
                f"`find_mode=False`, with `center`, or beyond {DENSE_LIMIT} dimensions "
                f"of a subsampled model (this one has {dim}): give a number for "
                "`step_size`, or `reference` or `inverse_mass_matrix`."
            )

    def _in_own_units(self, state, single):
        """Centred as before, but in the model's own units."""
        old = state.adapt_state.scale
        unit = jnp.ones((), state.whitened.dtype)
        found = state.adapt_state._replace(scale=Scale(old.center, unit))
        move = old.direction if single else jax.vmap(old.direction)
        z = move(state.whitened)
        return state._replace(adapt_state=found, whitened=z, last=z)

    def _with_noise(self, chain, plan):
        # Of the rate along a vector that has length 1 in each coordinate; nothing
        # refines a step size, so it has to be for where the chain is going.
        noise = jnp.where(jnp.isfinite(plan.noise), plan.noise, plan.near)
        variance = jnp.nan_to_num(noise, posinf=0) ** 2 / chain.whitened.size
        dtype = chain.whitened.dtype
        return chain.adapt_state._replace(gradient_variance=variance.astype(dtype))

    def _init_state(self, source, num_warmup, rng_key, random_numbers, z, energy):
        uniform, words = random_numbers
        x = ravel_pytree(z)[0]
        scale = self._initial_scale(z)
        zero, count = jnp.zeros((), x.dtype), jnp.zeros((), int)
        # A descent replaces the position, and takes noise from where it was.
        position = scale.whiten(x)
        if self._finds_mode(z, source is not None):
            position = normal(uniform[x.size + 1 :])
        found = Found(scale, None, None, zero, zero, jnp.asarray(num_warmup))
        return SGMCMCState(
            i=count,
            z=z,
            potential_energy=zero + (energy if self._potential_energy else jnp.nan),
            num_grad=count,
            num_rejected=count,
            diverging=jnp.zeros((), bool),
            step_size=zero,
            adapt_state=found,
            whitened=position,
            last=position,
            memory=self._first_memory(normal(uniform[1 : x.size + 1])),
            batches=None if source is None else start_batches(source, words, False),
            rng_key=rng_key,
        )

    def _placed(self, state, z):
        return state._replace(whitened=z, last=z)

    # A draw

    def sample(self, state, model_args, model_kwargs):
        """Make ``num_steps`` steps.

        :param SGMCMCState state: the current state, of one chain or of a batch.
        :param model_args: arguments provided to the model.
        :param model_kwargs: keyword arguments provided to the model.
        :return: the next state.
        """
        single = is_prng_key(state.rng_key)
        one = state.z if single else first_chain(state.z)
        functions = self._functions(model_args, model_kwargs)
        advance = partial(
            self._advance, functions=functions, unravel=ravel_pytree(one)[1]
        )
        if not single:
            advance = jax.vmap(advance, in_axes=(0, None))
        found = state.adapt_state
        return advance(state._replace(adapt_state=None), found)._replace(
            adapt_state=found
        )

    def _advance(self, state, found, functions, unravel):
        target = self._target(functions, unravel, found.control, found.importance)
        scale, dtype = found.scale, state.whitened.dtype
        num_words = 0 if target.source is None else target.source.num_words

        def draw(rng_key):
            return draw_uniform(rng_key, state.whitened.size, dtype, num_words)

        def body(k, state):
            number = state.i * self._num_steps + k
            size = found.step_size
            if callable(self._step_size):
                # Not below zero, where rounding may take the end of a schedule.
                size = jnp.maximum(jnp.asarray(self._step_size(number), dtype), 0)
            rng_key, uniform, words = draw(state.rng_key)
            batches, batch = batch_arguments(
                target.source, state.batches, words, rng_key, draw
            )
            z = state.whitened
            grad = scale.gradient(target.gradient(scale.position(z), *batch))
            step = Step(
                size,
                number,
                k == 0,
                state.i < found.num_warmup,
                found.gradient_variance,
            )
            new, memory = self._update(z, state.memory, grad, normal(uniform), step)
            finite = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((new, memory))]
            fine = jnp.stack([*finite, jnp.all(jnp.isfinite(grad))]).all()
            # Else back to where the gradient was finite, for here it may never be.
            z, last, memory = jax.tree.map(
                lambda a, b: jnp.where(fine, a, b),
                (new, z, memory),
                (state.last, state.last, self._turned(state.memory)),
            )
            return state._replace(
                whitened=z,
                last=last,
                memory=memory,
                batches=batches,
                rng_key=rng_key,
                step_size=size,
                num_rejected=state.num_rejected + ~fine,
            )

        state = state._replace(num_rejected=jnp.zeros_like(state.num_rejected))
        state = lax.fori_loop(0, self._num_steps, body, state)
        x = scale.position(state.last)
        energy = jnp.full((), jnp.nan, dtype)
        if self._potential_energy:
            energy = self._energy(target, state, x)
        return state._replace(
            i=state.i + 1,
            z=unravel(x),
            potential_energy=jnp.asarray(energy, dtype),
            num_grad=jnp.full_like(state.num_grad, self._num_steps),
            diverging=state.num_rejected > 0,
        )

    def refresh(self, state, model_args, model_kwargs):
        """Nothing that depends on the conditioning is kept, but the energy."""
        if not self._potential_energy:
            return state
        energy = self._functions(model_args, model_kwargs).potential_fn(state.z)
        energy = jnp.asarray(energy, state.potential_energy.dtype)
        return state._replace(potential_energy=energy)
