"""Eight fake CPU devices and programs that compile fast, set before anything imports jax."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Of XLA's two ways to make code of fused operations for CPUs the newer one compiles twice as
    # long, and compiling is most of the time of a test. Later versions have the newer one only.
    flags.insert(0, "--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests build the same programs again and again, most of their time. The first process makes the
# folder, the workers of pytest-xdist inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.mkdtemp(prefix="lcjax_test_programs_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


# Every compiled program keeps memory mappings of its own. Linux allows a process 65,530 and kills
# the one that asks for more, which a worker with a thousand tests does.
MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def programs_are_freed():
    """After a file of tests, where many programs have gathered."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def compiled_quickly():
    """For files in which nothing depends on how fast the compiled code is."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
