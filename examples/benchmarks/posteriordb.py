# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Defaults of each kernel on reference posteriors.

The directory holds ``models.py`` (``MODELS``, ``load``, ``flatten_samples``) and
``criterion.py`` (``compare``), with NumPyro translations of posteriordb's models and
its reference draws. A posterior passes when ``compare`` says so and the smallest bulk
effective sample size is at least 100.

    python examples/benchmarks/posteriordb.py --dir DIR --kernels Boomerang BPS
"""

import argparse
from pathlib import Path
import sys
import time

import numpy as np

import jax

from numpyro.infer import MCMC, NUTS, Predictive
import numpyro_pdmp


def flat_samples(mcmc, model, data, names, flatten):
    """Draws of the reference parameters, (chain, draw, parameter)."""
    samples = mcmc.get_samples(group_by_chain=True)
    sites = {name.split("[")[0] for name in names}
    if not sites <= set(samples):
        extra = Predictive(model, samples, batch_ndims=2)(jax.random.key(1), data)
        samples = {**extra, **samples}
    return flatten(samples, names)


def main(args):
    jax.config.update("jax_enable_x64", True)
    if not (args.dir / "models.py").exists():
        sys.exit(f"--dir {args.dir} has no models.py; see this file's docstring.")
    sys.path.insert(0, str(args.dir))
    import criterion
    import models

    print(
        "| posterior | kernel | pass | max z | max log sd ratio | max R-hat | min ESS "
        "| gradients a draw | min ESS per 1000 gradients | seconds | failed |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    passed = {name: 0 for name in args.kernels}
    posteriors = args.posteriors or sorted(models.MODELS)
    for posterior in posteriors:
        data, ref = models.load(posterior)
        model = models.MODELS[posterior]
        for name in args.kernels:
            kernel = NUTS if name == "NUTS" else getattr(numpyro_pdmp, name)
            field = "num_steps" if name == "NUTS" else "num_grad"
            mcmc = MCMC(
                kernel(model),
                num_warmup=args.num_warmup,
                num_samples=args.num_samples,
                num_chains=4,
                chain_method="vectorized",
                progress_bar=False,
            )
            start = time.time()
            mcmc.run(jax.random.key(args.seed), data, extra_fields=(field,))
            seconds = time.time() - start
            x = flat_samples(mcmc, model, data, ref["names"], models.flatten_samples)
            r = criterion.compare(x, ref)
            ok = r["pass"] and r["min_ess_bulk"] >= 100
            passed[name] += ok
            grads = np.asarray(mcmc.get_extra_fields()[field])
            print(
                f"| {posterior} | {name} | {'yes' if ok else 'NO'} | {r['max_z']} | "
                f"{r['max_abs_log_sd_ratio']} | {r['max_rhat']} | "
                f"{r['min_ess_bulk']} | {grads.mean():.1f} | "
                f"{1000 * r['min_ess_bulk'] / grads.sum():.1f} | {seconds:.0f} | "
                f"{' '.join(r['failed'])} |",
                flush=True,
            )
    for name, count in passed.items():
        print(f"{name}: {count} of {len(posteriors)} passed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--kernels", nargs="+", default=["Boomerang", "BPS", "ZigZag"])
    parser.add_argument("--posteriors", nargs="*")
    parser.add_argument("--num-warmup", type=int, default=1000)
    parser.add_argument("--num-samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
