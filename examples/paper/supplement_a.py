# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Envelopes for alpha = 1.0, 1.2 and 1.5: the figure and the table of supplement A.

LeNet5 on MNIST with the velocities and refreshment rates of the paper (supplement E),
from one MAP. ``published``: Algorithm 2 as printed, one batch until the next event,
draws at events, and for Boomerang the reference in the target. ``repaired``: lines that
are trusted between two evaluations only, an offset, a batch for every evaluation, draws
at equal times, and the posterior as target.

    python examples/paper/supplement_a.py --data-dir DIR
"""

import time
import warnings

from images import load_problem, options
import numpy as np
from runner import main, parse, run_jobs

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_pdmp import (
    BPS,
    MAP,
    Boomerang,
    Interpolation,
    PublishedInterpolation,
    Scale,
    SigmaBPS,
    bnn,
    laplace_reference,
)
from numpyro_pdmp.bnn import models, pipeline, sampling

METHODS = ["bps", "sigma-bps", "boomerang"]
ALPHAS = [1.0, 1.2, 1.5]
SCHEMES = ["published", "repaired"]
#: warm-up of sigma-BPS or of the envelope, draws, gradients a draw of the repaired ones
SIZES = {"full": (40, 80, 5), "quick": (20, 30, 5), "tiny": (10, 10, 2)}
#: of the published code, in units of the velocity
T_INIT = {"bps": 10.0, "sigma-bps": 1.0, "boomerang": 1.0}


def make_kernel(scheme, method, alpha, model, flat, mode, x, y, batch_size):
    preset = bnn.presets["mnist"]
    given = dict(preset[method.replace("-", "_")])
    published = scheme == "published"
    if published:
        given["event_time"] = PublishedInterpolation(alpha, T_INIT[method])
        given.update(batch="event", record="events")
    else:
        given["event_time"] = Interpolation(alpha)
        given["draw_time"] = sampling.FIRST_DRAW_TIME
    given.update(potential_energy=False, control_variates=None)
    if method != "boomerang":
        # Around the MAP, since chains start at the centre of their reference.
        center = ravel_pytree(mode.params)[0]
        size = given.pop("inverse_mass_matrix") ** 0.5
        given["reference"] = Scale(center, jnp.full_like(center, size))
        given["adapt_mass_matrix"] = method == "sigma-bps"
        return (BPS if method == "bps" else SigmaBPS)(model, **given)
    reference = laplace_reference(
        model,
        mode,
        x,
        y,
        num_probes=64,
        subsample_size=batch_size,
        **preset["reference"],
    )
    given["reference"] = reference
    if not published:
        given["target"] = "posterior"
        return Boomerang(model, **given)
    return Boomerang(flat, **given)


def run(job, args):
    scheme, method, alpha = job.values()
    chosen, out = options(args.image_data, "map", 0, args)
    if not (out / "map.npz").is_file():
        pipeline.run(chosen)
    data, network, model = load_problem(chosen)
    flat = models.categorical(network, "flat")
    mode = MAP.load(out / "map.npz")
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    batch_size = min(chosen.batch_size, len(x))
    begin = time.perf_counter()
    kernel = make_kernel(scheme, method, alpha, model, flat, mode, x, y, batch_size)
    num_warmup, num_samples, per_draw = SIZES[args.mode]
    if scheme == "published" and method != "sigma-bps":
        num_warmup = 0  # nothing to tune
    chosen.sampler, chosen.num_warmup, chosen.num_samples = (
        method,
        num_warmup,
        num_samples,
    )
    chosen.gradients_per_draw, chosen.batch_size = per_draw, batch_size
    chosen.draw_time = 1.0 if scheme == "published" else None
    progress = args.cache / f"{scheme}_{method}_{alpha}.npz"
    streams = [bnn.StreamingPrediction(model, data.x_test, data.y_test)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batches that are held
        kept, state, extra, every = sampling.sample(
            chosen, data, kernel, streams, num_samples, progress
        )
    content = sampling.describe(kernel, state, kept, extra, every)
    content.pop("report", None)
    content["gradients"] = float(extra["num_grad"].sum())
    content["scores"] = bnn.score(streams[0].result(), data.y_test)
    moved = np.concatenate(
        [
            np.ravel(kept[k][0, -1] - np.asarray(mode.params[k]))
            for k in sorted(mode.params)
        ]
    )
    content["distance"] = float(np.sqrt(np.mean(np.square(moved))))
    content["seconds"] = time.perf_counter() - begin
    content["sizes"] = {"warmup": num_warmup, "draws": num_samples}
    return content


def script(argv=None):
    choices = {"image_data": "mnist", "only": 0.0}
    choices |= {"paper_size": False, "all_rows": False}
    args = parse(__doc__, argv, methods=METHODS, **choices)
    few = 1 if args.tiny else None
    todo = [
        {"scheme": scheme, "method": method, "alpha": alpha}
        for alpha in ALPHAS[:few]
        if args.only in (0, alpha)
        for scheme in SCHEMES[:few]
        for method in args.methods
    ]
    code = run_jobs("supplement_a", todo, run, args)
    jax.clear_caches()
    return code


if __name__ == "__main__":
    main(script)
