"""Sources of type text: every format of file that holds documents as text."""

from collections.abc import Iterable
from typing import Any

from lcjax.data.array_record import ArrayRecords
from lcjax.data.arrow import ArrowRows, ParquetRows
from lcjax.data.corpus import Document, FoundFiles
from lcjax.data.files import Files
from lcjax.data.paths import find_files, kind
from lcjax.data.readers import JsonLines, Reader, TextFile, field_of, text_of
from lcjax.data.sources import Source, TextSource


class RecordFiles:
    """The files of a source of records; `fields` are those that it reads, by setting."""

    def __init__(self, source: Source, fields: Iterable[str], on_bad_text: str = "error"):
        self.source, self._on_bad_text = source, on_bad_text
        self._fields: dict[str, str] = {
            key: name for key in fields if (name := getattr(source, key))
        }
        self.found = FoundFiles(find_files(source.path))

    def open(self, index: int, files: Files) -> Reader:
        (name, path), bad = self.found[index], self._on_bad_text
        match kind(path):
            case ".jsonl":
                return JsonLines(name, path, bad, files)
            case ".array_record":
                return ArrayRecords(name, path, bad, files)
            case ".parquet":
                return ParquetRows(name, path, self._fields, files)
            case ".arrow":
                return ArrowRows(name, path, self._fields, files)
            case _:
                return TextFile(name, path, bad, files)

    def document(self, reader: Reader, index: int) -> Document:
        raise NotImplementedError


class TextFiles(RecordFiles):
    """Documents are one field of a record, or all of a file."""

    source: TextSource

    def __init__(self, source: TextSource, on_bad_text: str = "error"):
        super().__init__(source, ("text_field", "label_field"), on_bad_text)

    def document(self, reader: Reader, index: int) -> Document:
        record, where, name = reader.record(index), reader.where(index), reader.name(index)
        text = text_of(record, self.source.text_field, where)
        return Document(name, text, self._label(record, where, name), len(text))

    def _label(self, record: Any, where: str, name: str) -> str:
        field = self.source.label_field
        if field and isinstance(record, dict):
            return str(field_of(record, field, where, "label_field"))
        folder, inside, _ = name.partition("/")
        # At the top a file of many documents is a kind of text, one of a single document is none.
        return folder if inside else folder.split(".")[0] if ":" in folder else "."
