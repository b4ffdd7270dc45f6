"""The cases of `fuzz.py`: bad and odd input, and whether it is accepted or refused.

Cases come from tables. Every key of every config gets every value of `VALUES`, and so does every
key of a checkpoint's JSON files; the other tables are written by hand.
"""

import contextlib
import dataclasses
import fnmatch
import gzip
import hashlib
import io
import json
import math
import random
import re
import shlex
import shutil
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

# By path: draccus installs a package of the name `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "checkpoints"))

import jax
import numpy as np
import yaml
from convert_support import random_params, tiny_config
from gguf_support import write_gguf

import lcjax
import pallas_kernels as kernels
from lcjax import checkpoints, convert
from lcjax import config as config_lib
from lcjax.attention import Landmark, Sliding
from lcjax.checkpoints.build import ModelSection, build
from lcjax.checkpoints.run_folder import load_run
from lcjax.config.help import is_choice, split_union
from lcjax.data import __main__ as data_command
from lcjax.data.prepare import PrepareConfig
from lcjax.data.teacher import TeacherConfig
from lcjax.errors import InputError
from lcjax.evaluation import command as evaluation
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.parallel import distributed
from lcjax.retrieval import BuildConfig, ChunksConfig
from lcjax.retrieval import __main__ as retrieval_command
from lcjax.rope import Linear, LongRope, Yarn
from lcjax.training import TrainConfig, run

REFUSED, ACCEPTED = "refused", "accepted"
CLEAN = "clean"  # either of them: a bit at a random place may change nothing that can be noticed

VALUES = {
    "text": "hello",
    "negative": -3,
    "zero": 0,
    "fraction": 0.37,
    "huge": 2**70,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "empty": "",
    "nul": "a\0b",
    "long": "x" * 5000,
    "list": [[1], "a"],
    "mapping": {"a": 1},
    "null": None,
}


class Started(BaseException):
    """The configuration was accepted: what would begin now takes time, and has other tests."""


class Refused(Exception):
    """A command ended with an exit code and these lines that begin with `error:`."""


class Broken(Exception):
    """A command raised an exception, printed no line, or left a run folder behind."""


class Place:
    """The files of one case: a folder of its own, and shared ones that it must not change."""

    def __init__(self, shared: Path, folder: Path, seed: str):
        self.shared, self.folder, self.random = shared, folder, random.Random(seed)
        self.model, self.gguf, self.corpus = shared / "model", shared / "m.gguf", shared / "corpus"
        self.run, self.evaluation, self.tokens, self.store = (
            shared / name for name in ("run", "evaluation", "tokens", "store")
        )
        folder.mkdir(parents=True)
        self.digests: dict[Path, str | None] = {}
        self.stamps = {path: stamp(path) for path in shared.rglob("*") if path.is_file()}
        self.foreign(folder)

    @property
    def lm(self) -> lcjax.LanguageModel:
        return language_model(self.model)

    def foreign(self, folder: Path) -> Path:
        """Puts files of a user into a folder; they must survive."""
        for name in ("mine.txt", "thesis/chapter.md"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("years of work")
            self.digests[folder / name] = digest(folder / name)
        return folder

    def lost(self) -> list[str]:
        lost = [path for path, value in self.digests.items() if digest(path) != value]
        lost += [path for path, value in self.stamps.items() if stamp(path) != value]
        return [path.name for path in lost]

    def copy(self, source: Path) -> Path:
        target = self.folder / f"copy_{source.name}"
        copy = shutil.copytree if source.is_dir() else shutil.copy
        return Path(copy(source, target))

    def changed(self, source: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
        """Returns a copy of a folder, in which one file (a glob) is changed."""
        copy = self.copy(source)
        files = [path for path in copy.glob(name) if path.is_file()] if copy.is_dir() else [copy]
        file = max(sorted(files), key=lambda path: path.stat().st_size)
        file.write_bytes(change(file.read_bytes()))
        return copy

    def changed_json(self, source: Path, name: str, **changes) -> Path:
        change = lambda data: json.dumps(json.loads(data) | changes).encode()  # noqa: E731
        return self.changed(source, name, change)

    def write(self, name: str, content: str | bytes) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def settings(self, tree: dict) -> list[str]:
        return ["--config", str(self.write("case.yaml", yaml.safe_dump(tree)))]

    def train(self, tree: dict, *words: str) -> None:
        base = {
            "model": {"preset": "tiny"},
            "data": {"path": str(self.corpus), "length": 32, "threads": 0, "prefetch": 0},
            "train": {"steps": 4, "warmup_steps": 0, "batch_size": 2},
            "run": {"folder": str(self.folder / "run")},
        }
        tree = merged(base, tree)
        folder = Path(str(tree["run"]["folder"] if isinstance(tree["run"], dict) else "none"))
        with contextlib.suppress(OSError, ValueError):
            existed = folder.exists()
        try:
            words = [*self.settings(tree), *words]
            self.command(lambda words: distributed.main(TrainConfig, run, words), words)
        except Refused:
            with contextlib.suppress(OSError, ValueError):
                if folder.exists() and not existed:
                    raise Broken(f"the start was refused and left {folder.name}/") from None
            raise

    def evaluate(self, tree: dict, *words: str) -> None:
        base = {
            "model": {"preset": "tiny"},
            "data": {"path": str(self.corpus)},
            "lengths": [64],
            "stride": 32,
            "run": {"folder": str(self.folder / "run")},
        }
        self.command(evaluation.main, [*self.settings(merged(base, tree)), *words])

    def command(self, main: Callable[[list[str]], int], words: list[str]) -> None:
        """Runs a command in this process; raises Refused if it ends with an error."""
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = main(list(map(str, words)))
        except SystemExit as error:
            code = error.code
        except Started:
            return
        except Exception as error:
            raise Broken(brief(error)) from error
        if code:
            text = output.getvalue()
            if "Traceback" in text:
                raise Broken(text)
            raise Refused("\n".join(re.findall(r"(?m)^.*?error: (.*)", text)))


@dataclasses.dataclass(frozen=True)
class Case:
    """One input. `says`: a regular expression that the line of a refusal contains."""

    name: str
    expected: str
    says: str
    run: Callable[[Place], object]


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def brief(error: BaseException) -> str:
    """Returns the innermost lines of this library in a traceback, and the error."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
    return f"{type(error).__name__}: {str(error)[:200]} ({' > '.join(places)})"


def stamp(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None


def merged(base: typing.Any, tree: typing.Any) -> typing.Any:
    if not isinstance(base, dict) or not isinstance(tree, dict):
        return tree
    if "path" in base and {"path", "sources", "preset"} & tree.keys():
        base = {key: value for key, value in base.items() if key != "path"}
    if "preset" in base and tree.get("path") is not None:
        base = {key: value for key, value in base.items() if key != "preset"}
    return base | {key: merged(base.get(key), value) for key, value in tree.items()}


_models: dict = {}


def language_model(path: Path) -> lcjax.LanguageModel:
    if path not in _models:
        _models[path] = lcjax.LanguageModel.load(str(path))
    return _models[path]


# Configs: every key with every value.

# Fields without a default, by the name of their class.
REQUIRED = {
    "DynamicNTK": {"factor": 2.0},
    "Linear": {"factor": 2.0},
    "LongRope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    "NTK": {"alpha": 2.0},
    "Yarn": {"factor": 2.0},
    "Sliding": {"window": 8},
    "ReRoPE": {"window": 8},
    "Share": {"label": "a", "share": 0.5},
    "Rate": {"rule": "mlp", "factor": 0.5},
    "Method": {"name": "base"},
    "AutoCompressorSection": {"chunk": 16},
    "BeaconSection": {"chunk": 16},
}
# Keys whose values may be negative.
SIGNED = ("*.document_start", "*.document_end", "*.mscale*", "*.decoder_start")


def leaves(kind: typing.Any, key: str) -> Iterator[tuple[str, typing.Any]]:
    """Yields (key, type) of a field and of every field below it.

    A key is written `a.b`; entries of a list have number 0, and a choice is written `rope=yarn.x`.
    """
    kinds, _ = split_union(kind)
    origin, items = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    if key:
        yield key, kind
    if origin in (tuple, list) and items and nested(items[0]):
        yield from leaves(items[0], f"{key}.0")
    elif is_choice(kinds[0]):
        for name, choice in kinds[0].get_known_choices().items():
            yield from fields_of(choice, f"{key}={name}")
    elif dataclasses.is_dataclass(kinds[0]):
        yield from fields_of(kinds[0], key)


def nested(kind: typing.Any) -> bool:
    kind = split_union(kind)[0][0]
    return dataclasses.is_dataclass(kind) or is_choice(kind)


def fields_of(cls: type, key: str) -> Iterator[tuple[str, typing.Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield from leaves(hints[field.name], f"{key}.{field.name}".removeprefix("."))


def tree_of(key: str, value: object, cls: type) -> dict:
    """Returns the config in which `key` has this value, and what has to stand around it."""
    parts = [part.partition("=")[::2] for part in key.split(".")]
    return _nested(cls, parts, value)


def _nested(kind: typing.Any, parts: list[tuple[str, str]], value: object) -> typing.Any:
    kind = split_union(kind)[0][0]
    if not parts:
        return value
    (name, choice), *rest = parts
    if name == "0":
        inner = _nested(typing.get_args(kind)[0], [("", choice), *rest], value)
        return [inner]
    if not name:  # the entry of a list
        cls = kind.get_known_choices()[choice] if choice else kind
        section = {"type": choice} if choice else {}
        return section | _required(cls) | _nested(cls, rest, value) if rest else value
    hint = typing.get_type_hints(kind)[name]
    inner_kind = split_union(hint)[0][0]
    if not rest:
        return {name: value}
    if choice:
        cls = inner_kind.get_known_choices()[choice]
        return {name: {"type": choice} | _required(cls) | _nested(cls, rest, value)}
    inner = _nested(inner_kind, rest, value)
    if dataclasses.is_dataclass(inner_kind) and isinstance(inner, dict):
        inner = _required(inner_kind) | inner
    return {name: inner}


def _required(cls: type) -> dict:
    return REQUIRED.get(cls.__name__, {})


def config_cases() -> Iterator[Case]:
    # Sections whose classes are those of a training.
    shared = (
        "model",
        "mesh",
        "distributed",
        "data",
        "methods.0.rope",
        "methods.0.pattern",
        "sources",
    )
    for label, cls, start in (
        ("train", TrainConfig, Place.train),
        ("eval", EvalConfig, Place.evaluate),
        ("prepare", PrepareConfig, None),
        ("teacher", TeacherConfig, None),
        ("retrieval", BuildConfig, None),
        ("chunks", ChunksConfig, None),
    ):
        for key, kind in fields_of(cls, ""):
            if label == "train" or not key.startswith(shared):
                for name, value in VALUES.items():
                    yield _config_case(label, cls, start, key, kind, name, value)


def is_wrong(kind: typing.Any, key: str, name: str) -> bool:
    """Whether a value of `VALUES` can be right for no field of this type."""
    kinds, optional = split_union(kind)
    if name == "null":
        return not optional
    if len(kinds) > 1 or nested(kinds[0]):
        return name in ("nan", "inf", "huge", "negative", "fraction")
    if typing.get_origin(kinds[0]) in (tuple, list):
        return name not in ("list",)
    if kinds[0] in (int, float):
        of_type = ("zero", "negative", "huge") + ("fraction",) * (kinds[0] is float)
        is_signed = any(fnmatch.fnmatch(key, pattern) for pattern in SIGNED)
        negative = name == "negative" and not is_signed
        return name not in of_type or negative or (name == "huge" and kinds[0] is int)
    if kinds[0] is bool:
        return name != "true"
    return name in ("list", "mapping") and kinds[0] is str


def _config_case(label, cls, start, key, kind, name, value) -> Case:
    def case(place: Place) -> None:
        tree = tree_of(key, value, cls)
        if start is None or key.startswith("distributed"):
            config_lib.parse(cls, place.settings(merged(PARSED.get(cls, {}), tree)))
        else:
            start(place, tree)

    wrong = is_wrong(kind, key, name)
    last = [part for part in re.split(r"[.=]", key) if part != "0"][-1]
    # A section may lack other keys, such as a path, and be refused for these.
    says = f"{re.escape(last)}|is empty|is no folder" if wrong else ""
    return Case(f"config {label} {key}={name}", REFUSED if wrong else CLEAN, says, case)


PARSED = {
    PrepareConfig: {"path": "corpus", "tokenizer": "model", "out": "tokens"},
    TeacherConfig: {"out": "rows", "rows": 8, "data": {"chunks": {"count": 2, "length": 8}}},
    BuildConfig: {"out": "store"},
    ChunksConfig: {
        "out": "rows",
        "rows": 8,
        "store": "store",
        "tokenizer": "model",
        "data": {"length": 32, "chunks": {"count": 2, "length": 8, "text": "retrieved"}},
    },
}


# Files of checkpoints.

JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")


def json_cases(model: Path) -> Iterator[Case]:
    """Every key of a checkpoint's JSON files with every value."""
    # What is read elsewhere, or not at all.
    unread = {"architectures", "torch_dtype", "rope_theta", "rope_scaling", "tokenizer_class"}
    unread |= {"clean_up_tokenization_spaces"}
    other_names = {"num_key_value_heads": "num_kv_heads", "num_attention_heads": "num_heads"}
    for file in JSON_FILES:
        for key, usual in json.loads((model / file).read_text()).items():
            for name, value in VALUES.items():

                def case(place: Place, file=file, key=key, value=value) -> None:
                    copies = {"torch_dtype": value} if key == "dtype" else {}
                    folder = place.changed_json(place.model, file, **{key: value}, **copies)
                    checkpoints.load(folder)

                # Of the right type it may be refused for other reasons: tensors that do not fit.
                fits = isinstance(value, type(usual)) and isinstance(value, bool | int | str | dict)
                fits = fits and (isinstance(value, bool) == isinstance(usual, bool))
                fits = fits or (isinstance(usual, float) and name in ("zero", "fraction", "huge"))
                right = (
                    key in unread or value is None or (fits and key not in ("dtype", "hidden_act"))
                )
                is_number = isinstance(usual, int) and not isinstance(usual, bool)
                right = right and not (name in ("negative", "huge") and is_number)
                says = f"{key}|{other_names.get(key, key)}|tensors"
                yield Case(f"{file} {key}={name}", CLEAN if right else REFUSED, says, case)


def flip(data: bytes, place: Place, below: int) -> bytes:
    """Flips one bit of the first `below` bytes."""
    data, index = bytearray(data), place.random.randrange(min(below, len(data)))
    data[index] ^= 1 << place.random.randrange(8)
    return bytes(data)


def damage_cases() -> Iterator[Case]:
    """Bit flips, cuts and nonsense in every file that is read."""
    nonsense = {
        "empty": b"",
        "deep": b"[" * 100_000 + b"]" * 100_000,
        "deep mapping": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "list": b"[1, 2]",
        "number": b"7",
        "null": b"null",
        "binary": bytes(range(256)) * 4,
        "zeros": bytes(4096),
        "surrogate": b'{"model_type": "\\ud800", "added_tokens": [{"content": "\\ud800"}]}',
        "huge number": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    }
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    load = {"model": checkpoints.load, "m.gguf": checkpoints.load}
    targets = [("model", name) for name in files] + [("m.gguf", "m.gguf")]
    for source, name in targets:

        def damaged(change, source=source, name=name):
            def case(place: Place) -> None:
                load[source](place.changed(place.shared / source, name, change(place)))

            return case

        header = 3000 if name in ("model.safetensors", "m.gguf") else 10**9
        for number in range(16):
            change = lambda place, end=header: lambda data: flip(data, place, end)  # noqa: E731
            yield Case(f"{name} bit {number}", CLEAN, "", damaged(change))
        for part in (0.0001, 0.01, 0.3, 0.9):
            change = lambda _, part=part: lambda data: data[: int(len(data) * part)]  # noqa: E731
            yield Case(f"{name} cut to {part:.2%}", REFUSED, re.escape(name), damaged(change))
        for label, content in nonsense.items():
            optional = name == "tokenizer_config.json" and label in (
                "null",
                "surrogate",
                "huge number",
            )
            kind = CLEAN if optional else REFUSED
            change = lambda _, content=content: lambda data: content  # noqa: E731
            yield Case(f"{name} is {label}", kind, re.escape(name), damaged(change))
        extra = lambda _: lambda data: data + b"more"  # noqa: E731
        yield Case(f"{name} with more behind", CLEAN, "", damaged(extra))


def weights(place: Place, change: Callable[[dict], None]) -> Path:
    """Returns a copy of the model whose header of model.safetensors is changed."""

    def rewrite(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return place.changed(place.model, "model.safetensors", rewrite)


def filled(place: Place, value: float) -> Path:
    """Returns a copy of the model with `value` in the first weights of the file."""
    number = np.float32(value).tobytes()

    def rewrite(data: bytes) -> bytes:
        start = 8 + int.from_bytes(data[:8], "little")
        return data[:start] + number * 64 + data[start + 4 * 64 :]

    return place.changed(place.model, "model.safetensors", rewrite)


def score(folder: Path) -> None:
    lm = lcjax.LanguageModel.load(str(folder))
    lm.nll(np.arange(3, 19)[None])


def header_change(**changes) -> Callable[[Place], None]:
    def change(header: dict) -> None:
        first = next(key for key in header if key != "__metadata__")
        header[first] |= changes

    return lambda place: checkpoints.load(weights(place, change))


def sharded(index: object) -> Callable[[Place], None]:
    def case(place: Place) -> None:
        folder = place.copy(place.model)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        text = index if isinstance(index, str) else json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(text)
        checkpoints.load(folder)

    return case


def template(text: str) -> Callable[[Place], None]:
    """Chats with a model of this chat template."""

    def case(place: Place) -> None:
        folder = place.copy(place.model)
        (folder / "chat_template.jinja").write_text(text)
        lm = lcjax.LanguageModel.load(str(folder))
        lm.chat("Hello", lcjax.Sampling(max_new_tokens=1))

    return case


TEMPLATES = {
    "loops": "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}",
    "grows": "{% set ns = namespace(t='x' * 1000) %}{% for i in range(60) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "multiplies": "{{ 'x' * 99999999999 }}",
    "is a power": "{{ 9 ** (9 ** 9) }}",
    "repeats a list": "{{ ([0] * 9999999999) | length }}",
    "is long": "{% for i in range(30000000) %}abcdefgh{% endfor %}",
    "includes": "{% include 'config.json' %}",
    "imports": "{% import 'config.json' as x %}",
    "extends": "{% extends 'config.json' %}",
    "reads a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "formats a class": "{{ '{0.__class__}'.format(messages) }}",
    "calls": "{{ messages.append.__globals__ }}",
    "does not parse": "{% for m in messages %}",
    "is not defined": "{{ nothing.at.all }}",
    "pads": "{{ '%99999999999d' | format(1) }}",
    "centres": "{{ 'x' | center(99999999999) }}",
    "recurs": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


def file_cases() -> Iterator[Case]:
    for name, text in TEMPLATES.items():
        harmless = name == "formats a class"  # the sandbox prints nothing
        kind = CLEAN if harmless else REFUSED
        yield Case(f"chat template {name}", kind, "" if harmless else "template", template(text))
    yield Case(
        "chat template as usual",
        ACCEPTED,
        "",
        template("{% for m in messages %}{{ m.content }}{% endfor %}"),
    )
    traversal = "../shared/model/model.safetensors"
    for name, index in {
        "path": {"weight_map": {"model.norm.weight": traversal}},
        "absolute path": {"weight_map": {"model.norm.weight": "/etc/passwd"}},
        "no map": {},
        "list": [],
        "map of numbers": {"weight_map": {"model.norm.weight": 3}},
        "missing file": {"weight_map": {"model.norm.weight": "absent.safetensors"}},
        "cut": "{",
    }.items():
        yield Case(f"safetensors index: {name}", REFUSED, "index|safetensors", sharded(index))
    for name, changes in {
        "dtype": {"dtype": "F31"},
        "integers": {"dtype": "I32"},
        "shape": {"shape": [3, 3]},
        "negative shape": {"shape": [-1, 64]},
        "huge shape": {"shape": [2**62, 2**62]},
        "shape of text": {"shape": "x"},
        "offsets past the end": {"data_offsets": [0, 2**40]},
        "offsets reversed": {"data_offsets": [100, 0]},
        "negative offsets": {"data_offsets": [-8, 0]},
        "no offsets": {"data_offsets": None},
    }.items():
        changed = header_change(**changes)
        yield Case(f"safetensors header: {name}", REFUSED, "safetensors|tensors", changed)
    for value in (math.nan, math.inf, -math.inf):
        yield Case(
            f"weights with {value}",
            REFUSED,
            "finite|nan|inf|NaN",
            lambda place, value=value: score(filled(place, value)),
        )
    yield Case("weights with zeros", ACCEPTED, "", lambda place: score(filled(place, 0.0)))


# Run folders.


def damaged_run(name: str, change: Callable[[bytes], bytes]) -> Callable[[Place], None]:
    def case(place: Place) -> None:
        folder = place.changed(place.run, name, change)
        with strict():
            load_run(folder)

    return case


@contextlib.contextmanager
def strict():
    """Makes warnings of lcjax errors: a fallback that says so is as good as a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            yield
        except UserWarning as warning:
            raise InputError(str(warning)) from None


def resumed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Place], None]:
    """Goes on with a run, one of whose files is changed."""

    def case(place: Place) -> None:
        folder = place.changed(place.run, name, change)
        tree = yaml.safe_load((place.run / "config.yaml").read_text())
        tree["run"]["folder"] = str(folder)
        with strict():
            words = place.settings(tree)
            config = config_lib.parse(TrainConfig, words)
            with contextlib.suppress(Started):
                run(config)

    return case


def run_cases() -> Iterator[Case]:
    constant = lambda value: lambda _: value  # noqa: E731

    def middle(data: bytes) -> bytes:
        index = len(data) // 2
        return data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]

    arrays = "checkpoints/2/state/**/d/*"
    yield Case(
        "checkpoint: a flipped bit of the arrays",
        REFUSED,
        "checkpoints?.*2",
        resumed(arrays, middle),
    )
    yield Case(
        "checkpoint: arrays cut",
        REFUSED,
        "checkpoints?.*2",
        resumed(arrays, lambda data: data[:-9]),
    )
    position = "checkpoints/2/data/position.json"
    for name, content in {
        "empty mapping": b"{}",
        "list": b"[]",
        "null": b"null",
        "cut": b'{"ne',
        "deep": b"[" * 99_999,
        "number": b"3",
        "binary": b"\xff\xfe",
    }.items():
        yield Case(
            f"position.json: {name}", REFUSED, "2|position", resumed(position, constant(content))
        )

    def next_index(data: bytes) -> bytes:
        text = data.decode()
        return re.sub(r"(\d+)", lambda m: str(int(m[0]) + 1), text, count=1).encode()

    yield Case(
        "position.json: another number", REFUSED, "2|position", resumed(position, next_index)
    )
    for name in (
        "checkpoints/2/_CHECKPOINT_METADATA",
        "checkpoints/2/state/_METADATA",
        "checkpoints/2/state/manifest.ocdbt",
    ):
        for label, content in {"empty": b"", "mapping": b"{}", "binary": b"\xff" * 99}.items():
            yield Case(f"{name} is {label}", REFUSED, "2", resumed(name, constant(content)))
    nonsense = {
        "empty": b"", "mapping": b"{}", "list": b"[]", "cut": b'{"a', "binary": b"\xff\xfe\x00",
        "deep": b"[" * 99_999, "text": b"hello",
    }  # fmt: skip
    for label, content in nonsense.items():
        for name in ("base.json", "config.yaml"):
            # An empty config has every default: keys that differ are refused anyhow.
            kind = CLEAN if label in ("empty", "mapping", "list") else REFUSED
            says = re.escape(name) + "|began with"
            yield Case(f"{name} is {label}", kind, says, resumed(name, constant(content)))
        load = damaged_run("model.yaml", constant(content))
        yield Case(f"loading a run: model.yaml is {label}", REFUSED, "model.yaml", load)
    yield Case(
        "metrics.jsonl is binary", CLEAN, "", resumed("metrics.jsonl", constant(b"\xff\xfe" * 9))
    )
    for label, content in {
        "cut": b'{"hash": "',
        "empty": b"",
        "list": b"[]",
        "mapping": b"{}",
        "binary": b"\xff\xfe",
        "deep": b"[" * 99_999,
    }.items():
        for name in (
            "run.json",
            "config.yaml",
            "summary.json",
            "records/perplexity_slide_press.jsonl",
        ):

            def report(place: Place, name=name, content=content) -> None:
                folder = place.changed(place.evaluation, name, constant(content))
                place.command(evaluation.main, ["report", folder])

            kind = CLEAN if name == "summary.json" or name.startswith("records") else REFUSED
            says = re.escape(Path(name).name) + "|records"
            yield Case(f"report of {name} that is {label}", kind, says, report)
    places = {
        "in /proc": "/proc/xx/run",
        "with NUL": "a\0b",
        "of 300 letters": "x" * 300,
        "that is a file": "mine.txt",
        "below a file": "mine.txt/run",
        "that is empty": "",
        "of blanks": "  ",
        "with a surrogate": "\ud800",
    }
    for label, folder in places.items():
        for start in (Place.train, Place.evaluate):

            def begin(place: Place, start=start, folder=folder) -> None:
                words = ["--run.folder=" + folder]
                start(place, {}, *words)

            yield Case(f"{start.__name__}: run.folder {label}", REFUSED, "run.folder", begin)

    def within(place: Place, start, inner: str) -> None:
        corpus = place.copy(place.corpus)
        start(place, {"data": {"path": str(corpus)}, "run": {"folder": str(corpus / inner)}})

    for start in (Place.train, Place.evaluate):
        for inner in ("", "run", "a/b"):
            yield Case(
                f"{start.__name__}: run.folder=data.path/{inner}",
                REFUSED,
                "run.folder",
                lambda place, start=start, inner=inner: within(place, start, inner),
            )

    def overwritten(place: Place, start, target: str) -> None:
        folder = place.foreign(
            place.copy(place.folder / target if target == "." else place.shared / target)
        )
        start(place, {"run": {"folder": str(folder), "existing": "overwrite"}})

    for start, target in ((Place.train, "run"), (Place.evaluate, "evaluation")):
        yield Case(
            f"{start.__name__}: overwrite with files of others",
            CLEAN,
            "",
            lambda place, start=start, target=target: overwritten(place, start, target),
        )
        yield Case(
            f"{start.__name__}: overwrite of a model",
            CLEAN,
            "copy_model",
            lambda place, start=start: overwritten(place, start, "model"),
        )

    def foreign_model(place: Place) -> None:
        folder = place.copy(place.run)
        place.foreign(folder / "model")
        place.train({"run": {"folder": str(folder), "existing": "overwrite"}})

    yield Case(
        "train: overwrite with files of others in model/", REFUSED, "mine.txt", foreign_model
    )


# Data.


def text_file(name: str, content: str | bytes, **changes) -> Callable[[Place], None]:
    def case(place: Place) -> None:
        file = place.write(f"data/{name}", content)
        place.train(merged({"data": {"path": str(file), "scan": True}}, {"data": changes}))

    return case


def token_folder(name: str, change: Callable[[bytes], bytes]) -> Callable[[Place], None]:
    def case(place: Place) -> None:
        place.train({"data": {"path": str(place.changed(place.tokens, name, change))}})

    return case


def data_cases() -> Iterator[Case]:
    good = json.dumps({"text": "the cat sat on a mat. " * 40}) + "\n"
    files = {
        "number": good + '{"text": 5}\n',
        "list": good + '{"text": ["a"]}\n',
        "mapping": good + '{"text": {"a": 1}}\n',
        "no field": good + '{"body": "x"}\n',
        "cut": good + '{"text": "a',
        "no object": good + "[1]\n",
        "text": good + "hello\n",
        "deep": good + "[" * 99_999 + "\n",
        "surrogate": good + '{"text": "\\ud800"}\n',
        "bad UTF-8": good.encode() + b'{"text": "\xff"}\n',
        "NaN": good + "NaN\n",
        "long number": good + '{"text": ' + "9" * 5000 + "}\n",
    }
    for name, content in files.items():
        yield Case(f"jsonl: {name}", REFUSED, r"x\.jsonl", text_file("x.jsonl", content))
        skip = {"on_bad_record": "skip", "on_bad_text": "skip"}
        yield Case(f"jsonl: {name}, skipped", ACCEPTED, "", text_file("x.jsonl", content, **skip))
    yield Case("jsonl: as usual", ACCEPTED, "", text_file("x.jsonl", good * 3))
    null = good + '{"text": null}\n'  # an absent text, as in datasets
    yield Case("jsonl: null", ACCEPTED, "", text_file("x.jsonl", null))
    for name, content in {
        "x.txt": b"\xff\xfe" * 50,
        "x.jsonl": b"",
        "x.parquet": b"PAR1" + bytes(50) + b"PAR1",
        "y.parquet": b"",
        "x.arrow": b"ARROW1" + bytes(40),
        "x.jsonl.gz": gzip.compress(good.encode() * 99)[:-20],
        "y.jsonl.gz": b"\x1f\x8b",
        "x.txt.gz": b"hello",
        "x.array_record": bytes(200),
        "x.bin": b"abc",
        "y.bin": b"",
        "x.exe": b"MZ",
        "x.jsonl.zst": b"(\xb5/\xfd" + bytes(9),
        "x.json": b"{}",
        "x.csv": b"a,b",
    }.items():
        yield Case(
            f"data file {name} of {len(content)} bytes",
            REFUSED,
            re.escape(name),
            text_file(name, content, scan=False),
        )
    for name, path in {
        "absent": "absent",
        "NUL": "a\0b",
        "long": "x" * 5000,
        "surrogate": "\ud800",
        "glob": "*.nothing",
        "package": "package:nothing_at_all",
        "python": "python:nothing",
        "empty folder": "thesis/none",
        "proc": "/proc/self/mem",
    }.items():
        words = {"data": {"path": path}}
        yield Case(
            f"data.path: {name}",
            REFUSED,
            r"data\.path|" + re.escape(path[:9]),
            lambda place, words=words: place.train(words),
        )

    def index(key: str, value: object) -> Callable[[bytes], bytes]:
        return lambda data: json.dumps(json.loads(data) | {key: value}).encode()

    passwd = "../../../../../../../../../../../../etc/passwd"
    for key in (
        "format",
        "dtype",
        "shards",
        "sources",
        "tokenizer",
        "vocab_size",
        "documents",
        "tokens",
    ):
        for name in ("text", "negative", "huge", "nan", "list", "mapping", "null", "nul"):
            yield Case(
                f"index.json: {key}={name}",
                CLEAN,
                "",
                token_folder("index.json", index(key, VALUES[name])),
            )

    def traverse(data: bytes) -> bytes:
        return re.sub(rb'"[\w.-]*\d{3,}[\w.-]*"', json.dumps(passwd).encode(), data)

    yield Case(
        "index.json: shards outside of the folder",
        REFUSED,
        "index.json|passwd",
        token_folder("index.json", traverse),
    )
    for name, content in {
        "cut": b'{"fo',
        "empty": b"",
        "list": b"[]",
        "deep": b"[" * 99_999,
        "binary": b"\xff",
        "null": b"null",
    }.items():
        yield Case(
            f"index.json is {name}",
            REFUSED,
            "index.json",
            token_folder("index.json", lambda _, content=content: content),
        )
    objects = io.BytesIO()
    np.save(objects, np.array([{"a": 1}, None], object), allow_pickle=True)
    for name, content in {
        "objects": objects.getvalue(),
        "empty": b"",
        "cut": objects.getvalue()[:9],
        "text": b"hello",
    }.items():
        yield Case(
            f".npy of {name}",
            REFUSED,
            r"npy",
            token_folder("*.npy", lambda _, content=content: content),
        )
    yield Case(".npy is cut", REFUSED, "npy", token_folder("*.npy", lambda data: data[:-9]))
    for name, content in {
        "empty": b"",
        "odd": b"abc",
        "cut": None,
        "ids beyond the vocabulary": b"\xff" * 4096,
    }.items():
        change = lambda data, content=content: data[:-8] if content is None else content  # noqa: E731
        yield Case(
            f"shard: {name}",
            CLEAN if "beyond" in name else REFUSED,
            r"bin",
            token_folder("*.bin", change),
        )


# Commands. A line is: what a refusal says | words.

CONVERT = """
src | ''
dst | {model}
absent | absent out
SRC | {model} {model}
SRC | {model} {model}/inner
SRC | {run} {run}/model
SRC | {run} {run} --force
mine.txt | {model} mine.txt
mine.txt | {model} mine.txt/x
mine.txt | mine.txt out
thesis | {model} thesis
chapter | {model} thesis --force
mine.txt | {model} . --force
dtype | {model} out --dtype=int3
context | {model} out --context=0
context | {model} out --context=x
context | {model} out --context=99999999999999999999
base | {model} out --base={model}
config.json | {corpus} out
config.json | {model}/.. out
proc | {model} /proc/x/y
a | {model} {nul}
xxx | {model} {long}
not empty | {model} ''
config.json | '' out
frce | {model} out --frce
m.gguf | {gguf} {gguf}
yarn | {model} out --rope.type=yarnn
factor | {model} out --rope.type=yarn --rope.factor=-3
accepted | {model} out
accepted | {gguf} out
accepted | {run} out
accepted | {model} out --dtype=bfloat16
accepted | {model} out --rope.type=yarn --rope.factor=8
"""

TRAIN = """
config | --config
absent.yaml | --config=absent.yaml
lcjax:absent is no recipe | --config=lcjax:absent
folder | --config=.
folder | --config={corpus}
mine.txt | --config=mine.txt
confg | --confg=x
hello | hello
lr | --train.lr
lr | --train.lr=
lr | --train.lr=abc
lr | --train.lr.x=1
lr | '--train.lr=!!python/object/apply:os.system [id]'
train | --train=hello
train | --train=[1]
train | --train..lr=1
train | --train.=1
=1 | --=1
rope.type | --model.rope.factor=2
yarn | --model.rope.type=yarnn
sources | --data.sources.0.path=x --data.sources.5.path=x
sources | --data.sources.x=1
absent_module | --import=absent_module
mine.txt | --import=mine.txt
absent.py | --import=absent.py
steps | --train.steps={surrogate}
steps | --train.steps={digits}
path | --model.path={surrogate}
path | --model.path={nul}
"""

EVAL = """
nothing | nothing
report | report
absent | report absent
folder|run | report .
export|x | report {evaluation} --export=x
--x | report {evaluation} --x=1
run | report {run}
mine.txt | report mine.txt
records | report {evaluation}/records
a | report {nul}
xxx | report {long}
score | score
absent | score absent
out | score {evaluation} --out={evaluation}
mine.txt | score {evaluation} --out=mine.txt
accepted | score {evaluation} --out=thesis
tasks | score {evaluation} --tasks.9.x=1
compare|run | compare
absent | compare absent
second run | compare {evaluation} --against=nothing
twice | compare {evaluation} {evaluation} --out=mine.txt
tasks | make-data
x | make-data x
absent.yaml | make-data --config=absent.yaml
tasks | --tasks
tasks | --tasks=nothing
lengths | --lengths=[]
methods | --methods=[]
nothing | --tasks.0.type=nothing
preset | --model.preset=nothing
methods|name | '--methods=[{{name: a}}, {{name: a}}]' --model.preset=tiny
name | "--methods=[{{name: ''}}]" --model.preset=tiny --data.path={corpus}
"""

PREPARE = """
command | ''
nothing | nothing
path | prepare
path | prepare --path
pth | prepare --pth={corpus}
absent | prepare --path=absent --tokenizer={model} --out=o
absent | prepare --path={corpus} --tokenizer=absent --out=o
mine.txt | prepare --path={corpus} --tokenizer={model} --out=mine.txt
out|corpus | prepare --path={corpus} --tokenizer={model} --out={corpus}
out|corpus | prepare --path={corpus} --tokenizer={model} --out={corpus}/x
out|proc | prepare --path={corpus} --tokenizer={model} --out=/proc/x/y
thesis | prepare --path={corpus} --tokenizer={model} --out=thesis
out|xxx | prepare --path={corpus} --tokenizer={model} --out={long}
workers | prepare --path={corpus} --tokenizer={model} --out=o --workers=-1
seed | prepare --path={corpus} --tokenizer={model} --out=o --seed={digits}
absent.yaml | teacher --config=absent.yaml
rows|data | teacher --out=o
accepted | prepare --path={corpus} --tokenizer={model} --out=o --workers=1
"""

RETRIEVAL = """
command | ''
nothing | nothing
out | build
path | build --out=o
absent | build --out=o --data.path=absent
mine.txt | build --out=mine.txt --data.path={corpus}
thesis | build --out=thesis --data.path={corpus}
out|corpus | build --out={corpus}/x --data.path={corpus}
out|proc | build --out=/proc/x/y --data.path={corpus}
out|xxx | build --out={long} --data.path={corpus}
part | build --out=o --data.path={corpus} --part=4/4
part | build --out=o --data.path={corpus} --part={surrogate}
search by | build --out=o --data.path={corpus} --sparse=null
encoder | build --out=o --data.path={corpus} --encoder.path=absent
tokenizer | build --out=o --data.path={corpus} --chunking.unit=tokens
klingon | build --out=o --data.path={corpus} --sparse.stopwords=klingon
question | search {store}
datastore | search {corpus} question
folder | search {nul} question
k | search {store} question --k=0
k | search {store} question --k={digits}
vectors | search {store} question --kind=dense
n= | check {store} --n=0
absent | append {store} --path=absent
absent | delete {store} absent
accepted | build --out=o --data.path={corpus} --workers=1
accepted | search {store} 'the cat' {surrogate} {nul}
accepted | check {store} --n=3 --files
"""

YAML = r"""
train | train: hello | --train.steps=3
key | - 1
key | hello
YAML | a:\n\tb: 1
steps | train: {steps: 1, steps: 2}
YAML|python | train: !!python/object/apply:os.system [id]
YAML|train | train: !!python/name:os.system
d | a: &a [x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: &d [*c,*c,*c]
itself|include | <<: !include bad.yaml
absent.yaml | <<: !include absent.yaml
lcjax:absent | <<: !include lcjax:absent
1 | 1: 2
null|None | null: 2
steps | train: {steps: 2020-01-01}
steps | train: {steps: !!set {a}}
steps | train: {steps: !!binary aGk=}
a | ? [a]\n: 1
path|YAML | model: {path: "\\ud800"}
train | train:\nmodel: {path: absent}
"""

# A training, as YAML. `accepted` starts.
START = """
seed | train: {seed: 1180591620717411303424}
rank | train: {lora: {rank: 100000000}}
targets|nothing | train: {lora: {rank: 2, targets: [nothing]}}
batch_size | train: {batch_size: 100000000}
length | data: {length: 1000000000}
profile | train: {profile: {start: 100, steps: 3}}
nothing | train: {trainable: [nothing]}
trainable | train: {trainable: ["("]}
float16 | model: {dtype: float16}
mesh|devices | mesh: {data: 64}
tensor | mesh: {tensor: -3}
tin | model: {preset: tin}
factor | model: {rope: {type: yarn, factor: 1.0e+30}}
chunks | model: {memory: {type: cepe, encoder: tiny-encoder}}
chunks | data: {length: 64, chunks: {count: 2, length: 16}}
chunks | data: {chunks: {count: 9, length: 99}}
teacher|distill | train: {distill: {}}
masking | data: {masking: {}}
landmark|block|train_length | model: {pattern: {type: landmark}}
accepted | {}
accepted | train: {lora: {rank: 2}}
accepted | model: {rope: {type: yarn, factor: 4}}
accepted | {model: {memory: {type: cepe, encoder: tiny-encoder}}, data: {length: 64, chunks: {count: 2, length: 16}}}
"""  # noqa: E501


def lines(table: str, columns: int = 2) -> Iterator[tuple[str, ...]]:
    """Yields (says, input) of every line; ` | ` separates them, as regular expressions use |."""
    for line in table.strip().splitlines():
        parts = line.split(" | ", columns - 1)
        yield (*parts, *[""] * (columns - len(parts)))


def expected(says: str) -> str:
    return ACCEPTED if says == ACCEPTED else REFUSED


def command_cases() -> Iterator[Case]:
    train = lambda words: distributed.main(TrainConfig, run, words)  # noqa: E731
    commands = {
        "convert": (convert.main, CONVERT), "train.py": (train, TRAIN),
        "eval.py": (evaluation.main, EVAL),
        "lcjax.data": (data_command.main, PREPARE),
        "lcjax.retrieval": (retrieval_command.main, RETRIEVAL),
    }  # fmt: skip
    for name, (main, table) in commands.items():
        for says, words in lines(table):

            def case(place: Place, main=main, words=words) -> None:
                odd = {
                    "nul": "a\0b",
                    "long": "x" * 300,
                    "digits": "9" * 5000,
                    "surrogate": "\ud800",
                }
                words = [word.format(**odd, **vars(place)) for word in shlex.split(words)]
                place.command(main, [word for word in words if words != [""]])

            yield Case(f"{name} {words}", expected(says), says, case)
    for says, text, words in lines(YAML, 3):

        def read(place: Place, text=text, words=words) -> None:
            file = place.write("bad.yaml", text.replace(r"\n", "\n").replace(r"\t", "\t") + "\n")
            place.command(train, ["--config", str(file), *words.split()])

        yield Case(f"YAML {text} {words}", REFUSED, says, read)
    nonsense = {
        "that is deep": b"train: " + b"[" * 5000 + b"]" * 5000,
        "in UTF-16": "train: {steps: 3}".encode("utf-16"),
        "that is binary": bytes(range(256)),
    }
    for name, content in nonsense.items():

        def binary(place: Place, content=content) -> None:
            place.command(train, ["--config", str(place.write("bad.yaml", content))])

        yield Case(f"YAML {name}", REFUSED, "bad.yaml", binary)
    for says, text in lines(START):
        start = lambda place, text=text: place.train(yaml.safe_load(text))  # noqa: E731
        yield Case(f"a training of {text}", expected(says), says, start)
    checkpoint = lambda place: place.train({"model": {"path": str(place.model)}})  # noqa: E731
    yield Case("a training of a checkpoint", ACCEPTED, "", checkpoint)
    yield Case("an evaluation", ACCEPTED, "", lambda place: place.evaluate({}))


# The Python API. A line is: what a refusal says | expression.

ROWS = np.arange(3, 27).reshape(2, 12)
ONE = lcjax.Sampling(max_new_tokens=1)

API = r"""
tokens | lm.nll("text")
tokens | lm.nll(["text"])
tokens | lm.nll(None)
tokens | lm.nll(5)
tokens | lm.nll([[3, 4], [5]])
tokens | lm.nll(np.arange(9))
tokens | lm.nll(np.ones((1, 2, 3), int))
tokens | lm.nll(np.ones((1, 4)))
tokens | lm.nll(np.ones((1, 4), bool))
tokens | lm.nll([])
tokens|length | lm.nll(np.ones((2, 0), int))
tokens|vocab | lm.nll([[3, -1]])
tokens|vocab | lm.nll([[3, 10**6]])
tokens | lm.nll([[3, 2**70]])
tokens | lm.nll([[3, None]])
tokens | lm.nll([[3, math.nan]])
tokens | lm.nll({"a": 1})
first | lm.nll(ROWS, first=0)
first | lm.nll(ROWS, first=99)
first | lm.nll(ROWS, first="1")
first | lm.nll(ROWS, first=1.5)
first | lm.nll(ROWS, first=None)
lengths | lm.nll(ROWS, lengths=np.array([1, 2, 3]))
lengths | lm.nll(ROWS, lengths=np.array([99, 2]))
lengths | lm.nll(ROWS, lengths=np.array([-1, 2]))
lengths | lm.nll(ROWS, lengths="ab")
lengths | lm.nll(ROWS, lengths=np.array([1.5, 2]))
memory|context | lm.nll(ROWS, context=["a", "b"])
context | lm.nll(ROWS, context="ab")
context | lm.nll(ROWS, context=5)
prompts | lm.generate(None)
prompts | lm.generate("hello")
prompts | lm.generate(5)
prompt | lm.generate([])
prompt | lm.generate([None])
prompt | lm.generate([5])
prompt | lm.generate([[1.5, 2.5]])
prompt | lm.generate([[]])
prompt|vocab | lm.generate([[10**6]])
prompt|vocab | lm.generate([[-4]])
prompt | lm.generate([[2**70]])
prompt | lm.generate([{"role": "user"}])
prompt|surrogate|text | lm.generate(["\ud800"], ONE)
sampling | lm.generate(["a"], None)
sampling | lm.generate(["a"], 5)
sampling | lm.generate(["a"], {"temperature": 1})
prefill_chunk | lm.generate(["a"], ONE, prefill_chunk=0)
prefill_chunk | lm.generate(["a"], ONE, prefill_chunk="8")
prefill_chunk | lm.generate(["a"], ONE, prefill_chunk=2**70)
memory|context | lm.generate(["a"], ONE, context=["b"])
max_new_tokens | lm.generate(["a"], Sampling(max_new_tokens=2**31 - 1))
seed | lm.generate(["a"], Sampling(seed=(1, 2)))
prompts | list(lm.stream("hello"))
prompts | list(lm.stream(None))
prompts | lm.continuations(None, None)
prompt|tokens | lm.continuations(["a"], [["b"]])
continuations | lm.continuations([[3]], [[[4]], [[5]]])
continuation | lm.continuations([[3]], [[[]]])
continuation | lm.continuations([[3]], [[3]])
continuation|vocab | lm.continuations([[3]], [[[10**6]]])
continuation | lm.continuations([[3]], [[[1.5]]])
continuation | lm.continuations([[3]], [None])
prompt | lm.continuations([[]], [[[3]]])
messages | lm.chat([])
messages | lm.chat(None)
messages | lm.chat(5)
messages | lm.chat(["hello"])
messages | lm.chat([{"content": "a"}])
messages|content | lm.chat([{"role": "user"}], ONE)
messages | lm.chat({"role": "user", "content": "a"})
messages|content | lm.chat([{"role": "user", "content": 5}], ONE)
text | lm.encode(5)
text | lm.encode(None)
text | lm.encode(["a"])
text|surrogate | lm.encode("\ud800")
rope | lm.with_method(rope=5)
rope | lm.with_method(rope="nothing")
rope | lm.with_method(rope=Yarn)
rope | lm.with_method(rope=Sliding(window=8))
rope|clex | lm.with_method(rope=Clex())
rop | lm.with_method(rop=Yarn(factor=2))
pattern | lm.with_method(pattern=5)
pattern | lm.with_method(pattern="nothing")
pattern | lm.with_method(pattern=Sliding)
memory | lm.with_method(memory="cepe")
length | lm.with_method(length=-5)
length | lm.with_method(length=0)
length | lm.with_method(length="8")
length | lm.with_method(length=1.5)
length | lm.with_method(length=2**70)
context | lm.encode_contexts("ab")
context | lm.encode_contexts(None)
memory | lm.encode_contexts(["ab"])
tokens | lm.logits("text")
tokens | lm.logits(np.arange(5))
tokens | lm.logits(np.ones((1, 3)))
tokens | lm.model.apply({"params": lm.params}, np.arange(5))
mine.txt | lm.save("mine.txt")
thesis | lm.save("thesis")
proc | lm.save("/proc/x/y")
length | Conversation(lm, length=0)
length | Conversation(lm, length="x")
lm|model | Conversation(None)
messages | Conversation(lm).say(5)
text | Conversation(lm).read(None)
text|vocab | Conversation(lm).read([10**6])
chunks|contexts?|passages | Replug(lm).generate(["a"], ONE, context=None)
path|source|model | load(None)
path|5 | load(5)
patern.*pattern | load(model, patern=Sliding(window=8))
rope | load(model, rope="nothing")
rope | load(model, rope=Yarn)
pattern | load(model, pattern=Sliding)
memory | load(model, memory="cepe")
dtype | load(model, dtype="int3")
dtype | load(model, param_dtype=5)
preset | load(model, preset="tiny")
mesh | load(model, mesh="x")
mesh|devices | load(model, mesh=Mesh(data=64))
absent | load(model, tokenizer="absent")
seed | load(ModelSection(preset="tiny", seed=2**70))
seed | load(ModelSection(preset="tiny", seed="x"))
factor | Yarn(factor="2")
factor | Yarn(factor=None)
factor | Yarn(factor=math.nan)
factor | Yarn(factor=0)
factor | Yarn(factor=-2)
factor | Yarn(factor=1e30)
factor | Yarn(factor=True)
factor | Yarn(factor=[2])
factr | Yarn(factr=2)
factor | Linear(factor=math.inf)
factor | LongRope(factor=2, short_factor="abc", long_factor="abc")
window | Sliding(window=0)
window | Sliding(window="8")
window | Sliding(window=1.5)
window | Sliding(window=2**70)
window | Sliding(window=None)
block | Landmark(block=-1)
tensor | Mesh(tensor=-3)
tensor | Mesh(tensor="2")
tensor | Mesh(tensor=2**70)
data | Mesh(data=0)
data | Mesh(data=1.5)
max_new_tokens | Sampling(max_new_tokens=0)
max_new_tokens | Sampling(max_new_tokens="5")
max_new_tokens | Sampling(max_new_tokens=1.5)
max_new_tokens | Sampling(max_new_tokens=None)
max_new_tokens | Sampling(max_new_tokens=2**70)
min_new_tokens | Sampling(min_new_tokens=-1)
min_new_tokens | Sampling(min_new_tokens=999)
temperature | Sampling(temperature=-1)
temperature | Sampling(temperature=math.nan)
temperature | Sampling(temperature=math.inf)
temperature | Sampling(temperature="1")
temperature | Sampling(temperature=None)
top_k | Sampling(top_k=0)
top_k | Sampling(top_k=1.5)
top_k | Sampling(top_k="3")
top_p | Sampling(top_p=0)
top_p | Sampling(top_p=2)
top_p | Sampling(top_p=math.nan)
top_p | Sampling(top_p=None)
stop | Sampling(stop="a")
stop | Sampling(stop=("",))
stop | Sampling(stop=(5,))
stop | Sampling(stop=None)
seed | Sampling(seed=-1)
seed | Sampling(seed=2**70)
seed | Sampling(seed="1")
seed | Sampling(seed=None)
seed | Sampling(seed=(1, "a"))
rope|type | from_hf({"rope_scaling": {"factor": 2}})
nothing | from_hf({"rope_scaling": {"rope_type": "nothing"}})
rope | from_hf({"rope_scaling": [1]})
factor | from_hf({"rope_scaling": {"rope_type": "yarn", "factor": "x"}, "rope_theta": 1e4})
model_type|config | checkpoints.config_from_hf({})
config | checkpoints.config_from_hf([])
not empty | checkpoints.save_hf(place.folder, *checkpoints.load(model))
mine.txt | checkpoints.load_tokenizer("mine.txt")
model|run | load_run(model)
99 | load_run(place.run, 99)
step|x | load_run(place.run, "x")
absent | checkpoints.load("absent")
config.json | checkpoints.load(".")
mine.txt | checkpoints.load("mine.txt")
a | checkpoints.load("a\0b")
xxx | checkpoints.load("x" * 5000)
path|model | checkpoints.load("")
accepted | lm.nll(ROWS)
accepted | lm.nll(ROWS.tolist())
accepted | lm.nll(ROWS, lengths=[12, 5])
accepted | lm.generate(["a", "bc"], ONE)
accepted | lm.generate([[3, 4]], ONE)
accepted | lm.continuations([[3]], [[[4], [5, 6]]])
accepted | lm.with_method(rope=Yarn(factor=2)).nll(ROWS)
DynamicNTK | lm.with_method(rope="dynamic_ntk")
accepted | lm.logits(ROWS).shape[:2] == ROWS.shape or 1 / 0
accepted | lm.save("out")
accepted | len(repr(lm)) < 500 or 1 / 0
accepted | Conversation(lm).read("hello")
accepted | load(model, dtype="bfloat16")
"""

KERNELS = """
q | flash(None, k, v)
q | flash("q", k, v)
q | flash([[1.0]], k, v)
floating | flash(q.astype(int), k, v)
q | flash(q[0], k, v)
q|k | flash(q, k[:0], v[:0])
heads|k | flash(q[:, :, :3], k, v)
q|k | flash(q[..., :4], k, v)
k|v | flash(q, k[:, :5], v)
mask | flash(q, k, v, True)
mask | flash(q, k, v, "causal")
mask|causal | flash(q, k, v, causal)
mask|from_block_mask | flash(q, k, v, np.ones((16, 16), bool))
scale | flash(q, k, v, scale="1")
scale | flash(q, k, v, scale=math.nan)
soft_cap | flash(q, k, v, soft_cap=-1)
soft_cap | flash(q, k, v, soft_cap="1")
soft_cap | flash(q, k, v, soft_cap=math.nan)
bias | flash(q, k, v, bias="alibi")
sinks | flash(q, k, v, sinks=np.ones(9))
table | flash(q, k, v, table="x")
splits | flash(q, k, v, splits=0)
splits | flash(q, k, v, splits="2")
q_index | flash(q, k, v, q_index="x")
q_index | flash(q, k, v, q_index=np.arange(5))
segments | flash(q, k, v, q_segments=np.ones((1, 16), int))
k_lengths | flash(q, k, v, k_lengths=np.ones(5, int))
nothing|implementation | flash(q, k, v, implementation="nothing")
implementation | flash(q, k, v, implementation=5)
layout | flash(q, k, v, layout="x")
window | window(0)
window | window("4")
window | window(1.5)
window | window(2**70)
prefix | prefix(-1)
chunk | chunks(0)
stride | stride(0)
& | causal() and window(3)
mask|& | causal() & 5
heads, length | decode(q, k, v)
keys|q | decode(q, None, None)
keys|list | decode(q, [1.0], [1.0])
splits | decode(q[:, :1], *cache, splits=-1)
block | landmark_attention(q, k, v, 0)
block | landmark_attention(q, k, v, "4")
landmark_attention | landmark_attention(q, k.astype(int), v, 4)
merge|partials|pairs | merge([])
merge|pairs | merge(None)
pairs | merge(flash(q, k, v))
mask | tables.from_mask(5, queries=16, keys=16, q_block=4, k_block=4)
block | tables.from_block_mask(np.ones((4, 4), bool), q_block=0, k_block=4)
bool|mask | tables.from_block_mask(np.ones((4, 4)), q_block=4, k_block=4)
heads | alibi_slopes(0)
mask | per_head([])
second|twice | jax.grad(lambda a: jax.grad(lambda b: flash(b, k, v)[0].sum())(a).sum())(q)
accepted | flash(q, k, v, causal())
accepted | flash(q[:, :0], k, v)
accepted | decode(q[:, :1], *cache)
accepted | landmark_attention(q, k, v, 4)
"""


def api_cases() -> Iterator[Case]:
    names = {"Yarn": Yarn, "Linear": Linear, "LongRope": LongRope, "Clex": lcjax.rope.Clex}
    names |= {name: getattr(lcjax, name) for name in ("Conversation", "Mesh", "Replug", "Sampling")}
    names |= {"Sliding": Sliding, "Landmark": Landmark, "ModelSection": ModelSection}
    names |= {"load": lcjax.LanguageModel.load, "from_hf": lcjax.rope.from_hf, "load_run": load_run}
    names |= {"np": np, "math": math, "checkpoints": checkpoints, "ROWS": ROWS, "ONE": ONE}
    for says, code in lines(API):

        def call(place: Place, code=code) -> None:
            eval(code, names | {"place": place, "model": str(place.model), "lm": place.lm})

        yield Case(f"API: {code}", expected(says), says, call)


def kernel_cases() -> Iterator[Case]:
    q, k, v = (jax.random.normal(jax.random.key(0), (1, 16, heads, 8)) for heads in (4, 2, 2))
    arrays = {"q": q, "k": k, "v": v, "cache": (k.swapaxes(1, 2), v.swapaxes(1, 2))}
    names = vars(kernels) | arrays | {"np": np, "math": math, "jax": jax}
    for says, code in lines(KERNELS):
        yield Case(f"kernels: {code}", expected(says), says, lambda _, code=code: eval(code, names))


# The campaign.


def make_shared(folder: Path) -> None:
    """Writes what the cases read: a corpus, a model in two formats, tokens, and finished runs."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    words, pick = ["the", "cat", "sat", "on", "a", "mat", "at", "dawn"], random.Random(0)
    for index in range(8):
        (corpus / f"{index}.txt").write_text(" ".join(pick.choice(words) for _ in range(120)))
    model, params, tokenizer = build(ModelSection(preset="tiny"))
    checkpoints.save_hf(folder / "model", params, model.config, tokenizer)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    write_gguf(folder / "m.gguf", random_params(tiny_config("llama")), tiny_config("llama"))
    place = Place(folder, folder.with_name("making"), "")
    words = [
        "prepare",
        f"--path={corpus}",
        f"--tokenizer={folder / 'model'}",
        f"--out={folder / 'tokens'}",
        "--workers=1",
    ]
    place.command(data_command.main, words)
    store = ["build", f"--data.path={corpus}", f"--out={folder / 'store'}", "--workers=1"]
    place.command(retrieval_command.main, [*store, "--chunking.size=20"])
    train = {"steps": 2, "save_every": 1}
    place.train({"train": train, "run": {"folder": str(folder / "run")}})
    place.evaluate({"max_windows": 2, "run": {"folder": str(folder / "evaluation")}})


def all_cases(model: Path) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    tables = (
        config_cases(), json_cases(model), damage_cases(), file_cases(), run_cases(), data_cases(),
        command_cases(), api_cases(), kernel_cases(),
    )  # fmt: skip
    for table in tables:
        for case in table:
            if case.name in cases:
                raise ValueError(f"two cases of the name {case.name!r}")
            cases[case.name] = case
    return cases
