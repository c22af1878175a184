# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bias of stochastic-gradient kernels against their step size.

Two targets with subsampled data: the mean of 100 observations in batches of 10, whose
posterior is known, and a logistic regression of 10,000 rows in batches of 100, whose
moments are those of a long run of NUTS. Prints Markdown tables.

    python examples/benchmarks/sgmcmc.py --num-draws 2000 --num-chains 16
"""

import argparse

from logistic import make_data
import numpy as np

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import PSGLD, SGHMC, SGLD, Boomerang


def mean_model(y, subsample_size=None):
    mu = numpyro.sample("x", dist.Normal(0, 10).expand([1]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(mu[0], 1), obs=y)


def logistic_model(x, y, subsample_size=None):
    beta = numpyro.sample("x", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def run(kernel, args, num_warmup, num_draws, num_chains, field):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, extra_fields=(field,))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["x"], float)
    grads = np.sum(mcmc.get_extra_fields()[field])
    return draws, grads, mcmc.last_state


def row(name, kernel, args, mean, sd, options, times=1):
    num_warmup, num_draws = times * options.num_warmup, times * options.num_draws
    draws, grads, state = run(
        kernel, args, num_warmup, num_draws, options.num_chains, "num_grad"
    )
    square = ((draws - mean) / sd) ** 2
    # Chains are independent: their spread is the Monte-Carlo error.
    ratios = square.mean((1, 2))
    error = ratios.std(ddof=1) / len(ratios) ** 0.5
    worst = np.abs((draws.mean((0, 1)) - mean) / sd).max()
    ess = min(effective_sample_size(draws).min(), effective_sample_size(square).min())
    step = float(np.ravel(getattr(state, "step_size", np.nan))[0])
    print(
        f"| {name} | {'' if np.isnan(step) else f'{step:.3g}'} | {ratios.mean():.3f} ± "
        f"{error:.3f} | {worst:.3f} | {1000 * ess / grads:.1f} |",
        flush=True,
    )


HEADER = """
| kernel | step size | variance ratio | largest error of a mean, sd \
| min ESS(x, x²) per 1000 gradients |
|---|---|---|---|---|"""


def table(title, model, args, mean, sd, options):
    print(f"\n{title}", HEADER)
    for control, words in ((1, "control variates"), (None, "plain batches")):
        shared = {"control_variates": control, "precondition": True}
        for kernel, sizes in (
            (SGLD, options.sgld_steps),
            (SGHMC, options.sghmc_steps),
        ):
            for size in [*sizes, "auto"]:
                name = f"{kernel.__name__}, {words}" + ", auto" * (size == "auto")
                made = kernel(model, step_size=size, **shared)
                row(name, made, args, mean, sd, options)
        made = SGHMC(model, step_size="auto", noise_estimate="auto", **shared)
        row(f"SGHMC, {words}, auto, noise known", made, args, mean, sd, options)
        if control is not None:  # without, ten steps are few
            made = SGHMC(model, num_steps=2, **shared)
            name = f"SGHMC, {words}, auto, 2 steps a draw"
            row(name, made, args, mean, sd, options, times=5)
        for freeze in (True, False):
            name = f"PSGLD, {words}, auto" + ", not held" * (not freeze)
            made = PSGLD(model, freeze=freeze, **shared)
            row(name, made, args, mean, sd, options)
        made = Boomerang(model, control_variates=control)
        row(f"Boomerang, {words}", made, args, mean, sd, options)


def main(options):
    y = jnp.asarray(np.random.default_rng(0).normal(1, 1, 100), "f4")
    precision = len(y) + 0.01
    mean, sd = np.asarray([y.sum() / precision]), precision**-0.5
    table("Mean of 100 observations", mean_model, (y, 10), mean, sd, options)
    x, y = make_data(options.num_data, options.dim)
    exact = run(
        NUTS(logistic_model, dense_mass=True), (x, y), 500, 2000, 2, "num_steps"
    )[0]
    mean, sd = exact.mean((0, 1)), exact.std((0, 1))
    title = f"Logistic regression, {options.num_data} rows, {options.dim} coefficients"
    table(title, logistic_model, (x, y, 100), mean, sd, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-draws", type=int, default=2000)
    parser.add_argument("--num-chains", type=int, default=16)
    parser.add_argument("--num-data", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=10)
    parser.add_argument("--sgld-steps", type=float, nargs="*", default=[0.02, 0.1, 0.5])
    parser.add_argument("--sghmc-steps", type=float, nargs="*", default=[0.1, 0.3, 0.6])
    main(parser.parse_args())
