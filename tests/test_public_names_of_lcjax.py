"""`import lcjax` is enough to reach the library, and imports nothing until it is used."""

import ast
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
