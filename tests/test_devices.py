# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Data on eight devices, and on two processes; see `on_devices.py`."""

import os
from pathlib import Path
import socket
import subprocess
import sys

HERE = Path(__file__).parent


def start(*args):
    """A process without other devices than it makes itself."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "on_devices.py"), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes):
    """What each has printed, when all have ended well."""
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return texts


def test_eight_devices():
    ended([start("eight")])


def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    texts = ended([start("process", index, port) for index in (0, 1)])
    sums = [float(text.split()[-1]) for text in texts]
    assert sums[0] == sums[1]  # the same draws in both
