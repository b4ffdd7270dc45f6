"""Datastores: python -m lcjax.retrieval COMMAND --help.

build: cuts text into passages, from --data.path=TEXT to --out=FOLDER, for a search by words, and
  with --encoder.path=MODEL by vectors. --part=i/n writes a part of the shards; without it, the
  command writes all that are missing.
search FOLDER "question": prints the passages that fit best.
check FOLDER: searches sentences of the passages themselves; with --files also compares checksums.
append FOLDER --path=TEXT: adds passages.
delete FOLDER ID ...: removes passages.
chunks: writes rows of text with the passages retrieved for them, for a training, from --config=FILE
  to --out=FOLDER. --part=i/n as for build.
windows: writes windows of text with the passages retrieved for their beginning, for the task rag_lm
  of eval.py, from --config=FILE to --out=FILE.jsonl.
negatives --path=QUESTIONS --store=FOLDER --out=FILE: writes pairs of questions and passages, with
  passages that lack the answer, to train an encoder on.
questions: makes questions with answers from a datastore by patterns, from --config=FILE to
  --out=FOLDER, for `eval.py` and `eval.py retrieval`.
build-tokens: writes keys and values for kNN-LM, from --data.path=TEXT by --model.path=MODEL to
  --out=FOLDER.
"""

import argparse
import json
import sys
import warnings
from typing import Any, NoReturn

from tqdm.auto import tqdm

from lcjax import config as config_lib
from lcjax.config.help import print_help
from lcjax.data.data_config import TextConfig
from lcjax.errors import InputError, suggestion
from lcjax.retrieval.build_store import BuildConfig, build, read_documents
from lcjax.retrieval.chunks import ChunksConfig, WindowsConfig, write_chunks, write_windows
from lcjax.retrieval.datastore import Datastore
from lcjax.retrieval.encoder import open_encoder
from lcjax.retrieval.knn_lm import TokenConfig, build_tokens
from lcjax.retrieval.negatives import mine
from lcjax.retrieval.passages import Chunking
from lcjax.retrieval.questions import QuestionsConfig, write_questions
from lcjax.retrieval.retriever import KINDS, Retriever, check

_PART = "{}: part {} is written; when all are, run the command without --part"
_WIDTH = 100  # characters of a passage that `search` prints on a line


def main(argv: list[str] | None = None) -> int:
    command, *words = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        print_help(__doc__)
        return 0
    with config_lib.ErrorReport() as report:
        if command not in _COMMANDS:
            problem = f"{command} is not a command" if command else "no command"
            raise InputError(f"{problem}; {suggestion(command, _COMMANDS)}")
        _COMMANDS[command](words, report)
    return report.code


class _Parser(argparse.ArgumentParser):
    def __init__(self, command: str, description: str):
        super().__init__(
            prog=f"python -m lcjax.retrieval {command}",
            description=description,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number")
    return int(text)


def _parse(kind: type, words: list[str], report: config_lib.ErrorReport) -> tuple[Any, str | None]:
    """Returns the settings of a command that can be divided, and its --part."""
    part, rest = None, []
    while words:
        key, equals, value = words.pop(0).partition("=")
        if key == "--part":
            if not equals and not words:
                raise InputError("--part has no value; write --part=i/n")
            part = value if equals else words.pop(0)
        else:
            rest.append(f"{key}{equals}{value}")
    if {"-h", "--help"} & set(rest):
        print("--part=i/n  write the shards i, i + n, ...; without it, all that are missing\n")
    report.config = settings = config_lib.parse(kind, rest)
    return settings, part


def _build(words: list[str], report: config_lib.ErrorReport) -> None:
    settings, part = _parse(BuildConfig, words, report)
    index = build(settings, part=part)
    if index is None:
        print(_PART.format(settings.out, part))
        return
    print(
        f"{settings.out}: {index['passages']:,} passages of {index['documents']:,} documents;"
        f' search them with python -m lcjax.retrieval search {settings.out} "question"'
    )


def _chunks(words: list[str], report: config_lib.ErrorReport) -> None:
    settings, part = _parse(ChunksConfig, words, report)
    if write_chunks(settings, part=part) is None:
        print(_PART.format(settings.out, part))


def _windows(words: list[str], report: config_lib.ErrorReport) -> None:
    report.config = settings = config_lib.parse(WindowsConfig, words)
    write_windows(settings)


def _questions(words: list[str], report: config_lib.ErrorReport) -> None:
    report.config = settings = config_lib.parse(QuestionsConfig, words)
    files = write_questions(settings)
    print("\n".join(["Written:", *(f"  {file}" for file in files)]))


def _build_tokens(words: list[str], report: config_lib.ErrorReport) -> None:
    for word in words:
        if word.partition("=")[0] == "--part":
            raise InputError(
                f"{word}: build-tokens appends the keys of all tokens to one file in the order of"
                " the text, so it has no parts: run it once, on several devices with --mesh.data=N"
            )
    report.config = settings = config_lib.parse(TokenConfig, words)
    index = build_tokens(settings)
    print(
        f"{settings.out}: {index['tokens']:,} tokens; evaluate with them by eval.py"
        f" --methods='[{{name: knn, knn: {{folder: {settings.out}}}}}]'"
    )


def _folder_parser(command: str, description: str) -> _Parser:
    parser = _Parser(command, description)
    parser.add_argument("folder", help="the datastore")
    return parser


def _add_search(parser: _Parser) -> None:
    parser.add_argument("--kind", choices=KINDS, help="default: hybrid, or what the folder has")
    parser.add_argument("--encoder", help="default: the one that built the datastore")
    parser.add_argument("--index", default="exact", help="exact, ivf, ivf_pq or hnsw")
    parser.add_argument("--rerank", help="cross-encoder or ColBERT that ranks the best 100 again")


def _open(store: str | Datastore, args: argparse.Namespace) -> Retriever:
    rerank = None if args.rerank is None else open_encoder(args.rerank)
    options = {"encoder": args.encoder, "index": args.index, "rerank": rerank}
    return Retriever.open(store, args.kind, **options)


def _search(words: list[str], report: config_lib.ErrorReport) -> None:
    parser = _folder_parser("search", "Prints the passages that fit a question best.")
    parser.add_argument("question", nargs="+", help="one or more questions")
    parser.add_argument("--k", type=_whole, default=5, help="passages for each (5)")
    parser.add_argument("--json", action="store_true", help="one JSON object per passage")
    _add_search(parser)
    args = report.config = parser.parse_args(words)
    retriever = _open(args.folder, args)
    for question, hits in zip(args.question, retriever.search(args.question, args.k)):
        if not args.json and len(args.question) > 1:
            print(f"# {question}")
        for rank, hit in enumerate(hits, 1):
            passage = hit.passage
            if args.json:
                fields = {"question": question, "rank": rank, "score": hit.score}
                fields |= {"id": passage.id, "title": passage.title, "text": passage.text}
                print(json.dumps(fields, ensure_ascii=False))
                continue
            text = " ".join(passage.text.split())
            text = text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
            print(f"{rank:>3}  {hit.score:9.4f}  {passage.id}\n     {text}")
        if not hits and not args.json:
            print("no passage has a word of the question")


def _check(words: list[str], report: config_lib.ErrorReport) -> None:
    parser = _folder_parser("check", "Searches sentences of the passages themselves.")
    parser.add_argument("--n", type=_whole, default=100, help="number of sentences (100)")
    parser.add_argument("--seed", type=_whole, default=0, help="of the sentences (0)")
    parser.add_argument("--files", action="store_true", help="compare checksums of all files first")
    _add_search(parser)
    args = report.config = parser.parse_args(words)
    store = Datastore(args.folder)
    if args.files:
        print(f"{args.folder}: {store.check_files()} checksums are right")
    retriever = _open(store, args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        print(check(retriever, args.n, args.seed).table())
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)


def _negatives(words: list[str], report: config_lib.ErrorReport) -> None:
    parser = _Parser("negatives", "Writes pairs with hard negatives to train an encoder on.")
    parser.add_argument("--path", required=True, help="lines of JSON with question and answer")
    parser.add_argument("--store", required=True, help="the datastore")
    parser.add_argument("--out", required=True, help="file of the pairs, .jsonl")
    parser.add_argument("--k", type=_whole, default=100, help="passages for each question (100)")
    parser.add_argument("--count", type=_whole, default=7, help="hard negatives of each (7)")
    _add_search(parser)
    args = report.config = parser.parse_args(words)
    pairs = mine(args.path, _open(args.store, args), args.out, k=args.k, count=args.count)
    print(f"{args.out}: {pairs}")


def _append(words: list[str], report: config_lib.ErrorReport) -> None:
    parser = _folder_parser("append", "Adds the passages of further text.")
    parser.add_argument("--path", required=True, help="text, as data.path")
    parser.add_argument(
        "--encoder", action="append", default=[], help="new path of an encoder that has moved"
    )
    args = report.config = parser.parse_args(words)
    store = Datastore(args.folder)
    chunking = Chunking(**store.index["chunking"])
    texts = read_documents(TextConfig(path=args.path), chunking)
    texts = tqdm(texts, desc="append", unit="document", delay=1)
    num_added = store.append(texts, encoder=args.encoder)
    print(f"{args.folder}: {num_added:,} passages more, {len(store):,} in all")


def _delete(words: list[str], report: config_lib.ErrorReport) -> None:
    parser = _folder_parser("delete", "Removes passages from all searches.")
    parser.add_argument("id", nargs="+", help="ids of passages, as `search` prints them")
    args = report.config = parser.parse_args(words)
    store = Datastore(args.folder)
    print(f"{args.folder}: {store.delete(args.id)} deleted, {len(store):,} passages remain")


_COMMANDS = {
    "build": _build,
    "search": _search,
    "check": _check,
    "append": _append,
    "delete": _delete,
    "chunks": _chunks,
    "windows": _windows,
    "negatives": _negatives,
    "questions": _questions,
    "build-tokens": _build_tokens,
}

if __name__ == "__main__":
    sys.exit(main())
