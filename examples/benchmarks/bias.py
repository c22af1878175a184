# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bias of every sampler with every event-time scheme on targets with known moments.

Prints a Markdown table: largest error of a mean in Monte-Carlo standard errors, ratio
of the standard deviation to the truth (mean over coordinates with its standard
error, and the coordinate farthest from one), violations and cost.

    python examples/benchmarks/bias.py --draws 5000 --chains 16
"""

import argparse
import time
from typing import NamedTuple

import numpy as np

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, ExactBound, ZigZag


class Target(NamedTuple):
    """A potential on R^d with known mean and standard deviation."""

    potential: object
    mean: np.ndarray
    sd: np.ndarray
    curvature: object = None  # matrix M with -M <= Hessian <= M, if there is one


def gaussian(dim, condition=1.0):
    rng = np.random.default_rng(1)
    rotation, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    values = np.logspace(0, np.log10(condition), dim)
    if condition == 1.0:
        rotation = np.eye(dim)
    precision = rotation @ np.diag(1 / values) @ rotation.T
    sd = np.sqrt(np.diag(rotation @ np.diag(values) @ rotation.T))
    matrix = jnp.asarray(precision)
    return Target(lambda x: 0.5 * x @ matrix @ x, np.zeros(dim), sd, matrix)


def student(dim=10, df=5):
    def potential(x):
        return 0.5 * (df + dim) * jnp.log1p(x @ x / df)

    return Target(potential, np.zeros(dim), np.full(dim, (df / (df - 2)) ** 0.5))


def mixture(dim=10):
    mode = jnp.full(dim, 2 / dim**0.5)

    def potential(x):
        distances = jnp.stack([jnp.sum((x - mode) ** 2), jnp.sum((x + mode) ** 2)])
        return -logsumexp(-0.5 * distances)

    return Target(potential, np.zeros(dim), np.full(dim, (1 + 4 / dim) ** 0.5))


def banana():
    def potential(x):
        return 0.5 * x[0] ** 2 + 0.5 * ((x[1] - x[0] ** 2 + 1) / 0.5) ** 2

    return Target(potential, np.zeros(2), np.array([1.0, 1.5]))


def logistic(num_data=1000, dim=25):
    """Bayesian logistic regression; moments from a long run of NUTS."""
    from logistic import make_data, model

    from numpyro.infer import NUTS

    x, y = make_data(num_data, dim)
    mcmc = MCMC(
        NUTS(model, dense_mass=True),
        num_warmup=1000,
        num_samples=25_000,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(7), x, y)
    beta = np.asarray(mcmc.get_samples()["beta"], float)

    def potential(b):
        logits = x @ b
        return 0.5 * b @ b + jnp.sum(jnp.logaddexp(0, logits) - y * logits)

    curvature = jnp.eye(dim) + 0.25 * x.T @ x
    return Target(potential, beta.mean(0), beta.std(0), curvature)


TARGETS = {
    "Gaussian d=10": lambda: gaussian(10),
    "Gaussian d=100": lambda: gaussian(100),
    "correlated Gaussian d=20": lambda: gaussian(20, 100.0),
    "logistic regression d=25": logistic,
    "Student-t(5) d=10": student,
    "two modes d=10": mixture,
    "banana": banana,
}


KERNELS = {"Boomerang": Boomerang, "BPS": BPS, "ZigZag": ZigZag}


def exact_bound(kernel, target):
    """A bound for log-concave targets: value now, slope from the largest curvature."""
    if target.curvature is None or kernel is Boomerang:
        return None
    grad, matrix = jax.grad(target.potential), target.curvature

    def bound(x, v):
        if kernel is ZigZag:
            return v * grad(x), jnp.abs(v) * (jnp.abs(matrix) @ jnp.abs(v))
        return v @ grad(x), v @ matrix @ v

    return ExactBound(bound)


def measure(kernel, scheme, target, args):
    dim = target.mean.size
    # An exact bound on each coordinate's rate is known in the original units only.
    fixed = kernel is ZigZag and isinstance(scheme, ExactBound)
    options = {"adapt_mass_matrix": False, "dense_mass": False} if fixed else {}
    if fixed:
        options["inverse_mass_matrix"] = np.asarray(target.sd**2)
    mcmc = MCMC(
        kernel(potential_fn=target.potential, event_time=scheme, **options),
        num_warmup=1000,
        num_samples=args.draws,
        num_chains=args.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = 0.5 * random.normal(random.key(3), (args.chains, dim))
    fields = ("num_grad", "num_violations", "num_proposals")
    mcmc.run(random.key(args.seed), init_params=start, extra_fields=fields)
    x = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    extra = {k: np.sum(v) for k, v in mcmc.get_extra_fields().items()}
    ess = effective_sample_size(x)
    ess_square = effective_sample_size((x - target.mean) ** 2)
    z = np.abs(x.mean((0, 1)) - target.mean) / (x.std((0, 1)) / np.sqrt(ess))
    # The error of the mean ratio comes from the chains: coordinates move together.
    by_chain = (((x - target.mean) ** 2).mean(1) / target.sd**2).mean(1)
    error = 0.5 * by_chain.std() / args.chains**0.5
    ratio = np.sqrt(((x - target.mean) ** 2).mean((0, 1))) / target.sd
    worst = ratio[np.argmax(np.abs(np.log(ratio)))]
    draws = x.shape[0] * x.shape[1]
    violations = extra["num_violations"] / max(extra["num_proposals"], 1)
    return (
        f"{z.max():.1f} | {ratio.mean():.4f} ± {error:.4f} | {worst:.3f} | "
        f"{100 * violations:.1f} % | {extra['num_grad'] / draws:.1f} | "
        f"{1000 * min(ess.min(), ess_square.min()) / extra['num_grad']:.1f}"
    )


def main(args):
    print(
        "| target | sampler | event times | worst mean error (MCSE) | sd ratio | "
        "worst sd ratio | violations | gradients a draw | "
        "min ESS(x, x^2) per 1000 gradients | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.targets or TARGETS:
        target = TARGETS[name]()
        for kernel in (KERNELS[name] for name in args.kernels):
            for scheme_name in args.schemes:
                scheme = scheme_name
                if scheme == "exact":
                    scheme = exact_bound(kernel, target)
                    if scheme is None:
                        continue
                start = time.time()
                row = measure(kernel, scheme, target, args)
                print(
                    f"| {name} | {kernel.__name__} | {scheme_name} | {row} | "
                    f"{time.time() - start:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="*", choices=list(TARGETS))
    parser.add_argument(
        "--schemes",
        nargs="*",
        default=["interpolation", "tangent", "exact", "published"],
    )
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS))
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
