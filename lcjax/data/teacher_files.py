"""Sources of type teacher: rows of text with the largest next-token probabilities of a model.

`python -m lcjax.data teacher` writes a folder: `teacher.json`, and `.bin` shards of rows of equal
size (`row_type`). A row holds the decoder's tokens and their targets, the chunks of context, and
for every token the teacher's distribution of the next one.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.chunks import segment_positions
from lcjax.data.config import TEACHER_INDEX, TEACHER_PLAN, DataConfig, TeacherSource
from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Reader, SourceFiles
from lcjax.data.token_files import DTYPES
from lcjax.errors import InputError

FORMAT = 1
Row = dict[str, np.ndarray]


def row_type(count: int, length: int, decoder: int, top: int, ids: str) -> np.dtype:
    """Returns the dtype of a row on disk.

    Args:
      count: number of chunks.
      length: tokens in a chunk.
      decoder: tokens of the decoder.
      top: number of probabilities; the probability of all other tokens is stored after them.
      ids: dtype of token ids, a key of `lcjax.data.token_files.DTYPES`.
    """
    token = DTYPES[ids]
    return np.dtype(
        [
            ("chunks", token, (count, length)),
            ("chunk_mask", "?", (count, length)),
            ("tokens", token, (decoder,)),
            ("targets", token, (decoder,)),
            ("segments", "<i4", (decoder,)),
            ("weights", "?", (decoder,)),
            ("teacher_ids", token, (decoder, top)),
            ("teacher_probabilities", "<f2", (decoder, top + 1)),
        ]
    )


class TeacherFiles(SourceFiles):
    """The shards of a folder of teacher rows."""

    def __init__(self, source: TeacherSource, tokenizer: Any = None):
        self.source, folder = source, Path(source.path).expanduser()
        self.index = _read_index(folder)
        shape = {key: self.index[key] for key in ("count", "length", "decoder", "top", "ids")}
        self._type = row_type(**shape)
        shards = self.index["shards"]
        for shard in shards:
            _check_shard(folder / f"{shard['name']}.bin", shard["rows"], self._type.itemsize)
        self.paths = FileList([(s["name"], folder / f"{s['name']}.bin") for s in shards])
        if tokenizer is not None and self.index["tokenizer"] != tokenizer.fingerprint:
            raise InputError(
                f"{source.path} was made with the tokenizer of {self.index['teacher']}"
                f" ({self.index['tokenizer']}), the model's is another ({tokenizer.fingerprint}):"
                " a student needs its teacher's tokenizer; make the rows again with such a teacher"
            )

    def check_rows(self, config: DataConfig) -> None:
        """Raises an `InputError` where the settings give rows of another shape."""
        stored, chunks = self.index, config.chunks
        shape = f"{{count: {stored['count']}, length: {stored['length']}}}"
        if chunks is None:
            raise InputError(
                f"data.chunks=null, and the rows of {self.source.path} have chunks; set it to"
                f" {shape}"
            )
        if (chunks.count, chunks.length, chunks.text) != (
            stored["count"],
            stored["length"],
            "before",
        ):
            raise InputError(
                f"data.chunks of {chunks.count} x {chunks.length}, text={chunks.text}, are not"
                f" those of {self.source.path}; set data.chunks to {shape}"
            )
        if (length := chunks.tokens + stored["decoder"]) != config.length:
            raise InputError(
                f"data.length={config.length} is not that of the rows of {self.source.path}; set"
                f" it to {length}"
            )

    def open(self, index: int, cache: FileCache) -> "TeacherReader":
        return TeacherReader(*self.paths[index], self._type, cache)


class TeacherReader(Reader):
    """The rows of one shard."""

    def __init__(self, name: str, path: Path, row_dtype: np.dtype, cache: FileCache):
        super().__init__(name, path, cache)
        self._type, self._count = row_dtype, path.stat().st_size // row_dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def record(self, index: int) -> Row:
        """Returns the fields of a training batch, without the batch axis."""
        start, size = index * self._type.itemsize, self._type.itemsize
        row = np.frombuffer(self._cache.map(self._path)[start : start + size], self._type)[0]
        integers = ("chunks", "tokens", "targets", "segments", "teacher_ids")
        return {name: row[name].astype(np.int32) for name in integers} | {
            "chunk_mask": row["chunk_mask"].copy(),
            "positions": segment_positions(row["segments"]),
            "weights": row["weights"].astype(np.float32),
            "teacher_probabilities": row["teacher_probabilities"][:, :-1].copy(),
            "teacher_rest": row["teacher_probabilities"][:, -1].copy(),
        }


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / TEACHER_INDEX
    if not file.is_file():
        if (folder / TEACHER_PLAN).is_file():
            raise InputError(
                f"data.sources: {folder} is not finished; run the same `python -m lcjax.data"
                " teacher` once more; it resumes"
            )
        raise InputError(
            f"data.sources: {folder} has no {TEACHER_INDEX}; name a folder that `python -m"
            " lcjax.data teacher` wrote"
        )
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; make the rows again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{file} is no index of format {FORMAT}; make the rows again")
    return index


def _check_shard(path: Path, rows: int, size: int) -> None:
    num_bytes = path.stat().st_size if path.is_file() else -1
    if num_bytes == rows * size:
        return
    fault = "is missing"
    if num_bytes >= 0:
        fault = f"has {num_bytes:,} bytes, and {rows:,} rows of {size:,} take {rows * size:,}"
    raise InputError(f"{path} {fault}: it was cut or moved; copy it again, or make the rows again")
