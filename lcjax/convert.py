"""`python -m lcjax.convert SRC DST` converts any readable checkpoint to a Hugging Face folder.

--rope.type=yarn --rope.factor=8 also exports a RoPE method that needs no training. Its keys are
those of `model.rope` (`python train.py --help`), and --import FILE.py registers your own methods.

`python -m lcjax.convert check FOLDER` shows which inference engines read a model's position method
and attention pattern correctly. To convert a source folder with the name check, write ./check.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm.auto import tqdm

from lcjax import config as config_lib
from lcjax.checkpoints.build import untrained_rope
from lcjax.checkpoints.engine_check import (
    NAMES,
    REFUSED,
    RIGHT,
    SAME,
    WRONG,
    Check,
    Row,
    check,
)
from lcjax.checkpoints.hf_save import HF_FOLDER, save_hf
from lcjax.checkpoints.hub import find_checkpoint, is_run
from lcjax.checkpoints.load import load
from lcjax.checkpoints.weights import DTYPES
from lcjax.errors import InputError, one_line
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
        "--engine", action="append", choices=NAMES, help="only this one; repeatable"
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
        result = check(args.folder, args.engine or NAMES)
    except InputError as error:
        hint = "; a source folder of this name is written ./check" if Path("check").is_dir() else ""
        raise InputError(f"{error}{hint}") from None
    if args.run is not None:
        result = _run(result, args.run)
    if args.json:
        rows = [dataclasses.asdict(row) for row in result.rows]
        print(json.dumps(result._asdict() | {"rows": rows}, indent=1))
    else:
        print(_table(result))
    return 0 if all(row.verdict == RIGHT for row in result.rows) else 1


def _table(result: Check) -> str:
    """Returns an aligned table, then a line for each row with a problem or advice."""
    lines = [f"{result.model}: {result.position}, {result.pattern}"]
    cells = [("engine", "source read", "verdict", "largest difference")]
    for row in result.rows:
        difference = "" if row.difference is None else f"{row.difference:.2g}"
        cells.append((row.engine, row.version, row.verdict, difference))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    for row in result.rows:
        if row.verdict != RIGHT or row.advice or row.reason != SAME:
            notes = filter(None, (row.reason, row.advice))
            lines.append(f"{row.engine} ({row.verdict}): {'; '.join(notes)}")
    return "\n".join(lines)


def _run(result: Check, length: int) -> Check:
    """Compares the logits of lcjax and transformers on texts of 32 and of `length` random tokens.

    Returns:
      `result`, in which the row of transformers is replaced by the measured one.

    Raises:
      InputError: a package is missing, or the model is no folder that transformers opens.
    """
    from lcjax.generation.language_model import LanguageModel

    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"--run={length} needs {error.name}: pip install torch transformers"
        ) from None
    path = find_checkpoint(result.model)
    path = path / "model" if is_run(path) else path
    if isinstance(path, URLPath):
        raise InputError(f"--run={length}: transformers opens local folders; copy {path} to a disk")
    if not path.is_dir():
        raise InputError(f"--run={length}: {path} is no folder that transformers opens")
    model = LanguageModel.load(str(path), param_dtype="float32", dtype="float32")
    transformers.utils.logging.disable_progress_bar()
    try:
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (KeyError, OSError, ValueError) as error:
        verdict, largest = REFUSED, None
        reason = f"in a run it stops: {one_line(error)[:200]}"
    else:
        reference.eval()
        largest = 0.0
        for n in sorted({32, length}):
            tokens = np.random.default_rng(n).integers(model.config.vocab_size, size=(1, n))
            logits = model.logits(tokens)
            with torch.no_grad():
                difference = np.abs(logits - reference(torch.from_numpy(tokens)).logits.numpy())
            largest = max(largest, float(difference.max() / np.abs(logits).max()))
        # Relative to the largest: float32 in two programs.
        verdict = RIGHT if largest <= 1e-4 else WRONG
        reason = f"in a run, logits of texts of 32 and {length} tokens differ by {largest:.2g} of"
        reason += " the largest"
    row = Row("transformers", f"{transformers.__version__} (run)", verdict, reason, "", largest)
    others = (row for row in result.rows if row.engine != "transformers")
    return result._replace(rows=(row, *others))


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
