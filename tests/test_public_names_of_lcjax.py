"""`import lcjax` is enough to reach the library, and imports nothing until it is used."""

import ast
import json
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import lcjax


def test_importing_lcjax_imports_no_jax_and_none_of_its_own_files():
    code = (
        "import sys, lcjax; dir(lcjax);"
        "print([name for name in sys.modules if name.startswith(('jax', 'lcjax.', 'numpy'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_public_name_is_there_and_listed():
    assert sorted(lcjax.__all__) == lcjax.__all__ and set(lcjax.__all__) <= set(dir(lcjax))
    for name in lcjax.__all__:
        assert getattr(lcjax, name) is not None
    installed = [d.version for d in metadata.distributions() if d.name == "lcjax"]
    assert lcjax.__version__ in (installed or ["0+source"])
    with pytest.raises(AttributeError, match="has no attribute 'LanguageModels'"):
        _ = lcjax.LanguageModels


def test_names_are_those_of_the_files_that_editors_are_shown():
    tree = ast.parse(Path(lcjax.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, module in shown.items() if module == "lcjax"}
    assert modules == set(lcjax._MODULES)
    assert {name: shown[name] for name in shown.keys() - modules} == lcjax._NAMES
    assert {*shown, "__version__"} == set(lcjax.__all__)


HEAVY = ("torch", "tensorflow", "transformers", "pandas", "scipy")  # nothing of lcjax imports these
OPTIONAL = ("pyarrow", "matplotlib", "gguf", "sentencepiece")  # only what needs one imports it

# A process without these packages: trains on text, then on tokens, then does what needs one.
WITHOUT = """
import json, sys
from pathlib import Path

names, folder = sys.argv[2:], Path(sys.argv[1])
sys.modules |= dict.fromkeys(names)  # None: importing it is an error
import numpy as np
import lcjax, lcjax.data.prepare, lcjax.pictures
from lcjax.checkpoints import gguf_file, tokenizer
from lcjax.checkpoints.build import ModelSection
from lcjax.data import DataConfig, TextConfig, TextSource, TokenSource, documents
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.evaluation.run import check
from lcjax.training.train_config import RunSection, TrainConfig, TrainSection

for name in lcjax.__all__:
    getattr(lcjax, name)


def train(run, source):
    data = DataConfig(sources=[source], length=16, threads=0, prefetch=0)
    train = TrainSection(steps=1, batch_size=8, lr=1e-3, warmup_steps=0)
    run = RunSection(folder=str(folder / run))
    model = ModelSection(preset="tiny")
    return lcjax.training.run(TrainConfig(model=model, data=data, train=train, run=run))


text = TextSource(str(folder / "text"))
assert np.isfinite(train("a", text)["loss"])
tokenizer.ByteTokenizer().save(folder / "tokenizer")
tokens = lcjax.data.prepare.PrepareConfig(
    text.path, tokenizer=str(folder / "tokenizer"), out=str(folder / "tokens"), workers=1
)
lcjax.data.prepare.prepare(tokens)
assert np.isfinite(train("b", TokenSource(str(folder / "tokens")))["loss"])
assert not (folder / "a/loss.png").exists() and (folder / "a/model").is_dir()

perplexity = EvalConfig(model=ModelSection(preset="tiny"), lengths=(16,))
cases = {
    "parquet": lambda: list(documents(str(folder / "a.parquet"))),
    "arrow": lambda: list(documents(str(folder / "a.arrow"))),
    "zstd": lambda: list(documents(str(folder / "a.txt.zst"))),
    "datastore": lambda: lcjax.retrieval.build(
        lcjax.retrieval.BuildConfig(out=str(folder / "out"), data=TextConfig(sources=[text]))
    ),
    "gguf": lambda: gguf_file.read_index(folder / "a.gguf"),
    "sentencepiece": lambda: tokenizer.SentencePieceTokenizer(b"", where="tokenizer.model"),
    "report": lambda: check(perplexity),
    "figure": lambda: lcjax.pictures.mask_picture(lcjax.attention.Causal(), 8, folder / "a.png"),
}
errors = {}
for name, case in cases.items():
    try:
        case()
    except lcjax.InputError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_training_works_without_optional_packages_and_what_needs_one_names_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the cat sat on a mat " * 9)
    packed = pyarrow.compress(b"text", codec="zstd", asbytes=True)
    (tmp_path / "a.txt.zst").write_bytes(packed)
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"x")
    index = struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 4, 0, 0)  # one tensor
    (tmp_path / "a.gguf").write_bytes(index + bytes(64))
    command = [sys.executable, "-c", WITHOUT, tmp_path, *OPTIONAL, *HEAVY]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "loss.png needs matplotlib: pip install matplotlib" in ran.stderr
    errors = json.loads(ran.stdout.splitlines()[-1])
    installs = {
        "parquet": "'pyarrow>=16'", "arrow": "'pyarrow>=16'", "zstd": "'pyarrow>=16'",
        "datastore": "'pyarrow>=16'", "gguf": "gguf", "sentencepiece": "sentencepiece",
        "report": "matplotlib", "figure": "matplotlib",
    }  # fmt: skip
    assert errors.keys() == installs.keys()
    for name, install in installs.items():
        assert f": pip install {install} (" in errors[name] and "\n" not in errors[name]


def test_the_library_imports_no_package_that_only_some_users_need():
    code = (
        "import sys, lcjax, lcjax.training, lcjax.evaluation.command, lcjax.pictures\n"
        "import lcjax.retrieval\n"
        "[getattr(lcjax, name) for name in lcjax.__all__]\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*HEAVY, *OPTIONAL} & {*ran.stdout.split()}
