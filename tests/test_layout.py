"""The shape of the code base: imports point one way, and nothing names a machine."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lcjax", "pallas_kernels")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
SCRIPTS = [ROOT / "train.py", ROOT / "eval.py"]

# A folder (or file) of lcjax imports from the lines above its own only: no two import each other.
ORDER = [
    {"errors", "progress", "tree"},
    {"storage"},
    {"files"},
    {"config", "rope"},
    {"parallel", "attention"},
    {"models"},
    {"memory"},
    {"checkpoints", "cost"},
    {"data"},
    {"training", "generation"},
    {"retrieval"},
    {"evaluation"},
    {"pictures"},
    {"serve"},
    {"plugins"},
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
# Packages for one use of language models; the core works without them and does not name them.
APPLICATIONS = {"retrieval", "evaluation", "pictures", "serve"}
CORE = ("pallas_kernels", *(p for p in RANK if RANK[p] < min(RANK[a] for a in APPLICATIONS)))

# Known sets of files of one package that import each other, imports inside functions and under
# TYPE_CHECKING included. They may become smaller; no other set is allowed.
CIRCLES = [
    {"lcjax.attention.base", "lcjax.attention.cache", "lcjax.attention.relative"},
    {
        "lcjax.models.cache",
        "lcjax.models.model_config",
        "lcjax.models.layers",
        "lcjax.models.memory",
    },
    {
        *("lcjax.checkpoints", "lcjax.checkpoints.build", "lcjax.checkpoints.load"),
        "lcjax.checkpoints.run_folder",
    },
    {"lcjax.training.train_config", "lcjax.training.training_task"},
    {"lcjax.evaluation.plots", "lcjax.evaluation.task"},
]

# Who may import what: everywhere else these libraries are an implementation detail.
ONLY_IN = {
    "flax": ("lcjax/models/", "lcjax/memory/"),
    "orbax": ("lcjax/checkpoints/orbax_io.py",),
    "torch": ("lcjax/convert.py",),  # `check --run`
    "transformers": ("lcjax/convert.py",),
}
# Extras, and what takes seconds to import: only inside the function that needs it.
LAZY = {
    "seqio",
    "tensorflow",
    "wandb",
    "tensorboardX",
    "matplotlib",
    "gguf",
    "pyarrow",
    "sentencepiece",
    "scipy",
    "huggingface_hub",
    "tokenizers",
    "bm25s",
    "faiss",
    "model2vec",
    "torch",
    "transformers",
}
KERNELS_NEED = {"jax", "jaxlib", "numpy", "jaxtyping", "pallas_kernels"}
MACHINE = re.compile(r"/(?:work|root|home|tmp|Users|mnt)/|\b(?:TODO|FIXME|XXX)\b")


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> set[str]:
    """Dotted names that the tree imports; `from a import b` gives `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def at_import_time(tree: ast.Module) -> set[str]:
    """What importing the module imports: everything outside functions and TYPE_CHECKING."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        def visit_If(self, node):
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else node

    return imports(Prune().visit(tree))


def tops(names: set[str]) -> set[str]:
    return {dotted.split(".")[0] for dotted in names}


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_imports_point_one_way(file):
    tree = ast.parse(file.read_text())
    found = imports(tree)
    if name(file).startswith("pallas_kernels/"):
        assert "lcjax" not in tops(found)
        return
    if file.name in ("__main__.py", "convert.py", "check.py"):
        return  # a command
    if file == ROOT / "lcjax" / "__init__.py":
        assert tops(at_import_time(tree)) <= sys.stdlib_module_names, "names are read when used"
        return
    folder = file.relative_to(ROOT / "lcjax").with_suffix("").parts[0]
    assert folder in RANK, f"{name(file)}: give {folder} its place in ORDER"
    used = {dotted.split(".")[1] for dotted in found if dotted.startswith("lcjax.")} - {folder}
    wrong = {other for other in used if RANK[other] >= RANK[folder]}
    assert not wrong, f"{name(file)} imports from {wrong}, which may import from {folder}"


def module(file: Path) -> str:
    """The dotted name of a file; that of the package for an `__init__.py`."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def find_circles(used: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, by what each module imports."""

    def reachable(start: str) -> set[str]:
        reached, todo = set(), [start]
        while todo:
            new = used[todo.pop()] - reached
            reached |= new
            todo += new
        return reached

    reached = {name: reachable(name) for name in used}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in used
    }
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def test_circles_are_found():
    used = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": {"f"}, "f": {"d", "a"}, "g": {"g"}}
    assert find_circles(used) == [{"b", "c"}, {"d", "e", "f"}]


def test_files_of_a_package_do_not_import_each_other_in_circles():
    files = {module(file): file for file in SOURCES}

    def imported(file: Path) -> set[str]:
        dotted = imports(ast.parse(file.read_text()))
        # `from a.b import c` imports a file a/b/c.py, or a name of a/b.py or a/b/__init__.py.
        return {x if x in files else x.rpartition(".")[0] for x in dotted} & set(files)

    found = find_circles({name: imported(file) for name, file in files.items()})
    new = [sorted(circle) for circle in found if not any(circle <= known for known in CIRCLES)]
    assert not new, f"these files import each other: {new}"


def in_core(file: Path) -> bool:
    top, *rest = file.relative_to(ROOT).with_suffix("").parts
    return (top if top != "lcjax" else rest[0]) in CORE


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    """Calls of a function by its name, also as an attribute of a module."""
    names = [(node, node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node, f in names if function in (getattr(f, "id", ""), getattr(f, "attr", ""))]


def test_imported_names_exist():
    """Scripts that no test runs, and imports inside functions."""
    own = {"lcjax", "pallas_kernels", "benchmarks"}
    scripts = [
        f
        for part in ("benchmarks", "tools", "notebooks", "tests")
        for f in ROOT.glob(f"{part}/**/*.py")
    ]
    missing = []
    for file in [*SOURCES, *scripts]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or tops({node.module or ""}).isdisjoint(own):
                continue
            path = ROOT / Path(*node.module.split("."))
            module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = module.read_text() if module.exists() else ""
            missing += [
                f"{name(file)}: {node.module}.{alias.name}"
                for alias in node.names
                if not re.search(rf"\b{alias.name}\b", text)
                and not (path / f"{alias.name}.py").exists()
                and not (path / alias.name).is_dir()
            ]
    assert not missing


@pytest.mark.parametrize("file", [file for file in SOURCES if in_core(file)], ids=name)
def test_the_core_imports_no_application(file):
    tree = ast.parse(file.read_text())  # commands and functions, too
    modules = imports(tree) | {
        node.value
        for call in calls(tree, "import_module")
        for node in ast.walk(call)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    parts = {dotted.split(".")[1] for dotted in modules if dotted.startswith("lcjax.")}
    assert not parts & APPLICATIONS, f"{name(file)} imports {parts & APPLICATIONS}"


@pytest.mark.parametrize("file", [file for file in SOURCES if in_core(file)], ids=name)
def test_the_core_asks_no_config_for_its_model_family(file):
    for call in calls(ast.parse(file.read_text()), "isinstance"):
        names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(call.args[1])}
        assert "BertConfig" not in names, f"{name(file)}, line {call.lineno}: {ast.unparse(call)}"


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_each_library_is_used_in_its_place_only(file):
    tree = ast.parse(file.read_text())
    used = tops(imports(tree))
    for library, places in ONLY_IN.items():
        allowed = name(file).startswith(places) if places else False
        assert allowed or library not in used, f"{name(file)} imports {library}"
    eager = tops(at_import_time(tree)) & LAZY
    assert not eager, f"{name(file)}: import {eager} inside the function that needs it"
    if name(file).startswith("pallas_kernels/"):
        assert used <= KERNELS_NEED | sys.stdlib_module_names


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_only_start_the_library(script):
    assert len(script.read_text().splitlines()) <= 40
    assert tops(imports(ast.parse(script.read_text()))) == {"sys", "lcjax"}


def test_names_of_test_files_differ():
    """Folders of tests are no packages, so pytest imports only one file of each name."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_no_file_names_a_machine_or_leaves_work_undone():
    kinds = ("*.py", "*.yaml", "*.toml", "*.md", "run")
    folders = ("lcjax", "pallas_kernels", "tests", "tools", "configs", "benchmarks", ".ci")
    files = {file for folder in folders for kind in kinds for file in (ROOT / folder).rglob(kind)}
    files |= {file for kind in kinds for file in ROOT.glob(kind)}
    for file in files - {Path(__file__).resolve()}:
        found = MACHINE.findall(file.read_text()) if file.is_file() else []
        assert not found, f"{name(file)} says {found}"
