"""Changes one place of a core module at a time, and counts the changes that its tests notice.

    python -m tools.campaigns.mutation --seed 0 --count 60 --minutes 60
    python -m tools.campaigns.mutation --seed 0 --modules "lcjax/rope/*"

Mutants are drawn from all places of the modules that a rule below can change: comparisons,
arithmetic, constants, conditions, minima, keyword arguments. Each is tested in a copy of the
working tree with the quick tests nearest to its module. One that no test notices is printed as a
diff: it needs a test, or is equivalent. Not collected by pytest: about a minute a mutant.
"""

import argparse
import ast
import dataclasses
import difflib
import fnmatch
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Modules, and the tests that are nearest to them; of these, files named like the module run first.
NEAREST = {
    "lcjax/attention/*": ["tests/attention"],
    "lcjax/rope/*": ["tests/rope"],
    "lcjax/models/*": [
        "tests/models",
        "tests/generation/test_generate.py",
        "tests/generation/test_shared_prefix.py",
    ],
    "lcjax/memory/*": ["tests/memory", "tests/cost"],
    "lcjax/generation/*": ["tests/generation"],
    "lcjax/training/step.py": ["tests/training/test_step.py"],
    "lcjax/training/optim.py": [
        "tests/training/test_optim.py",
        "tests/training/test_step.py",
        "tests/training/test_offload.py",
    ],
    "lcjax/training/objective.py": ["tests/training/test_step.py", "tests/memory"],
    "lcjax/evaluation/metrics/*": ["tests/evaluation/test_metrics.py", "tests/evaluation/tasks"],
}
LIMIT = 600  # seconds; a mutant whose tests take longer counts as noticed

SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or",
    ast.Or: "and", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*",
    ast.Mod: "//", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and",
    ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//",
    ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
PAIRS = [("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all")]
NAMES = dict(PAIRS) | {b: a for a, b in PAIRS} | {"floor": "ceil", "ceil": "floor"}
# On a CPU in float32 these change no value, or only how fast it is computed.
WITHOUT_EFFECT = {
    "precision", "preferred_element_type", "mesh", "implementation", "static_argnames",
    "static_argnums", "donate_argnums", "out_shardings", "strict", "stacklevel",
}  # fmt: skip
IGNORED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: str
    before: str
    after: str

    def parses(self) -> bool:
        """Whether it is a program: a deleted argument may have left a parenthesis."""
        try:
            ast.parse(self.after)
        except SyntaxError:
            return False
        return True

    def diff(self) -> str:
        lines = (text.splitlines() for text in (self.before, self.after))
        return "\n".join(difflib.unified_diff(*lines, self.path, self.path, lineterm="", n=1))


def mutants(path: str) -> Iterator[Mutant]:
    """Yields every mutant of a module."""
    source = (ROOT / path).read_text()
    raw = source.encode()  # columns of `ast` count bytes
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    for node in _nodes(ast.parse(source)):
        for start, end, text in _changes(node, span, raw):
            yield Mutant(path, source, (raw[:start] + text.encode() + raw[end:]).decode())


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that compute: no annotations, decorators, messages and examples."""
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for item in child if isinstance(child, list) else [child]:
            is_ignored = isinstance(item, IGNORED) or (
                isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "examples"
            )
            if isinstance(item, ast.AST) and not is_ignored:
                yield item
                yield from _nodes(item)


def _changes(node: ast.AST, span, raw: bytes) -> Iterator[tuple[int, int, str]]:
    """Yields (start, end, text): what replaces these bytes."""

    def operator(left: ast.AST, right: ast.AST, kind: ast.AST):
        start, end = span(left)[1], span(right)[0]
        at = raw.find(SIGNS[type(kind)].encode(), start, end)
        if at >= 0:
            yield at, at + len(SIGNS[type(kind)]), SWAPS[type(kind)]

    match node:
        case ast.Compare():
            for left, kind, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators
            ):
                yield from operator(left, right, kind)
        case ast.BinOp() if type(node.op) in SWAPS:
            yield from operator(node.left, node.right, node.op)
        case ast.AugAssign() if type(node.op) in SWAPS:
            yield from operator(node.target, node.value, node.op)
        case ast.BoolOp():
            yield from operator(node.values[0], node.values[1], node.op)
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            yield span(node)[0], span(node.operand)[0], ""
        case ast.If() | ast.IfExp() | ast.While():
            start, end = span(node.test)
            yield start, end, f"not ({raw[start:end].decode()})"
        case ast.Constant(value=bool()):
            yield *span(node), str(not node.value)
        case ast.Constant(value=int()):
            yield *span(node), str(node.value + 1)
        case ast.Constant(value=float()):
            yield *span(node), f"{node.value or 0.5} * 1.5"
        case ast.Name(id=name) if name in NAMES:
            yield *span(node), NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES:
            end = span(node)[1]
            yield end - len(name), end, NAMES[name]
        case ast.Call():
            for keyword in node.keywords:
                if keyword.arg and keyword.arg not in WITHOUT_EFFECT:
                    start, end = span(keyword)
                    comma = raw[end : end + 1] == b","
                    yield start, end + comma, ""


def tests_of(path: str) -> list[str]:
    """The quick tests nearest to a module, those named like it first."""
    nearest = next(tests for glob, tests in NEAREST.items() if fnmatch.fnmatch(path, glob))
    files = [file for name in nearest for file in sorted((ROOT / name).rglob("test_*.py"))]
    files += [ROOT / name for name in nearest if name.endswith(".py")]
    names = [file.relative_to(ROOT).as_posix() for file in dict.fromkeys(files)]
    words = path.removesuffix(".py").split("/")[2:]
    return sorted(names, key=lambda name: not any(word in name for word in words))


def passes(tree: Path, tests: list[str]) -> bool:
    """Whether the tests pass in time in a copy of the tree."""
    programs = {"JAX_COMPILATION_CACHE_DIR": str(tree.parent / "programs")}
    # Bytecode would be taken for that of another mutant of the same second and size.
    variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-qx", "-n", "0", "-p", "no:cacheprovider", *tests]
    with (tree.parent / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=programs | os.environ | variables, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(LIMIT) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="mutants")
    parser.add_argument("--minutes", type=float, default=60, help="no mutant begins later")
    parser.add_argument("--modules", default="*", help="a pattern of paths")
    options = parser.parse_args()
    begin, survivors, tested = time.monotonic(), 0, 0
    paths = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "lcjax").rglob("*.py"))
    core = [path for path in paths if any(fnmatch.fnmatch(path, glob) for glob in NEAREST)]
    paths = [path for path in core if fnmatch.fnmatch(path, options.modules)]
    every = [mutant for path in paths for mutant in mutants(path)]
    random.Random(options.seed).shuffle(every)
    sample = list(itertools.islice(filter(Mutant.parses, every), options.count))
    print(f"seed {options.seed}: {len(sample)} of {len(every)} mutants of {len(paths)} modules")
    with tempfile.TemporaryDirectory() as folder:
        tree, passed = Path(folder) / "tree", set()
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "build"))
        for mutant in sample:
            if time.monotonic() - begin > 60 * options.minutes:
                break
            tests = tests_of(mutant.path)
            if frozenset(tests) not in passed and not passes(tree, tests):
                sys.exit(
                    f"{' '.join(tests)} fail without any mutant:\n"
                    + (tree.parent / "log").read_text()
                )
            passed.add(frozenset(tests))
            (tree / mutant.path).write_text(mutant.after)
            has_survived = passes(tree, tests)
            (tree / mutant.path).write_text(mutant.before)
            tested, survivors = tested + 1, survivors + has_survived
            if has_survived:
                print(f"\nsurvived, seed {options.seed}, mutant {tested}:\n{mutant.diff()}\n")
            print(f"{tested - survivors} of {tested} noticed, {mutant.path}", flush=True)
    share = (tested - survivors) / max(tested, 1)
    print(f"seed {options.seed}: {tested - survivors} of {tested} mutants noticed, {share:.0%}")


if __name__ == "__main__":
    main()
