"""Records of measurements: their files, and where they come from (device, versions, code)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .workers import ROOT, STARTING

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "torch", "triton", "tokamax", "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)  # fmt: skip
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
FIGURES = ("tokens_per_second", "peak_gb")  # that a new record shows beside its own
OURS = ("lcjax", "pallas_kernels", "benchmarks")
IN_A_WHEEL = ("lcjax", "benchmarks")  # the place of `benchmarks` there


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
        if "reason" not in old and (figures := {x: old[x] for x in FIGURES if old.get(x)}):
            record = record | {"before": figures | {"commit": old["about"].get("commit")}}
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
    """Returns the commit of the sources, followed by "+" if files differ from it."""
    try:
        words = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **words).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **words).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changed.strip())


def code() -> dict[str, str]:
    """Returns a hash of each part of the repository that this process has imported.

    A part is a folder of a package with its subfolders, such as lcjax/models, or a file of a
    package or of the benchmarks. So a result is outdated when code changes that it ran, and stays
    when other code or the docs change.
    """
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return {part: _hash(part) for part in sorted({*map(_part, files)} - {None})}


def code_of(backend: str) -> dict[str, str]:
    """Returns the hashes of one implementation of attention: its files and those that all share."""
    from pallas_kernels.dispatch import BACKENDS

    module = "/".join(BACKENDS[backend].module.split(".")[:3])
    own = module if (ROOT / module).is_dir() else f"{module}.py"
    shared = (f"pallas_kernels/{file.name}" for file in (ROOT / "pallas_kernels").glob("*.py"))
    return {part: _hash(part) for part in (own, *sorted(shared))}


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
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    digest = hashlib.sha256()
    for file in (x for x in found if x.suffix in (".py", ".yaml")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
