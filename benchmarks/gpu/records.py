"""Records of measurements: their files, and where they come from (device, versions, code)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .workers import ROOT, STARTING, emit

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "torch", "triton", "tokamax", "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)  # fmt: skip
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
FIGURES = ("tokens_per_second", "peak_gb")  # that a new record shows beside its own
OURS = ("lcjax", "pallas_kernels", "benchmarks")
IN_A_WHEEL = ("lcjax", "benchmarks")  # the place of `benchmarks` there
# Modules that run and print measurements, and so do not change their figures.
NEUTRAL = frozenset(f"benchmarks/{x}.py" for x in (
    "__init__", "gpu/__init__", "gpu/attention", "gpu/day", "gpu/model", "gpu/model_report",
    "gpu/pack", "gpu/records", "gpu/report", "gpu/summary", "gpu/workers",
))  # fmt: skip
NO_GPU = (
    "error: JAX runs on {} here, and this is for NVIDIA GPUs; install jax for CUDA, or try it at "
    "tiny sizes with {}"
)

# Environment variables: the commit, where git does not know it, and a description in JSON that is
# used instead of asking the device, which takes ten seconds in a process of its own.
COMMIT, ABOUT = "LCJAX_COMMIT", "LCJAX_GPU_ABOUT"


def describe() -> dict:
    """Returns the device, its driver and limits, the versions of packages, and the commit."""
    import jax

    from pallas_kernels.timings import driver, sources

    device = jax.devices()[0]
    about = {"device": device.device_kind, "platform": device.platform, "driver": driver()}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    about |= {"commit": _commit() or os.environ.get(COMMIT), "kernels": sources()}
    for package in PACKAGES:
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = None
    return about | nvidia_smi("clocks.max.sm", "clocks.max.mem", "power.limit")


class Records:
    """Records by case on one kind of GPU, in a file that is written atomically.

    A record has the fields "case", "about" (`describe`) and "code" (`code`), and "reason" if the
    case failed.
    """

    def __init__(self, file: Path):
        self.file = file
        self.by_case = json.loads(file.read_text())["cases"] if file.exists() else {}

    @classmethod
    def of(cls, folder: Path, about: dict) -> Records:
        """Returns the records of a device in a folder."""
        from pallas_kernels.timings import file_of

        return cls(folder / file_of(about["device"]))

    def state(self, case: str, about: dict) -> str:
        """Returns "missing", "outdated" (other code or version of JAX), "failed" or "done"."""
        if (record := self.by_case.get(case)) is None:
            return "missing"
        same_jax = record["about"].get("jax") == about.get("jax")
        if not same_jax or "code" not in record or not is_current(record["code"]):
            return "outdated"
        return "failed" if "reason" in record else "done"

    def add(self, record: dict) -> None:
        """Adds a record; figures of the one that it replaces are kept as its "before"."""
        old = self.by_case.get(record["case"], {})
        before = {x: old[x] for x in FIGURES if old.get(x)}
        if before:
            before["commit"] = old["about"].get("commit")
        elif "reason" in old:
            before = old.get("before")
        if before:
            record = record | {"before": before}
        self.by_case[record["case"]] = record
        write(self.file, {"cases": self.by_case})


def write(file: Path, content: dict) -> None:
    """Writes JSON atomically, because a later run reads it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


def known_about() -> dict | None:
    """Returns the description that a parent process has passed on."""
    return json.loads(os.environ[ABOUT]) if ABOUT in os.environ else None


def about_here() -> dict:
    """Returns `describe()` of a child process, which frees the device when it ends."""
    if (known := known_about()) is not None:
        return known
    program = f"import json; from {__name__} import describe; print(json.dumps(describe()))"
    run = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True,
        timeout=STARTING, cwd=ROOT,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def peers(record: dict, others: Iterable[dict]) -> list[dict]:
    """Returns the records of the other sides of one task, with the same code and setup."""

    def is_peer(other: dict) -> bool:
        one, two = record.get("code", {}), other.get("code", {})
        return (
            all(other[x] == record[x] for x in ("kind", "model", "tokens"))
            and other["side"] != record["side"]
            and "reason" not in other
            and same_setup(record["about"], other["about"])
            and all(one[part] == two[part] for part in one.keys() & two.keys())
        )

    return [other for other in others if is_peer(other)]


def same_setup(one: dict, other: dict) -> bool:
    """Whether two descriptions differ in nothing that changes the results of kernels."""
    keys = {*one, *other} - {"commit", "self_check"}
    return all(one.get(key) == other.get(key) for key in keys)


def nvidia_smi(*fields: str) -> dict[str, str]:
    """Returns what nvidia-smi reports of the first GPU; empty if it cannot be run."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = run.stdout.splitlines()[0].split(", ") if run.stdout else []
    return dict(zip(fields, values, strict=False))


def _commit() -> str | None:
    """Returns the commit of the sources, followed by "+" if files but results differ from it."""
    try:
        words = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **words).stdout.strip()
        but = ":(exclude)benchmarks/gpu/results"
        changed = subprocess.run(["git", "status", "--porcelain", "-uno", ".", but], **words).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changed.strip() else commit


def code() -> dict[str, str]:
    """Returns a hash of each part of the repository that this process has imported.

    A part is a folder of a package with its subfolders, such as lcjax/models, or a file of a
    package or of the benchmarks. So a result is outdated when code changes that it ran, and stays
    when other code or the docs change.
    """
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return {part: _hash(part) for part in sorted({*map(_part, files)} - {None} - NEUTRAL)}


def code_of(backend: str, *files: Path) -> dict[str, str]:
    """Returns hashes of an implementation of attention: its files, shared ones, and `files`."""
    from pallas_kernels.dispatch import BACKENDS

    module = "/".join(BACKENDS[backend].module.split(".")[:3])
    backend_files = module if (ROOT / module).is_dir() else f"{module}.py"
    shared = (f"pallas_kernels/{file.name}" for file in (ROOT / "pallas_kernels").glob("*.py"))
    others = (file.resolve().relative_to(ROOT).as_posix() for file in files)
    return {part: _hash(part) for part in (backend_files, *sorted(shared), *others)}


def is_current(parts: dict[str, str]) -> bool:
    """Whether none of the `code` of a result has changed."""
    return all(_hash(part) == value for part, value in parts.items())


def _part(file: str | None) -> str | None:
    """Returns the part of a module's file; None for a module of another library."""
    path = Path(file or "/").resolve()
    if not path.is_relative_to(ROOT):
        return None
    words = path.relative_to(ROOT).parts
    words = words[1:] if words[:2] == IN_A_WHEEL else words
    if words[0] not in OURS:
        return None
    return "/".join(words if words[0] == "benchmarks" else words[:2])


@functools.cache
def _hash(part: str) -> str:
    """Returns a hash of a file, or of all Python and YAML files of a folder; "" if it is gone."""
    path = next((x for x in (ROOT / part, ROOT / IN_A_WHEEL[0] / part) if x.exists()), None)
    if path is None:
        return ""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    digest = hashlib.sha256()
    for file in (x for x in files if x.suffix in (".py", ".yaml")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def failure_emitted() -> Iterator[None]:
    """Emits the error of the block, and the code that ran until then; the error goes on."""
    try:
        yield
    except Exception as error:  # XLA and its libraries raise various errors
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        emit(failed=f"{type(error).__name__}: {lines[0]}"[:400], code=code())
        raise


def reserve_memory() -> None:
    """Lets JAX take most of the GPU's memory at once, unless the user says how much."""
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses both names at once
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # its default is 0.75
