# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Runs whose draws come in chunks, for what should not wait or be kept in memory."""

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any, NamedTuple

from tqdm.auto import tqdm

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key, nested_attrgetter
from numpyro_pdmp.initialize import jit_arrays
from numpyro_pdmp.model_kernel import ModelKernel
from numpyro_pdmp.options import require_count
from numpyro_pdmp.shards import plain


class Chunk(NamedTuple):
    """A few draws, and all that is needed to go on from them."""

    samples: Any  # by site, (chains, draws, ...); as from `get_samples`
    extra_fields: dict[str, Array]  # by name, (chains, draws, ...)
    state: Any  # of the kernel, after the last step
    step: int  # steps of a chain so far, warm-up included


def _need_count(name: str, value: Any, least: int) -> int:
    if value is None:
        raise ValueError(f"`{name}` is missing; give it, or an `MCMC` object.")
    if least or value != 0:
        require_count(name, value)
    return int(value)


def first_state(kernel, rng_key, num_warmup, init_params, args, kwargs, state):
    # As in NumPyro: some kernels are not ready for a state before their `init`.
    if state is None or getattr(kernel, "_sample_fn", None) is None:
        prepared = getattr(kernel, "_prepared", None)
        # A chunk is of traced data, so that a draw would be traced once more.
        with nullcontext() if prepared is None else prepared.unwanted():
            new = kernel.init(rng_key, num_warmup, init_params, args, kwargs)
        state = new if state is None else state
    return _strong(state)


def _strong(tree: Any) -> Any:
    """Without weak types, for which a program would be compiled once more."""

    def strong(a):
        key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return a if key else lax.convert_element_type(a, a.dtype)

    return jax.tree.map(lambda a: strong(jnp.asarray(a)), tree)


def run_chunks(
    sampler: MCMC | MCMCKernel,
    rng_key: Array,
    *args: Any,
    num_warmup: int | None = None,
    num_samples: int | None = None,
    num_chains: int | None = None,
    thinning: int | None = None,
    chunk: int = 50,
    extra_fields: tuple[str, ...] = (),
    transform: Callable | None = None,
    init_params: Any = None,
    state: Any = None,
    step: int = 0,
    yield_warmup: bool = False,
    progress_bar: bool | None = None,
    **kwargs: Any,
) -> Generator[Chunk, Any, None]:
    """Sample, and yield the draws of every chunk as soon as it is done.

    The draws are those of ``MCMC(sampler, ..., chain_method="vectorized")``, but no
    more than a chunk of them is in memory, and only those that ``thinning`` keeps ever
    leave the loop. One program is compiled for warm-up and all chunks. To go on from
    a chunk, in this process or another one, give its ``state`` and ``step`` with
    otherwise equal arguments: what follows is the same to the last bit. A state that
    is given to the generator's ``send`` replaces its own, to change what it holds, such
    as ``adapt_state.draw_time``, between chunks.

    :param sampler: a kernel, or an ``MCMC`` object, which gives the numbers below that
        are not given. Its chain method is not used: chains are vectorised.
    :param rng_key: as for ``MCMC.run``. Not used when going on from a state.
    :param args: arguments of the model; large data as JAX arrays, since those in NumPy
        arrays become constants of the compiled program.
    :param num_warmup: steps of warm-up. Default: 0.
    :param num_samples: steps after warm-up.
    :param num_chains: number of chains. Default: 1.
    :param thinning: keep every so many draws, the last of each group.
    :param chunk: draws to keep in each chunk, and of each chain. The last chunk may
        have fewer.
    :param extra_fields: names of the fields of the state to collect, as for
        ``MCMC.run``; those of ``kernel.default_fields`` are always there.
    :param transform: function of the sites of one draw, applied on the device: what it
        returns is kept in their place, such as a few of many weights.
    :param init_params: unconstrained values to start from, as for ``MCMC.run``.
    :param state: of the chunk to go on from.
    :param step: of the chunk to go on from.
    :param yield_warmup: whether to yield chunks without draws in warm-up, too, to save
        their states.
    :param progress_bar: whether to show one.
    :param kwargs: keyword arguments of the model.

    **Example**

    >>> from jax import random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_pdmp import BPS, run_chunks
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(3.0, 2.0))
    >>> total = 0
    >>> for chunk in run_chunks(BPS(model), random.key(0), num_warmup=200,
    ...                         num_samples=1000, chunk=250):
    ...     total = total + chunk.samples["x"].sum()
    >>> bool(abs(total / 1000 - 3) < 1)
    True
    """
    kernel: Any = sampler
    if isinstance(sampler, MCMC):
        kernel = sampler.sampler
        num_warmup = sampler.num_warmup if num_warmup is None else num_warmup
        num_samples = sampler.num_samples if num_samples is None else num_samples
        num_chains = sampler.num_chains if num_chains is None else num_chains
        thinning = sampler.thinning if thinning is None else thinning
        progress_bar = sampler.progress_bar if progress_bar is None else progress_bar
    elif not isinstance(sampler, MCMCKernel):
        raise TypeError(
            "`sampler` must be a kernel such as `Boomerang(model)` or an `MCMC` "
            f"object, got {sampler!r}."
        )
    num_warmup = _need_count("num_warmup", 0 if num_warmup is None else num_warmup, 0)
    num_samples = _need_count("num_samples", num_samples, 1)
    num_chains = _need_count("num_chains", 1 if num_chains is None else num_chains, 1)
    thinning = _need_count("thinning", 1 if thinning is None else thinning, 1)
    require_count("chunk", chunk)
    if thinning > num_samples:
        raise ValueError(
            f"`thinning={thinning}` keeps none of `num_samples={num_samples}` draws."
        )
    if (state is None) != (step == 0):
        raise ValueError(
            f"`state` and `step` belong together, got step={step} and "
            f"{'no' if state is None else 'a'} state; give both of a chunk."
        )
    if num_chains > 1 and is_prng_key(rng_key):
        rng_key = random.split(rng_key, num_chains)
    # Errors are raised here and not at the first `next`, so this is no generator.
    return _chunks(
        kernel,
        (rng_key, num_warmup, init_params, args, kwargs, state),
        num_warmup,
        num_warmup + num_samples,
        thinning,
        chunk,
        tuple(dict.fromkeys((*kernel.default_fields, *extra_fields))),
        transform,
        step,
        num_chains,
        yield_warmup,
        bool(progress_bar),
    )


def _chunks(
    kernel,
    init,
    num_warmup,
    end,
    thinning,
    chunk,
    fields,
    transform,
    step,
    num_chains,
    yield_warmup,
    progress_bar,
):
    single = num_chains == 1
    field = kernel.sample_field
    names = [name for name in fields if name != field]
    *_, args, kwargs, _ = init

    def advance(args, kwargs, state, num_draws, stride):
        def sites(z):
            z = kernel.postprocess_fn(args, kwargs)(z)
            return z if transform is None else transform(z)

        def kept(state):
            if isinstance(kernel, ModelKernel):
                state = kernel._with_energy(state, args, kwargs)
            z = nested_attrgetter(field)(state)
            extra = {name: nested_attrgetter(name)(state) for name in names}
            if single:
                return sites(z), extra
            return jax.vmap(sites)(z), jax.tree.map(for_all, extra)

        def for_all(a):
            # Chains share what they adapt.
            alone = a.shape[:1] != (num_chains,)
            return jnp.broadcast_to(a, (num_chains, *a.shape)) if alone else a

        def body(k, carry):
            state, buffer = carry
            state = lax.fori_loop(
                0, stride, lambda _, s: kernel.sample(s, args, kwargs), state
            )
            buffer = jax.tree.map(lambda b, v: b.at[k].set(v), buffer, kept(state))
            return _strong(state), buffer

        buffer = jax.tree.map(
            lambda a: jnp.zeros((chunk, *a.shape), a.dtype),
            jax.eval_shape(kept, state),
        )
        return lax.fori_loop(0, num_draws, body, (state, buffer))

    def as_chunk(buffer, num, state, step):
        samples, extra = jax.tree.map(
            lambda a: a[None, :num] if single else jnp.swapaxes(a[:num], 0, 1),
            plain(buffer),
        )
        return Chunk(samples, extra, state, step)

    state = first_state(kernel, *init)
    compiled = jit_arrays(advance, args, kwargs)
    # As in NumPyro, draws that do not fill a group are left out at the beginning.
    first = num_warmup + (end - num_warmup) % thinning
    with tqdm(total=end, initial=step, disable=not progress_bar) as bar:

        def show(phase):
            bar.set_description(phase, refresh=False)
            if single and progress_bar:
                bar.set_postfix_str(kernel.get_diagnostics_str(state), refresh=False)
            bar.update(step - bar.n)

        while step < first:
            stride = min(chunk * thinning, first - step)
            state, buffer = compiled(state, 1, stride)
            step += stride
            show("warmup")
            if yield_warmup:
                state = (yield as_chunk(buffer, 0, state, step)) or state
        while step < end:
            num = min(chunk, (end - step) // thinning)
            state, buffer = compiled(state, num, thinning)
            step += num * thinning
            show("sample")
            state = (yield as_chunk(buffer, num, state, step)) or state
