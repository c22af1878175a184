# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Regression on five data sets of the UCI repository: the paper's Table 1 and E.2.

The first of the standard splits, as in the published code, with inputs and targets
standardised by the training part alone. ``--network`` is ``code``, one layer of 50 with
tanh, which is what the published code runs, or ``text``, three layers of 512, 256 and
128 with ReLU, which is what the paper says. ``--noise`` is ``unit``, a standard
deviation of 1 in standardised units, which is what the published code has (the paper
says a variance of 0.01), or ``learned``, a parameter with a half-normal prior.
``--prior`` of the weights is ``fan_in``, normal with variance 4/fan-in, or ``wide``,
with variance 9 for all, which is next to none. All data are in every gradient, unless
``--batch-size`` is given. Naval, with the most rows, has fewer draws.

    python examples/paper/uci.py --data-dir DIR
    python examples/paper/uci.py --data-dir DIR --noise learned
    python examples/paper/uci.py --data-dir DIR --prior wide --methods map sigma-bps
    python examples/paper/uci.py --data-dir DIR --network text --seeds 5
    python examples/paper/uci.py --data-dir DIR --methods nuts --data yacht --seeds 1
"""

from methods import Settings, mixing, mode_of, sample
from runner import jobs, main, parse, run_jobs

import jax
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro_pdmp import bnn
from numpyro_pdmp.bnn.data import load_data
from numpyro_pdmp.bnn.networks import _mlp

DATA = ["bostonHousing", "concrete", "energy", "naval-propulsion-plant", "yacht"]
METHODS = [
    "map",
    "vi",
    "bps",
    "sigma-bps",
    "boomerang",
    "boomerang-3",
    "sgld",
    "sgld-white",
    "sghmc",
]
STOCHASTIC = ("sgld", "sgld-white", "sghmc")
SETTINGS = {
    "code": {
        "full": Settings(150, 200, 100, 1e-5, 3000, 5000, max_grad=300),
        "quick": Settings(50, 100, 20, 1e-5, 1000, 1000, max_grad=100),
        "tiny": Settings(10, 16, 2, 1e-5, 20, 20),
    },
    "text": {
        "full": Settings(20, 40, 10, 1e-5, 500, 500, max_grad=40),
        "quick": Settings(20, 40, 5, 1e-5, 200, 200),
        "tiny": Settings(10, 16, 2, 1e-5, 20, 20),
    },
}


def run(job, args):
    name, method, seed = job.values()
    data = load_data(name, args.data_dir, split=args.split)
    if args.network == "code":
        network = _mlp((8 if args.tiny else 50,), 1, jnp.tanh)
    else:
        network = bnn.uci_mlp()
    settings = SETTINGS[args.network][args.mode]
    if len(data.y_train) > 5000 and args.mode == "full":  # a gradient takes 20 times
        few = {"num_warmup": 40, "num_samples": 60, "num_steps": 50}
        settings = settings._replace(map_steps=2000, svi_steps=1500, **few)
    if method in STOCHASTIC and args.mode == "full":
        # As many gradients in closer draws, or their number would limit the ESS.
        settings = settings._replace(
            num_warmup=5 * settings.num_warmup,
            num_samples=5 * settings.num_samples,
            num_steps=settings.num_steps // 5,
        )
    if args.batch_size:
        settings = settings._replace(batch_size=min(args.batch_size, len(data.y_train)))
    unit = args.noise == "unit"
    noise = 1.0 if unit else dist.HalfNormal(1.0)
    prior = {"fan_in": bnn.fan_in_prior(2.0), "wide": bnn.normal_prior(3.0)}[args.prior]
    model = bnn.regression(network, prior, noise)
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    mode = mode_of(model, network, x, y, seed, settings, noise=not unit)
    draws = sample(method, model, network, mode, x, y, seed, settings, noise=not unit)
    prediction = bnn.predict(
        model,
        draws.samples,
        data.x_test,
        data.y_test,
        weights=draws.weights,
        batch_ndims=2,
    )
    scores = bnn.score(prediction, data.y_test)
    return {
        **draws.info,
        "settings": settings._asdict(),
        "network": args.network,
        "noise": args.noise,
        "num_weights": bnn.num_params(network, data.x_train[:1].shape),
        "rows": len(data.y_train),
        "y_sd": data.y_sd,
        "scores": scores,
        "mixing": mixing(model, draws.samples, jnp.asarray(data.x_test[:20])),
    }


def script(argv=None):
    choices = {"network": "code", "noise": "unit", "prior": "fan_in"}
    sizes = {"split": 0, "batch_size": 0}
    args = parse(__doc__, argv, data=DATA, methods=METHODS, **choices, **sizes)
    # One directory for each variation of the published model.
    name = "uci_text" if args.network == "text" else f"uci_{args.noise}"
    if args.prior == "wide":
        name = f"{name}_wide"
    code = run_jobs(name, jobs(args), run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
