# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import os

import pytest

import jax

from numpyro_pdmp.process.pieces import TESTED

#: Most of the time of these tests is compilation, and half of that LLVM's. With XLA's
#: defaults run the README's code and the quickstart.
SHORT_RUNS = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
)
if jax.__version_info__[:2] in TESTED:  # XLA ends at a flag that it does not know
    SHORT_RUNS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SHORT_RUNS}"


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compile equal programs once: most of the time of these tests is compilation."""
    directory = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forget compiled programs: a process can map only so many pieces of memory."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quickly_compiled():
    """Without most of XLA's optimisations, for files whose runs are all short."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    """Double precision for the duration of a test."""
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", old)
