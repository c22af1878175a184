# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian neural networks from the command line: ``python -m numpyro_pdmp.bnn``."""

import argparse
from pathlib import Path
import sys
from typing import Any

from numpyro_pdmp.bnn.data import DATA_VARIABLE, IMAGES
from numpyro_pdmp.storage import read_json

EPILOG = f"""
The directory of --data-dir (or of the variable {DATA_VARIABLE}) has files such as
mnist/mnist.npz with x_train, y_train, x_test and y_test, and uci/yacht.npz with X, y,
train_idx and test_idx. Without one there are scikit-learn's digits.

Results in --out: metrics.json, map.npz, draws.nc (NetCDF, for arviz.from_netcdf),
prediction.npz and figures. The same command goes on where it was interrupted: the MAP
and the draws are not made again.
"""


def parser() -> argparse.ArgumentParser:
    from numpyro_pdmp.bnn.pipeline import NETWORKS, SAMPLERS

    result = argparse.ArgumentParser(
        prog="python -m numpyro_pdmp.bnn",
        description="Train, sample and score a Bayesian neural network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    known = ", ".join(("digits", *IMAGES))
    add("--data", default="digits", help=f"{known}, or a file in uci/ (yacht, ...)")
    add("--data-dir", help="directory of the data sets")
    add("--network", choices=NETWORKS, help="default: by the data")
    add("--sampler", choices=SAMPLERS, default="boomerang")
    add("--out", required=True, help="directory for the results")
    add("--force", action="store_true", help="delete the results that are in --out")
    add("--seed", type=int, default=0)
    add(
        "--prior",
        choices=("normal", "fan_in", "flat"),
        default="fan_in",
        help="of all weights alike, narrower for those with many inputs, or none",
    )
    add("--prior-scale", type=float, default=2.0, help="standard deviation of it")
    add(
        "--temperature",
        type=float,
        help="of the likelihood, which counts with the power 1 / temperature, for MAP "
        "and sampler alike; 1 is Bayes' theorem; default: by the data",
    )
    add("--batch-size", type=int, help="rows of a mini-batch")
    add("--map", help="file of a MAP, such as map.npz of another run, to start from")
    add("--map-steps", type=int, help="steps of Adam to the mode")
    add("--learning-rate", type=float, default=0.01, help="of Adam, at first")
    add("--num-warmup", type=int, help="draws of warm-up")
    add("--num-samples", type=int, help="draws after it")
    add("--num-chains", type=int, default=1)
    add("--thinning", type=int, default=1, help="predict with every so many draws")
    add(
        "--gradients-per-draw",
        type=int,
        default=50,
        help="warm-up spaces the draws of a PDMP accordingly; steps of the others",
    )
    add("--draw-time", type=float, help="process time between draws of a PDMP instead")
    add(
        "--refresh-rate",
        type=float,
        help="of a PDMP; default: 3 for boomerang, else the kernel's",
    )
    add("--step-size", type=float, help="of sgld, sgld-nd, sghmc, in posterior sds")
    add(
        "--reference",
        choices=("diagonal", "fisher"),
        default="diagonal",
        help="curvature at the mode that scales the sampler",
    )
    add("--gamma", type=float, default=1.0, help="factor of the covariance of it")
    add("--damping", type=float, default=0.0, help="precision added to the curvature")
    add(
        "--target",
        choices=("posterior", "reference_prior"),
        default="posterior",
        help="of boomerang: reference_prior takes the reference as the prior, as the "
        "paper does, with --prior flat",
    )
    add("--keep-draws", type=int, default=100, help="draws of a chain in draws.nc")
    add("--rows", type=int, help="train on the first so many rows")
    add("--test-rows", type=int, help="test on the first so many rows")
    add("--split", type=int, default=0, help="of the digits, or of a data set in uci/")
    add("--ood", help="data set to tell from the data by entropy, or 'noise'")
    add("--no-plots", dest="plots", action="store_false")
    add("--quiet", dest="progress_bar", action="store_false")
    return result


#: what does not change the results
FREE = ("out", "force", "progress_bar", "plots", "data_dir")


def prepare(args: argparse.Namespace) -> bool:
    """Fill in defaults and make the directory; whether there is anything to do."""
    from numpyro_pdmp.bnn.pipeline import defaults
    from numpyro_pdmp.bnn.results import FILES, write_json

    for name, value in defaults(args.data).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    counts = ("batch_size", "map_steps", "num_samples", "num_chains", "thinning")
    for name in (*counts, "gradients_per_draw", "keep_draws"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be positive, got {getattr(args, name)}.")
    for name in ("temperature", "prior_scale", "learning_rate", "gamma"):
        if not 0 < getattr(args, name) < float("inf"):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be positive, got {getattr(args, name)}.")
    if args.damping < 0:
        raise ValueError(f"--damping must not be negative, got {args.damping}.")
    if args.target != "posterior" and args.sampler not in ("boomerang", "map"):
        raise ValueError("--target reference_prior is for --sampler boomerang.")
    if args.prior == "flat" and args.target == "posterior" and args.sampler != "map":
        raise ValueError(
            "--prior flat leaves no proper posterior: give --target reference_prior, "
            "or another prior."
        )
    out = Path(args.out)
    config: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in FREE}
    path = out / "config.json"
    if out.is_dir() and any(out.iterdir()):
        if args.force:
            for name in FILES:
                (out / name).unlink(missing_ok=True)
        elif not path.is_file():
            raise FileExistsError(
                f"--out {out} has files that are not of a run; choose another "
                "directory, or give --force."
            )
        else:
            old = read_json(path, "Choose another directory, or give --force.")
            changed = sorted(
                k for k in old.keys() | config.keys() if old.get(k) != config.get(k)
            )
            if changed:
                flags = ", ".join(
                    f"--{k.replace('_', '-')} {old.get(k)}" for k in changed
                )
                raise FileExistsError(
                    f"--out {out} has results with {flags}; choose another directory, "
                    "or give --force to delete them."
                )
            return not (out / "metrics.json").is_file()
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, config)
    return True


DAMAGED = "Delete it, or give --force."


def show(content: dict[str, Any]) -> None:
    """The scores side by side."""
    columns = [k for k in ("map", "posterior") if k in content]
    names = list(content["map"])
    print(" " * 20 + "".join(f"{k:>12}" for k in columns))
    for name in names:
        print(f"{name:20}" + "".join(f"{content[k][name]:12.4f}" for k in columns))
    sampling = content.get("sampling", {})
    if "report" in sampling:
        print(sampling["report"])
    for part in ("mixing",):
        for name, value in sampling.get(part, {}).items():
            print(f"{name}: {value}")
    if "ood" in content:
        print("AUROC of entropy against {data}: {auroc:.3f}".format(**content["ood"]))


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        todo = prepare(args)
        if todo:
            from numpyro_pdmp.bnn.pipeline import run

            content = run(args)
        else:
            path = Path(args.out) / "metrics.json"
            print(f"{path} is there already; --force makes it anew.")
            content = read_json(path, DAMAGED)
            try:
                show(content)
                return 0
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is not of this run. {DAMAGED}") from error
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
