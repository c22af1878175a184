# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""What each error of the published code does to a posterior, one at a time.

Logistic regression with 1,000 rows in batches of 100 and 8 correlated inputs of
different scales; the truth is a long run of NUTS on all data. BPS and Boomerang are
scaled by the diagonal of the curvature. Each row of the table differs from a correct
run by one error (but ``boomerang-tight``, whose envelopes are exceeded less often):

- ``bps-event-batch``: one batch until the next event, not one for each evaluation;
- ``bps-unscaled``: no factor N/m for the batch (the corrigendum's error);
- ``bps-prior``: the gradient of the prior once for each row of the batch;
- ``bps-events``, ``boomerang-events``: draws at events and not at equal times;
- ``bps-published``, ``boomerang-published``: the event times as printed;
- ``boomerang-twice``: the curvature's Gaussian times the likelihood, so that the data
  count twice (with the right diagonal);
- ``boomerang-row-sum``: the same with the row sums of the Hessian for its diagonal;
- ``bps-ones``: a variance from 1,000 draws whose sum of squares begins at one;
- ``sgld-noise``: noise that the learning rate scales twice.

    python examples/paper/ablation.py
"""

import warnings

import numpy as np
from runner import job_path, jobs, load, main, parse, run_jobs

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import (
    BPS,
    SGLD,
    Boomerang,
    Scale,
    find_map,
    full_data,
    laplace_reference,
)

NUM_ROWS, BATCH_SIZE, DIM = 1000, 100, 8
METHODS = [
    "nuts",
    "bps",
    "bps-event-batch",
    "bps-unscaled",
    "bps-prior",
    "bps-events",
    "bps-published",
    "bps-ones",
    "boomerang",
    "boomerang-tight",
    "boomerang-events",
    "boomerang-published",
    "boomerang-twice",
    "boomerang-row-sum",
    "sgld",
    "sgld-noise",
]
#: warm-up, draws, chains
SIZES = {"full": (500, 2000, 4), "quick": (200, 500, 4), "tiny": (20, 30, 2)}


class PublishedSGLD(SGLD):
    """Noise is added to the gradient, and the learning rate scales both."""

    def _update(self, z, memory, grad, noise, step):
        rate = step.size / 2
        return z - rate * (grad + jnp.sqrt(2 * rate) * noise), memory


def make_data():
    rng = np.random.default_rng(1)
    mix = np.eye(DIM) + 0.35 * rng.normal(size=(DIM, DIM))
    # Posterior sds from about 0.004 to 0.3, on both sides of the 0.03 of bps-ones.
    x = rng.normal(size=(NUM_ROWS, DIM)) @ mix * np.geomspace(30, 0.5, DIM)
    logits = x @ (rng.normal(size=DIM) / np.geomspace(30, 0.5, DIM) / 2)
    y = rng.random(NUM_ROWS) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)


def make_model(likelihood=1.0, prior=1.0, flat=False):
    def model(x, y):
        law = dist.ImproperUniform(dist.constraints.real_vector, (), (DIM,))
        if not flat:
            law = dist.Normal(0, 2).expand([DIM]).to_event(1)
        with numpyro.handlers.scale(scale=prior):
            w = numpyro.sample("w", law)
        with numpyro.plate("data", NUM_ROWS, subsample_size=BATCH_SIZE):
            x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            with numpyro.handlers.scale(scale=likelihood):
                numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    return model


def make_kernel(method, x, y):
    """Correct kernels, or with the one error; no control variates, as published."""
    model, options = make_model(), {"control_variates": None}
    sampler, _, error = method.partition("-")
    if error == "unscaled":
        model = make_model(likelihood=BATCH_SIZE / NUM_ROWS)
    if error == "prior":
        model = make_model(prior=float(BATCH_SIZE))
    if error == "event-batch":
        options["batch"] = "event"
    if error == "events":
        options["record"] = "events"
    if error == "published":
        options.update(event_time="published")
    mode = find_map(full_data(model), random.key(0), x, y, progress_bar=False)
    reference = laplace_reference(full_data(model), mode, x, y, kind="diagonal")
    if sampler == "sgld":
        kind = PublishedSGLD if error else SGLD
        return kind(model, reference=reference, step_size=0.02, num_steps=20, **options)
    if error == "ones":
        factor = jnp.sqrt(reference.factor**2 + 1 / 1000)
        reference = Scale(reference.center, factor)
    if sampler == "bps":
        return BPS(model, reference=reference, **options)
    if error == "tight":
        options["target_violation"] = 0.002
    if error in ("twice", "row-sum"):
        flat = make_model(flat=True)
        if error == "row-sum":
            curvature = row_sums(full_data(flat), mode, x, y)
            reference = Scale(reference.center, 1 / jnp.sqrt(jnp.abs(curvature)))
        options["target"] = "reference_prior"
        return Boomerang(flat, reference=reference, **options)
    return Boomerang(model, reference=reference, **options)


def row_sums(model, mode, x, y):
    """What differentiating the list of gradients gives: the Hessian times ones."""
    values, unravel = ravel_pytree(mode.params)

    def energy(z):
        return -numpyro.infer.util.log_density(model, (x, y), {}, unravel(z))[0]

    return jax.jvp(jax.grad(energy), (values,), (jnp.ones_like(values),))[1]


def run(job, args):
    _, method, seed = job.values()
    x, y = make_data()
    num_warmup, num_samples, num_chains = SIZES[args.mode]
    if method == "nuts":
        kernel, fields = NUTS(full_data(make_model())), ("num_steps",)
        if args.mode == "full":
            num_samples *= 3
    else:
        kernel, fields = make_kernel(method, x, y), ("num_grad",)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batches that are held
        mcmc.run(random.key(seed), x, y, extra_fields=fields)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], float)
    extra = mcmc.get_extra_fields()
    gradients = int(np.sum(extra[fields[0]]))
    ess = numpyro.diagnostics.effective_sample_size(draws)
    flat = draws.reshape(-1, DIM)
    content = {
        "mean": flat.mean(0),
        "sd": flat.std(0),
        "gradients": gradients,
        "ess_min": float(np.min(ess)),
        "ess_per_1000": float(1000 * np.min(ess) / gradients),
        "settings": {"warmup": num_warmup, "draws": num_samples, "chains": num_chains},
    }
    path = job_path(args.results, "ablation", {**job, "method": "nuts", "seed": 0})
    if method != "nuts" and path.is_file():
        truth = next(r for r in load(args.results, "ablation") if r["method"] == "nuts")
        mean, sd = np.asarray(truth["mean"]), np.asarray(truth["sd"])
        ratio = np.log(content["sd"] / sd)
        content["sd_ratio"] = float(np.exp(ratio.mean()))
        content["sd_ratio_range"] = np.exp([ratio.min(), ratio.max()])
        content["mean_error"] = float(np.max(np.abs(content["mean"] - mean) / sd))
    return content


def script(argv=None):
    args = parse(__doc__, argv, data=["logistic"], methods=METHODS)
    todo = [j for j in jobs(args) if j["method"] != "nuts" or j["seed"] == 0]
    code = run_jobs("ablation", todo, run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
