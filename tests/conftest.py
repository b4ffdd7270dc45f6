"""Eight fake CPU devices and programs that compile fast, set before anything imports jax."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Of XLA's two ways to make code of fused operations for CPUs the newer one compiles twice as
    # long, and compiling is most of the time of a test. Later versions have the newer one only.
    flags.insert(0, "--xla_cpu_use_fusion_emitters=false")
    # XLA compiles the parts of a program side by side, each with costs of its own. The workers of
    # pytest-xdist have no idle core for that: whole programs take 15 % less of the tests' time.
    flags.insert(0, "--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# NumPy's and torch's threads wait in busy loops, on the cores of other workers of pytest-xdist.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests build the same programs again and again, most of their time. The first process makes the
# folder, the workers of pytest-xdist inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.mkdtemp(prefix="lcjax_test_programs_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

# Tracing makes objects by the million; after every 700, as usual, is too often to look for garbage.
gc.set_threshold(10_000, 20)


# Every compiled program keeps memory mappings of its own. Linux allows a process 65,530 and kills
# the one that asks for more, which a worker with a thousand tests does.
MAPPINGS = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Applies `slow_except(*ids)`: the parameter sets of the function with other ids are slow."""
    items = yield
    if isinstance(items, list):
        marked = [(item, item.get_closest_marker("slow_except")) for item in items]
        for item, mark in marked:
            if mark is not None and item.callspec.id not in mark.args:
                item.add_marker("slow")
        named = {id for _, mark in marked if mark is not None for id in mark.args}
        if unknown := named - {item.callspec.id for item, mark in marked if mark is not None}:
            raise collector.CollectError(f"{name}: slow_except names no case: {sorted(unknown)}")
    return items


@pytest.fixture(scope="session", autouse=True)
def empty_working_folder(tmp_path_factory):
    """Tests neither find what a user has in the clone, such as `runs/`, nor write there."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("work"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module", autouse=True)
def freeze_garbage():
    """Collecting garbage goes through all that lives: most of it imported, or a file's programs.

    So what a file finds and leaves is set apart, until many programs have gathered and are freed.
    """
    gc.collect()
    gc.freeze()
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAPPINGS:
        import jax

        jax.clear_caches()
        gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def disable_xla_optimizations():
    """Compiling is most of the time of a test, and how fast its programs run matters to few."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def enable_xla_optimizations(disable_xla_optimizations):
    """For what a compiler says of a program that users run: whether it fits, what it copies."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The URL of an object store whose writers can be killed."""
    from storage_support import ROOT

    from lcjax.storage import to_path

    monkeypatch.setenv(ROOT, str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # universal_pathlib does not know the scheme
        yield to_path("store://bucket")
