# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The files of a run of the command line: all of a file is written, or nothing."""

from argparse import Namespace
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_pdmp.bnn import metrics
from numpyro_pdmp.bnn.streaming import Prediction
from numpyro_pdmp.storage import read_arrays, require_names

#: files of a run
FILES = (
    "config.json",
    "map.npz",
    "progress.npz",
    "draws.nc",
    "prediction.npz",
    "outside.npz",
    "sampling.json",
    "metrics.json",
)
ANEW = "Delete it, or give --force to make all results anew."


def write_json(path: Path, content: Any) -> None:
    """Write all of a file or nothing."""
    new = path.with_suffix(".part")
    new.write_text(json.dumps(content, indent=2, default=float) + "\n")
    os.replace(new, path)


def write_arrays(path: Path, **arrays: Any) -> None:
    new = path.with_name(f"part_{path.name}")
    np.savez(new, **arrays)
    os.replace(new, path)


def load_prediction(path: Path) -> Prediction:
    file = read_arrays(path, ANEW)
    require_names(file, ("mean", "variance", "noise"), path, ANEW)
    entropy = None
    if "total" in file:
        names = metrics.Uncertainty._fields
        require_names(file, names, path, ANEW)
        entropy = metrics.Uncertainty(*(file[k] for k in names))
    mean, variance, noise = (file[k] for k in ("mean", "variance", "noise"))
    return Prediction(mean, variance, noise, entropy, file.get("log_density"))


def save_prediction(path: Path, prediction: Prediction) -> None:
    fields = {k: v for k, v in prediction._asdict().items() if v is not None}
    entropy = fields.pop("entropy", None)
    write_arrays(path, **fields, **({} if entropy is None else entropy._asdict()))


def load_draws(path: Path) -> dict[str, np.ndarray]:
    import arviz as az

    try:
        posterior = az.from_netcdf(path).posterior.load()
    # HDF5 raises whatever the bytes make it stumble over.
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or has no draws ({type(error).__name__}). {ANEW}"
        ) from error
    return {str(name): posterior[name].values for name in posterior}


def save_draws(path: Path, kept: Any, extra: Any, every: int, args: Namespace) -> None:
    import arviz as az

    index = slice(every - 1, None, every)
    num = next(iter(kept.values())).shape[1]
    stats = {k: v[:, index][:, :num] for k, v in extra.items()}
    attrs = {"sampler": args.sampler, "network": args.network, "data": args.data}
    # A dimension of one, as of a scale, has no name in common with any other.
    tree = az.from_dict(posterior=kept, sample_stats=stats, posterior_attrs=attrs)
    new = path.with_name(f"part_{path.name}")
    tree.to_netcdf(str(new), engine="h5netcdf")
    os.replace(new, path)
