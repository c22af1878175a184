# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""
Example: Logistic regression with the Boomerang sampler
=======================================================

Fits a logistic regression to the ten mean features of scikit-learn's breast cancer
data, once with the Boomerang sampler and once with NUTS, compares the two posteriors
and their costs, and saves the marginal posteriors in `quickstart.png`.
"""

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer

import jax.numpy as jnp
import jax.random as random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_pdmp import Boomerang, check, to_inference_data

plt.switch_backend("Agg")

BLUE, VERMILION = "#56B4E9", "#D55E00"  # colour-blind-safe (Okabe and Ito)


def load_data():
    data = load_breast_cancer()
    X = data.data[:, :10]
    X = (X - X.mean(0)) / X.std(0)
    names = [name.removeprefix("mean ") for name in data.feature_names[:10]]
    return jnp.array(X), jnp.array(data.target), names


def model(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ beta), obs=y)


def run_inference(kernel, rng_key, X, y, extra_fields):
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(rng_key, X, y, extra_fields=extra_fields)
    return mcmc


def get_coefficients(mcmc):
    """All coefficients in one array of shape (chain, draw, coefficient)."""
    samples = mcmc.get_samples(group_by_chain=True)
    return np.concatenate([samples["intercept"][..., None], samples["beta"]], axis=-1)


def print_comparison(names, draws, num_grads):
    width = max(map(len, names))
    columns = [f"{s} {key}" for key in ("mean", "sd") for s in draws]
    print(" " * width, *(f"{column:>15}" for column in columns))
    for i, name in enumerate(names):
        values = [f(x[..., i]) for f in (np.mean, np.std) for x in draws.values()]
        print(f"{name:>{width}}", *(f"{value:>15.3f}" for value in values))
    print()
    for sampler, x in draws.items():
        ess = min(az.ess(x[..., i]) for i in range(len(names)))
        grads = int(num_grads[sampler].sum())
        print(
            f"{sampler:>{width}}: min ESS {ess:.0f}, {grads} gradient evaluations, "
            f"{1000 * ess / grads:.1f} min ESS per 1000 gradient evaluations"
        )


def plot_marginals(names, draws, path):
    fig, axes = plt.subplots(3, 4, figsize=(12, 8), layout="constrained")
    for i, (ax, name) in enumerate(zip(axes.flat, names, strict=False)):
        grid, density = az.kde(draws["Boomerang"][..., i].ravel())
        ax.fill_between(grid, density, color=BLUE, alpha=0.7, label="Boomerang")
        grid, density = az.kde(draws["NUTS"][..., i].ravel())
        ax.plot(grid, density, color=VERMILION, linewidth=2, label="NUTS")
        ax.set(title=name, xlabel="coefficient", ylabel="density", ylim=(0, None))
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    fig.suptitle("Logistic regression, breast cancer data: marginal posteriors")
    fig.savefig(path, dpi=150)


def main():
    X, y, names = load_data()
    names = ["intercept", *names]
    key_boomerang, key_nuts = random.split(random.PRNGKey(0))

    fields = (
        "num_grad",
        "num_bounces",
        "num_refreshments",
        "num_proposals",
        "num_violations",
    )
    boomerang = run_inference(Boomerang(model), key_boomerang, X, y, fields)
    print(az.summary(to_inference_data(boomerang)).to_string(), "\n")
    print(check(boomerang), "\n")

    nuts = run_inference(NUTS(model), key_nuts, X, y, ("num_steps",))
    draws = {"Boomerang": get_coefficients(boomerang), "NUTS": get_coefficients(nuts)}
    num_grads = {
        "Boomerang": boomerang.get_extra_fields()["num_grad"],
        "NUTS": nuts.get_extra_fields()["num_steps"],
    }
    print_comparison(names, draws, num_grads)

    plot_marginals(names, draws, "quickstart.png")
    print("\nSaved the marginal posteriors in quickstart.png")


if __name__ == "__main__":
    main()
