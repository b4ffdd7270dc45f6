"""Random access to the rows of Parquet files and of Arrow files, as Hugging Face `datasets` writes.

Both through pyarrow; the package `datasets` is not needed.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.data.files import Files
from lcjax.data.readers import Reader, no_field
from lcjax.errors import InputError


class ParquetRows(Reader):
    """The rows of a Parquet file, read by row groups; the last ones of a source are kept."""

    def __init__(self, name: str, path: Path, fields: Mapping[str, str], files: Files):
        super().__init__(name, path)
        self._files = files
        self._lock = threading.Lock()
        file = self._file()
        self._columns = _columns(fields, file.schema_arrow.names, path)
        meta = file.metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *rows])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def where(self, index: int) -> str:
        return f"{self._path}: row {index + 1}"

    def record(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # a ParquetFile is not safe to read from two threads
            table = self._files.blocks.get((self._path, group), lambda: self._read(group))
        return _row(table, index - int(self._starts[group]))

    def _file(self):
        return self._files.opened.get(self._path, self._open)

    def _open(self):
        pyarrow = _pyarrow(".parquet")
        try:
            return pyarrow.parquet.ParquetFile(self._path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is not a readable Parquet file: {error}") from None

    def _read(self, group: int):
        pyarrow, file = _pyarrow(".parquet"), self._file()
        try:
            return file.read_row_group(group, columns=self._columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path}: row group {group} is damaged: {error}") from None


class ArrowRows(Reader):
    """The rows of an Arrow file, of the streaming or the random access kind, read from its map."""

    def __init__(self, name: str, path: Path, fields: Mapping[str, str], files: Files):
        super().__init__(name, path)
        self._files = files
        table = self._table()
        self._columns = _columns(fields, table.column_names, path)
        self._rows = table.num_rows

    def __len__(self) -> int:
        return self._rows

    def where(self, index: int) -> str:
        return f"{self._path}: row {index + 1}"

    def record(self, index: int) -> dict[str, Any]:
        table = self._table()
        return {name: table.column(name)[index].as_py() for name in self._columns}

    def _table(self):
        return self._files.opened.get(self._path, self._open)

    def _open(self):
        pyarrow = _pyarrow(".arrow")
        try:
            mapped = pyarrow.memory_map(str(self._path))
            try:
                return pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is not a readable Arrow file: {error}") from None


def _columns(fields: Mapping[str, str], present: Sequence[str], path: Path) -> list[str]:
    """The columns that hold the fields, given by setting; `a.b` lies in column a."""
    columns = []
    for key, name in fields.items():
        column = name if name in present else name.split(".")[0]
        if column not in present:
            raise no_field(str(path), name, present, key)
        columns.append(column)
    return list(dict.fromkeys(columns))


def _row(table: Any, index: int) -> dict[str, Any]:
    return {name: table.column(name)[index].as_py() for name in table.column_names}


def _pyarrow(suffix: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"reading {suffix} files needs `pip install pyarrow`") from None
    return pyarrow
