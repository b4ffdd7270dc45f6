"""Rows that are stored with all fields of a batch: sources of types teacher and retrieved.

A folder has an index (`teacher.json`, `retrieved.json`) and `.bin` shards of rows of equal size
(`row_type`). A row holds the decoder's tokens, their targets and the chunks of context. A row of a
teacher also holds the distribution of the next token at every token. `write_rows` writes such a
folder from the rows of a loader, shard by shard. After a kill it resumes after the last complete
shard.
"""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tqdm.auto import tqdm

from lcjax.data.chunks import Chunks, Row, segment_positions
from lcjax.data.data_config import RETRIEVED, TEACHER, DataConfig, FolderKind, StoredSource
from lcjax.data.jobs import WHY_LOCAL, read_shard
from lcjax.data.readers import Reader, SourceFiles
from lcjax.data.token_files import (
    DTYPES,
    FORMAT,
    check_finished,
    check_tokenizer,
    list_shards,
    read_index,
)
from lcjax.errors import InputError, NonEmpty, PositiveInt, check_fields
from lcjax.files import atomic_file, sums_of, write_index, write_json
from lcjax.parallel import distributed
from lcjax.storage import local_path, to_path


@dataclass(frozen=True)
class RowsConfig:
    """Options of the commands that store rows."""

    data: DataConfig = field(default_factory=DataConfig)  # the data section of the training
    out: Annotated[str, NonEmpty("give --out=FOLDER")] = ""  # folder to write
    rows: PositiveInt | None = None  # number of rows; null: to the end of the text (data.repeat)
    batch_size: PositiveInt = 8  # rows of a batch, over all devices
    save_every: PositiveInt = 16  # batches in a shard; a kill loses at most one shard

    def __post_init__(self):
        check_fields("", self)
        if self.rows is None and self.data.repeat is None:
            raise InputError(
                "rows=null with data.repeat=null has no end: give --rows, or --data.repeat=1"
            )
        if self.data.chunks is not None and self.data.chunks.noise is not None:
            raise InputError(
                "data.chunks.noise hides context in a training, anew in every epoch; set it in the"
                " training's config, and leave it out here"
            )
        for i, source in enumerate(self.data.sources):
            if isinstance(source, StoredSource):
                raise InputError(
                    f"data.sources.{i}: rows of type {source.kind.name} are stored already; name"
                    " their text"
                )

    @property
    def folder(self) -> Path:
        return local_path("out", self.out, WHY_LOCAL)

    def row_shape(self, vocab_size: int) -> dict[str, Any]:
        """Returns the fields of the index that describe a row: arguments of `row_type`."""
        chunks, ids = self.data.chunks, "uint16" if vocab_size <= 1 << 16 else "uint32"
        shape = {"count": chunks.count, "length": chunks.length}
        return shape | {"decoder": self.data.decoder_length, "top": None, "ids": ids}


def row_type(count: int, length: int, decoder: int, top: int | None, ids: str) -> np.dtype:
    """Returns the dtype of a row on disk.

    Args:
      count: number of chunks.
      length: number of tokens in a chunk.
      decoder: number of tokens that the decoder reads.
      top: number of a teacher's probabilities; the probability of all other tokens is stored after
        them. None: no teacher.
      ids: dtype of token ids, a key of `DTYPES`.
    """
    token = DTYPES[ids]
    fields = [
        ("chunks", token, (count, length)),
        ("chunk_mask", "?", (count, length)),
        ("tokens", token, (decoder,)),
        ("targets", token, (decoder,)),
        ("segments", "<i4", (decoder,)),
        ("weights", "?", (decoder,)),
    ]
    if top is not None:
        fields.append(("teacher_ids", token, (decoder, top)))
        fields.append(("teacher_probabilities", "<f2", (decoder, top + 1)))
    return np.dtype(fields)


class StoredFiles(SourceFiles):
    """The shards of a folder of rows."""

    def __init__(self, source: StoredSource, tokenizer: Any = None):
        self.source, folder, kind = source, to_path(source.path), source.kind
        if not (folder / kind.index).is_file():
            check_finished(folder, kind)
            raise InputError(
                f"data.sources: {folder} has no {kind.index}; name a folder that"
                f" `{kind.command}` wrote"
            )
        self.index, _ = read_index(folder, kind)
        index = self.index
        check_tokenizer(source, index, index.get(kind.name), tokenizer)
        names = ("count", "length", "decoder", "top", "ids")
        self.row_type = row_type(**{name: index[name] for name in names})
        counts = {shard["name"]: shard["rows"] for shard in index["shards"]}
        self.paths = list_shards(folder, counts, self.row_type.itemsize, kind)

    def check_rows(self, config: DataConfig) -> None:
        """Raises an `InputError` if the stored rows have another shape than those of `config`."""
        index, chunks, path = self.index, config.chunks, self.source.path
        fields = {"count": index["count"], "length": index["length"]}
        if self.source.kind is RETRIEVED:
            fields |= {"text": "retrieved", "stride": index["stride"]}
        stored = Chunks(**fields)
        if chunks is None or _describe(chunks) != _describe(stored):
            fields = ", ".join(f"{k}: {v}" for k, v in fields.items() if v is not None)
            raise InputError(
                f"data.chunks={(chunks and _describe(chunks)) or 'null'} is not that of the rows of"
                f" {path}; set it to {{{fields}}}"
            )
        row_length = index["decoder"] + (stored.tokens if stored.text == "before" else 0)
        if row_length != config.length:
            raise InputError(
                f"data.length={config.length} is not that of the rows of {path}; set it to"
                f" {row_length}"
            )

    def reader_class(self, path: Path) -> type[Reader]:
        return StoredReader


def _describe(chunks: Chunks) -> str:
    stride = "" if chunks.stride is None else f", stride={chunks.stride}"
    return f"{chunks.count} x {chunks.length}, text={chunks.text}{stride}"


class StoredReader(Reader):
    """Reads the rows of one shard."""

    def __len__(self) -> int:
        return len(self._map())

    def record(self, index: int) -> Row:
        """Returns the fields of a training batch, without the batch axis."""
        row = self._map()[index]
        integers = ("chunks", "tokens", "targets", "segments")
        fields = {name: row[name].astype(np.int32) for name in integers} | {
            "chunk_mask": row["chunk_mask"].copy(),
            "positions": segment_positions(row["segments"]),
            "weights": row["weights"].astype(np.float32),
        }
        if "teacher_ids" not in row.dtype.names:
            return fields
        return fields | {
            "teacher_ids": row["teacher_ids"].astype(np.int32),
            "teacher_probabilities": row["teacher_probabilities"][:, :-1].copy(),
            "teacher_rest": row["teacher_probabilities"][:, -1].copy(),
        }

    def _map(self) -> np.ndarray:
        return np.frombuffer(self._cache.map(self._path), self._files.row_type)


def write_rows(
    config: RowsConfig,
    kind: FolderKind,
    shape: dict[str, Any],
    loader: Any,
    complete: Callable[[Row], Row],
    fields: dict[str, Any],
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any] | None:
    """Writes the missing shards and the index of a folder that `lcjax.data.jobs.begin` created.

    Args:
      config: folder, number of rows, and batches of a shard.
      kind: kind of the folder.
      shape: arguments of `row_type`.
      loader: yields batches.
      complete: adds the fields of a batch that the loader lacks; every process calls it.
      fields: further fields of the index. They must be equal in all runs whose identity `begin`
        accepts.
      part: (i, n) with n > 1 writes only the shards i, i + n, ... and no index; the rows of other
        shards are read, but not completed.

    Returns:
      The index; None for a part.

    Raises:
      InputError: the disk is too small.
    """
    _ShardWriter(config, kind, shape, loader, complete, part).run()
    distributed.barrier("rows written")
    _, num_parts = part
    if num_parts > 1:
        return None
    out, shards = config.folder, list(_read_shards(config.folder).values())
    index = {
        "format": FORMAT,
        "rows": sum(shard["rows"] for shard in shards),
        **shape,
        "shards": [{k: s[k] for k in ("name", "rows")} for s in shards if s["rows"]],
        **fields,
    }
    if distributed.is_main_process():
        sums = [shard.get("sums", {}) for shard in shards if shard["rows"]]
        write_index(out / kind.index, index, {name: s[name] for s in sums for name in s})
        (out / kind.plan).unlink()
        for shard in shards:
            (out / f"{shard['name']}.json").unlink()
            if not shard["rows"]:
                (out / f"{shard['name']}.bin").unlink()
    distributed.barrier("index written")
    return index


class _ShardWriter:
    """Writes the missing rows of a folder, shard by shard."""

    def __init__(
        self,
        config: RowsConfig,
        kind: FolderKind,
        shape: dict[str, Any],
        loader: Any,
        complete: Callable[[Row], Row],
        part: tuple[int, int],
    ):
        self._config, self._kind, self._out, self._part = config, kind, config.folder, part
        self._loader, self._complete, self._type = loader, complete, row_type(**shape)
        self._shards = _read_shards(self._out)
        self._num_rows, self._data_ended = 0, False  # before the next shard
        self._num_stored = sum(shard["rows"] for shard in self._shards.values())
        if not distributed.equal_on_all_processes(str(sorted(self._shards))):
            raise InputError(
                f"out={self._out} is not the same folder for all processes; name one on storage"
                " that all machines share"
            )

    def run(self) -> None:
        self._check_disk()
        # In a log file one line a minute is enough.
        interval = 0.1 if sys.stderr.isatty() else 60.0
        options = {"unit": "row", "desc": self._kind.name, "mininterval": interval}
        options |= {"disable": not distributed.is_main_process()}
        number, position = 0, None
        with tqdm(total=self._config.rows, **options) as self._bar:
            try:
                while not self._data_ended and self._num_rows != self._config.rows:
                    if shard := self._shards.get(number):
                        self._num_rows += shard["rows"]
                        self._data_ended, position = shard["ended"], shard["position"]
                        self._bar.update(shard["rows"])
                    else:
                        if position is not None:
                            self._loader.set_state(position)
                        position = None
                        self._read_shard(number)
                    number += 1
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{self._num_stored:,} rows are in {self._out}; the same command resumes"
                ) from None

    def _check_disk(self) -> None:
        size, rows = self._type.itemsize, self._config.rows
        missing = 0 if rows is None else (rows - self._num_stored) * size
        free = shutil.disk_usage(self._out).free
        if missing > free:
            smaller = ", a smaller top" if self._kind is TEACHER else ""
            raise InputError(
                f"rows={rows}: the missing ones take {missing / 1e9:,.1f} GB ({size:,} bytes"
                f" each), and out={self._out} has {free / 1e9:,.1f} GB free; lower rows"
                f"{smaller}, or name a larger disk"
            )

    def _read_shard(self, number: int) -> None:
        """Reads the batches of a shard, and writes it if it is of this part."""
        is_written, parts = number % self._part[1] == self._part[0], []
        for _ in range(self._config.save_every):
            batch = next(self._loader, None)
            if batch is None:
                self._data_ended = True
                break
            rows = self._to_disk_rows(self._complete(batch)) if is_written else _text_rows(batch)
            rows = rows[: self._num_missing(sum(map(len, parts)))]
            parts.append(rows)
            self._bar.update(len(rows))
            if self._num_missing(sum(map(len, parts))) == 0:
                break
        count, name = sum(map(len, parts)), f"{number:06d}"
        position = self._loader.get_state()
        if is_written and distributed.is_main_process():
            with atomic_file(self._out / f"{name}.bin", "wb") as file:
                file.writelines(rows.tobytes() for rows in parts)
            shard = {"name": name, "rows": count, "ended": self._data_ended, "position": position}
            shard["sums"] = sums_of([self._out / f"{name}.bin"], self._out)
            write_json(self._out / f"{name}.json", shard)
        self._num_rows += count
        self._num_stored += count * is_written

    def _num_missing(self, num_pending: int) -> int | None:
        """Returns the number of rows missing after `num_pending` further ones; None: no limit."""
        rows = self._config.rows
        return None if rows is None else rows - self._num_rows - num_pending

    def _to_disk_rows(self, batch: Row) -> np.ndarray:
        """Converts a batch to the dtype on disk, without padding rows."""
        rows = np.zeros(len(batch["tokens"]), self._type)
        for name in self._type.names:
            rows[name] = batch[name]
        return rows[_text_rows(batch)]


def _text_rows(batch: Row) -> np.ndarray:
    """Returns the indices of the rows of a batch that are not padding."""
    return np.flatnonzero((batch["segments"] > 0).any(1))


def _read_shards(out: Path) -> dict[int, dict[str, Any]]:
    """Returns the descriptions of the complete shards by number, in order."""
    numbers = sorted(int(f.stem) for f in out.iterdir() if re.fullmatch(r"\d{6}\.json", f.name))
    return {number: read_shard(out, number) for number in numbers}
