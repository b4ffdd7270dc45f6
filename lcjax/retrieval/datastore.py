"""A datastore: a folder of passages with indices for searches by words and by vectors.

    index.json            what the folder holds: shards, chunking, encoders, checksums
    000000.parquet, ...   passages: id, text, title, source, document, start, end
    vectors-<encoder>.bin a header of 128 bytes, then the vectors of all passages
    sparse-<passages>/    the index of words (`SparseIndex`)
    vectors-<encoder>.ivf-<passages>.faiss  an approximate index of the vectors, if one was built
    deleted.npy           rows of the deleted passages

`build` writes the folder shard by shard (`lcjax.data.jobs`). `append` adds shards and vectors after
the existing ones, and `delete` marks passages. `index.json` is replaced last, so a killed command
changes nothing. `append` builds the index of words again, because every new passage changes the
word frequencies on which all scores depend.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import numbers
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from lcjax.data.files import LRUCache, import_pyarrow
from lcjax.errors import InputError, PositiveInt, check_fields, check_one_of, one_line
from lcjax.files import (
    SMALL,
    FileSum,
    atomic_file,
    check_path,
    read_sealed,
    seal,
    sha256,
    sync_file,
    write_json,
)
from lcjax.generation.passages import join_title
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval.encoder import Encoder, open_encoder
from lcjax.retrieval.faiss_index import KINDS as FAISS_KINDS
from lcjax.retrieval.faiss_index import FaissIndex, RefinedIndex
from lcjax.retrieval.passages import Chunking, Document, Passage
from lcjax.retrieval.sparse import Sparse, SparseIndex
from lcjax.storage import check_regular, local_path

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
WHY_MAPPED = "its files are mapped from there; copy the folder"  # reason for `local_path`
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
INDEX, PLAN, _DELETED = "index.json", "plan.json", "deleted.npy"
_NPY_HEADER = 128  # bytes of a .npy file before its numbers, for small shapes
_WAY_OUT = "copy it again, or build the datastore again"
_HEADER = 128  # bytes of a vector file before its vectors
_ROW_GROUP = 1024  # passages that are read at once to return one of them
_CACHE_BYTES = 1 << 28  # bytes of the row groups that are held in memory
_APPEND_CHARACTERS = 1 << 24  # characters of documents after which `append` begins a new shard
_COLUMNS = dict.fromkeys(("id", "text", "title", "source", "document"), "string") | dict.fromkeys(
    ("start", "end"), "int64"
)  # of a Parquet file of passages, with their types


@dataclasses.dataclass(frozen=True)
class EncoderSection:
    """The encoder of a datastore. Fields that are null take the value of the encoder's folder."""

    path: str = ""  # folder, hub id or name; empty: search by words only
    query_folder: str | None = None  # folder of a separate encoder for questions (DPR)
    pooling: str | None = None  # mean, cls or max; mean or last for a language model
    normalize: bool | None = None  # whether vectors have unit length
    query_prefix: str | None = None  # text before every question
    passage_prefix: str | None = None  # text before every passage
    max_tokens: PositiveInt | None = None  # tokens of the longest text
    on_long: str | None = None  # what happens to longer texts: truncate (with a warning), or error
    # Layer of a language model that gives the vector; null: the middle
    layer: PositiveInt | None = None
    dtype: str | None = None  # dtype of the computation: float32 or bfloat16
    batch_tokens: PositiveInt | None = None  # tokens that are computed at once
    allow_pickle: bool = False  # read .bin weights with a restricted reader

    def __post_init__(self):
        check_fields("encoder", self)

    def open(self, mesh: Mesh | None = None) -> Encoder | None:
        """Opens the encoder; returns None if `path` is empty.

        Args:
          mesh: devices that share the texts; None: one device.

        Raises:
          InputError: there is no such encoder, or it is a re-ranker, which has no passage vectors.
        """
        if not self.path:
            return None
        options = {"mesh": mesh} | dataclasses.asdict(self)
        path = options.pop("path")
        options["allow_pickle"] = self.allow_pickle or None  # an option of some encoders only
        try:
            encoder = open_encoder(path, **{k: v for k, v in options.items() if v is not None})
        except InputError as error:
            message = str(error).removeprefix(f"{path}: ")
            raise InputError(f"encoder.path={path}: {message}") from error
        if not hasattr(encoder, "encode_passages"):
            raise InputError(
                f"encoder.path={path} is a {type(encoder).__name__}, which scores pairs of texts:"
                " name an encoder here, and search with this one as rerank"
            )
        return encoder


def encoder_fields(encoder: Encoder) -> dict[str, Any]:
    """Returns the name, fingerprint, pooling and dimension of an encoder, as in `index.json`."""
    check_encoder(encoder)
    names = ("name", "fingerprint", "pooling", "dim")
    return {name: getattr(encoder, name) for name in names}


def check_encoder(encoder: Encoder) -> None:
    """Raises an InputError unless `encoder` has the fingerprint of an encoder."""
    if not hasattr(encoder, "fingerprint"):
        raise InputError(f"encoder={encoder!r:.60} is no encoder; open one with open_encoder(path)")


def encoder_entry(encoder: Encoder, section: EncoderSection, dtype: str) -> dict[str, Any]:
    """Returns the whole entry of an encoder in `index.json`, without approximate indices."""
    fields = {"section": dataclasses.asdict(section), "dtype": dtype, "faiss": {}}
    return encoder_fields(encoder) | fields


def write_passages(out: Path, name: str, passages: list[Passage]) -> dict[str, Any]:
    """Writes passages to a Parquet file, and returns the entry of the shard in `index.json`."""
    pyarrow = import_pyarrow("a datastore")
    schema = pyarrow.schema(_COLUMNS.items())
    columns = {field: [getattr(p, field) for p in passages] for field in _COLUMNS}
    path = out / f"{name}.parquet"
    with atomic_file(path, "wb") as file:
        table = pyarrow.table(columns, schema=schema)
        options = {"compression": "zstd", "write_page_checksum": True}
        pyarrow.parquet.write_table(table, file, row_group_size=_ROW_GROUP, **options)
    size, digest = path.stat().st_size, sha256(path)
    shard = {"name": name, "passages": len(passages), "bytes": size, "sha256": digest}
    return shard | {"vectors": {}}


def encode_passages(encoder: Encoder, passages: list[Passage], dtype: str) -> bytes:
    """Encodes passages and returns the bytes of their vectors, row by row in `dtype`."""
    texts, titles = ([getattr(p, name) for p in passages] for name in ("text", "title"))
    vectors = encoder.encode_passages(texts, titles if any(titles) else None)
    vectors = np.asarray(vectors, np.float32)
    if vectors.shape != (len(passages), encoder.dim):
        raise InputError(
            f"{encoder.name} returned vectors {list(vectors.shape)}, not"
            f" {[len(passages), encoder.dim]}: one vector of size dim for each passage"
        )
    is_bad = ~np.isfinite(vectors).all(1)
    if is_bad.any():
        raise InputError(
            f"{encoder.name} gives a vector that is not finite for passage"
            f" {passages[int(is_bad.argmax())].id}: check its weights, or leave the text out"
        )
    return vectors.astype(DTYPES[dtype]).tobytes()


def vector_file(out: Path, fingerprint: str) -> Path:
    return out / f"vectors-{fingerprint[:16]}.bin"


def vector_header(fields: dict[str, Any]) -> bytes:
    """Returns the 128-byte header of a vector file; `fields` is the entry of its encoder."""
    names = ("fingerprint", "dim", "dtype")
    values = {"format": FORMAT} | {name: fields[name] for name in names}
    return json.dumps(values).encode().ljust(_HEADER - 1)[: _HEADER - 1] + b"\n"


def open_vectors(out: Path, fields: dict[str, Any], num_rows: int) -> np.ndarray:
    """Maps the vectors [rows, dim] of an encoder into memory."""
    path, dtype, dim = (
        vector_file(out, fields["fingerprint"]),
        DTYPES[fields["dtype"]],
        fields["dim"],
    )
    expected = _HEADER + num_rows * dim * dtype.itemsize
    size = path.stat().st_size if path.is_file() else 0
    # A killed append leaves more bytes than the index counts.
    if size < expected:
        raise InputError(
            f"{path} has {size:,} bytes, and {num_rows:,} vectors of {dim} take {expected:,}:"
            f" {_WAY_OUT}"
        )
    with path.open("rb") as file:
        if file.read(_HEADER) != vector_header(fields):
            raise InputError(f"{path} is damaged: it has another header; {_WAY_OUT}")
    return np.memmap(path, dtype, "r", _HEADER, (num_rows, dim))


def read_texts(out: Path, shards: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields pairs of the id and the joined title and text of all passages, in order."""
    for shard in shards:
        table = _read_table(out / f"{shard['name']}.parquet", None, ["id", "text", "title"])
        for row in table.to_pylist():
            yield row["id"], join_title(row["title"], row["text"])


def _read_table(path: Path, group: int | None, columns: list[str]) -> "pyarrow.Table":
    pyarrow = import_pyarrow("a datastore")
    try:
        options = {"memory_map": True, "page_checksum_verification": True}
        file = pyarrow.parquet.ParquetFile(path, **options)
        table = file.read(columns) if group is None else file.read_row_group(group, columns)
        # A column that is not found is left out without an error.
        types = {field.name: str(field.type) for field in table.schema}
        if types != {name: _COLUMNS[name] for name in columns}:
            raise pyarrow.ArrowInvalid("its columns have other names or types")
        return table
    except (pyarrow.ArrowException, OSError, KeyError, IndexError) as error:
        raise InputError(
            f"{path} is damaged ({one_line(error)}): copy it again, or build the datastore again"
        ) from None


def write_sparse(
    out: Path, num_rows: int, texts: Iterable[str], settings: Sparse
) -> dict[str, Any]:
    """Builds the index of words in `sparse-<passages>`; returns its entry in `index.json`."""
    folder, draft = out / f"sparse-{num_rows}", out / "sparse.tmp"
    index = SparseIndex.build(texts, progress=sys.stderr.isatty(), **dataclasses.asdict(settings))
    for leftover in (folder, draft):
        shutil.rmtree(leftover, ignore_errors=True)
    index.save(draft)
    draft.rename(folder)
    files = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    return {"settings": dataclasses.asdict(settings), "files": files}


def _faiss_file(out: Path, fingerprint: str, kind: str, num_rows: int) -> Path:
    return vector_file(out, fingerprint).with_suffix(f".{kind}-{num_rows}.faiss")


def write_faiss(
    out: Path, index: dict[str, Any], fingerprint: str, kind: str, old: Path | None = None
) -> dict[str, str]:
    """Builds an approximate index, or extends the one in `old`; returns {kind: checksum}."""
    num_rows = index["passages"]
    vectors = open_vectors(out, index["encoders"][fingerprint], num_rows)
    if old is None:
        faiss = FaissIndex.build(vectors, kind=kind)
        print(f"index {faiss.describe()} on rows of the datastore")
    else:
        faiss = FaissIndex.load(old)
        faiss.add(vectors[len(faiss) :])
    path = _faiss_file(out, fingerprint, kind, num_rows)
    draft = path.with_name(path.name + ".tmp")
    faiss.save(draft)
    draft.replace(path)
    return {kind: sha256(path)}


class Datastore:
    """An open datastore. `append`, `delete`, `encode` and `build_faiss` change its folder.

    A passage is identified by its row 0, 1, ... in the order of addition. Rows never change.

    Attributes:
      folder: path of the datastore.
      index: content of `index.json`.
      valid: bool [rows], False for deleted passages; None if no passage is deleted.
    """

    def __init__(self, folder: str | Path):
        """Opens a folder, and checks that its files exist and have the right sizes.

        Raises:
          InputError: the folder is not a complete datastore, or a file is missing or truncated.
        """
        check_path("folder", folder)
        self.folder = local_path("datastore", folder, WHY_MAPPED)
        self._tables = LRUCache(_CACHE_BYTES, lambda table: table.nbytes)
        self._open()

    def _open(self) -> None:
        out = self.folder
        self.index = _read_index(out)
        self._starts = np.cumsum([0, *(shard["passages"] for shard in self.index["shards"])])
        for shard in self.index["shards"]:
            path = out / f"{shard['name']}.parquet"
            size = path.stat().st_size if path.is_file() else 0
            if size != shard["bytes"]:
                raise InputError(
                    f"{path} has {size:,} bytes, and {shard['bytes']:,} were written: copy it"
                    " again, or build the datastore again"
                )
        for fields in self.index["encoders"].values():
            open_vectors(out, fields, self.num_rows)
        self.valid = _read_deleted(out, self.num_rows)

    @property
    def num_rows(self) -> int:
        """Number of passages, deleted ones included."""
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Digest of everything that searches depend on: passages, vectors, indices, deletions."""
        faiss = {name: fields["faiss"] for name, fields in self.index["encoders"].items()}
        content = [self.index["shards"], self.index["sparse"], faiss]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        if self.valid is not None:
            digest.update(self.valid.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Number of passages that are not deleted."""
        return self.num_rows if self.valid is None else int(self.valid.sum())

    def passages(self, rows: Sequence[int]) -> list[Passage]:
        """Returns the passages of `rows`, in the order of `rows`."""
        rows = _list_of(numbers.Integral, "rows", rows, "[0, 7]")
        return [self._passage(int(row)) for row in rows]

    def _passage(self, row: int) -> Passage:
        if not 0 <= row < self.num_rows:
            raise InputError(f"row={row} must be in 0 ... {self.num_rows - 1}")
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        group, place = divmod(row - int(self._starts[shard]), _ROW_GROUP)
        path = self.folder / f"{self.index['shards'][shard]['name']}.parquet"
        table = self._tables.get((shard, group), lambda: _read_table(path, group, list(_COLUMNS)))
        return Passage(**table.slice(place, 1).to_pylist()[0])

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields pairs of the id and the joined title and text of all rows, also deleted ones."""
        return read_texts(self.folder, self.index["shards"])

    def rows(self, ids: Iterable[str]) -> dict[str, int]:
        """Returns the rows of passages by id, without deleted passages and unknown ids.

        Reads the ids of all passages.
        """
        ids, rows = set(_list_of(str, "ids", ids, "['book.txt#0-97']")), {}
        for shard, start in zip(self.index["shards"], self._starts):
            table = _read_table(self.folder / f"{shard['name']}.parquet", None, ["id"])
            for i, passage in enumerate(table.column("id").to_pylist()):
                row = int(start) + i
                if passage in ids and (self.valid is None or self.valid[row]):
                    rows[passage] = row
        return rows

    def encoder_entry(self, encoder: Encoder | None = None) -> dict[str, Any]:
        """Returns the entry of an encoder in `index.json`; None means the only encoder.

        Raises:
          InputError: the datastore has no vectors of this encoder, or has vectors of several
            encoders and `encoder` is None.
        """
        encoders = self.index["encoders"]
        if not encoders:
            raise InputError(
                f"{self.folder} has no vectors: build it with an encoder, or search by words"
            )
        names = ", ".join(f"{e['name']} ({fp[:12]})" for fp, e in encoders.items())
        if encoder is None:
            if len(encoders) > 1:
                raise InputError(f"{self.folder} has vectors of {names}: name one of them")
            return next(iter(encoders.values()))
        check_encoder(encoder)
        if encoder.fingerprint not in encoders:
            raise InputError(
                f"{self.folder} was built by the encoder {names}, and encoder={encoder.name}"
                f" ({encoder.fingerprint[:12]}) is another: search with the same, or add its"
                " vectors with Datastore.encode"
            )
        return encoders[encoder.fingerprint]

    def open_encoder(self, path: str | Path | None = None, mesh: Mesh | None = None) -> Encoder:
        """Opens the encoder that made the vectors, with the settings of the build.

        Args:
          path: path of the encoder: selects one of several encoders, or replaces the path of the
            only one, which has moved. A path that matches none of several encoders is opened with
            default settings. None: the path of the build.
          mesh: devices that share the texts; None: one device.

        Raises:
          InputError: there are no vectors, there are vectors of several encoders and `path` is
            None, the encoder cannot be opened, or without a `path` its fingerprint has changed.
        """
        if path is None or not self.index["encoders"]:
            return _open_known_encoder(self.folder, self.encoder_entry(), mesh)
        entries = self.index["encoders"].values()
        sections = [EncoderSection(**fields["section"]) for fields in entries]
        sections = [s for s in sections if s.path == str(path)] or sections
        section = sections[0] if len(sections) == 1 else EncoderSection()
        return dataclasses.replace(section, path=str(path)).open(mesh)

    def vectors(self, encoder: Encoder | None = None) -> np.ndarray:
        """Maps the vectors [rows, dim] of an encoder into memory, float32 or bfloat16."""
        fields = self.encoder_entry(encoder)
        vectors = open_vectors(self.folder, fields, self.num_rows)
        if vectors.nbytes <= SMALL:
            _compare(self._vector_sums(fields))
        return vectors

    def sparse(self) -> SparseIndex:
        """Opens the index of words.

        Raises:
          InputError: the datastore has no index of words, or the index is damaged.
        """
        if self.index["sparse"] is None:
            raise InputError(
                f"{self.folder} has no index of words (sparse=null): search by vectors, or build it"
                " again"
            )
        _compare(sum for sum in self._sparse_sums() if sum.num_bytes <= SMALL)
        index = SparseIndex.load(self.folder / f"sparse-{self.num_rows}")
        if len(index) != self.num_rows:
            raise InputError(
                f"{self.folder}: its index of words has {len(index):,} passages, and there are"
                f" {self.num_rows:,}; build the datastore again"
            )
        return index

    def faiss(self, kind: str, encoder: Encoder | None = None) -> FaissIndex | RefinedIndex:
        """Opens an approximate index of the vectors: ivf, ivf_pq or hnsw.

        The scores of ivf_pq are exact, because a `RefinedIndex` computes them from the vectors.

        Raises:
          InputError: the index was not built, or is damaged.
        """
        fields = self.encoder_entry(encoder)
        if kind not in fields["faiss"]:
            raise InputError(
                f"{self.folder} has no index {kind}, but {', '.join(fields['faiss']) or 'none'}:"
                f" build it with Datastore.build_faiss({kind!r}), or search exactly"
            )
        file = _faiss_file(self.folder, fields["fingerprint"], kind, self.num_rows)
        # Of any size, since FAISS may read outside of its memory if lists and graphs are damaged.
        _compare([FileSum(file, fields["faiss"][kind])])
        index = FaissIndex.load(file, dim=fields["dim"], count=self.num_rows)
        return RefinedIndex(index, self.vectors(encoder)) if kind == "ivf_pq" else index

    def build_faiss(self, kind: str) -> None:
        """Builds an approximate index of the vectors: ivf, ivf_pq or hnsw."""
        check_one_of("kind", kind, FAISS_KINDS)
        with self._changing() as index:
            fingerprint = self.encoder_entry()["fingerprint"]
            faiss = index["encoders"][fingerprint]["faiss"]
            faiss |= write_faiss(self.folder, index, fingerprint, kind)

    def encode(self, encoder: Encoder | EncoderSection, *, dtype: str = "float32") -> None:
        """Encodes all passages with another encoder, and stores the vectors.

        Args:
          encoder: the encoder, or a section with its path. Searches can open an encoder by
            themselves only if it was added by a section.
          dtype: dtype of the stored vectors: float32 or bfloat16.
        """
        section = encoder if isinstance(encoder, EncoderSection) else EncoderSection()
        encoder = section.open() or encoder
        check_encoder(encoder)
        check_one_of("dtype", dtype, DTYPES)
        with self._changing() as index:
            fields = encoder_entry(encoder, section, dtype)
            with atomic_file(vector_file(self.folder, encoder.fingerprint), "wb") as file:
                file.write(vector_header(fields))
                for shard, vectors in zip(index["shards"], self.encoded_shards(encoder, dtype)):
                    shard["vectors"][encoder.fingerprint] = hashlib.sha256(vectors).hexdigest()
                    file.write(vectors)
            index["encoders"][encoder.fingerprint] = fields

    def encoded_shards(self, encoder: Encoder, dtype: str) -> Iterator[bytes]:
        """Yields the bytes of the vectors of each shard, deleted passages included.

        The vectors are not stored.
        """
        for shard, start in zip(self.index["shards"], self._starts):
            rows = range(int(start), int(start) + shard["passages"])
            yield encode_passages(encoder, self.passages(rows), dtype)

    def append(
        self,
        documents: Iterable[Document],
        *,
        encoder: Encoder | str | Path | Sequence[Encoder | str | Path] = (),
    ) -> int:
        """Appends the passages of documents, with their vectors, and extends the indices.

        Args:
          documents: the documents. Their passages must have new ids, or those of deleted passages.
          encoder: the encoders that made the vectors, or their paths if they have moved. Encoders
            that are not listed are opened by the path of the build.

        Returns:
          The number of passages added.

        Raises:
          InputError: a passage with such an id exists, or the datastore has no vectors of one of
            the encoders.
        """
        with self._changing() as index:
            is_one = isinstance(encoder, str | Path) or not isinstance(encoder, Sequence)
            encoders = [
                self.open_encoder(one) if isinstance(one, str | Path) else one
                for one in ([encoder] if is_one else encoder)
            ]
            by_fingerprint = {self.encoder_entry(one)["fingerprint"]: one for one in encoders}
            encoders = [
                by_fingerprint.get(fingerprint) or _open_known_encoder(self.folder, fields)
                for fingerprint, fields in index["encoders"].items()
            ]
            chunking, num_rows = Chunking(**index["chunking"]), self.num_rows
            ids: set[str] = set()
            for passages, num_documents in _append_groups(documents, chunking):
                self._check_new(passages, ids)
                name = f"{int(index['shards'][-1]['name']) + 1:06d}"
                shard = write_passages(self.folder, name, passages)
                for encoder in encoders:
                    fields = index["encoders"][encoder.fingerprint]
                    vectors = encode_passages(encoder, passages, fields["dtype"])
                    self._append_vectors(fields, index["passages"], vectors)
                    shard["vectors"][encoder.fingerprint] = hashlib.sha256(vectors).hexdigest()
                index["shards"].append(shard)
                index["passages"] += len(passages)
                index["documents"] += num_documents
            added = index["passages"] - num_rows
            if added:
                self._extend_indices(index)
        return added

    def _check_new(self, passages: list[Passage], ids: set[str]) -> None:
        """Raises an InputError for ids that exist; adds the ids of `passages` to `ids`."""
        exists = self.rows(passage.id for passage in passages)
        for passage in passages:
            if passage.id in exists or passage.id in ids:
                raise InputError(
                    f"passage {passage.id} exists in {self.folder}: delete it first, or give the"
                    " document another name"
                )
            ids.add(passage.id)

    def _append_vectors(self, fields: dict[str, Any], num_rows: int, vectors: bytes) -> None:
        with vector_file(self.folder, fields["fingerprint"]).open("r+b") as file:
            offset = _HEADER + num_rows * fields["dim"] * DTYPES[fields["dtype"]].itemsize
            file.truncate(offset)  # drops vectors that a killed append has written
            file.seek(offset)
            file.write(vectors)
            sync_file(file)

    def _extend_indices(self, index: dict[str, Any]) -> None:
        """Writes indices of all passages; the old files stay until `index.json` is replaced."""
        if index["sparse"] is not None:
            settings = Sparse(**index["sparse"]["settings"])
            texts = (text for _, text in read_texts(self.folder, index["shards"]))
            index["sparse"] = write_sparse(self.folder, index["passages"], texts, settings)
        for fingerprint, fields in index["encoders"].items():
            for kind in list(fields["faiss"]):
                old = _faiss_file(self.folder, fingerprint, kind, self.num_rows)
                fields["faiss"] |= write_faiss(self.folder, index, fingerprint, kind, old)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Locks the folder and yields a copy of the index; writes the copy as `index.json` at exit.

        An exception in the block leaves `index.json` as it was.
        """
        with RunLock(self.folder, "folder"):
            self._open()  # another process may have changed the folder
            index = json.loads(json.dumps(self.index))
            old_rows = self.num_rows
            yield index
            write_json(self.folder / INDEX, seal(index))
            if index["passages"] != old_rows:
                shutil.rmtree(self.folder / f"sparse-{old_rows}", ignore_errors=True)
                for fingerprint, fields in index["encoders"].items():
                    for kind in fields["faiss"]:
                        file = _faiss_file(self.folder, fingerprint, kind, old_rows)
                        file.unlink(missing_ok=True)
            self._tables = LRUCache(_CACHE_BYTES, lambda table: table.nbytes)
            self._open()

    def delete(self, ids: Iterable[str]) -> int:
        """Marks passages as deleted, so that no search returns them.

        The word frequencies of sparse search still include deleted passages.

        Returns:
          The number of passages deleted.

        Raises:
          InputError: an id does not exist, or no passage would remain. Nothing is deleted then.
        """
        ids = list(dict.fromkeys(_list_of(str, "ids", ids, "['book.txt#0-97']")))
        with RunLock(self.folder, "folder"):
            self._open()
            rows = self.rows(ids)
            if unknown := [i for i in ids if i not in rows]:
                raise InputError(
                    f"{self.folder} has no passage {unknown[0]}"
                    + (f" (nor {len(unknown) - 1} others)" if unknown[1:] else "")
                )
            deleted = np.zeros(self.num_rows, bool) if self.valid is None else ~self.valid
            deleted[list(rows.values())] = True
            if deleted.all():
                raise InputError(f"{self.folder} would be empty: delete the folder instead")
            with atomic_file(self.folder / _DELETED, "wb") as file:
                file.write(_deleted_bytes(np.flatnonzero(deleted)))
            self.valid = ~deleted
        return len(ids)

    def file_sums(self) -> list[FileSum]:
        """Returns the sums of the files that `index.json` lists; it has a sum of its own."""
        out, index = self.folder, self.index
        sums = [
            FileSum(out / f"{shard['name']}.parquet", shard["sha256"]) for shard in index["shards"]
        ]
        for fingerprint, fields in index["encoders"].items():
            sums += self._vector_sums(fields)
            for kind, sum in fields["faiss"].items():
                sums.append(FileSum(_faiss_file(out, fingerprint, kind, self.num_rows), sum))
        return sums + self._sparse_sums()

    def _vector_sums(self, fields: dict[str, Any]) -> list[FileSum]:
        """Returns the sums of the vectors of each shard."""
        file, sums = vector_file(self.folder, fields["fingerprint"]), []
        row_bytes = fields["dim"] * DTYPES[fields["dtype"]].itemsize
        for shard, start in zip(self.index["shards"], self._starts):
            sum = shard["vectors"].get(fields["fingerprint"], "")
            place = _HEADER + int(start) * row_bytes
            sums.append(FileSum(file, sum, place, shard["passages"] * row_bytes))
        return sums

    def _sparse_sums(self) -> list[FileSum]:
        folder = self.folder / f"sparse-{self.num_rows}"
        files = self.index["sparse"]["files"] if self.index["sparse"] else {}
        return [FileSum(folder / name, sum) for name, sum in files.items()]

    def check_files(self) -> int:
        """Compares the SHA-256 sums of all files with those of `index.json`.

        Returns:
          The number of checksums compared.

        Raises:
          InputError: a file differs; the message names the first one.
        """
        sums = self.file_sums()
        _compare(sums)
        return len(sums)


def _compare(sums: Iterable[FileSum]) -> None:
    """Raises an InputError for the first file that differs from its sum."""
    for sum in sums:
        if (damage := sum.damage()) is not None:
            raise InputError(f"{damage}; {_WAY_OUT}")


def _open_known_encoder(folder: Path, fields: dict[str, Any], mesh: Mesh | None = None) -> Encoder:
    """Opens the encoder of an entry in `index.json`, and checks that its fingerprint is equal."""
    section = EncoderSection(**fields["section"])
    if not section.path:
        raise InputError(
            f"{folder} was built by {fields['name']}, which has no path: pass the encoder itself"
        )
    try:
        encoder = section.open(mesh)
    except InputError as error:
        raise InputError(
            f"the encoder of {folder} cannot be opened ({error}); if it has moved, name its path:"
            " --encoder=PATH of a command, encoder= of Retriever.open and Datastore.append"
        ) from None
    if encoder.fingerprint != fields["fingerprint"]:
        raise InputError(
            f"encoder={section.path} is not the one that built {folder}: its weights or settings"
            f" changed ({encoder.fingerprint[:12]}, and was {fields['fingerprint'][:12]})"
        )
    return encoder


def _append_groups(
    documents: Iterable[Document], chunking: Chunking
) -> Iterator[tuple[list[Passage], int]]:
    """Yields the passages of each appended shard, and the number of documents that have some."""
    passages, num_documents, size = [], 0, 0
    for document in documents:
        if not isinstance(document, Document):
            raise InputError(f"documents: {document!r:.60} must be a Document(name, text)")
        num_passages = len(passages)
        passages += chunking.passages(document)
        num_documents += len(passages) > num_passages
        size += len(document.text)
        if passages and size >= _APPEND_CHARACTERS:
            yield passages, num_documents
            passages, num_documents, size = [], 0, 0
    if passages:
        yield passages, num_documents


def _read_index(out: Path) -> dict[str, Any]:
    check_regular(out)
    if not (out / INDEX).is_file():
        if (out / PLAN).is_file():
            raise InputError(
                f"{out} is not finished: run the same `python -m lcjax.retrieval build` once more"
            )
        raise InputError(
            f"{out} holds no datastore: give a folder of `python -m lcjax.retrieval build`"
        )
    index = read_sealed(out / INDEX, _WAY_OUT)
    if index.get("format") != FORMAT or not _is_index(index):
        raise InputError(
            f"{out / INDEX} is no index of a datastore of format {FORMAT}: build it again"
        )
    return index


def _is_index(index: dict[str, Any]) -> bool:
    """Returns whether the fields have the types and formats of `build`.

    File names are made of them, so an unchecked index could name files outside the folder.
    """
    try:
        Chunking(**index["chunking"])
        if index["sparse"] is not None:
            Sparse(**index["sparse"]["settings"])
            names = index["sparse"]["files"]
            if not all(isinstance(s, str) and Path(n).name == n for n, s in names.items()):
                return False
        for fingerprint, fields in index["encoders"].items():
            is_encoder = (
                re.fullmatch(r"[0-9a-f]{8,128}", fingerprint)
                and fields["fingerprint"] == fingerprint
                and fields["dtype"] in DTYPES
                and type(fields["dim"]) is int
                and fields["dim"] > 0
                and isinstance(fields["name"], str)
                and isinstance(EncoderSection(**fields["section"]).path, str)
                and fields["faiss"].keys() <= set(FAISS_KINDS)
            )
            if not is_encoder:
                return False
        shards = index["shards"]
        return (
            bool(shards)
            and all(map(_is_shard, shards))
            and index["passages"] == sum(shard["passages"] for shard in shards)
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        return False


def _is_shard(shard: dict[str, Any]) -> bool:
    counts = ("passages", "bytes")
    return (
        bool(re.fullmatch(r"\d{6,9}", shard["name"]))
        and all(type(shard[name]) is int and shard[name] > 0 for name in counts)
        and isinstance(shard["sha256"], str)
        and isinstance(shard["vectors"], dict)
    )


def _deleted_bytes(rows: np.ndarray) -> bytes:
    """Returns the content of `deleted.npy`: the rows int64 as .npy, and the SHA-256 sum of that."""
    file = io.BytesIO()
    np.save(file, rows.astype("<i8"))
    return file.getvalue() + hashlib.sha256(file.getvalue()).digest()


def _read_deleted(out: Path, num_rows: int) -> np.ndarray | None:
    """Returns bool [rows], False for deleted passages; None if no passage is deleted."""
    path = out / _DELETED
    if not path.is_file():
        return None
    try:
        data = path.read_bytes()
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        valid = np.ones(num_rows, bool)
        if rows.dtype.kind != "i" or rows.ndim != 1 or (rows < 0).any():
            raise ValueError
        # Files of older versions end after the rows.
        if len(data) > rows.nbytes + _NPY_HEADER and data != _deleted_bytes(rows):
            raise ValueError
        valid[rows] = False
    except (OSError, ValueError, IndexError, EOFError):
        raise InputError(
            f"{path} is damaged: copy it again, or remove it to undo all deletions"
        ) from None
    return valid


def _list_of(kind: type, name: str, values: Any, example: str) -> list:
    """Returns an argument as a list; raises an InputError unless it holds values of a type."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        values = list(values)
        if all(isinstance(value, kind) for value in values):
            return values
    raise InputError(f"{name}={values!r:.60} must be a list, such as {example}")
