# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Kill a checkpointed run again and again, and compare it with one that was not.

python scripts/kill_runs.py --kills 200
"""

import argparse
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
import time


def child(path, num_samples):
    import numpy as np

    import jax
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC
    from numpyro_pdmp import BPS, run_checkpointed

    jax.config.update("jax_compilation_cache_dir", str(path.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    y = jnp.asarray(np.random.default_rng(0).normal(size=20), jnp.float32)
    mcmc = MCMC(BPS(model), num_warmup=200, num_samples=num_samples, progress_bar=False)
    mcmc = run_checkpointed(mcmc, jax.random.key(0), y, path=path, every=200)
    np.save(path.parent / f"{path.name}.npy", mcmc.get_samples()["mu"])


def start(path, num_samples):
    command = [sys.executable, __file__, "--child", str(path), str(num_samples)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def chunks(path):
    return {p.name: p.read_bytes() for p in path.glob("chunk-*.npz")}


def main(args):
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "killed"
        num_samples = 200 * 4 * args.kills
        lost = 0
        for k in range(args.kills):
            before = chunks(path)
            process, begin = start(path, num_samples), time.monotonic()
            # Until it writes; then a random moment in what follows.
            while process.poll() is None and len(chunks(path)) <= len(before):
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.wait()
            after = chunks(path)
            lost += sum(after.get(name) != data for name, data in before.items())
            print(
                f"kill {k + 1}: {len(after)} chunks, {len(list(path.glob('*.part')))} "
                f"unfinished files, {time.monotonic() - begin:.1f} s",
                flush=True,
            )
        whole = Path(directory) / "whole"
        for run in (path, whole):
            if start(run, num_samples).wait():
                sys.exit(f"the run in {run} failed by itself")
        names = [os.path.join(directory, f"{p.name}.npy") for p in (path, whole)]
        same = Path(names[0]).read_bytes() == Path(names[1]).read_bytes()
        print(f"{args.kills} kills: {lost} completed chunks lost or changed; ", end="")
        print("draws are" + ("" if same else " NOT") + " those of a run without kills")
        sys.exit(bool(lost) or not same)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Path(args.child[0]), int(args.child[1]))
    else:
        main(args)
