"""The wheel: what is in it and what works from it, read from the build configuration."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lcjax import config

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def wheel_files() -> dict[str, Path]:
    """The files of the wheel by their paths in it; hatchling packs what git does not ignore."""
    files = {}
    for name in WHEEL["only-include"]:
        place = ROOT / name
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            target = file.relative_to(ROOT).as_posix()
            for source, package in WHEEL["sources"].items():
                if target.startswith(f"{source}/"):
                    target = package + target.removeprefix(source)
            files[target] = file
    return files


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what a wheel installs, and an empty one to run commands in."""
    site = tmp_path_factory.mktemp("site")
    for target, file in wheel_files().items():
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, site / target)

    def run(*words: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, words)], capture_output=True, text=True,
            cwd=tmp_path_factory.mktemp("empty"), env=os.environ | {"PYTHONPATH": str(site)},
        )  # fmt: skip

    return run


def test_the_wheel_has_both_packages_every_recipe_and_the_benchmarks_of_gpus():
    files = wheel_files()
    assert {name.split("/")[0] for name in files} == {"lcjax", "pallas_kernels"}
    for package in ("lcjax", "pallas_kernels"):
        sources = {file.relative_to(ROOT).as_posix() for file in (ROOT / package).rglob("*.py")}
        assert sources <= files.keys()
    recipes = (ROOT / "configs").rglob("*.yaml")
    assert {f"lcjax/{file.relative_to(ROOT).as_posix()}" for file in recipes} <= files.keys()
    assert {f"lcjax/configs/{name}.yaml" for name in config.recipes()} <= files.keys()
    assert {"lcjax/evaluation/tasks/prompts.yaml", "lcjax/benchmarks/gpu/compile.json"} <= {*files}
    assert any(name.startswith("lcjax/evaluation/report/templates/") for name in files)


RECIPES = """
import sys
from lcjax import config
from lcjax.evaluation import study
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.training import TrainConfig
from lcjax.training.__main__ import main
assert {"lcjax", "configs"} <= {*config.recipes()["quickstart_train"].parts}
for name in sys.argv[1:]:
    config.read_yaml(f"lcjax:{name}")
config.parse(TrainConfig, ["--config=lcjax:quickstart_train"])
for name in ("quickstart_eval", "study_tiny"):
    print(len(study.trainings(config.parse(EvalConfig, [f"--config=lcjax:{name}"]))))
sys.exit(main(["--config", "lcjax:quickstart_trian"]))
"""


def test_recipes_and_the_recipes_that_they_name_are_read_from_an_installed_wheel(installed):
    done = installed("-c", RECIPES, *config.recipes())
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "did you mean quickstart_train?" in done.stderr
    base, tiny = map(int, done.stdout.split())
    assert base == 0 and tiny > 5


def test_the_benchmark_of_models_on_a_gpu_finds_what_it_shares_in_an_installed_wheel(installed):
    done = installed("-m", "lcjax.benchmarks.gpu.model", "--list", "--cases", "train 16k lcjax")
    assert done.stdout.splitlines() == ["train 1.1b 16k lcjax", "train 135m 16k lcjax"], done.stderr


@pytest.mark.slow
def test_the_gpu_benchmarks_check_kernels_in_processes_of_an_installed_wheel(installed):
    only = ("--only", "small, float32: causal, odd", "--backends", "xla", "--processes", "1")
    done = installed("-m", "lcjax.benchmarks.gpu.check", *only)
    assert "xla: 1 ok, 0 skip, 0 FAIL" in done.stdout, done.stderr


def test_console_scripts_are_functions():
    scripts = PYPROJECT["project"]["scripts"]
    assert scripts.keys() == {"lcjax-train", "lcjax-eval", "lcjax-serve"}
    for place in scripts.values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == PYPROJECT["project"]["version"]


def test_floors_are_the_versions_that_were_tried_and_reach_colab():
    """`.ci/floors.txt` has the lower bounds of pyproject.toml, and no pin of Colab's is below."""

    def pins(name: str) -> dict[str, Version]:
        lines = (ROOT / ".ci" / name).read_text().splitlines()
        pairs = [line.split()[0].split("==") for line in lines if "==" in line and line[0] != "#"]
        return {canonicalize_name(package): Version(version) for package, version in pairs}

    project = PYPROJECT["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["parquet"]]
    floors, colab = pins("floors.txt"), pins("colab.txt")
    for requirement in map(Requirement, needs):
        package = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"python_version": "3.11"}):
            continue
        (floor,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
        # transformers 5, to which the suite compares, needs newer ones of these two.
        is_same = floor == floors[package] or package in ("huggingface-hub", "tokenizers")
        assert is_same and floor <= floors[package], package
        assert colab.get(package, floor) >= floor, package
