"""The random cases of `fuzz.py --random N`: every case is drawn from its number and the seed.

The tables of `fuzz_cases` hold input that somebody thought of. Here several keys of a config are
wrong at once, files are damaged anywhere, words of commands are left out and exchanged, and
functions get arguments of other types. No case says whether it is refused. It fails by a traceback,
by an error of several lines, by changing files of others, by taking too long, and if damaged files
are read with other results although `python -m lcjax.check` calls them sound.
"""

import contextlib
import datetime
import inspect
import json
import math
import os
import random
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import lcjax
import pallas_kernels as kernels
from lcjax import check as check_command
from lcjax import checkpoints, convert
from lcjax import config as config_lib
from lcjax.cost import __main__ as cost_command
from lcjax.data import DataConfig
from lcjax.data import __main__ as data_command
from lcjax.data.data_config import TokenSource
from lcjax.data.loader import make_loader
from lcjax.evaluation import command as evaluation
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.models.loss import token_nll
from lcjax.parallel import distributed
from lcjax.pictures import __main__ as pictures_command
from lcjax.retrieval import (
    Chunking,
    Datastore,
    ExactIndex,
    Retriever,
    Sparse,
    SparseIndex,
    open_encoder,
    recall,
    top_k,
)
from lcjax.retrieval import __main__ as retrieval_command
from lcjax.training import TrainConfig, run
from tools.campaigns import fuzz_cases as tables
from tools.campaigns.fuzz_cases import CLEAN, Broken, Case, Place, Refused, brief

TEXTS = (
    "", " ", "a\0b", "é" * 40, "x" * 300, "../..", "null", "1e5", "0x10", "a\nb", "\ud800",
    "{{ x }}", "-1", "👩‍👩‍👧", "9" * 4400, "tiny", "mine.txt", "thesis", "/dev/null",
    "/proc/self/mem", ".", "file:///x", "memory://a", "%s", "<|im_end|>", "1:30", "010", "no",
    "2020-02-30",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 3, 2**31 - 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 5e-324, math.nan,
    math.inf, -math.inf,
)  # fmt: skip


def odd(rng: random.Random, depth: int = 0) -> Any:
    """Draws a value of any type that YAML and JSON know, and dates."""
    kind = rng.randrange(9 if depth < 2 else 6)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return rng.choice((datetime.date(2020, 2, 3), datetime.datetime(2020, 2, 3, 4), b"\xff"))
    if kind == 6:
        return {str(odd(rng, 9)): odd(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]


def random_cases(seed: int, count: int) -> Iterator[Case]:
    kinds = (
        _config, _yaml, _words, _damaged, _damaged, _damaged, _edited, _records, _call, _kernel,
    )  # fmt: skip
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        case = rng.choice(kinds)
        name, function = case(rng)
        yield Case(f"random {number}: {name}", CLEAN, "", function)


# Configs and commands


def _config(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A training or an evaluation with odd values of several keys."""
    cls, start = rng.choice(((TrainConfig, Place.train), (EvalConfig, Place.evaluate)))
    keys = [key for key, _ in tables.fields_of(cls, "") if not key.startswith("distributed")]
    picks = rng.sample(keys, rng.randint(1, 3))
    tree: dict = {}
    for key in picks:
        tree = tables.merged(tree, tables.tree_of(key, odd(rng), cls))
    return f"config {cls.__name__} {picks}", lambda place: start(place, tree)


_PIECES = (
    "!!float x", "!!int 9", "!!python/name:os.system", "!!binary aGk=", "!!set {a}", "&a [*a]",
    "*b", "<<: *a", "? [a]\n: 1", "- ", "\t", "\0", "\ufeff", "|\n  a", "2020-01-01", "1:30", "010",
    "0o10", "{", "]", "'", '"', "#", "%YAML 1.1", "---", "...", ".inf", "yes", "~",
    "!include x.yaml",
    "!!timestamp 2020-13-45", "!<tag:x> 1", "\x85", "\u2028", "1e400", "=", "<<: 1", "<<: [1]",
)  # fmt: skip


def _yaml(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """The text of a config with pieces of YAML put in anywhere."""
    text = yaml.safe_dump(
        {"model": {"preset": "tiny"}, "train": {"steps": 2, "lr": 1e-4}, "data": {"path": "corpus"}}
    )
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(_PIECES) + text[place + rng.choice((0, 0, 3)) :]

    def case(place: Place) -> None:
        file = place.write("odd.yaml", text.encode("utf-8", "surrogatepass"))
        words = [f"--config={file}", f"--run.folder={place.folder / 'run'}"]
        place.command(lambda words: distributed.main(TrainConfig, run, words), words)

    return f"YAML {text!r}", case


_COMMANDS = {
    "convert": (
        convert.main,
        "{model} out --dtype=bfloat16 --rope.type=yarn --rope.factor=8 --force",
    ),
    "data": (
        data_command.main,
        "prepare --path={corpus} --tokenizer={model} --out=o --workers=1 --seed=3 --dtype=uint16",
    ),
    "retrieval": (retrieval_command.main, "search {store} 'the cat' --k=3 --kind=sparse --json"),
    "build": (
        retrieval_command.main,
        "build --out=o --data.path={corpus} --workers=1 --chunking.size=20 --part=0/1",
    ),
    "append": (retrieval_command.main, "append {store} --path={corpus}"),
    "pictures": (
        pictures_command.main,
        "mask --pattern.type=self_extend --pattern.window=8 --pattern.group=2 --length=32"
        " --heads=2 --layer=0 --out=p.png",
    ),
    "ropes": (pictures_command.main, "rope --length=64 --out=p.png"),
    "positions": (pictures_command.main, "positions --rows=4 --out=p.png"),
    "cost": (
        cost_command.main,
        "--model.preset=tiny --data.length=64 --topology=v5e:2x2 --mfu=0.4 --train.batch_size=4",
    ),
    "report": (evaluation.main, "report {evaluation}"),
    "compare": (evaluation.main, "compare {evaluation} --against=base"),
    "score": (evaluation.main, "score {evaluation} --out=again"),
    "reproduce": (evaluation.main, "reproduce lceg/table1 --scale=tiny --lengths=[64]"),
    "check": (check_command.main, "{model} {tokens} {store} {run} {evaluation}"),
    "train": (
        lambda words: distributed.main(TrainConfig, run, words),
        "--model.preset=tiny --data.path={corpus} --data.length=32 --run.folder=r --train.steps=2",
    ),
}


def _words(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A valid command line with words left out, doubled, or given other values."""
    name = rng.choice([*_COMMANDS])
    main, line = _COMMANDS[name]
    words = shlex.split(line)
    for _ in range(rng.randint(1, 2)):
        index, value = rng.randrange(len(words)), str(odd(rng, 9))
        key = words[index].partition("=")[0] if "=" in words[index] else None
        words[index : index + 1] = rng.choice(
            ([], [words[index]] * 2, [f"{key}={value}" if key else value], [words[index], value])
        )
        if not words:
            break

    def case(place: Place) -> None:
        if name in ("append", "score", "report"):  # they may write there
            place = _Writable(place)
        filled = list(words)
        for key, value in vars(place).items():
            filled = [word.replace(f"{{{key}}}", str(value)) for word in filled]
        place.command(main, filled)

    return f"{name} {words}"[:300], case


class _Writable:
    """A place whose shared folders are copies."""

    def __init__(self, place: Place):
        self.__dict__ |= vars(place)
        self.store, self.evaluation = place.copy(place.store), place.copy(place.evaluation)
        self.command = place.command


# Files


def _damage(rng: random.Random, file: Path, others: list[Path]) -> str:
    """Damages a file in one of many ways; returns which."""
    data = file.read_bytes()
    kind = rng.choice(("bit", "bit", "bit", "bits", "cut", "zeros", "swap", "gone", "odd file"))
    if kind in ("bit", "bits") and data:
        changed = bytearray(data)
        for _ in range(1 if kind == "bit" else 20):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "zeros":
        start = rng.randrange(len(data) + 1)
        file.write_bytes(data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :])
    elif kind == "swap":
        file.write_bytes(rng.choice(others).read_bytes())
    else:
        file.unlink()
        if kind == "odd file":
            kind = rng.choice(("fifo", "folder", "broken link", "circle", "socket"))
            _put(kind, file)
    return kind


def _put(kind: str, file: Path) -> None:
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(file.parent)  # the path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.bind(file.name[:100])
        os.chdir(here)
    else:
        file.symlink_to("nowhere" if kind == "broken link" else file.name)


def _read_model(folder: Path) -> Any:
    lm = lcjax.LanguageModel.load(str(folder))
    text = "The cat sat </s> on 日本 mats."
    with contextlib.suppress(lcjax.InputError):  # without a template
        text = lm.tokenizer.render_chat([{"role": "user", "content": text}])
    return lm.nll(tables.ROWS).tolist(), lm.encode(text), lm.tokenizer.decode([3, 4, 5, 6])


def _read_run(folder: Path) -> Any:
    lm = lcjax.LanguageModel.load(str(folder))
    return lm.nll(tables.ROWS).tolist(), lm.encode("The cat")


def _read_tokens(folder: Path) -> Any:
    data = DataConfig(sources=[TokenSource(str(folder))], length=16, shuffle=False, repeat=1)
    tokenizer = tables.language_model(folder.parent / "model").tokenizer
    return [batch["tokens"].tolist() for batch in make_loader(data, tokenizer, 2)]


def _read_store(folder: Path) -> Any:
    retriever = Retriever.open(Datastore(str(folder)))
    queries = ["the cat", "dawn", "mat at a"]
    return [
        [(hit.passage.id, hit.passage.text, hit.score) for hit in hits]
        for hits in retriever.search(queries, 5)
    ]


def _read_evaluation(folder: Path) -> Any:
    code = evaluation.main(["score", str(folder), f"--out={folder}_scored"])
    if code:
        raise Refused("score")
    tables_ = sorted(Path(f"{folder}_scored").rglob("*.md"))
    return [file.read_text() for file in tables_]


_READERS = {
    "model": _read_model,
    "run": _read_run,
    "tokens": _read_tokens,
    "store": _read_store,
    "evaluation": _read_evaluation,
}
_sound: dict[str, Any] = {}  # results of the sound folders


def _damaged(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A damaged folder is refused, or `check` finds the damage, or the results are the same."""
    source, state = rng.choice([*_READERS]), rng.getstate()
    read = _READERS[source]

    def case(place: Place) -> None:
        rng.setstate(state)
        (place.folder / "model").symlink_to(place.model)
        copy = place.copy(getattr(place, source))
        if source == "model":  # it has no checksums
            place.command(check_command.main, [str(copy), "--write"])
        if source not in _sound:
            _sound[source] = read(place.copy(copy))
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        file = rng.choice(files)
        kind = _damage(rng, file, files)
        found = _check(place, copy)
        if read(copy) != _sound[source] and not found:
            name = file.relative_to(copy)
            raise Broken(f"{name} with {kind} is read with other results, and no check finds it")

    return f"damaged {source}", case


def _check(place: Place, folder: Path) -> bool:
    """Returns whether `python -m lcjax.check` finds damage in a folder."""
    try:
        place.command(check_command.main, [str(folder)])
    except Refused:
        return True
    return False


def _edited(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A JSON file of a model in which values are odd, gone or new."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    name, state = rng.choice(names), rng.getstate()

    def case(place: Place) -> None:
        rng.setstate(state)
        copy = place.copy(place.model)
        for sums in copy.glob("*sums*"):
            sums.unlink()
        file = copy / name
        tree = json.loads(file.read_text()) if file.exists() else {}
        for _ in range(rng.randint(1, 3)):
            _change(rng, tree)
        file.write_text(json.dumps(tree, default=str))
        _read_model(copy)

    return f"edited {name}", case


def _change(rng: random.Random, tree: Any) -> None:
    """Changes one entry of nested lists and mappings."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.7:
            tree = tree[key]
            continue
        if rng.random() < 0.2:
            del tree[key]
        elif isinstance(tree, dict) and rng.random() < 0.2:
            tree[rng.choice(TEXTS)] = odd(rng)
        else:
            tree[key] = odd(rng)
        return


def _records(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A training on records with odd fields."""
    kind = rng.choice(("text", "chat", "answers"))
    rows = [_record(rng, kind) for _ in range(rng.randint(1, 4))]
    lines = [json.dumps(row, default=str) for row in rows]
    if rng.random() < 0.2:
        lines[-1] = lines[-1][: rng.randrange(len(lines[-1]) + 1)]
    source = {"type": "text"} if kind == "text" else {"type": "chat"}
    if kind == "answers":
        source |= {"prompt": "Q: {q}\n", "answer": "{a}"}

    def case(place: Place) -> None:
        file = place.write("rows.jsonl", "\n".join(lines).encode("utf-8", "surrogatepass"))
        place.train({"data": {"sources": [source | {"path": str(file)}], "holdout": 0.0}})

    return f"records {kind} {lines}"[:300], case


def _record(rng: random.Random, kind: str) -> Any:
    def maybe(value: Any) -> Any:
        return odd(rng) if rng.random() < 0.3 else value

    if kind == "text":
        return maybe({"text": maybe("The cat sat on a mat.")})
    if kind == "answers":
        return maybe({"q": maybe("Who?"), "a": maybe("A cat.")})
    turns = [
        maybe({"role": maybe(role), "content": maybe("The cat."), rng.choice(TEXTS): odd(rng)})
        for role in ("user", "assistant") * rng.randint(1, 2)
    ]
    return maybe({"messages": maybe(turns), "tools": maybe(None)})


# Functions


def _call(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A function of the Python API with one or two odd arguments."""
    name, state = rng.choice(_FUNCTIONS), rng.getstate()

    def case(place: Place) -> None:
        rng.setstate(state)
        function, arguments = _functions(place)[name]
        names = [
            n for n, p in inspect.signature(function).parameters.items() if p.kind in (0, 1, 3)
        ]
        chosen = rng.sample(names, min(len(names), rng.randint(1, 2)))
        arguments = arguments | {n: _argument(rng) for n in chosen}
        positional = [
            n for n, p in inspect.signature(function).parameters.items() if p.kind == 0
        ]  # only by position
        args = [arguments.pop(n) for n in positional if n in arguments]
        with _errors_that_name(chosen):
            result = function(*args, **arguments)
            if inspect.isgenerator(result):
                list(zip(range(3), result))

    return f"API {name}", case


@contextlib.contextmanager
def _errors_that_name(names: list[str]) -> Iterator[None]:
    """Raises Broken for an error that Python or a package raised, if it names no argument."""
    try:
        yield
    except lcjax.InputError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        if not any(name in str(error) for name in names):
            raise Broken(f"{brief(error)} names none of {names}") from error
        raise


def _argument(rng: random.Random) -> Any:
    others = (np.zeros((2, 3)), np.ones(3, int), np.zeros((0, 4), int), object(), len, (1, "a"), 1j)
    return rng.choice(others) if rng.random() < 0.3 else odd(rng)


_FUNCTIONS = (
    "nll", "logits", "generate", "stream", "chat", "continuations", "encode", "decode", "score",
    "rotation", "rotations", "memory", "with_method", "save", "load", "Sampling", "render_chat",
    "check", "search", "passages", "SparseIndex", "words", "top_k", "recall", "exact",
    "open_encoder", "from_hf", "yarn", "Chunking", "Sparse", "save_hf", "load_tokenizer",
    "Yarn", "LongRope", "Replug", "Mesh", "parse",
)  # fmt: skip


def _functions(place: Place) -> dict[str, tuple[Callable, dict[str, Any]]]:
    lm, one = place.lm, lcjax.Sampling(max_new_tokens=1)
    store = Datastore(str(place.store))
    tokens = {"tokens": tables.ROWS}
    params, model, tokenizer = checkpoints.load(place.model)
    vectors = np.eye(4, dtype=np.float32)
    exact, yarn = ExactIndex(vectors), lcjax.rope.Yarn(factor=2.0, original_length=64, theta=1e4)
    return {
        "nll": (lm.nll, tokens),
        "logits": (lm.logits, tokens),
        "generate": (lm.generate, {"prompts": ["a", "bc"], "sampling": one}),
        "stream": (lm.stream, {"prompts": ["a"], "sampling": one}),
        "chat": (lm.chat, {"messages": "Hello", "sampling": one}),
        "continuations": (lm.continuations, {"prompts": [[3]], "continuations": [[[4], [5]]]}),
        "encode": (lm.encode, {"text": "a"}),
        "decode": (lm.tokenizer.decode, {"ids": [3, 4]}),
        "score": (lm.score, {"score": token_nll, **tokens}),
        "rotation": (lm.rotation, {"length": 64}),
        "rotations": (lm.rotations, {"lengths": [64, 128]}),
        "memory": (lm.inference_memory, {"rows": 1, "length": 64}),
        "with_method": (lm.with_method, {}),
        "save": (lm.save, {"folder": str(place.folder / "saved")}),
        "load": (lcjax.LanguageModel.load, {"source": str(place.model)}),
        "Sampling": (lcjax.Sampling, {}),
        "render_chat": (
            lm.tokenizer.render_chat,
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True},
        ),
        "check": (lcjax.retrieval.check, {"retriever": Retriever.open(store), "n": 1}),
        "search": (Retriever.open(store).search, {"queries": ["cat"], "k": 2}),
        "passages": (store.passages, {"rows": [0, 1]}),
        "SparseIndex": (SparseIndex.build, {"texts": ["the cat", "a dog"]}),
        "words": (SparseIndex.build(["the cat", "a dog"]).search, {"queries": ["cat"], "k": 1}),
        "top_k": (top_k, {"queries": vectors, "vectors": vectors, "k": 2}),
        "recall": (recall, {"index": exact, "exact": exact, "queries": vectors, "k": 2}),
        "exact": (exact.search, {"queries": vectors, "k": 2}),
        "open_encoder": (open_encoder, {"path_or_name": str(place.model)}),
        "from_hf": (lcjax.rope.from_hf, {"config": {"rope_theta": 1e4}}),
        "yarn": (yarn.rotation, {"head_dim": 16, "length": 64}),
        "Chunking": (Chunking, {}),
        "Sparse": (Sparse, {}),
        "save_hf": (
            checkpoints.save_hf,
            {
                "folder": place.folder / "hf", "params": params, "config": model,
                "tokenizer": tokenizer,
            },
        ),
        "load_tokenizer": (checkpoints.load_tokenizer, {"path_or_name": str(place.model)}),
        "Yarn": (lcjax.rope.Yarn, {"factor": 2.0}),
        "LongRope": (
            lcjax.rope.LongRope,
            {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
        ),
        "Replug": (lcjax.Replug, {"lm": lm}),
        "Mesh": (lcjax.Mesh, {}),
        "parse": (config_lib.parse, {"cls": TrainConfig, "argv": ["--train.steps=3"]}),
    }  # fmt: skip


def _kernel(rng: random.Random) -> tuple[str, Callable[[Place], None]]:
    """A function of the attention kernels with odd arguments."""
    state = rng.getstate()

    def case(place: Place) -> None:
        del place
        rng.setstate(state)
        arrays = {
            name: np.ones((1, 16, heads, 8), np.float32)
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        }
        names = [*inspect.signature(kernels.flash).parameters]
        chosen = rng.sample(names, rng.randint(1, 2))
        for name in chosen:
            arrays[name] = _argument(rng)
        positional = [arrays.pop(n) for n in ("q", "k", "v", "mask") if n in arrays]
        with _errors_that_name(chosen):
            kernels.flash(*positional, **arrays)

    return "kernels flash", case
