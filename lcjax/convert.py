"""`python -m lcjax.convert SRC DST` converts any readable checkpoint to a Hugging Face folder.

--rope.type=yarn --rope.factor=8 also exports a RoPE method that needs no training. Its keys are
those of `model.rope` (`python train.py --help`), and --import FILE.py registers your own methods.

`python -m lcjax.convert check FOLDER` shows which inference engines read a model's position method
and attention pattern correctly. To convert a source folder with the name check, write ./check.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

from tqdm.auto import tqdm

from lcjax import config as config_lib
from lcjax.checkpoints import engine_check
from lcjax.checkpoints.build import untrained_rope
from lcjax.checkpoints.hf_save import HF_FOLDER, save_hf
from lcjax.checkpoints.load import load
from lcjax.checkpoints.weights import DTYPES
from lcjax.errors import InputError
from lcjax.files import check_destination, check_path
from lcjax.rope import Rope
from lcjax.storage import URLPath, check_writable, to_path


@dataclasses.dataclass(frozen=True)
class _Method:
    """Keys of the RoPE method that is exported with the weights."""

    rope: Rope | None = None  # null: the checkpoint's own


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        words = config_lib.import_modules(words)
        if words[:1] == ["check"]:
            return _check(words[1:])
        parser = _parser()
        args, words = parser.parse_known_args(words)
        if unknown := [w for w in words if not w.startswith(("--rope.", "--rope="))]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.dst = to_path(args.dst)
        _convert(args, config_lib.parse(_Method, words))
    except (InputError, OSError) as error:  # a full disk, a file where a folder should be
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    positional = "SRC DST"

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; write {self.prog} {self.positional}, and see --help")


class _CheckParser(_Parser):
    positional = "FOLDER"


def _check(words: list[str]) -> int:
    """Prints the table; returns 0 if all engines in it are right, 1 if one is not."""
    parser = _CheckParser(
        prog="python -m lcjax.convert check",
        description="Says which inference engines read a model's position method and attention"
        " pattern right. It reads config.json and no weights. Exit status: 0 if all listed engines"
        " are right, 1 if one is not, 2 for an error. A folder of the name check, as SRC of a"
        " conversion, is written ./check.",
    )
    parser.add_argument("folder", help="Hugging Face folder, run folder, .gguf, hub id")
    parser.add_argument(
        "--engine", action="append", choices=engine_check.NAMES, help="only this one; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--run",
        type=_tokens,
        metavar="TOKENS",
        help="also load the weights in lcjax and transformers (float32, on the CPU) and compare"
        " the logits of a text of 32 and of TOKENS random tokens",
    )
    args = parser.parse_args(words)
    try:
        result = engine_check.check(args.folder, args.engine or engine_check.NAMES)
    except InputError as error:
        hint = "; a source folder of this name is written ./check" if Path("check").is_dir() else ""
        raise InputError(f"{error}{hint}") from None
    if args.run is not None:
        from lcjax.generation.language_model import LanguageModel

        result = engine_check.run(result, args.run, LanguageModel.load)
    print(result.to_json() if args.json else result)
    return 0 if result.is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lcjax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", help="Hugging Face folder, adapters, .gguf, run folder, hub id")
    parser.add_argument("dst", help="folder to write: config, safetensors, tokenizer")
    parser.add_argument("--base", help="of SRC with adapters only (LoRA); default: what it names")
    parser.add_argument(
        "--context",
        type=_tokens,
        help="tokens SRC was trained for where it does not say (LongLoRA's adapters, LCEG's NTK)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights; default: as read")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace DST if lcjax wrote every file in it; else DST stays and the other files are"
        " listed",
    )
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add the SHA-256 sums of all files, for python -m lcjax.check",
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin weights with a restricted reader"
    )
    return parser


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number of tokens, 1 or more")
    return int(text)


def _convert(args: argparse.Namespace, method: _Method) -> None:
    _check_destination(args)
    with _bar("reading") as bar:
        params, config, tokenizer = load(
            args.src,
            base=args.base,
            context=args.context,
            param_dtype=args.dtype,
            allow_pickle=args.allow_pickle,
            progress=bar.update,
        )
    if method.rope is not None:
        rope = untrained_rope(method.rope, config, params)
        config = config.replace(rope=rope, extended_length=None)
    with _bar("writing") as bar:
        options = {"overwrite": args.force, "checksums": args.checksums, "progress": bar.update}
        save_hf(args.dst, params, config, tokenizer, **options)
    print(f"{args.dst}: {config.num_layers} layers, {config.param_dtype}")


def _check_destination(args: argparse.Namespace) -> None:
    """Raises an InputError if DST cannot be written or overlaps a source, before loading."""
    dst = args.dst
    check_path("DST", dst)
    if isinstance(dst, Path):
        nearest = next(parent for parent in (dst, *dst.absolute().parents) if parent.exists())
        if not nearest.is_dir():
            raise InputError(f"{dst}: {nearest} is a file, so no folder can be made below it")
    for key, name in (("SRC", args.src), ("--base", args.base)):
        source = to_path(name or "")
        source_exists = name and type(source) is type(dst) and source.exists()
        if source_exists and _overlap(source.resolve(), dst.resolve()):
            raise InputError(f"DST {dst} overlaps {key}={name}; choose a separate folder")
    check_destination(dst, HF_FOLDER, args.force, "--force")
    if isinstance(dst, URLPath):
        check_writable(dst)


def _overlap(source: Path, dst: Path) -> bool:
    """Whether `dst` is `source`, lies inside it, or contains it."""
    if isinstance(dst, URLPath):
        return source in (dst, *dst.parents) or dst in source.parents
    if any(parent.exists() and parent.samefile(source) for parent in (dst, *dst.parents)):
        return True
    return dst.is_dir() and any(parent.samefile(dst) for parent in source.parents)


def _bar(what: str) -> tqdm:
    # The delay hides the bar until the first bytes, so that an error before them is one line.
    return tqdm(desc=what, unit="B", unit_scale=True, mininterval=0.5, delay=0.01)


if __name__ == "__main__":
    sys.exit(main())
