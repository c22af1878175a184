# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""All samplers on all targets, side by side: ``make bench``.

Each pair is a process of its own (``adapter.py``), with 4 chains. Peers are installed
on demand in virtual environments of their own, under ``--envs``. Writes ``bench.json``
and ``bench.md`` to ``--output``; with ``--docs FILE`` also between the marks in there.

    python examples/benchmarks/bench.py --quick
    python examples/benchmarks/bench.py --targets logistic-1000 --samplers bps nuts

Results are written after every run. ``--resume`` leaves out what is there already, so a
run that was interrupted goes on where it stopped.
"""

import argparse
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from targets import TARGETS

from numpyro.diagnostics import effective_sample_size

HERE = Path(__file__).parent
ENVS = {"bj": ("blackjax==1.7.1",), "pj": ("pdmp-jax==0.1.1",)}
OURS = ("boomerang", "bps", "forwardbps", "zigzag")
FULL = (
    *OURS,
    "nuts",
    "nuts-dense",
    "bj-nuts",
    "bj-nuts-dense",
    "bj-mclmc",
    "pj-zigzag",
    "pj-bps",
    "pj-boomerang",
)
BATCHES = (
    *(f"{name}-batches" for name in ("boomerang", "bps", "zigzag")),
    "nuts",
    "hmcecs",
    "bj-nuts",
    "bj-mclmc",
    "bj-sgld",
    "bj-sgld-cv",
    "bj-sghmc",
    "bj-sghmc-cv",
)
QUICK_TARGETS = ("gaussian-10", "banana-50", "logistic-1000")
QUICK = ("boomerang", "nuts", "nuts-dense", "bj-nuts", "bj-mclmc", "pj-boomerang")


def samplers_of(target):
    # pdmp-jax has no batches: an event would take some 20 gradients of all rows.
    if target in ("logistic-100000", "logistic-1000000"):
        return BATCHES
    # Dense metrics are of no use, or take too long to learn.
    if target.startswith("gaussian") or target == "ill-1000":
        return tuple(s for s in FULL if "dense" not in s)
    return FULL


def interpreter(sampler, envs):
    """The Python of a sampler's environment, which is made if need be; None: failed."""
    kind = sampler.split("-")[0]
    if kind not in ENVS:
        return sys.executable
    env = envs / "-".join(ENVS[kind]).replace("=", "")
    python = env / "bin" / "python"
    stamp = env / ".installed"
    if not stamp.exists():
        print(f"installing {', '.join(ENVS[kind])} in {env}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", env], check=True)
        command = [python, "-m", "pip", "install", "-qq", *ENVS[kind]]
        if subprocess.run(command).returncode:
            return None
        stamp.touch()
    return str(python)


def reference(name, directory):
    """Mean and covariance of a target, and what draws are compared with, in a file.

    Exact where known; by importance sampling from Laplace's approximation for logistic
    regressions (with a million rows that approximation itself); else by NUTS.
    """
    path = directory / f"reference-{name}.npz"
    if path.exists():
        return path
    target = TARGETS[name]()
    if target.truth is not None:
        mean, covariance = (np.asarray(a, float) for a in target.truth)
        sd = np.sqrt(np.diag(covariance) if covariance.ndim == 2 else covariance)
        if covariance.ndim == 1:
            covariance = np.diag(covariance)
        save = {"mean": mean, "sd": sd, "error": np.zeros_like(sd)}
        np.savez(path, center=mean, covariance=covariance, **save)
        return path
    if target.rows is not None:
        from subsampling import laplace, weighted_truth

        x, y = target.rows.data
        mode, covariance = laplace(x, y)
        mean, sd = mode, np.sqrt(np.diag(covariance))
        error = np.zeros_like(sd)
        if len(y) < 1_000_000:
            mean, sd = weighted_truth(x, y, 20_000)
            error = sd / 10_000**0.5
        np.savez(
            path, center=mean, covariance=covariance, mean=mean, sd=sd, error=error
        )
        return path
    draws = directory / f"long-{name}.npz"
    command = [sys.executable, HERE / "adapter.py", "--sampler", "nuts-dense"]
    command += ["--target", name, "--out", draws, "--x64", "--seed", "7"]
    command += ["--budget", "20", "--max-draws", "50000", "--raw"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with np.load(draws) as file:
        x, raw = np.asarray(file["x"], float), np.asarray(file["raw"], float)
    flat = raw.reshape(-1, raw.shape[-1])
    sd = x.std((0, 1))
    error = sd / np.sqrt(effective_sample_size(x))
    save = {"mean": x.mean((0, 1)), "sd": sd, "error": error}
    np.savez(path, center=flat.mean(0), covariance=np.cov(flat.T), **save)
    return path


def metrics(result, x, known):
    """Common to all samplers; rates are of the smallest and median effective size."""
    x = np.asarray(x, float)
    mean, sd = known["mean"], known["sd"]
    if not np.isfinite(x).all():
        return {"failed": "draws are not finite"}
    size = np.minimum(effective_sample_size(x), effective_sample_size((x - mean) ** 2))
    size = np.nan_to_num(size, nan=0.0)
    total = x.shape[0] * x.shape[1]
    size = np.minimum(size, 10 * total)  # antithetic draws: no better than that
    seconds = result["seconds_a_draw"] * x.shape[1]
    gradients = result["gradients_a_draw"] * total
    found = {}
    for label, ess in (("min", size.min()), ("median", np.median(size))):
        found[f"{label}_ess"] = float(ess)
        found[f"{label}_ess_a_second"] = float(ess / seconds)
        found[f"{label}_ess_a_gradient"] = float(ess / gradients)
        if result["rows_a_gradient"]:
            rows = gradients * result["rows_a_gradient"]
            found[f"{label}_ess_a_row"] = float(ess / rows)
    error = np.abs(x.mean((0, 1)) - mean) / sd
    mcse = np.hypot(1 / np.sqrt(np.maximum(size, 1)), known["error"] / sd)
    ratio = x.std((0, 1)) / sd
    return found | {
        "worst_mean_error": float(error.max()),
        "worst_mean_error_mcse": float((error / mcse).max()),
        "sd_ratio": [float(r) for r in (ratio.min(), ratio.mean(), ratio.max())],
    }


def cpu_seconds():
    """Of all processes that were started and are done."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(sampler, target, args, known):
    python = interpreter(sampler, args.envs)
    base = {"sampler": sampler, "target": target}
    if python is None:
        return base | {"failed": "could not be installed"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "draws.npz"
        command = [python, HERE / "adapter.py", "--sampler", sampler]
        command += ["--target", target, "--out", out, "--reference", known]
        command += ["--budget", args.budget, "--max-draws", args.max_draws]
        command += ["--seed", args.seed, "--clock", args.clock]
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        start, used = time.perf_counter(), cpu_seconds()
        try:
            done = subprocess.run(
                [str(part) for part in command],
                capture_output=True,
                text=True,
                env=env,
                timeout=args.timeout,
            )
        except subprocess.TimeoutExpired:
            return base | {"failed": f"not done in {args.timeout:.0f} s"}
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["?"]
            return base | {"failed": lines[-1][:200]}
        result = json.loads(done.stdout.splitlines()[-1])
        result["process_seconds"] = time.perf_counter() - start
        result["process_cpu_seconds"] = cpu_seconds() - used
        with np.load(out) as draws, np.load(known) as file:
            return result | metrics(result, draws["x"], dict(file))


# Tables


COLUMNS = (
    "sampler",
    "gradients a draw",
    "min ESS(x, x^2) a second, over NUTS",
    "median",
    "min ESS per gradient, over NUTS",
    "per row",
    "largest mean error, sd (in MCSE)",
    "sd ratio, mean (range)",
    "compile, s",
    "peak, MiB",
)


def over(result, base, key):
    if key not in result or not base or not base.get(key):
        return ""
    return f"{result[key] / base[key]:.2f}"


def table(target, results):
    """Markdown of one target."""
    fine = {r["sampler"]: r for r in results if "failed" not in r}
    base = fine.get("nuts", {})
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for r in results:
        if "failed" in r:
            rest = " | " * (len(COLUMNS) - 2)
            lines.append(f"| {r['sampler']} | {r['failed']}{rest} |")
            continue
        low, mid, high = r["sd_ratio"]
        cells = (
            r["sampler"],
            f"{r['gradients_a_draw']:.1f}",
            over(r, base, "min_ess_a_second"),
            over(r, base, "median_ess_a_second"),
            over(r, base, "min_ess_a_gradient"),
            over(r, base, "min_ess_a_row"),
            f"{r['worst_mean_error']:.3f} ({r['worst_mean_error_mcse']:.1f})",
            f"{mid:.3f} ({low:.3f} to {high:.3f})",
            f"{r['compile_seconds']:.1f}",
            f"{r['peak_mib']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([f"### {target}", "", *lines, ""])


def markdown(results):
    targets = list(dict.fromkeys(r["target"] for r in results))
    return "\n".join(
        table(t, [r for r in results if r["target"] == t]) for t in targets
    )


def in_order(results):
    """Ours first, and targets as they are listed, whenever each was run."""
    samplers = list(dict.fromkeys((*FULL, *BATCHES)))
    targets = list(TARGETS)

    def place(result):
        sampler = result["sampler"]
        known = sampler in samplers
        at = samplers.index(sampler) if known else len(samplers)
        return targets.index(result["target"]), at

    return sorted(results, key=place)


def write(results, args):
    results = in_order(results)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (args.output / "bench.md").write_text(text)
    if args.docs is not None:
        begin, end = "<!-- bench: begin -->", "<!-- bench: end -->"
        page = args.docs.read_text()
        head, tail = page.split(begin)[0], page.split(end)[1]
        args.docs.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")


def main(args):
    old = args.output / "bench.json"
    results = json.loads(old.read_text()) if old.exists() and args.keep else []
    if args.render:
        write(results, args)
        return
    args.envs.mkdir(parents=True, exist_ok=True)
    targets = args.targets or (QUICK_TARGETS if args.quick else TARGETS)
    for target in targets:
        known = reference(target, args.envs)
        default = samplers_of(target)
        if args.quick:
            default = [s for s in default if s in QUICK]
        for sampler in args.samplers or default:
            same = (sampler, target)
            there = any((r["sampler"], r["target"]) == same for r in results)
            if args.resume and there:
                continue
            result = run(sampler, target, args, known)
            results = [r for r in results if (r["sampler"], r["target"]) != same]
            results.append(result)
            rate = result.get("min_ess_a_second", float("nan"))
            note = result.get("failed", f"{rate:.4g} effective draws a second")
            print(f"{target} {sampler}: {note}", file=sys.stderr, flush=True)
            write(results, args)
    print(markdown(in_order(results)))


if __name__ == "__main__":
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", choices=TARGETS)
    parser.add_argument("--samplers", nargs="*")
    parser.add_argument("--quick", action="store_true", help="in under ten minutes")
    parser.add_argument("--envs", type=Path, default=cache / "numpyro_pdmp-bench")
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    parser.add_argument("--keep", action="store_true", help="results that are there")
    parser.add_argument("--resume", action="store_true", help="run only what is not")
    parser.add_argument("--render", action="store_true", help="only write the tables")
    parser.add_argument("--docs", type=Path, help="page with marks to write between")
    parser.add_argument("--budget", type=float, help="seconds of sampling of a run")
    parser.add_argument("--max-draws", type=int, default=4000)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    clock = "of a busy machine: CPU seconds of all threads, rather than the wall's"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clock)
    args = parser.parse_args()
    args.keep |= args.render or args.resume
    if args.budget is None:
        args.budget = 1.0 if args.quick else 5.0
    main(args)
