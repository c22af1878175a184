# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The family of samplers and of event-time schemes, in two tables.

``schemes``: BPS with envelopes by interpolation, tangents and regression: what an event
costs, and bias. ``samplers``: effective draws per gradient of every sampler.

    python examples/benchmarks/family.py --part schemes
    python examples/benchmarks/family.py --part samplers --format json
"""

import argparse
import functools
import json

from bias import gaussian, student
from logistic import make_data, model as logistic_model
import numpy as np
from tuning import Target, known, relative_error, small_bnn, smallest_ess

from jax import random

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import (
    BPS,
    SBPS,
    Boomerang,
    ForwardBPS,
    GeneralisedBPS,
    SigmaBPS,
    ZigZag,
)

FIELDS = (
    "num_grad",
    "num_bounces",
    "num_refreshments",
    "num_proposals",
    "num_violations",
)


def subsampled_model(x, y, subsample_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def logistic(num_data=1000, dim=25, subsample_size=None):
    data = make_data(num_data, dim)
    if subsample_size is None:
        return Target(logistic_model, data, lambda draws: draws["beta"])
    args = (*data, subsample_size)
    return Target(subsampled_model, args, lambda draws: draws["beta"])


def network():
    return small_bnn(num_data=100)


def run(kernel, args, model_args, fields=FIELDS, seed=0, num_samples=None):
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=num_samples or args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *model_args, extra_fields=fields)
    totals = {k: float(np.sum(v)) for k, v in mcmc.get_extra_fields().items()}
    return mcmc.get_samples(group_by_chain=True), totals


def truth(target, args):
    """Mean and sd of the quantities, and the standard errors of both; from NUTS."""
    data = (*target.args[:2], None) if len(target.args) == 3 else target.args
    kernel = NUTS(target.model, dense_mass=True)
    samples, _ = run(kernel, args, data, (), 7, args.truth_samples)
    x = np.asarray(target.quantities(samples), float)
    mean, sd = x.mean((0, 1)), x.std((0, 1))
    errors = sd / np.sqrt(effective_sample_size(x)), 0.5 * relative_error(x, mean, sd)
    return mean, sd, *errors


# Event-time schemes

SCHEMES = {
    "interpolation": BPS,
    "tangent": functools.partial(BPS, event_time="tangent"),
    "regression": SBPS,
}
SUBSAMPLED = functools.partial(logistic, 10_000, 10, subsample_size=100)
SCHEME_TARGETS = {
    "logistic regression, N=1,000": (logistic, {}),
    "logistic regression, N=10,000, m=100": (SUBSAMPLED, {}),
    "the same without control variates": (SUBSAMPLED, {"control_variates": None}),
    "network 1-10-1, N=100": (network, {}),
}


def schemes(args):
    truths = {}
    for name in args.targets or SCHEME_TARGETS:
        make, options = SCHEME_TARGETS[name]
        target = make()
        if make not in truths:
            truths[make] = truth(target, args)
        mean, sd, mean_error, sd_error = truths[make]
        for scheme, new_kernel in SCHEMES.items():
            kernel = new_kernel(target.model, **options)
            samples, totals = run(kernel, args, target.args)
            x = np.asarray(target.quantities(samples), float)
            error = np.hypot(sd / np.sqrt(effective_sample_size(x)), mean_error)
            variance = np.square((x - mean) / sd)
            by_chain = variance.mean((1, 2)).std(ddof=1) / args.num_chains**0.5
            events = totals["num_bounces"] + totals["num_refreshments"]
            yield {
                "target": name,
                "event times": scheme,
                "gradients an event": totals["num_grad"] / events,
                "proposals a bounce": totals["num_proposals"] / totals["num_bounces"],
                "violations, %": 100
                * totals["num_violations"]
                / totals["num_proposals"],
                "worst mean error, MCSE": np.max(np.abs(x.mean((0, 1)) - mean) / error),
                "sd ratio": np.sqrt(variance.mean((0, 1))).mean(),
                "its standard error": np.hypot(0.5 * by_chain, np.mean(sd_error)),
                "min ESS(x, x^2) per 1000 gradients": 1000
                * smallest_ess(x)
                / totals["num_grad"],
            }


# Samplers

SAMPLERS = {
    "NUTS": functools.partial(NUTS, dense_mass=True),
    "Boomerang": Boomerang,
    "Boomerang, regression": functools.partial(Boomerang, event_time="regression"),
    "BPS": BPS,
    "BPS, regression": SBPS,
    "GeneralisedBPS": GeneralisedBPS,
    "ForwardBPS": ForwardBPS,
    "ForwardBPS, regression": functools.partial(ForwardBPS, event_time="regression"),
    "SigmaBPS": SigmaBPS,
    "ZigZag": ZigZag,
    "ZigZag, regression": functools.partial(ZigZag, event_time="regression"),
}
SAMPLER_TARGETS = {
    "Gaussian d=50": lambda: known(gaussian(50)),
    "correlated Gaussian d=20": lambda: known(gaussian(20, 100.0)),
    "logistic regression d=25": logistic,
    "Student-t(5) d=10": lambda: known(student()),
    "network 1-10-1, N=100": network,
}


def samplers(args):
    targets = {
        name: SAMPLER_TARGETS[name]() for name in args.targets or SAMPLER_TARGETS
    }
    for name in args.samplers or SAMPLERS:
        row = {"sampler": name}
        for label, target in targets.items():
            field = "num_steps" if name == "NUTS" else "num_grad"
            kernel = SAMPLERS[name](target.model)
            samples, totals = run(kernel, args, target.args, (field,))
            x = np.asarray(target.quantities(samples), float)
            row[label] = 1000 * smallest_ess(x) / totals[field]
        yield row


PARTS = {"schemes": schemes, "samplers": samplers}


def cell(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(args):
    for i, row in enumerate(PARTS[args.part](args)):
        if args.format == "json":
            print(json.dumps(row), flush=True)
            continue
        if i == 0:
            print("| " + " | ".join(row) + " |")
            print("|" + "---|" * len(row))
        print("| " + " | ".join(map(cell, row.values())) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--format", choices=["markdown", "json"], default="markdown")
    parser.add_argument("--targets", nargs="*", help="names in the first column or row")
    parser.add_argument("--samplers", nargs="*", choices=list(SAMPLERS))
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--num-chains", type=int, default=16)
    parser.add_argument("--truth-samples", type=int, default=8000)
    parser.add_argument("--quick", action="store_true", help="short, to try it")
    args = parser.parse_args()
    if args.quick:
        args.num_warmup, args.num_samples, args.truth_samples = 200, 200, 300
    main(args)
