# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The samplers of the paper, and those beyond it, on models that fit into memory."""

from typing import Any, NamedTuple
import warnings

import numpy as np

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from numpyro_pdmp import (
    BPS,
    SGHMC,
    SGLD,
    Boomerang,
    Scale,
    SigmaBPS,
    bnn,
    find_map,
    laplace_reference,
    run_chunks,
)
from numpyro_pdmp.sghmc import hamiltonian_step
from numpyro_pdmp.sgld import langevin_step
from numpyro_pdmp.subsample import SubsampledModel

#: names in tables and figures
TITLES = {
    "bps": "BPS",
    "sigma-bps": "σBPS",
    "boomerang": "Boomerang",
    "boomerang-3": "Boomerang, rate 3",
    "sgld": "SGLD",
    "sgld-nd": "SGLD-ND",
    "sgld-white": "SGLD, preconditioned",
    "sghmc": "SGHMC",
    "vi": "mean-field VI",
    "map": "MAP",
    "nuts": "NUTS",
    "sgd": "SGD",
}
#: steps that tell whether their size is too large
PILOT = 1000
PDMPS = {
    "bps": BPS,
    "sigma-bps": SigmaBPS,
    "boomerang": Boomerang,
    "boomerang-3": Boomerang,
}
#: refreshments a unit of time, where they are not the kernel's own
REFRESH_RATES = {"boomerang-3": 3.0}


class Settings(NamedTuple):
    """Sizes of a run."""

    num_warmup: int = 500
    num_samples: int = 1000
    num_steps: int = 50  # of stochastic gradients a draw
    learning_rate: float = 1e-5  # of SGLD: half of the step size
    map_steps: int = 10_000
    svi_steps: int = 5_000
    nuts: tuple[int, int, int, int] = (500, 500, 2, 8)  # warm-up, draws, chains, depth
    batch_size: int | None = None
    max_grad: int = 1000  # of a draw of a PDMP


class Draws(NamedTuple):
    """Draws of one chain, and what they took."""

    samples: dict[str, Any]  # (chains, draws, ...)
    weights: Any  # of the draws, or None
    info: dict[str, Any]


def mode_of(model, network, x, y, seed, settings, noise=False):
    """The MAP by Adam from Haiku's initial weights, as in the paper."""
    key = random.fold_in(random.key(seed), 0)
    start = bnn.initial_params(network, x, random.fold_in(key, 1))
    if noise:
        start["noise"] = jnp.log(0.3)
    steps = settings.map_steps
    return find_map(
        model,
        key,
        x,
        y,
        **rows(settings),
        init_params=start,
        num_steps=steps,
        optimizer=optax.adam(optax.cosine_decay_schedule(0.01, steps)),
        progress_bar=False,
    )


def rows(settings):
    size = settings.batch_size
    return {} if size is None else {"subsample_size": size}


def one_scale(reference):
    """The reference of plain BPS: one number for all coordinates."""
    size = jnp.exp(jnp.mean(jnp.log(reference.factor)))
    return Scale(reference.center, jnp.full_like(reference.factor, size))


def make_reference(model, mode, x, y, settings):
    # Damped by the precision of the widest prior: no weight is freer than before.
    return laplace_reference(
        model, mode, x, y, kind="diagonal", damping=1.0, **rows(settings)
    )


def make_pdmp(method, model, reference, settings):
    options = {}
    if method in REFRESH_RATES:
        options["refresh_rate"] = REFRESH_RATES[method]
    return PDMPS[method](
        model,
        reference=one_scale(reference) if method == "bps" else reference,
        adapt_mass_matrix=method != "bps",
        potential_energy=False,
        max_grad=settings.max_grad,
        **options,
    )


def make_stochastic(method, model, reference, settings, size):
    """SGLD in the model's own units, or a kernel that is scaled by the curvature."""
    steps = {"num_steps": settings.num_steps}
    if method in ("sgld", "sgld-nd"):
        if method == "sgld":
            draws = settings.num_warmup + settings.num_samples
            size = optax.linear_schedule(size, 0.0, settings.num_steps * draws)
        return SGLD(model, step_size=size, find_mode=False, **steps)
    kind = SGHMC if method == "sghmc" else SGLD
    return kind(model, reference=reference, step_size=size, **steps)


def stable_size(method, model, reference, mode, x, y, settings):
    """The largest step size, from the usual one down by fours, that does not run away.

    That is: after some steps on all data the energy is finite and not far above what
    it should be.
    """
    first = {"sghmc": 0.3, "sgld-white": 0.1}.get(method, 2 * settings.learning_rate)
    whole = SubsampledModel(model, (x, y))
    center, unravel = ravel_pytree(mode.params)
    factor = reference.factor if method in ("sghmc", "sgld-white") else 1.0

    def energy(z):
        return whole.full_potential_fn(unravel(center + factor * z))

    def pilot(size):
        def step(k, carry):
            z, momentum = carry
            noise = random.normal(random.fold_in(random.key(0), k), z.shape)
            grad = jax.grad(energy)(z)
            if method == "sghmc":
                return hamiltonian_step(z, momentum, grad, noise, size, 1.0)
            return langevin_step(z, grad, noise, size), momentum

        zero = jnp.zeros_like(center)
        return energy(lax.fori_loop(0, PILOT, step, (zero, zero))[0])

    sizes = first * 4.0 ** -jnp.arange(8)
    rise = jax.jit(lambda s: lax.map(pilot, s) - energy(0 * center))(sizes)
    fine = np.asarray(jnp.isfinite(rise) & (rise < 2 * center.size))
    return float(sizes[np.argmax(fine) if fine.any() else -1])


def chunks(kernel, mode, x, y, seed, settings, num_warmup, num_samples, fields=()):
    return run_chunks(
        kernel,
        random.fold_in(random.key(seed), 1),
        x,
        y,
        **rows(settings),
        num_warmup=num_warmup,
        num_samples=num_samples,
        chunk=num_samples,
        init_params=mode.params,
        extra_fields=("num_grad", "diverging", *fields),
        progress_bar=False,
    )


def nuts(model, network, x, y, seed, settings, noise=False):
    """The truth; from starts of their own, since equal ones agree too soon."""
    num_warmup, num_samples, num_chains, depth = settings.nuts
    key = random.fold_in(random.key(seed), 7)
    starts = [
        bnn.initial_params(network, x, random.fold_in(key, k))
        for k in range(num_chains)
    ]
    if noise:
        starts = [{**s, "noise": jnp.log(0.3)} for s in starts]
    mcmc = MCMC(
        NUTS(model, max_tree_depth=depth),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = {k: jnp.stack([s[k] for s in starts]) for k in starts[0]}
    if num_chains == 1:
        start = starts[0]
    mcmc.run(key, x, y, init_params=start, extra_fields=("num_steps",))
    steps = np.asarray(mcmc.get_extra_fields()["num_steps"])
    info = {"gradients": int(steps.sum()), "num_chains": num_chains}
    return Draws(mcmc.get_samples(group_by_chain=True), None, info)


def constrained(model, mode, x, y):
    return SubsampledModel(model, (x[:2], y[:2])).constrain_fn(mode.params)


def variational(model, mode, x, y, seed, settings):
    start = init_to_value(values=constrained(model, mode, x, y))
    guide = AutoNormal(model, init_loc_fn=start, init_scale=0.01)
    steps = settings.svi_steps
    optimizer = Adam(optax.cosine_decay_schedule(0.01, steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    keys = random.split(random.key(seed + 100))
    fit = svi.run(keys[0], steps, x, y, **rows(settings), progress_bar=False)
    shape = (1, settings.num_samples)
    draws = guide.sample_posterior(keys[1], fit.params, sample_shape=shape)
    return Draws(draws, None, {"gradients": steps})


def sample(method, model, network, mode, x, y, seed, settings, noise=False):
    """Draws of any method from the mode."""
    if method == "nuts":
        return nuts(model, network, x, y, seed, settings, noise)
    if method == "vi":
        return variational(model, mode, x, y, seed, settings)
    if method == "map":
        one = constrained(model, mode, x, y)
        draws = {k: v[None, None] for k, v in one.items()}
        return Draws(draws, None, {"gradients": settings.map_steps})
    reference, pdmp = make_reference(model, mode, x, y, settings), method in PDMPS
    info: dict[str, Any] = {}
    fields = ("num_violations", "num_proposals") if pdmp else ("step_size",)
    sizes = (settings.num_warmup, settings.num_samples, fields)
    if pdmp:
        kernel: Any = make_pdmp(method, model, reference, settings)
        (chunk,) = chunks(kernel, mode, x, y, seed, settings, *sizes)
    else:
        size = 4 * stable_size(method, model, reference, mode, x, y, settings)
        for _ in range(4):  # a pilot may be too short to tell
            size /= 4
            kernel = make_stochastic(method, model, reference, settings, size)
            (chunk,) = chunks(kernel, mode, x, y, seed, settings, *sizes)
            if not chunk.extra_fields["diverging"].any():
                break
        info["step_size"] = size
    extra = {k: np.asarray(v) for k, v in chunk.extra_fields.items()}
    info["gradients"] = int(extra["num_grad"].sum())
    info["diverging"] = int(extra["diverging"].sum())
    if pdmp:
        proposals = max(extra["num_proposals"].sum(), 1)
        info["violations"] = extra["num_violations"].sum() / proposals
        info["ratio_histogram"] = np.asarray(chunk.state.totals.ratio_histogram)
    weights = extra["step_size"] if method == "sgld" else None
    return Draws(chunk.samples, weights, info)


def mixing(model, samples, probes) -> dict[str, Any]:
    """Effective sizes in weight space (principal components) and function space."""
    num = next(iter(samples.values())).shape[1]
    moves = any(np.ptp(np.asarray(v), axis=1).any() for v in samples.values())
    if num < 8 or not moves:
        return {}
    values = bnn.function_values(model, samples, probes, batch_ndims=2)
    ess = bnn.mixing(values).ess
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result says whether it drifts
        components = bnn.principal_components(samples)
    first, second, last = components.mixing.ess
    return {
        "num_draws": num,
        "ess_first": first,
        "ess_second": second,
        "ess_last": last,
        "ess_function": float(np.nanmedian(ess)) if np.isfinite(ess).any() else None,
        "ess_function_min": float(np.nanmin(ess)) if np.isfinite(ess).any() else None,
        "drifts": components.drifts,
    }
