# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What warm-up tunes, and how much depends on it: three tables in Markdown.

``metric``: scales that warm-up learns on Gaussians, and the draws that follow.
``violation``: cost and bias as functions of ``target_violation``.
``sensitivity``: effective draws per gradient with other refreshment rates.

    python examples/benchmarks/tuning.py --part metric --num-samples 4000
"""

import argparse
from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from bias import mixture, student
from logistic import make_data, model as logistic_model
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import BPS, Boomerang, SigmaBPS, ZigZag

FIELDS = ("num_grad", "num_violations", "num_proposals")


def run(kernel, args, *model_args):
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(args.seed), *model_args, extra_fields=FIELDS)
    totals = {k: float(np.sum(v)) for k, v in mcmc.get_extra_fields().items()}
    return mcmc, totals


def flat_model(potential, dim):
    """A model with one site ``x`` whose density is given."""

    def model():
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (dim,))
        numpyro.factor("energy", -potential(numpyro.sample("x", flat)))

    return model


# Metric


def correlated(dim=50, condition=1e4):
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    values = np.logspace(0, np.log10(condition), dim)
    root = jnp.asarray((rotation / np.sqrt(values)).T, jnp.float32)
    sd = np.sqrt(np.square(rotation) @ values)
    return lambda x: 0.5 * jnp.sum(jnp.square(root @ x)), sd


def scaled(dim=500):
    sd = np.logspace(-2, 2, dim)
    unit = jnp.asarray(1 / sd, jnp.float32)
    return lambda x: 0.5 * jnp.sum(jnp.square(unit * x)), sd


METRICS = {
    "diagonal": {"dense_mass": False},
    "dense": {"dense_mass": True},
    "low rank": {"low_rank": 10},
}


def metric(args):
    print(
        "| target | sampler | metric | learned sd over truth, min | max | "
        "sd of draws over truth, min | max | mean | error of one coordinate | "
        "gradients a draw | min ESS(x, x^2) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    targets = {
        "correlated Gaussian d=50": correlated(),
        "scaled Gaussian d=500": scaled(),
    }
    for name, (potential, sd) in targets.items():
        if name not in (args.gaussians or targets):
            continue
        model = flat_model(potential, sd.size)
        for kernel in (Boomerang, BPS, ZigZag, SigmaBPS):
            if kernel.__name__ not in (args.kernels or (kernel.__name__,)):
                continue
            for kind in args.metrics or METRICS:
                options = METRICS[kind]
                if kernel is SigmaBPS:
                    if kind != "diagonal":
                        continue
                    options = {}
                mcmc, totals = run(kernel(model, **options), args)
                learned = np.sqrt(mcmc.last_state.adapt_state.scale.variance()) / sd
                z = np.asarray(mcmc.get_samples(group_by_chain=True)["x"], float) / sd
                ratio = np.sqrt(np.square(z).mean((0, 1)))
                ess, ess_square = (effective_sample_size(a) for a in (z, z**2))
                # Of the mean, from the chains: coordinates move together.
                error = 0.5 * np.square(z).mean((1, 2)).std() / args.num_chains**0.5
                one = np.median(1 / np.sqrt(2 * ess_square))
                print(
                    f"| {name} | {kernel.__name__} | {kind} | {learned.min():.3f} | "
                    f"{learned.max():.3f} | {ratio.min():.3f} | {ratio.max():.3f} | "
                    f"{ratio.mean():.4f} ± {error:.4f} | {one:.3f} | "
                    f"{totals['num_grad'] / z[..., 0].size:.1f} | "
                    f"{min(ess.min(), ess_square.min()):.0f} |",
                    flush=True,
                )


# Targets of the other two parts


class Target(NamedTuple):
    """A model and the quantities to look at."""

    model: Callable
    args: tuple
    quantities: Callable  # samples of the sites -> (chain, draw, quantity)
    mean: Any = None  # of the quantities, if known
    sd: Any = None
    options: Any = {}  # of the kernel


def small_bnn(num_data=40):
    """A network of 31 weights, 1-10-1 with tanh, on a sine with noise."""
    rng = np.random.default_rng(0)
    x = np.linspace(-2, 2, num_data)
    y = np.sin(2 * x) + 0.3 * rng.normal(size=num_data)

    def network(w, x):
        hidden = jnp.tanh(x[:, None] * w[:10] + w[10:20])
        return hidden @ w[20:30] + w[30]

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([31]).to_event(1))
        numpyro.sample("y", dist.Normal(network(w, x), 0.3), obs=y)

    # Weights have symmetries, so no sampler agrees on them with another. What the
    # network says, between the data and beyond, has none.
    places = jnp.linspace(-3, 3, 7)

    def quantities(samples):
        return jax.vmap(jax.vmap(lambda w: network(w, places)))(samples["w"])

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Target(model, data, quantities)


def known(potential, mean, sd, **options):
    model = flat_model(potential, sd.size)
    return Target(model, (), lambda samples: samples["x"], mean, sd, options)


def gaussian(make, **options):
    potential, sd = make()
    return known(potential, np.zeros(sd.size), sd, **options)


TARGETS = {
    "logistic regression d=25": lambda: Target(
        logistic_model, make_data(1000, 25), lambda samples: samples["beta"]
    ),
    "Student-t(5) d=10": lambda: known(*student()[:3]),
    "two modes d=10": lambda: known(*mixture()[:3]),
    "BNN d=31": small_bnn,
}
GAUSSIANS = {
    "correlated Gaussian d=50, diagonal metric": lambda: gaussian(
        correlated, dense_mass=False
    ),
    "scaled Gaussian d=500": lambda: gaussian(scaled),
}


@functools.cache
def truth(name, num_samples, num_warmup):
    """Mean, sd and relative error of the variance, from NUTS if not known."""
    target = TARGETS[name]()
    if target.mean is not None:
        return target.mean, target.sd, 0.0
    mcmc = MCMC(
        NUTS(target.model, dense_mass=True),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(7), *target.args)
    x = np.asarray(target.quantities(mcmc.get_samples(group_by_chain=True)), float)
    mean, sd = x.mean((0, 1)), x.std((0, 1))
    return mean, sd, relative_error(x, mean, sd)


def relative_error(x, mean, sd):
    """Monte-Carlo standard error of the variance, over the true one."""
    square = np.square((x - mean) / sd)
    return square.std((0, 1)) / np.sqrt(effective_sample_size(square))


def smallest_ess(x):
    square = np.square(x - x.mean((0, 1)))
    return min(effective_sample_size(a).min() for a in (x, square))


# Violations


def violation(args):
    print(
        "| target | sampler | `target_violation` | measured | gradients a draw | "
        "worst sd error (MCSE) | sd ratio | min ESS(x, x^2) per 1000 gradients |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.targets or TARGETS:
        target = TARGETS[name]()
        mean, sd, truth_error = truth(name, args.truth_samples, args.num_warmup)
        for kernel in (Boomerang, BPS):
            if kernel.__name__ not in (args.kernels or (kernel.__name__,)):
                continue
            for share in args.violations:
                mcmc, totals = run(
                    kernel(target.model, target_violation=share), args, *target.args
                )
                samples = mcmc.get_samples(group_by_chain=True)
                x = np.asarray(target.quantities(samples), float)
                variance = np.square((x - mean) / sd).mean((0, 1))
                error = np.hypot(relative_error(x, mean, sd), truth_error)
                chains = np.square((x - mean) / sd).mean((1, 2))
                ratio_error = 0.5 * chains.std() / args.num_chains**0.5
                rate = totals["num_violations"] / max(totals["num_proposals"], 1)
                print(
                    f"| {name} | {kernel.__name__} | {share:g} | {rate:.4f} | "
                    f"{totals['num_grad'] / x[..., 0].size:.1f} | "
                    f"{np.max(np.abs(variance - 1) / error):.1f} | "
                    f"{np.sqrt(variance).mean():.4f} ± {ratio_error:.4f} | "
                    f"{1000 * smallest_ess(x) / totals['num_grad']:.1f} |",
                    flush=True,
                )


# Sensitivity


def sensitivity(args):
    print(
        "| target | sampler | `refresh_rate` | over the default | "
        "bounces a unit of time | gradients a draw | "
        "min ESS(x, x^2) per 1000 gradients | over that of the default |"
    )
    print("|---|---|---|---|---|---|---|---|")
    targets = TARGETS | GAUSSIANS
    for name in args.targets or targets:
        target = targets[name]()
        for kernel in (Boomerang, BPS):
            default = kernel(target.model)._sampler.refresh_rate
            found = {}
            for factor in (1, 1 / 10, 1 / 3, 3):
                rate = factor * default
                changed = kernel(target.model, refresh_rate=rate, **target.options)
                mcmc, totals = run(changed, args, *target.args)
                samples = mcmc.get_samples(group_by_chain=True)
                x = np.asarray(target.quantities(samples), float)
                found[factor] = 1000 * smallest_ess(x) / totals["num_grad"]
                bounces = mcmc.last_state.adapt_state.bounce_rate
                print(
                    f"| {name} | {kernel.__name__} | {rate:.3g} | {factor:.2f} | "
                    f"{max(bounces, 0):.1f} | "
                    f"{totals['num_grad'] / x[..., 0].size:.1f} | "
                    f"{found[factor]:.1f} | {found[factor] / found[1]:.2f} |",
                    flush=True,
                )


PARTS = {"metric": metric, "violation": violation, "sensitivity": sensitivity}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--targets", nargs="*", choices=list(TARGETS | GAUSSIANS))
    parser.add_argument("--gaussians", nargs="*", help="of the part metric")
    parser.add_argument("--metrics", nargs="*", choices=list(METRICS))
    parser.add_argument("--kernels", nargs="*", help="default: all")
    parser.add_argument(
        "--violations",
        nargs="*",
        type=float,
        default=[0.001, 0.005, 0.02, 0.05, 0.1],
    )
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--num-chains", type=int, default=8)
    parser.add_argument("--truth-samples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    PARTS[args.part](args)
