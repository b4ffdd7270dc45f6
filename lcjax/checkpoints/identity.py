"""What tells a checkpoint from another one under the same path, without reading all of it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lcjax.checkpoints.adapter_folder import base_named_by, is_adapter_folder
from lcjax.checkpoints.load import is_run, resolve
from lcjax.checkpoints.run_folder import BASE, MODEL_CONFIG
from lcjax.checkpoints.safetensors_io import has_weights, read_header
from lcjax.checkpoints.torch_pickle import bin_files

_PART = 4096  # bytes
_PARTS = 256  # of a large file, evenly spread: of 5 GB they are 1 MB
_KINDS = (".safetensors", ".bin", ".json", ".model", ".jinja")  # what a model is read from


def identity(path_or_name: str | Path, base: str | Path | None = None) -> str:
    """A digest of the names and sizes of a checkpoint's files, and of parts of what they hold.

    Of safetensors the beginning of every tensor counts, so no training goes unnoticed; of other
    large files evenly spread parts do. Of a run folder it is the newest checkpoint. Adapters count
    with the base that `load` puts them on.
    """
    path = resolve(path_or_name)
    folder = path.parent if path.is_file() else path
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        with file.open("rb") as stream:
            for start in _starts(file, size):
                stream.seek(start)
                digest.update(stream.read(_PART))
    if path.is_dir() and is_adapter_folder(path, has_weights(path) or bool(bin_files(path))):
        base = base_named_by(path) if base is None else base
        digest.update(identity(base).encode() if base is not None else b"")
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not is_run(path):
        return sorted(file for file in path.iterdir() if file.suffix in _KINDS and file.is_file())
    steps = [int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdigit()]
    newest = path / "checkpoints" / str(max(steps, default=0))
    found = [path / BASE, path / MODEL_CONFIG, *newest.rglob("*"), *(path / "tokenizer").rglob("*")]
    return sorted(file for file in found if file.is_file())


def _starts(file: Path, size: int) -> Iterator[int]:
    if file.suffix == ".safetensors":
        return (offset for _, _, offset in read_header(file))
    count = min(_PARTS, -(-size // _PART))
    return map(int, np.linspace(0, max(size - _PART, 0), count))
