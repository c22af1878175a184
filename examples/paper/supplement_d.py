# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Velocity scale and refreshment rate that are wrong, as in the paper's supplement D.

A regression network of the paper's size (hidden layers of 25 and 10 units, tanh, noise
variance 0.01) on synthetic data of our own. The target is the posterior with standard
normal priors in all runs, and every run starts at the mode (MAP). *Published* are the
paper's event times and draws at events, *repaired* this package's envelopes and draws
at equal times.

Section D.1, ``velocity``: Boomerang with a reference variance that is a thousandth or a
hundred times of the curvature's. Section D.2, ``refreshment``: BPS with refreshment
rates 0.01 and 10. The third setting is what warm-up finds; where there is none
(published), the curvature at the mode and a rate of 1.

    python examples/paper/supplement_d.py
"""

import numpy as np
from runner import main, parse, run_jobs

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, find_map, laplace_reference

LAYERS = (1, 25, 10, 1)
NOISE = 0.1
GRID = np.linspace(-2, 2, 81)
FIELDS = ("num_grad", "num_violations", "num_proposals")
#: figure -> setting -> factor of the variance, or refreshment rate
SETTINGS = {
    "velocity": {"small": 1e-3, "large": 100.0, "right": 1.0},
    "refreshment": {"small": 0.01, "large": 10.0, "right": 1.0},
}
SCHEMES = ["published", "repaired"]
#: warm-up, draws, steps to the mode, most gradients a draw
SIZES = {
    "full": (500, 1000, 2000, 500),
    "quick": (60, 100, 300, 200),
    "tiny": (10, 16, 20, 20),
}


def make_data(num=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.25, 1.1, num) * rng.choice([-1, 1], num)
    y = np.cos(4 * x + 0.8) + NOISE * rng.normal(size=num)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def network(sites, x):
    hidden = x[:, None]
    for i in range(len(LAYERS) - 1):
        hidden = hidden @ sites[f"w{i}"] + sites[f"b{i}"]
        if i < len(LAYERS) - 2:
            hidden = jnp.tanh(hidden)
    return hidden[:, 0]


def model(x, y):
    sites = {}
    for i, (n, m) in enumerate(zip(LAYERS[:-1], LAYERS[1:], strict=True)):
        unit = dist.Normal(0, 1)
        sites[f"w{i}"] = numpyro.sample(f"w{i}", unit.expand([n, m]).to_event(2))
        sites[f"b{i}"] = numpyro.sample(f"b{i}", unit.expand([m]).to_event(1))
    numpyro.sample("y", dist.Normal(network(sites, x), NOISE), obs=y)


def make_kernel(figure, scheme, setting, mode, data, max_grad):
    value = SETTINGS[figure][setting]
    options = {"max_grad": max_grad}
    if scheme == "published":
        options.update(event_time="published", record="events")
    elif setting == "right":
        options["adapt_mass_matrix"] = True
    gamma = value if figure == "velocity" else 1.0
    # Damped by the precision of the prior: no weight is freer than before.
    options["reference"] = laplace_reference(
        model, mode, *data, kind="diagonal", gamma=gamma, damping=1.0
    )
    if figure == "velocity":
        return Boomerang(model, **options)
    tuned = scheme == "repaired" and setting == "right"
    return BPS(model, refresh_rate="auto" if tuned else value, **options)


def run(job, args):
    figure, scheme, setting = job.values()
    num_warmup, num_samples, map_steps, max_grad = SIZES[args.mode]
    data = make_data()
    mode = find_map(
        model, random.key(1), *data, num_steps=map_steps, progress_bar=False
    )
    kernel = make_kernel(figure, scheme, setting, mode, data, max_grad)
    mcmc = MCMC(
        kernel,
        num_warmup=0 if scheme == "published" else num_warmup,
        num_samples=num_samples,
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data, init_params=mode.params, extra_fields=FIELDS)
    grid = jnp.asarray(GRID, jnp.float32)
    predict = jax.jit(jax.vmap(lambda sites: network(sites, grid)))
    found = np.asarray(predict(mcmc.get_samples()), float)
    totals = {k: np.sum(v) for k, v in mcmc.get_extra_fields().items()}
    x, y = (np.asarray(a, float) for a in data)
    among = np.abs(GRID) < 1.1
    mean, sd = found.mean(0), found.std(0)
    return {
        "gradients_per_draw": totals["num_grad"] / num_samples,
        "violations": totals["num_violations"] / max(totals["num_proposals"], 1),
        "rmse": np.sqrt(np.mean((np.interp(x, GRID, mean) - y) ** 2)),
        "sd_inside": sd[among].mean(),
        "sd_outside": sd[~among].mean(),
        "mean": mean,
        "sd": sd,
        "curves": found[:: max(1, num_samples // 8)][:8],
        "sizes": SIZES[args.mode],
    }


def script(argv=None):
    args = parse(__doc__, argv, methods=list(SETTINGS))
    few = 1 if args.tiny else None
    todo = [
        {"figure": figure, "scheme": scheme, "setting": setting}
        for figure in args.methods
        for scheme in SCHEMES[:few]
        for setting in list(SETTINGS[figure])[:few]
    ]
    code = run_jobs("supplement_d", todo, run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
