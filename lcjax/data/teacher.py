"""`python -m lcjax.data teacher`: what a model makes of rows of text, kept for a student.

CEPED (Yen et al. 2024, arXiv 2402.16617, sec. 4): the original decoder reads a row's context and
the tokens behind it as one text, and for each of these the probabilities of the next token are
stored, the largest ones. Rows come from `data:` as they would in training, in the same order; they
are written shard by shard, whole or not at all, and after a kill the same command goes on where the
last shard ends.
"""

import functools
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
import jax
import numpy as np
from tqdm.auto import tqdm

from lcjax.attention import Landmark
from lcjax.checkpoints.build import ModelSection, build, check_source
from lcjax.checkpoints.run_folder import fingerprint
from lcjax.data.config import TEACHER_INDEX, TEACHER_PLAN, DataConfig, TeacherSource
from lcjax.data.corpus import check_sources
from lcjax.data.loader import Loader, make_loader
from lcjax.data.prepare import begin, write_json
from lcjax.data.teacher_files import FORMAT, row_type
from lcjax.errors import InputError, whole_numbers
from lcjax.models import Decoder, head
from lcjax.models.distill import Teacher, largest_probabilities
from lcjax.parallel import distributed
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, process_rows

Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class TeacherConfig:
    """Which model reads which rows, and where to what it says is written."""

    model: ModelSection = field(default_factory=ModelSection)  # the teacher: a plain decoder
    data: DataConfig = field(default_factory=DataConfig)  # rows as the student will read them
    out: str = ""  # folder to write
    rows: int | None = None  # how many; null: until the text ends (data.repeat)
    top: int = 50  # probabilities that are stored of each distribution, the largest
    batch_size: int = 8  # rows at once, over all devices
    save_every: int = 16  # batches of a shard: what a kill can cost
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
                "data.chunks: the teacher reads a context and the text behind it; give"
                " data.chunks.count and data.chunks.length, with text: before"
            )
        if chunks.noise is not None:
            raise InputError(
                "data.chunks.noise hides context from the student, anew in every epoch; set it in"
                " the student's config, and leave it out here"
            )
        if any(isinstance(source, TeacherSource) for source in self.data.sources):
            raise InputError("data.sources: rows of type teacher have been read; name their text")


def teach(config: TeacherConfig) -> dict[str, Any]:
    """Writes what is missing of the folder; returns its index."""
    mesh = make_mesh(config.mesh)
    own = process_rows(mesh, config.batch_size)  # refuses a batch that the devices do not divide
    check_source(config.model)
    check_sources(config.data)
    model, params, tokenizer = build(config.model, mesh)
    _check_teacher(config, model)
    loader = make_loader(config.data, tokenizer, config.batch_size)
    out, asked = Path(config.out).expanduser(), _asked(config, model, params, loader)
    if distributed.first():
        begin(out, asked, TEACHER_INDEX, TEACHER_PLAN)
    distributed.wait("teacher's folder ready")
    if (out / TEACHER_INDEX).is_file():
        index = json.loads((out / TEACHER_INDEX).read_text(encoding="utf-8"))
    else:
        ask = functools.partial(_ask, model, params, config, own)
        Writing(config, out, tokenizer, loader, ask).run()
        index = _finish(config, out, tokenizer, asked)
    loader.close()
    if distributed.first():
        print(f"{out}: {index['rows']:,} rows; read them with data.sources: {_use(out)}")
    return index


def _use(out: Path) -> str:
    return f"[{{type: teacher, path: {out}}}], and train.distill"


def _check_teacher(config: TeacherConfig, model: Decoder) -> None:
    pattern = model.config.pattern
    if model.config.mlm_head or pattern.prefill_only or isinstance(pattern, Landmark):
        raise InputError(
            f"model.path={config.model.path or config.model.preset} gives no probabilities of the"
            " next token in plain text; name a decoder"
        )
    if config.top > model.config.vocab_size:
        raise InputError(
            f"top={config.top} is more than the {model.config.vocab_size} tokens of the model"
        )


def _asked(config: TeacherConfig, model: Decoder, params: dict, loader: Loader) -> dict[str, Any]:
    """What the rows depend on."""
    chosen = {name: getattr(model.config, name) for name in ("rope", "pattern")}
    fields = {f"model.{name}": draccus.encode(value) for name, value in chosen.items()}
    fields |= {"model.dtype": model.config.dtype, "weights of the teacher": fingerprint(params)}
    fields |= {"top": config.top, "rows": config.rows} | loader.get_state()["identity"]
    return json.loads(json.dumps(fields))


def _ids(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def _shape(config: TeacherConfig, vocabulary: int) -> dict[str, Any]:
    """The arguments of `row_type`."""
    chunks = config.data.chunks
    shape = {"count": chunks.count, "length": chunks.length, "decoder": config.data.decoder_length}
    return shape | {"top": config.top, "ids": _ids(vocabulary)}


def _ask(model: Decoder, params: dict, config: TeacherConfig, own: list[int], batch: Row) -> Row:
    """The rows of `batch` with what the teacher says, complete on every process."""
    context, mask = (
        batch[name].reshape(config.batch_size, -1) for name in ("chunks", "chunk_mask")
    )
    tokens = np.concatenate([context, batch["tokens"]], 1)
    # One text, padded before it where context is missing, and behind it at the end of all rows.
    there = np.concatenate([mask, batch["segments"] > 0], 1).astype(np.int32)
    where = batch_sharding(model.mesh)
    tokens, there = (jax.make_array_from_process_local_data(where, x[own]) for x in (tokens, there))
    found = _probabilities(model, params, tokens, there, context.shape[1], config.top)
    ids, p, rest = map(distributed.gather, found)
    said = {"teacher_ids": ids, "teacher_probabilities": np.append(p, rest[..., None], axis=2)}
    kept = ("chunks", "chunk_mask", "tokens", "targets", "segments", "weights")
    return {name: batch[name] for name in kept} | said


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _probabilities(model: Decoder, params: dict, tokens, there, context: int, top: int) -> Teacher:
    """Of the places behind the first `context` ones, of rows [B, T] with text where `there`."""
    model = Decoder(model.config.for_inference(), model.mesh)
    positions = jax.numpy.maximum(there.cumsum(1) - 1, 0)
    hidden, _ = model.apply({"params": params}, tokens, positions=positions, segments=there)
    hidden = hidden[:, context:]
    return largest_probabilities(hidden, head(params, model.config), top, mesh=model.mesh)


class Writing:
    """The rows of a folder that are not there yet, shard after shard."""

    def __init__(self, config: TeacherConfig, out: Path, tokenizer: Any, loader: Loader, ask):
        self._config, self._out, self._loader, self._ask = config, out, loader, ask
        self._type = row_type(**_shape(config, tokenizer.vocab_size))
        shards = finished(out)
        self._shards, self._rows = len(shards), sum(shard["rows"] for shard in shards)
        self._ended = bool(shards) and shards[-1]["ended"]
        if not distributed.same(str(self._rows)):
            raise InputError(
                f"out={out} is not the same folder for all processes; name one on storage that all"
                " machines share"
            )
        if shards:
            loader.set_state(shards[-1]["position"])

    def run(self) -> None:
        self._check_disk()
        # In a log file a line a minute will do.
        every = 0.1 if sys.stderr.isatty() else 60.0
        shown = {"unit": "row", "desc": "teacher", "mininterval": every, "initial": self._rows}
        quiet = not distributed.first()
        with tqdm(total=self._config.rows, disable=quiet, **shown) as self._bar:
            try:
                while not self._ended and self._rows != self._config.rows:
                    self._shard()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{self._rows:,} rows are in {self._out}; the same command goes on"
                ) from None

    def _check_disk(self) -> None:
        size, rows = self._type.itemsize, self._config.rows
        missing = 0 if rows is None else (rows - self._rows) * size
        free = shutil.disk_usage(self._out).free
        if missing > free:
            raise InputError(
                f"rows={rows}: those that are missing take {missing / 1e9:,.1f} GB ({size:,} bytes"
                f" each), and out={self._out} has {free / 1e9:,.1f} GB free; ask for fewer rows, a"
                " smaller top, or name a larger disk"
            )

    def _shard(self) -> None:
        """Some batches: the rows, then the file that says they are complete."""
        name, made = f"{self._shards:06d}", []
        for _ in range(self._config.save_every):
            batch = next(self._loader, None)
            if batch is None:
                self._ended = True
                break
            rows = self._packed(self._ask(batch))[: self._left(sum(map(len, made)))]
            made.append(rows)
            self._bar.update(len(rows))
            if self._left(sum(map(len, made))) == 0:
                break
        count, state = sum(map(len, made)), self._loader.get_state()
        if distributed.first():
            draft = self._out / f"{name}.bin.tmp"
            with open(draft, "wb") as file:
                file.writelines(rows.tobytes() for rows in made)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._out / f"{name}.bin")
            note = {"name": name, "rows": count, "ended": self._ended, "position": state}
            write_json(self._out / f"{name}.json", note)
        self._shards, self._rows = self._shards + 1, self._rows + count

    def _left(self, more: int) -> int | None:
        """Rows that are lacking behind `more` new ones; None without end."""
        rows = self._config.rows
        return None if rows is None else rows - self._rows - more

    def _packed(self, batch: Row) -> np.ndarray:
        """As they lie on disk, without rows of padding."""
        rows = np.zeros(self._config.batch_size, self._type)
        for name in self._type.names:
            rows[name] = batch[name]
        return rows[(batch["segments"] > 0).any(1)]


def finished(out: Path) -> list[dict[str, Any]]:
    """What is known of the shards that are complete, in order."""
    notes = []
    while (file := out / f"{len(notes):06d}.json").is_file():
        notes.append(json.loads(file.read_text(encoding="utf-8")))
    return notes


def _finish(
    config: TeacherConfig, out: Path, tokenizer: Any, asked: dict[str, Any]
) -> dict[str, Any]:
    """The index over all shards, the last that is written."""
    distributed.wait("teacher's rows written")
    shards = finished(out)
    index = {
        "format": FORMAT,
        "rows": sum(shard["rows"] for shard in shards),
        **_shape(config, tokenizer.vocab_size),
        "tokenizer": tokenizer.fingerprint,
        "teacher": config.model.path or f"random weights of {config.model.preset}",
        "weights": asked["weights of the teacher"],
        "shards": [{k: s[k] for k in ("name", "rows")} for s in shards if s["rows"]],
        "asked": asked,
    }
    if distributed.first():
        write_json(out / TEACHER_INDEX, index)
        (out / TEACHER_PLAN).unlink()
        for shard in shards:
            (out / f"{shard['name']}.json").unlink()
            if not shard["rows"]:
                (out / f"{shard['name']}.bin").unlink()
    distributed.wait("teacher's index written")
    return index
