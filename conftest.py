# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import pytest

import jax


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
