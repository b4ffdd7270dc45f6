"""`python -m lcjax.data teacher`: stores a model's next-token probabilities, to train a student.

CEPED (Yen et al. 2024, arXiv 2402.16617, sec. 4): the original decoder reads the context and the
tokens of a row as one text. For each of these tokens the largest next-token probabilities are
stored. Rows come from `data:` as in training, in the same order. Each shard is written atomically,
and after a kill the same command resumes after the last complete shard.
"""

import functools
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
import jax
import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints.build import ModelSection, build, check_source
from lcjax.checkpoints.run_folder import fingerprint
from lcjax.data.config import INDEX, PLAN, DataConfig, TeacherSource
from lcjax.data.corpus import check_sources
from lcjax.data.jobs import begin, write_json
from lcjax.data.loader import Loader, make_loader
from lcjax.data.token_files import FORMAT, row_type
from lcjax.errors import InputError, whole_numbers
from lcjax.files import atomic_file
from lcjax.models import Decoder, head
from lcjax.models.distill import Teacher, largest_probabilities
from lcjax.parallel import distributed
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, process_rows

Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class TeacherConfig:
    """Settings of `python -m lcjax.data teacher`."""

    model: ModelSection = field(default_factory=ModelSection)  # the teacher: a plain decoder
    data: DataConfig = field(default_factory=DataConfig)  # rows as the student will read them
    out: str = ""  # folder to write
    rows: int | None = None  # number of rows; null: to the end of the text (data.repeat)
    top: int = 50  # largest probabilities of each distribution that are stored
    batch_size: int = 8  # rows at once, over all devices
    save_every: int = 16  # batches in a shard; a kill loses at most one shard
    mesh: Mesh = field(default_factory=Mesh)
    distributed: Distributed = field(default_factory=Distributed)

    def __post_init__(self):
        whole_numbers("", self, 1, "rows", "top", "batch_size", "save_every")
        if not self.out:
            raise InputError("out is empty: give --out=FOLDER")
        if self.rows is None and self.data.repeat is None:
            raise InputError(
                "rows=null with data.repeat=null has no end: give --rows, or --data.repeat=1"
            )
        chunks = self.data.chunks
        if chunks is None or chunks.text != "before":
            raise InputError(
                "data.chunks: the teacher reads a context and the text after it; give"
                " data.chunks.count and data.chunks.length, with text: before"
            )
        if chunks.noise is not None:
            raise InputError(
                "data.chunks.noise hides context from the student, anew in every epoch; set it in"
                " the student's config, and leave it out here"
            )
        if any(isinstance(source, TeacherSource) for source in self.data.sources):
            raise InputError(
                "data.sources: rows of type teacher hold probabilities already; name their text"
            )


def teach(config: TeacherConfig) -> dict[str, Any]:
    """Writes the missing shards of a folder of teacher rows.

    Returns:
      The index of the folder, the content of `teacher.json`.

    Raises:
      InputError: the folder belongs to other text, weights or settings, or the model is no decoder.
    """
    mesh = make_mesh(config.mesh)
    rows = process_rows(mesh, config.batch_size)  # checks that the devices divide the batch
    check_source(config.model)
    check_sources(config.data)
    model, params, tokenizer = build(config.model, mesh)
    _check_teacher(config, model)
    loader = make_loader(config.data, tokenizer, config.batch_size)
    out, identity = Path(config.out).expanduser(), _identity(config, model, params, loader)
    if distributed.is_main_process():
        begin(out, identity, INDEX["teacher"], PLAN["teacher"])
    distributed.barrier("teacher's folder ready")
    if (out / INDEX["teacher"]).is_file():
        index = json.loads((out / INDEX["teacher"]).read_text(encoding="utf-8"))
    else:
        read = functools.partial(_add_probabilities, model, params, config, rows)
        ShardWriter(config, out, tokenizer, loader, read).run()
        index = _finish(config, out, tokenizer, identity)
    loader.close()
    if distributed.is_main_process():
        print(
            f"{out}: {index['rows']:,} rows; read them with data.sources:"
            f" [{{type: teacher, path: {out}}}], and train.distill"
        )
    return index


def _check_teacher(config: TeacherConfig, model: Decoder) -> None:
    pattern = model.config.pattern
    if model.config.mlm_head or pattern.prefill_only or pattern.has_landmarks:
        raise InputError(
            f"model.path={config.model.path or config.model.preset} gives no probabilities of the"
            " next token in plain text; name a decoder"
        )
    if config.top > model.config.vocab_size:
        raise InputError(
            f"top={config.top} is more than the {model.config.vocab_size} tokens of the model"
        )


def _identity(
    config: TeacherConfig, model: Decoder, params: dict, loader: Loader
) -> dict[str, Any]:
    """Returns everything that determines the rows."""
    fields = {
        f"model.{name}": draccus.encode(getattr(model.config, name)) for name in ("rope", "pattern")
    }
    fields |= {"model.dtype": model.config.dtype, "weights of the teacher": fingerprint(params)}
    fields |= {"top": config.top, "rows": config.rows} | loader.get_state()["identity"]
    return json.loads(json.dumps(fields))


def _row_shape(config: TeacherConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the arguments of `row_type`."""
    chunks = config.data.chunks
    shape = {"count": chunks.count, "length": chunks.length, "decoder": config.data.decoder_length}
    return shape | {"top": config.top, "ids": "uint16" if vocab_size <= 1 << 16 else "uint32"}


def _add_probabilities(
    model: Decoder, params: dict, config: TeacherConfig, rows: list[int], batch: Row
) -> Row:
    """Adds the teacher's probabilities to a global batch, on every process.

    `rows` are the rows that the devices of this process compute.
    """
    context, mask = (
        batch[name].reshape(config.batch_size, -1) for name in ("chunks", "chunk_mask")
    )
    tokens = np.concatenate([context, batch["tokens"]], 1)
    # One text per row, with padding on the left where context is missing, and on the right at
    # the end of the data.
    is_text = np.concatenate([mask, batch["segments"] > 0], 1).astype(np.int32)
    sharding = batch_sharding(model.mesh)
    tokens, is_text = (
        jax.make_array_from_process_local_data(sharding, x[rows]) for x in (tokens, is_text)
    )
    largest = _probabilities(model, params, tokens, is_text, context.shape[1], config.top)
    ids, p, rest = map(distributed.gather, largest)
    teacher = {"teacher_ids": ids, "teacher_probabilities": np.append(p, rest[..., None], axis=2)}
    names = ("chunks", "chunk_mask", "tokens", "targets", "segments", "weights")
    return {name: batch[name] for name in names} | teacher


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _probabilities(
    model: Decoder, params: dict, tokens, is_text, context: int, top: int
) -> Teacher:
    """Computes the largest probabilities after the first `context` places of rows [B, T].

    `is_text` int32 [B, T] is 0 on padding.
    """
    model = Decoder(model.config.for_inference(), model.mesh)
    positions = jax.numpy.maximum(is_text.cumsum(1) - 1, 0)
    hidden, _ = model.apply({"params": params}, tokens, positions=positions, segments=is_text)
    hidden = hidden[:, context:]
    return largest_probabilities(hidden, head(params, model.config), top, mesh=model.mesh)


class ShardWriter:
    """Writes the missing rows of a folder, shard by shard."""

    def __init__(self, config: TeacherConfig, out: Path, tokenizer: Any, loader: Loader, read):
        """`read` adds the teacher's probabilities to a batch."""
        self._config, self._out, self._loader, self._read = config, out, loader, read
        self._type = row_type(**_row_shape(config, tokenizer.vocab_size))
        shards = _read_shards(out)
        self._num_shards, self._num_rows = len(shards), sum(shard["rows"] for shard in shards)
        self._data_ended = bool(shards) and shards[-1]["ended"]
        if not distributed.equal_on_all_processes(str(self._num_rows)):
            raise InputError(
                f"out={out} is not the same folder for all processes; name one on storage that all"
                " machines share"
            )
        if shards:
            loader.set_state(shards[-1]["position"])

    def run(self) -> None:
        self._check_disk()
        # In a log file one line a minute is enough.
        interval = 0.1 if sys.stderr.isatty() else 60.0
        options = {"unit": "row", "desc": "teacher", "mininterval": interval}
        options |= {"initial": self._num_rows, "disable": not distributed.is_main_process()}
        with tqdm(total=self._config.rows, **options) as self._bar:
            try:
                while not self._data_ended and self._num_rows != self._config.rows:
                    self._write_shard()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{self._num_rows:,} rows are in {self._out}; the same command resumes"
                ) from None

    def _check_disk(self) -> None:
        size, rows = self._type.itemsize, self._config.rows
        missing = 0 if rows is None else (rows - self._num_rows) * size
        free = shutil.disk_usage(self._out).free
        if missing > free:
            raise InputError(
                f"rows={rows}: the missing ones take {missing / 1e9:,.1f} GB ({size:,} bytes"
                f" each), and out={self._out} has {free / 1e9:,.1f} GB free; ask for fewer rows, a"
                " smaller top, or name a larger disk"
            )

    def _write_shard(self) -> None:
        """Writes the rows of some batches, then the description that completes the shard."""
        name, parts = f"{self._num_shards:06d}", []
        for _ in range(self._config.save_every):
            batch = next(self._loader, None)
            if batch is None:
                self._data_ended = True
                break
            rows = self._to_disk_rows(self._read(batch))
            rows = rows[: self._num_missing(sum(map(len, parts)))]
            parts.append(rows)
            self._bar.update(len(rows))
            if self._num_missing(sum(map(len, parts))) == 0:
                break
        count, state = sum(map(len, parts)), self._loader.get_state()
        if distributed.is_main_process():
            with atomic_file(self._out / f"{name}.bin", "wb") as file:
                file.writelines(rows.tobytes() for rows in parts)
            shard = {"name": name, "rows": count, "ended": self._data_ended, "position": state}
            write_json(self._out / f"{name}.json", shard)
        self._num_shards, self._num_rows = self._num_shards + 1, self._num_rows + count

    def _num_missing(self, num_pending: int) -> int | None:
        """Returns the rows to write after `num_pending` further ones; None without a limit."""
        rows = self._config.rows
        return None if rows is None else rows - self._num_rows - num_pending

    def _to_disk_rows(self, batch: Row) -> np.ndarray:
        """Converts a batch to the dtype on disk, without rows of padding."""
        rows = np.zeros(self._config.batch_size, self._type)
        for name in self._type.names:
            rows[name] = batch[name]
        return rows[(batch["segments"] > 0).any(1)]


def _read_shards(out: Path) -> list[dict[str, Any]]:
    """Reads the descriptions of the complete shards, in order."""
    shards = []
    while (file := out / f"{len(shards):06d}.json").is_file():
        shards.append(json.loads(file.read_text(encoding="utf-8")))
    return shards


def _finish(
    config: TeacherConfig, out: Path, tokenizer: Any, identity: dict[str, Any]
) -> dict[str, Any]:
    """Writes the index over all shards, the last file."""
    distributed.barrier("teacher's rows written")
    shards = _read_shards(out)
    index = {
        "format": FORMAT,
        "rows": sum(shard["rows"] for shard in shards),
        **_row_shape(config, tokenizer.vocab_size),
        "tokenizer": tokenizer.fingerprint,
        "teacher": config.model.path or f"random weights of {config.model.preset}",
        "weights": identity["weights of the teacher"],
        "shards": [{k: s[k] for k in ("name", "rows")} for s in shards if s["rows"]],
        "asked": identity,
    }
    if distributed.is_main_process():
        write_json(out / INDEX["teacher"], index)
        (out / PLAN["teacher"]).unlink()
        for shard in shards:
            (out / f"{shard['name']}.json").unlink()
            if not shard["rows"]:
                (out / f"{shard['name']}.bin").unlink()
    distributed.barrier("teacher's index written")
    return index
