"""The generated part of the documentation site: what `conf.py` connects to the build.

`write` makes the pages of docs/reference: the API from docstrings, the keys of configs as `--help`
has them, and a gallery of pictures. `finish` writes llms.txt and the Markdown beside the built
pages, and checks every link between them.
"""

import ast
import contextlib
import dataclasses
import html.parser
import importlib
import inspect
import io
import os
import re
import shutil
import tomllib
import types
import urllib.parse
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from lcjax import attention, rope
from lcjax.attention import Pattern
from lcjax.config.help import HOW, REQUIRED, Line, comments, key_lines
from lcjax.pictures import mask_picture, rope_picture

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("lcjax.site")

# One page each, in this order; a name is documented in the first module that has it.
MODULES = (
    "lcjax",
    "lcjax.rope",
    "lcjax.attention",
    "lcjax.memory",
    "lcjax.models",
    "lcjax.models.loss",
    "lcjax.checkpoints",
    "lcjax.data",
    "lcjax.training",
    "lcjax.retrieval",
    "lcjax.evaluation",
    "lcjax.config",
    "lcjax.cost",
    "lcjax.pictures",
    "pallas_kernels",
    "pallas_kernels.tables",
    "pallas_kernels.gather",
    "pallas_kernels.key_bits",
)

# Windows, blocks and groups that can be seen in a text of 128 tokens (512 for vertical_slash, which
# shows 30 columns and 50 diagonals at least).
PATTERNS = (
    attention.Causal(),
    attention.Sliding(window=32),
    attention.Chunked(size=32),
    attention.ShiftedSparse(group=32),
    attention.LMInfinite(window=32, sinks=4),
    attention.Streaming(sinks=4, recent=28),
    attention.ReRoPE(window=32),
    attention.SelfExtend(window=32, group=4),
    attention.DualChunk(chunk=48, local=16),
    attention.Longformer(window=16, global_tokens=(0, 40), dilation=2, dilated_heads=1),
    attention.BigBird(block=8, random=2),
    attention.SparseTransformer(stride=16),
    attention.SparseTransformer(kind="fixed", stride=16, summary=4),
    attention.VerticalSlash(vertical=30, slash=50),
    attention.TriShape(sinks=4, window=28, last=16),
    attention.FlexPrefill(gamma=0.4, block=8, min_budget=16),
    attention.XAttention(threshold=0.4, stride=2, block=8),
    attention.SeerAttention(block=8, gate_dim=16, share=0.3, last=1),
    attention.Landmark(block=8, top_k=2, train_length=64),
    attention.InfLLM(window=32, sinks=4, block=8, top_k=2, representatives=2, chunk=8),
    attention.InfLLMV2(block=16, top_k=4, kernel=8, stride=4, local=1, dense_len=0),
    attention.MoBA(block=16, top_k=3),
    attention.DSA(heads=2, head_dim=16, top_k=24),
    attention.QSA(heads=2, head_dim=16, top_k=24, run=4),
    attention.MSA(block=16, top_k=3, head_dim=16),
    attention.NSA(block=16, top_k=4, window=8),
    attention.SeerAttentionR(block=16, top_k=3, gate_dim=16),
    attention.Bidirectional(),
)
ROPES = (
    rope.Default(),
    rope.Linear(factor=4.0),
    rope.NTK(alpha=4.0),
    rope.DynamicNTK(factor=4.0),
    rope.Yarn(factor=4.0),
    rope.Llama3(factor=4.0),
)

_FOLDER = "docs/reference"
_API_PAGES = {f"{_FOLDER}/{name}" for name in MODULES}
_public_names: dict[str, str] = {}  # of documented objects, by the module that defines them


def write(app) -> None:
    """Writes docs/reference, before Sphinx looks for pages."""
    folder = ROOT / _FOLDER
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": _api_page(name) for name in MODULES}
    pages |= _config_pages()
    pages["gallery.md"] = _gallery(folder)
    for name, text in pages.items():
        file = folder / name
        if not file.is_file() or file.read_text() != text:  # Sphinx reads again what is newer
            file.write_text(text)
    for file in folder.glob("*.md"):
        if file.name not in pages:
            file.unlink()


# API reference


def _api_page(name: str) -> str:
    """The page of a module: a table of its names, then each with its docstring."""
    module = importlib.import_module(name)
    groups: dict[str, list[str]] = {"class": [], "function": []}
    for entry in entries(module):
        value = getattr(module, entry)
        if not hasattr(value, "__qualname__"):
            continue  # a tuple of names
        key = f"{value.__module__}.{value.__qualname__}"
        if key not in _public_names:
            _public_names[key] = f"{name}.{entry}"
            groups["class" if isinstance(value, type) else "function"].append(entry)
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}", ""]
    lines += [f".. currentmodule:: {name}", "```", ""]
    for kind, names in groups.items():
        if not names:
            continue
        lines += ["## Classes" if kind == "class" else "## Functions", "", "```{eval-rst}"]
        lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in names)]
        for entry in names:
            lines += ["", f".. auto{kind}:: {entry}", *["   :members:"] * (kind == "class")]
        lines += ["```", ""]
    return "\n".join(lines)


def entries(module: types.ModuleType) -> list[str]:
    """The public names of a module, without the modules among them."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    skipped = ("__version__",)
    return [n for n in names if n not in skipped and not inspect.ismodule(getattr(module, n))]


def process_docstring(app, what, name, value, options, lines: list[str]) -> None:
    """Adds the comments beside the fields of a dataclass, and makes Markdown reStructuredText."""
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        _add_fields(value, lines)
    text = "\n".join(lines)
    lines[:] = "\n\n".join(map(to_rst, re.split(r"\n\n(?=.)", text))).split("\n")


def _add_fields(cls: type, lines: list[str]) -> None:
    notes = comments(cls)
    header = lines.index("Attributes:") if "Attributes:" in lines else None
    described = set()
    if header is not None:  # of a dataclass they are its arguments, too
        lines[header] = "Args:"
        described = {line.strip().partition(":")[0] for line in lines[header:] if ":" in line}
    names = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in described]
    new = [f"  {name}: {notes[name]}" for name in names if name in notes]
    if new and header is None:
        lines += ["", "Args:", *new, ""]
    elif new:
        lines[header + 1 : header + 1] = new


def to_rst(paragraph: str) -> str:
    """One paragraph of a docstring as reStructuredText, for Napoleon."""
    if paragraph.startswith("    "):  # an example
        return f"::\n\n{paragraph}"
    # Napoleon takes what precedes a colon for the type.
    paragraph = re.sub(r"^((?:Returns|Yields):\n\s+)", r"\1: ", paragraph, flags=re.MULTILINE)
    parts = re.split(r"(`[^`]+`)", paragraph)
    for i, part in enumerate(parts):
        if i % 2:
            after = "\\ " if re.match(r"\w", parts[i + 1]) else ""
            before = "\\ " if re.search(r"\w$", parts[i - 1]) else ""
            parts[i] = f"{before}``{part[1:-1].strip()}``{after}"
        else:
            part = re.sub(r"([\\*|])", r"\\\1", part)
            parts[i] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", part)
    return "".join(parts)


def process_signature(app, what, name, value, options, signature, returns):
    """Writes types as in the source: `Float[Array, 'B T']`, and no field that Flax adds."""

    def clean(text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(
            r"\b(jaxlib\._jax|jaxtyping|jax|numpy|typing|pathlib|collections\.abc)\.", "", text
        )
        text = re.sub(r"(['\"]) +([^'\"]+['\"])", r"\1\2", text)  # ' N', a jaxtyping of one axis
        text = re.sub(r", parent: .*, name: str \| None = None", "", text)
        return re.sub(r"=\s*<factory>", "= ...", text)

    return clean(signature), clean(returns)


def skip_member(app, what, name, value, skip, options) -> bool | None:
    """Leaves out what has no documentation of its own: fields of tuples, Flax's `setup`."""
    text = getattr(value, "__doc__", None) or ""
    return True if name == "setup" or text.startswith("Alias for field number") else None


def resolve_type(app, env, node, contnode):
    """Links a type of a signature to its page under its public name; others are not links."""
    if node.get("refdomain") != "py":
        return None
    name = _public_names.get(node["reftarget"])
    domain = env.get_domain("py")
    if name is None or name not in domain.objects:
        return contnode
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, domain.objects[name].objtype, name, node, contnode
    )


class LinkNames(SphinxPostTransform):
    """Links names such as `lcjax.rope.Yarn(factor=...)` in the text to their docstrings."""

    default_priority = 5  # before references are resolved

    def run(self, **options) -> None:
        objects = self.env.get_domain("py").objects
        for node in list(self.document.findall(nodes.literal)):
            name = node.astext().partition("(")[0]
            if name not in objects or isinstance(node.parent, nodes.reference | pending_xref):
                continue
            link = pending_xref(
                refdomain="py",
                reftype="obj",
                reftarget=name,
                refdoc=self.env.current_document.docname,
            )
            node.replace_self(link)
            link += node


# Config reference


def _config_pages() -> dict[str, str]:
    from lcjax.data.prepare import PrepareConfig
    from lcjax.data.teacher import TeacherConfig
    from lcjax.evaluation.eval_config import EvalConfig
    from lcjax.pictures.command import AttentionPicture, MaskPicture, RopePicture
    from lcjax.retrieval import BuildConfig, ChunksConfig, QuestionsConfig, TokenConfig
    from lcjax.training import TrainConfig

    seen: dict[tuple, str] = {}
    train = _script("train.py") + config_tables("train", TrainConfig, seen)
    evaluate = _script("eval.py") + config_tables("eval", EvalConfig, seen)
    commands = "reproduce", "report", "score", "compare", "retrieval", "make-data"
    evaluate += "\n## Commands\n\n" + _helps("lcjax.evaluation.command", commands)
    others = {
        "lcjax.data": {"prepare": PrepareConfig, "teacher": TeacherConfig},
        "lcjax.retrieval": {
            "build": BuildConfig,
            "chunks": ChunksConfig,
            "build-tokens": TokenConfig,
            "questions": QuestionsConfig,
        },
        "lcjax.pictures": {
            "mask": MaskPicture,
            "rope": RopePicture,
            "attention": AttentionPicture,
        },
    }
    text = "# Other commands\n\nKeys and options of other commands, as `--help` prints them.\n"
    for module, configs in others.items():
        text += f"\n## python -m {module}\n\n"
        text += _helps(f"{module}.__main__", [""])
        for command, cls in configs.items():
            text += f"\n### {command}\n\n" + config_tables(command, cls, seen, level=3)
        if module == "lcjax.retrieval":
            options = "search", "check", "append", "delete", "negatives"
            text += f"\n### {', '.join(options)}\n\n" + _helps(f"{module}.__main__", options)
    text += "\n## python -m lcjax.convert\n\n" + _helps("lcjax.convert", [""])
    text += "\n## python -m lcjax.cost\n\n" + _block(_doc("lcjax/cost/__main__.py"))
    from lcjax.serve.command import ServeConfig

    text += f"\n## python -m lcjax.serve\n\n{ServeConfig.__doc__}\n"
    text += config_tables("serve", ServeConfig, seen, level=2)
    return {"train.md": train, "eval.md": evaluate, "commands.md": text}


def _doc(file: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / file).read_text()))


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def _script(file: str) -> str:
    intro = f"Every key of `python {file}`: its type, default and meaning, as `--help` prints them."
    return f"# {file}\n\n{intro}\n\n{_block(_doc(file))}\n{HOW}\n"


def _helps(module: str, commands) -> str:
    """What `--help` of these commands prints."""
    os.environ["COLUMNS"] = "100"  # argparse wraps lines at the width of the terminal
    main = importlib.import_module(module).main
    texts = []
    for command in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*([command] if command else []), "--help"])
        texts.append(_block(out.getvalue()))
    return "\n".join(dict.fromkeys(texts))


def config_tables(page: str, cls: type, seen: dict[tuple, str], level: int = 1) -> str:
    """Tables of the keys of a config, a section each.

    Args:
      page: prefix of the anchors.
      cls: dataclass of the config.
      seen: anchors of the sections that other configs share; is updated.
      level: of the heading above.
    """
    sections: list[list[Line]] = [[]]
    for line in key_lines(cls):
        if line is None:
            sections.append([])
        else:
            sections[-1].append(line)
    text, shared, ids = [], [], set()
    anchors: dict[str, str] = {}  # of the sections of this config
    for lines in filter(None, sections):
        section, key = _section(lines), tuple(lines)
        anchors[section] = seen.setdefault(key, f"{page}.{section}")
        if anchors[section] != f"{page}.{section}":
            shared.append(f"[`{section}`](#{anchors[section]})")
        else:
            text += _table(page, lines, level, ids, anchors)
    if shared:
        text += [f"Sections with the keys that they have there: {', '.join(shared)}.", ""]
    return "\n" + "\n".join(text)


def _section(lines: list[Line]) -> str:
    first = lines[0]
    return first.key.rpartition(".")[0] if first.type else first.key


def _table(
    page: str, lines: list[Line], level: int, ids: set[str], anchors: dict[str, str]
) -> list[str]:
    """The keys of one section; those of a type of it under a heading of their own."""
    section = _section(lines)
    is_nested = "." in section.replace(".0", "")
    marks = "#" * (level + 2 if is_nested else level + 1)
    title = f"`{section.removesuffix('.0')}`" if section else "Top level"
    text = [f"({page}.{section})=", f"{marks} {title}", ""]
    if section.endswith(".0"):
        text += [f"A list; `--{section}.` on the command line are keys of its first item.", ""]
    if not lines[0].type:  # a section that may be null
        default = "`null` by default" if lines[0].default else "May be `null`"
        note = _markdown(lines[0].note)
        text += [f"{default}: {note}" if note else default, ""]
        lines = lines[1:]
    head = ["{.keys}", "| key | type | default | meaning |", "|---|---|---|---|"]
    is_open = False
    for line in lines:
        if line.key:
            text += [*([] if is_open else head), _row(line, section, ids, page)]
        elif line.type.startswith("["):
            text += ["", f"{marks}# `type: {line.type[1:-1]}`", ""]
        else:
            other = line.type.rpartition("--")[2].removesuffix(".type")
            link = f"[`{other}`](#{anchors[other]})" if other in anchors else f"`{other}`"
            text += ["", f"Its types and keys are those of {link}.", ""]
        is_open = bool(line.key)
    return [*text, ""]


def _row(line: Line, section: str, ids: set[str], page: str) -> str:
    name = line.key[len(section) + 1 :] if section else line.key
    anchor = re.sub(r"\W", "-", f"{page}.{line.key}")
    key = f"`{name}`" if anchor in ids else f"`{name}`{{#{anchor}}}"
    ids.add(anchor)
    # The names of a registry are many; lines break between them.
    types = line.type.split(" | ") if line.key.endswith(".type") else [line.type or "section"]
    types += ["null"] * line.is_optional
    default = "null" if line.default is None and line.is_optional else line.default
    default = {None: "", REQUIRED: "required"}.get(default, f"`{default}`")
    cells = [key, " ".join(f"`{text}`" for text in types), default]
    return " | ".join(
        ["", *(c.replace("|", "\\|") for c in cells), _markdown(line.note), ""]
    ).strip()


def _markdown(text: str) -> str:
    """A comment as Markdown in a table: marks outside of code are escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part.replace("|", "\\|") if i % 2 else re.sub(r"([\\*_|<>\[\]{}$])", r"\\\1", part)
        for i, part in enumerate(parts)
    )


# Gallery


def _gallery(folder: Path) -> str:
    missing = set(Pattern.get_known_choices().values()) - {type(pattern) for pattern in PATTERNS}
    if missing:
        raise ValueError(f"site_pages.PATTERNS lacks {missing}")
    text = ["# Gallery", "", _GALLERY, "", "::::{grid} 1 1 2 2", ":gutter: 3", ""]
    for pattern in PATTERNS:
        cls = type(pattern)
        name = Pattern.get_choice_name(cls)
        length = 512 if name == "vertical_slash" else 128
        kind = getattr(pattern, "kind", "")  # of sparse_transformer, which is drawn twice
        file = folder / f"mask_{name}{kind and '_'}{kind}.png"
        if _is_older_than_code(file):
            mask_picture(pattern, length, file, heads=2)
        call = _call(pattern)
        text += [
            ":::{grid-item-card}",
            f"```{{image}} {file.name}",
            f":alt: who sees whom under {name}",
            "```",
            f"[`{call}`](#lcjax.attention.{cls.__name__})",
            ":::",
            "",
        ]
    text += ["::::", "", "## Position methods", "", _ROPES, ""]
    file = folder / "ropes.png"
    if _is_older_than_code(file):
        rope_picture({_call(method): method for method in ROPES}, file)
    text += [f"```{{image}} {file.name}", ":alt: frequencies of RoPE methods", "```", ""]
    return "\n".join(text)


_GALLERY = """\
Drawn by `lcjax.pictures` when this site was built, through the code that computes attention.

## Attention patterns

Rows are queries, columns are keys; white is not seen. The colour is the distance at which a query
sees a key. Grey are keys that the data choose (here random), from the cache or without a distance
of their own. Yours: `python -m lcjax.pictures mask --pattern.type=self_extend --pattern.window=32
--pattern.group=4 --out=mask.png`."""
_ROPES = """\
Left: how many positions a pair of channels needs for a full turn. Middle: how many times slower it
turns than under plain RoPE. Right: how well equal queries and keys agree over a distance. Trained
length 4,096, text of 16,384 tokens. Yours: `python -m lcjax.pictures rope
--length=32768 --out=rope.png`."""


def _is_older_than_code(file: Path) -> bool:
    folders = ("attention", "rope", "pictures")
    code = [Path(__file__), *(path for f in folders for path in (ROOT / "lcjax" / f).rglob("*.py"))]
    return not file.is_file() or file.stat().st_mtime < max(p.stat().st_mtime for p in code)


def _call(value) -> str:
    """The call that makes a dataclass, with the fields that are not defaults."""
    fields = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != f.default
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


# Beside the built pages


def finish(app, error) -> None:
    """Writes llms.txt with the Markdown that it names, and checks the links of all pages."""
    if error is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    index = "docs/index.html"
    (out / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>lcjax</title>'
        '<link rel="icon" href="_static/favicon.svg">'
        f'<meta http-equiv="refresh" content="0; url={index}"><a href="{index}">lcjax</a>\n'
    )
    for name in app.env.found_docs:
        if name not in _API_PAGES and name != app.config.root_doc:
            _copy(_source(name), out)
    for picture in [*ROOT.glob("docs/*.png"), *ROOT.glob("docs/notebooks/*.png")]:
        _copy(picture.relative_to(ROOT).as_posix(), out)
    (out / "llms.txt").write_text(_llms(app))
    _check_links(out)


def _source(page: str) -> str:
    """The file that is copied beside a page: its Markdown, or the Python form of a notebook."""
    return f"{page}.{'py' if page.startswith('notebooks/') else 'md'}"


def _copy(path: str, out: Path) -> None:
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, out / path)


def _llms(app) -> str:
    """The site for language models (llmstxt.org): a title, a summary, links to Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = ["# lcjax", "", f"> {project['description']}", ""]
    for caption, pages in _contents():
        lines += [f"## {caption}", ""]
        for page in pages:
            url = f"{page}.html" if page in _API_PAGES else _source(page)
            title = app.env.titles[page].astext()
            lines.append(f"- [{title}]({app.config.html_baseurl}{url}){_summary(page)}")
        lines.append("")
    return "\n".join(lines)


def _contents() -> list[tuple[str, list[str]]]:
    """Captions and pages of the site, as docs/index.md lists them."""
    trees = re.findall(r"```{toctree}\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    contents = []
    for tree in trees:
        caption = re.search(r"^:caption: (.*)", tree, re.MULTILINE).group(1)
        entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
        targets = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
        pages = [t[1:] if t.startswith("/") else f"docs/{t}" for t in targets]
        contents.append((caption, pages))
    return contents


def _summary(page: str) -> str:
    """The first sentence of a page, behind a colon."""
    if page in _API_PAGES:
        text = importlib.import_module(Path(page).name).__doc__
    else:
        text = (ROOT / _source(page)).read_text()
        if _source(page).endswith(".py"):
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    for paragraph in text.split("\n\n"):
        if re.match(r"(?!```)[A-Z\[`][^|]*$", paragraph):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return f": {re.match(r'.*?[.](?= |$)|.*', text).group(0).rstrip(':.')}"
    return ""


class _Links(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for key, value in attributes:
            if key in ("id", "name"):
                self.ids.add(value)
            elif key in ("href", "src") and value:
                self.links.add(value)


def _check_links(out: Path) -> None:
    """Warns of each link of a built page that leads to no file, or to no place in it."""
    files = (file for file in out.rglob("*.html") if "_static" not in file.parts)
    pages = {file: _Links(file.read_text()) for file in files}
    for file, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = file.parent / urllib.parse.unquote(url.path) if url.path else file
            target = target.resolve()
            fragment = urllib.parse.unquote(url.fragment)
            is_page = target in pages and fragment and not fragment.startswith(":")
            if not target.exists() or (is_page and fragment not in pages[target].ids):
                log.warning("%s: no such place: %s", file.relative_to(out), link)
    for link in re.findall(r"\]\(([^)]*)\)", (out / "llms.txt").read_text()):
        if "://" not in link and not (out / link).is_file():
            log.warning("llms.txt: no such file: %s", link)
