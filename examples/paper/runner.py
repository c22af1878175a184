# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What all experiments share: options, jobs, and a JSON file for each of them.

A job is one (data set, method, seed). Its result is written when it is done, and what
has a result is not run again, so any script may be stopped at any moment and started
again. ``--minutes`` stops between two jobs; the exit code is then 75.
"""

import argparse
from collections.abc import Callable, Iterable
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np

import jax

HERE = Path(__file__).parent
#: exit code if there are jobs left
UNFINISHED = 75


def parse(description: str, argv: list[str] | None = None, **defaults: Any) -> Any:
    """Options of a script.

    :param defaults: what ``--data`` and ``--methods`` are by default, and ``seeds``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="+", default=defaults.pop("data", None))
    add("--methods", nargs="+", default=defaults.pop("methods", None))
    add("--seeds", type=int, default=defaults.pop("seeds", 3), help="0 to SEEDS - 1")
    add("--first-seed", type=int, default=0)
    add("--data-dir", help="directory of the data sets; see python -m numpyro_pdmp.bnn")
    add("--results", type=Path, help="directory of the JSON files")
    add("--cache", type=Path, default=Path("paper_cache"), help="modes and draws")
    add("--minutes", type=float, default=float("inf"), help="begin no job after these")
    add("--quick", action="store_true", help="smaller runs, for a look: minutes")
    add("--tiny", action="store_true", help="smallest runs, for tests: seconds")
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            add(flag, action="store_true")
        else:
            add(flag, type=type(value), default=value)
    args = parser.parse_args(argv)
    args.mode = "tiny" if args.tiny else "quick" if args.quick else "full"
    if args.results is None:
        name = "results" if args.mode == "full" else f"results_{args.mode}"
        args.results = HERE / name
    if args.mode == "tiny":
        args.seeds = 1
    args.cache = args.cache / args.mode
    args.cache.mkdir(parents=True, exist_ok=True)
    if jax.config.jax_compilation_cache_dir is None:
        # Seeds have programs in common.
        directory = str(args.cache / "compiled")
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return args


def rounded(values: Any, digits: int = 4) -> Any:
    """Arrays as lists of short numbers, whatever holds them."""
    if isinstance(values, dict):
        return {str(k): rounded(v, digits) for k, v in values.items()}
    if isinstance(values, (list, tuple)):
        return [rounded(v, digits) for v in values]
    if isinstance(values, (str, bool)) or values is None:
        return values
    array = np.asarray(values)
    if array.dtype.kind in "iub":
        return array.tolist()
    if array.ndim:
        return [rounded(v, 3 if array.size > 30 else digits) for v in array]
    return float(f"{float(array):.{digits}g}") if np.isfinite(array) else None


def write(path: Path, content: Any) -> None:
    """All of a file or nothing; not numbers are null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".part")
    new.write_text(json.dumps(rounded(content, 5), separators=(",", ":")) + "\n")
    os.replace(new, path)


def job_path(results: Path, experiment: str, job: dict[str, Any]) -> Path:
    return results / experiment / ("_".join(str(v) for v in job.values()) + ".json")


def jobs(args: Any) -> list[dict[str, Any]]:
    """All data sets, methods and seeds; every seed of all before the next."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return [
        {"data": data, "method": method, "seed": seed}
        for seed in seeds
        for data in args.data
        for method in args.methods
    ]


def run_jobs(
    experiment: str, todo: Iterable[dict[str, Any]], run: Callable, args: Any
) -> int:
    """Run the jobs that have no result; the exit code."""
    begin = time.monotonic()
    for job in todo:
        path = job_path(args.results, experiment, job)
        if path.is_file():
            continue
        if time.monotonic() - begin > 60 * args.minutes:
            return UNFINISHED
        start = time.perf_counter()
        content = run(job, args)
        seconds = time.perf_counter() - start
        write(path, {**job, "mode": args.mode, **content, "job_seconds": seconds})
        print(f"{path.stem}: {seconds:.0f} s", flush=True)
    return 0


def load(results: Path, experiment: str) -> list[dict[str, Any]]:
    """All results of an experiment."""
    paths = sorted((results / experiment).glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def main(run: Callable[[list[str] | None], int]) -> None:
    sys.exit(run(None))
