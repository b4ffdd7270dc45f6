"""Counts what a reader must get through: lines, functions, guards, circles, words in many files.

python tools/house.py              # this checkout
python tools/house.py OLD NEW      # two checkouts, side by side

Lines are those of files, with comments and blank lines. A guard is an `if` that only raises, or a
call of a `check_*` function as a statement. A circle is a set of files of one package that import
each other, imports inside functions and under TYPE_CHECKING included.
"""

import ast
import collections
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    *("errors", "progress", "tree", "storage", "files", "config", "rope", "parallel", "attention"),
    *("models", "memory", "checkpoints", "cost", "data", "training", "generation"),
)
COMMON = {"__init__.py", "__main__.py"}  # names that say nothing about a file


def python(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py")) if folder.is_dir() else []


def num_lines(files: list[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def is_core(root: Path, file: Path) -> bool:
    package, *rest = file.relative_to(root).with_suffix("").parts
    return package == "pallas_kernels" or rest[0] in CORE


def is_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return not node.orelse and all(isinstance(step, ast.Raise) for step in node.body[-1:])
    call = node.value if isinstance(node, ast.Expr) else None
    name = getattr(call, "func", None)
    name = getattr(name, "attr", getattr(name, "id", ""))
    return name.startswith(("check_", "_check"))


def guard_lines(tree: ast.AST) -> int:
    return sum(n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if is_guard(n))


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def circles(root: Path, trees: dict[Path, ast.AST]) -> list[list[str]]:
    """Returns the sets of files that import each other, the largest first."""
    modules = {".".join(f.relative_to(root).with_suffix("").parts): f for f in trees}
    edges = {
        name: {other for other in imported(trees[file]) if other in modules} - {name}
        for name, file in modules.items()
    }

    def reachable(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for other in edges[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reached = {name: reachable(name) for name in edges}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in edges
    }
    return sorted((sorted(group) for group in groups if len(group) > 1), key=len, reverse=True)


def counts(root: Path) -> dict[str, int]:
    """Returns the counts of a checkout by what is counted."""
    source = [file for package in ("lcjax", "pallas_kernels") for file in python(root / package)]
    trees = {file: ast.parse(file.read_text()) for file in source}
    core = [file for file in source if is_core(root, file)]
    tests = python(root / "tests")
    defined = [node for tree in trees.values() for node in functions(tree)]
    names = collections.Counter(file.name for file in source if file.name not in COMMON)
    kinds = collections.Counter()
    for file in tests:
        for node in functions(ast.parse(file.read_text())):
            if node.name.startswith("test_"):
                text = ast.unparse(node)
                slow = any("slow" in ast.unparse(mark) for mark in node.decorator_list)
                kinds["slow" if slow else "of errors" if "pytest.raises" in text else "other"] += 1
    loops = circles(root, trees)
    return {
        "lines of source": num_lines(source),
        "lines of the core": num_lines(core),
        "lines of applications": num_lines(source) - num_lines(core),
        "functions": len(defined),
        "functions above 60 lines": sum(n.end_lineno - n.lineno >= 60 for n in defined),
        "guard lines": sum(map(guard_lines, trees.values())),
        "files that say landmark": sum("landmark" in f.read_text().lower() for f in source),
        "circles": len(loops),
        "files in circles": sum(map(len, loops)),
        "file names in use 3 times or more": sum(count > 2 for count in names.values()),
        "lines of tests": num_lines(tests),
        **{f"test functions, {kind}": kinds[kind] for kind in ("of errors", "other", "slow")},
        "lines of tools": num_lines(python(root / "tools")),
    }


def main(roots: list[str]) -> None:
    columns = [counts(Path(root).resolve()) for root in roots or [ROOT]]
    for name in columns[0]:
        print(f"{name:36}", *(f"{column[name]:>8,}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
