# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The sampler of the command line: kernel, draws, and what is to be said of them."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array, random
import jax.numpy as jnp
import optax

from numpyro_pdmp.bnn.data import Data
from numpyro_pdmp.bnn.mixing import mixing, principal_components
from numpyro_pdmp.bnn.predict import function_values
from numpyro_pdmp.bnn.progress import Progress, joined
from numpyro_pdmp.boomerang import Boomerang
from numpyro_pdmp.bps import BPS
from numpyro_pdmp.chunks import first_state, run_chunks
from numpyro_pdmp.diagnostics import report_run
from numpyro_pdmp.find_map import MAP
from numpyro_pdmp.kernel import PDMPKernel
from numpyro_pdmp.process.scale import Scale
from numpyro_pdmp.reference import laplace_reference
from numpyro_pdmp.sghmc import SGHMC
from numpyro_pdmp.sgld import SGLD
from numpyro_pdmp.sigma_bps import SigmaBPS
from numpyro_pdmp.zigzag import ZigZag

#: process time between draws of a PDMP before it is tuned
FIRST_DRAW_TIME = 0.001
#: refreshments of Boomerang a unit of time: paths that bounce often forget nothing of
#: their energy but by these, and the kernel's own rate is for references that fit
REFRESH_RATE = 3.0
#: inputs at which function values are compared
NUM_PROBES = 20


def make_kernel(args: Namespace, model: Callable, mode: MAP, x: Array, y: Array) -> Any:
    """The kernel, around the mode and scaled by the curvature there."""
    data = {"subsample_size": args.batch_size}
    reference: Any = laplace_reference(
        model,
        mode,
        x,
        y,
        kind=args.reference,
        gamma=args.gamma,
        damping=args.damping,
        num_probes=64,
        **data,
    )
    if args.sampler == "bps":
        # As in the literature: one scale for all coordinates.
        one = jnp.exp(jnp.mean(jnp.log(reference.factor)))
        reference = Scale(reference.center, jnp.full_like(reference.factor, one))
    kernels = {
        "boomerang": Boomerang,
        "bps": BPS,
        "sigma-bps": SigmaBPS,
        "zigzag": ZigZag,
    }
    if args.sampler in kernels:
        draw_time = FIRST_DRAW_TIME if args.draw_time is None else args.draw_time
        settings: dict[str, Any] = {"draw_time": draw_time, "potential_energy": False}
        if args.sampler == "boomerang":
            settings |= {"refresh_rate": REFRESH_RATE, "target": args.target}
        if args.refresh_rate is not None:
            settings["refresh_rate"] = args.refresh_rate
        return kernels[args.sampler](model, reference=reference, **settings)
    kind: Any = SGHMC if args.sampler == "sghmc" else SGLD
    settings = {"reference": reference, "num_steps": args.gradients_per_draw}
    size: Any = "auto" if args.step_size is None else args.step_size
    if args.sampler == "sgld":
        if args.step_size is None:
            first = kind(model, **settings).init(
                random.key(0), 0, model_args=(x, y), model_kwargs=data
            )
            # Half of it on average, so that the noise is the same.
            size = 2 * float(first.adapt_state.step_size)
        steps = args.gradients_per_draw * (args.num_warmup + args.num_samples)
        size = optax.linear_schedule(size, 0.0, steps)
    return kind(model, step_size=size, **settings)


def _tuned(state: Any, spent: float, wanted: float) -> Any:
    """A state with draws as far apart as the wanted gradients reach."""
    ratio = np.clip(wanted / max(spent, 1e-9), 0.2, 5.0)
    adapted = state.adapt_state
    # Not beyond a quarter turn: draws that far apart are about independent.
    draw_time = jnp.minimum(adapted.draw_time * ratio, np.pi / 2)
    draw_time = draw_time.astype(adapted.draw_time.dtype)
    return state._replace(adapt_state=adapted._replace(draw_time=draw_time))


def sample(args, data, kernel, streams, kept_draws, path):
    """Sample and predict; draws that are to be kept are moved to the host.

    :param streams: predictions to be updated.
    :param kept_draws: how many draws to keep, of each chain.
    :param path: of the file from which an interrupted run goes on.
    :return: the kept draws, the last state, and the fields of all draws.
    """
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    key = random.fold_in(random.key(args.seed), 1)
    pdmp = isinstance(kernel, PDMPKernel)
    total = args.num_samples // args.thinning
    chunk = int(np.clip(args.num_warmup // (10 * args.thinning), 1, 10))
    every = max(1, total // kept_draws)
    fields = ["num_grad", *(["num_violations", "num_proposals"] if pdmp else [])]
    fields += [] if pdmp else ["step_size"]
    progress = Progress(path, streams)
    if path.is_file():
        keys = key if args.num_chains == 1 else random.split(key, args.num_chains)
        rows = {"subsample_size": args.batch_size}
        progress.load(
            first_state(kernel, keys, args.num_warmup, None, (x, y), rows, None)
        )
    runs = run_chunks(
        kernel,
        key,
        x,
        y,
        subsample_size=args.batch_size,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
        chunk=chunk,
        extra_fields=tuple(fields),
        state=progress.state,
        step=progress.step,
        yield_warmup=True,
        progress_bar=args.progress_bar,
    )
    send: Any = None
    spent = 0.0
    if pdmp and progress.step:
        spent = float(np.mean(progress.state.totals.num_grad))
    while True:
        try:
            part = runs.send(send)
        except StopIteration:
            break
        send, steps = None, part.step - progress.step
        progress.state, progress.step = part.state, part.step
        num = next(iter(part.samples.values())).shape[1]
        if num == 0 and pdmp and args.draw_time is None:
            grads = float(np.mean(part.state.totals.num_grad))
            send = _tuned(part.state, (grads - spent) / steps, args.gradients_per_draw)
            spent, progress.state = grads, send
        if num:
            _take(args, part, streams, progress, every)
        progress.save()
    kept, extra = joined(progress.kept), joined(progress.extra)
    return kept, progress.state, extra, every


def _take(args, part, streams, progress, every):
    """Predict with the draws of a chunk, and keep some of them."""
    progress.extra.append(jax.tree.map(np.asarray, part.extra_fields))
    weights = None
    if args.sampler == "sgld":  # steps that fall, as Welling and Teh weigh them
        weights = part.extra_fields["step_size"]
    for stream in streams:
        stream.update(part.samples, weights, batch_ndims=2)
    num = next(iter(part.samples.values())).shape[1]
    chosen = [k for k in range(num) if (progress.done + k + 1) % every == 0]
    if chosen:
        progress.kept.append(
            {k: np.asarray(a[:, chosen]) for k, a in part.samples.items()}
        )
    progress.done += num


def describe(kernel: Any, state: Any, kept: Any, extra: Any, thinning: int) -> dict:
    """What is to be said of a run, as plain numbers, and the report of a PDMP."""
    result: dict[str, Any] = {"gradients_per_draw": extra["num_grad"].mean()}
    result["diverging"] = int(extra["diverging"].sum())
    if not isinstance(kernel, PDMPKernel):
        result["step_size"] = float(np.mean(extra["step_size"]))
        return result
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = report_run(kernel, state, kept, extra["diverging"], thinning)
    result.update(
        violation_rate=report.violation_rate,
        acceptance=report.acceptance,
        draw_time=report.draw_time,
        ratio_histogram=np.asarray(report.ratio_histogram).tolist(),
        report=str(report),
    )
    return result


def describe_mixing(model: Callable, kept: Any, data: Data) -> dict[str, Any]:
    """Effective sizes of the kept draws, as far as there are enough."""
    if next(iter(kept.values())).shape[1] < 8:
        return {}
    probes = jnp.asarray(data.x_test[:NUM_PROBES])
    values = mixing(function_values(model, kept, probes, batch_ndims=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result says whether it drifts
        components = principal_components(kept)
    return {
        "num_draws": int(np.prod(next(iter(kept.values())).shape[:2])),
        "function_ess_median": float(np.nanmedian(values.ess)),
        "function_ess_min": float(np.nanmin(values.ess)),
        "function_r_hat_max": float(np.nanmax(values.r_hat)),
        "component_ess": components.mixing.ess.tolist(),
        "component_r_hat": components.mixing.r_hat.tolist(),
        "drifts": components.drifts,
    }
