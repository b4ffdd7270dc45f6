"""Hugging Face `datasets` folders and ArrayRecord files, beside the formats of test_sources.py."""

import json
import struct

import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, write_jsonl

from lcjax.data import DataConfig, TextSource, documents, make_loader
from lcjax.data.corpus import open_corpus
from lcjax.data.readers import parse_example
from lcjax.errors import InputError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


def save_to_disk(folder, texts, shards=2):
    """What `datasets.Dataset.save_to_disk` leaves, with a file that a later map() cached."""
    folder.mkdir(parents=True)
    size, names = -(-len(texts) // shards), []
    for k in range(shards):
        part = texts[k * size : (k + 1) * size]
        table = pa.table({"text": part, "meta": [{"kind": "a"}] * len(part)})
        names.append(f"data-{k:05d}-of-{shards:05d}.arrow")
        with pa.ipc.new_stream(folder / names[-1], table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")
    with pa.ipc.new_stream(folder / "cache-1234.arrow", pa.schema([("ids", pa.int32())])):
        pass
    return str(folder)


def example(features):
    """A serialised tf.train.Example: bytes, ints and floats."""

    def varint(value):
        out = b""
        while True:
            value, low = value >> 7, value & 127
            out += bytes([low | (128 if value else 0)])
            if not value:
                return out

    def block(number, data):
        return varint(number << 3 | 2) + varint(len(data)) + data

    entries = b""
    for name, value in features.items():
        if isinstance(value, str):
            feature = block(1, block(1, value.encode()))
        elif isinstance(value, int):
            feature = block(3, block(1, varint(value % 2**64)))
        else:
            feature = block(2, block(1, struct.pack(f"<{len(value)}f", *value)))
        entries += block(1, block(1, name.encode()) + block(2, feature))
    return block(1, entries)


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:3")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def rows_of(path, **more):
    config = DataConfig(sources=[TextSource(path, **more)], length=16, repeat=1)
    return list(make_loader(config, Bytes(), 4))


def assert_refused(match, path, **more):
    with pytest.raises(InputError, match=match) as caught:
        rows_of(str(path), **more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_datasets_folder_gives_its_texts(stream, tmp_path):
    texts = make_texts(30)
    path = save_to_disk(tmp_path / "set", texts)
    assert [text for _, text in documents(path)] == texts
    corpus = open_corpus(TextSource(path))
    for i in np.random.default_rng(0).permutation(30):
        assert corpus[int(i)][1] == texts[i]
    assert corpus[0][0] == "data-00000-of-00002.arrow:1"
    assert rows_of(path, text_field="meta.kind", stream=stream)
    if not stream:
        jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
        assert_same(rows_of(path), rows_of(jsonl))


def test_an_arrow_file_with_a_footer_is_read_too(tmp_path):
    table = pa.table({"text": ["one", "two"]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert [text for _, text in documents(str(tmp_path / "a.arrow"))] == ["one", "two"]


def test_splits_of_a_dataset_must_be_named(tmp_path):
    save_to_disk(tmp_path / "set" / "train", make_texts(4))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert_refused(
        r"holds the splits train, test of a dataset: name one of them, as .*/train",
        tmp_path / "set",
    )
    assert len(list(documents(str(tmp_path / "set" / "train")))) == 4


def test_damaged_arrow_files_and_missing_columns_are_named(tmp_path):
    path = save_to_disk(tmp_path / "set", make_texts(4), shards=1)
    assert_refused(r"has no field 'body'; it has meta, text: .*text_field", path, text_field="body")
    (tmp_path / "bad.arrow").write_bytes(b"no arrow at all")
    assert_refused(r"bad.arrow is not a readable Arrow file", tmp_path / "bad.arrow")


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_a_flipped_bit_is_one_line_or_another_text_and_ends_no_process(suffix, tmp_path):
    table, file = pa.table({"text": make_texts(20)}), tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pa.parquet.write_table(table, file)
    else:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    whole, choose, num_refused = file.read_bytes(), np.random.default_rng(0), 0
    for place in choose.integers(len(whole), size=150):
        data = bytearray(whole)
        data[place] ^= 1 << choose.integers(8)
        file.write_bytes(data)
        try:
            assert len(list(documents(str(file)))) <= 20
        except InputError as error:
            assert "\n" not in str(error) and str(file) in str(error)
            num_refused += 1
    assert num_refused > 10


@pytest.mark.parametrize("kind", ["text", "json", "example"])
@pytest.mark.parametrize("suffix", ["array_record", "arrayrecord"])
def test_records_of_every_kind_give_the_same_documents(kind, suffix, tmp_path):
    texts = [*make_texts(20), "\nnäive café, 日本語"]
    pack = {
        "text": str.encode,
        "json": lambda text: json.dumps({"text": text, "id": 1}).encode(),
        "example": lambda text: example({"text": text, "id": -5, "scores": [0.5, 2.0]}),
    }[kind]
    path = write_records(tmp_path / f"a.{suffix}", map(pack, texts))
    assert [text for _, text in documents(path)] == texts
    corpus = open_corpus(TextSource(path))
    for i in np.random.default_rng(0).permutation(21):
        assert corpus[int(i)] == (f"a.{suffix}:{i + 1}", texts[i])
    assert_same(rows_of(path), rows_of(write_jsonl(tmp_path / "a.jsonl", texts)))


def test_an_example_is_told_from_other_bytes():
    assert parse_example(example({"a": "b", "n": -3, "x": [0.5]})) == {
        "a": [b"b"],
        "n": [-3],
        "x": [0.5],
    }
    for data in (b"\nplain text", b'{"text": "a"}', b"\n\x05abc", example({"a": "b"})[:-1]):
        assert parse_example(data) is None


def test_bad_records_are_placed(tmp_path, monkeypatch):
    good = example({"text": "fine and long enough"})
    path = write_records(tmp_path / "a.array_record", [good, b"no example"])
    assert_refused(r"a.array_record: record 2 is no tf.train.Example, but the first", path)
    assert_refused(
        r"record 1 has no field 'body'; it has text: .*text_field", path, text_field="body"
    )
    path = write_records(tmp_path / "b.array_record", [b'{"text": "a"}', b"{"])
    assert_refused(r"b.array_record: record 2 is not JSON", path)
    (tmp_path / "c.array_record").write_bytes(b"no such thing")
    assert_refused(
        r"c.array_record is not a readable ArrayRecord file", tmp_path / "c.array_record"
    )


def test_odd_files_are_named(tmp_path):
    path = write_records(tmp_path / "a.array_record", [b"\x08\x01", b"text"])
    assert [text for _, text in documents(str(path))] == ["\x08\x01", "text"]
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "b.parquet")
    assert_refused(r"b.parquet has 2 columns 'text': rename one", tmp_path / "b.parquet")
    for name in ("dataset_dict.json", "state.json"):
        save_to_disk(tmp_path / name, make_texts(4))
        (tmp_path / name / name).write_text('{"splits": ')
        assert_refused(rf"{name}: not JSON, truncated", tmp_path / name)
