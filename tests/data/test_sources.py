"""Where text comes from, what it is called, and what is said when it is not there."""

import gzip
import json
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from data_support import Bytes, make_texts, write_jsonl

from lcjax import config as configs
from lcjax.data import DataConfig, TextSource, documents, make_loader, scan
from lcjax.data.readers import line_starts
from lcjax.errors import InputError


@pytest.fixture(scope="module")
def texts():
    return [*make_texts(12), "näive café, 日本語\nsecond line"]


def write_all(folder, texts):
    """The same documents in every format; names of the sources."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    plain = folder / "texts"
    plain.mkdir()
    for i, text in enumerate(texts):
        (plain / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    jsonl = folder / "a.jsonl"
    write_jsonl(jsonl, texts)
    with gzip.open(folder / "a.jsonl.gz", "wb") as file:
        file.write(jsonl.read_bytes())
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=2)
    return {
        "folder": str(plain),
        "glob": str(plain / "*.txt"),
        "jsonl": str(jsonl),
        "gz": str(folder / "a.jsonl.gz"),
        "parquet": str(folder / "a.parquet"),
    }


def assert_refused(match, path, **more):
    with pytest.raises(InputError, match=match) as caught:
        make_loader(DataConfig(**{"path": str(path), "length": 8} | more), Bytes(), 1)
    assert "\n" not in str(caught.value)


def test_every_format_gives_the_same_documents_and_the_same_batches(texts, tmp_path):
    paths = write_all(tmp_path, texts)
    batches = {}
    for name, path in paths.items():
        assert [text for _, text in documents(path)] == texts, name
        loader = make_loader(DataConfig(path=path, length=16, repeat=1), Bytes(), 4)
        batches[name] = np.concatenate([batch["tokens"] for batch in loader])
    for name, rows in batches.items():
        np.testing.assert_array_equal(rows, batches["folder"], err_msg=name)


def test_parquet_rows_are_right_in_any_order(texts, tmp_path):
    path = write_all(tmp_path, texts)["parquet"]
    from lcjax.data.corpus import open_corpus

    corpus = open_corpus(TextSource(path))
    for i in np.random.default_rng(0).permutation(len(texts)).tolist() * 2:
        assert corpus[i] == (f"a.parquet:{i + 1}", texts[i])


def test_folders_are_read_recursively_in_the_order_of_names(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("b/c/z.md", "a.py", "b/a.txt", ".hidden/x.txt", "image.png"):
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "b" / "b.jsonl", ["one", "two"])
    names = [name for name, _ in documents(str(tmp_path))]
    assert names == ["a.py", "b/a.txt", "b/b.jsonl:1", "b/b.jsonl:2", "b/c/z.md"]
    assert [name for name, _ in documents(str(tmp_path / "b" / "**" / "*.md"))] == ["c/z.md"]


def test_line_offsets_hold_with_and_without_a_last_line_feed():
    for content, wanted in [
        (b"", [0]),
        (b"a", [0, 1]),
        (b"a\n", [0, 2]),
        (b"a\n\nbc", [0, 2, 3, 5]),
        (b"a\r\nb\n", [0, 3, 5]),
    ]:
        for size in (1, 2, 100):
            chunks = [content[i : i + size] for i in range(0, len(content), size)]
            assert line_starts(chunks, "lines", len(content)).tolist() == wanted


def test_blank_lines_byte_order_marks_and_carriage_returns_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \n{"text": "two"}')
    assert list(documents(str(path))) == [("a.jsonl:1", "one"), ("a.jsonl:4", "two")]


def test_the_standard_library_is_a_corpus_of_code():
    names = dict(zip(("argparse.py", "json/decoder.py"), (None, None), strict=True))
    for name, text in documents("python:stdlib"):
        assert name.endswith(".py")
        assert "site-packages" not in name and "/test/" not in name
        if name in names:
            names[name] = text
    assert "class ArgumentParser" in names["argparse.py"]
    assert "class JSONDecoder" in names["json/decoder.py"]


def test_an_installed_package_is_read_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "somebooks"
    (package / "plays").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "plays" / "one.md").write_text("to be")
    (tmp_path / "onefile.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, _ in documents("package:somebooks")] == ["__init__.py", "plays/one.md"]
    assert list(documents("package:somebooks/plays")) == [("one.md", "to be")]
    assert list(documents("package:somebooks/**/*.md")) == [("plays/one.md", "to be")]
    assert [name for name, _ in documents("package:onefile")] == ["onefile.py"]
    assert "somebooks" not in sys.modules


def test_documents_below_the_least_number_of_tokens_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abc", "abcd", "ab"])
    config = DataConfig(
        path=path, length=8, min_document_tokens=4, repeat=2, add_bos=False, add_eos=False
    )
    (batch,) = make_loader(config, Bytes(), 1)
    assert bytes(batch["tokens"][0].tolist()) == b"abcdabcd"


def test_the_section_is_read_from_yaml_and_the_command_line(tmp_path):
    @dataclass(frozen=True)
    class Run:
        data: DataConfig = field(default_factory=DataConfig)

    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  sources:\n  - {path: a.txt, weight: 2}\n  - {path: b.jsonl}\n  add_bos: false\n"
    )
    argv = ["--config", str(file), "--data.length=64", "--data.sources.1.text_field=body"]
    data = configs.parse(Run, argv).data
    assert data.sources == [TextSource("a.txt", 2.0), TextSource("b.jsonl", 1.0, "body")]
    assert (data.length, data.add_bos, data.repeat) == (64, False, None)
    with pytest.raises(InputError, match=r"^data.sources.0: weight=0.0 must be a number x > 0"):
        configs.parse(Run, [*argv, "--data.sources.0.weight=0"])


def test_a_missing_path_and_a_path_without_text_are_named(tmp_path):
    assert_refused(r"data.path is empty: give a file", "")
    assert_refused(r"data.path=.*nowhere does not exist", tmp_path / "nowhere")
    assert_refused(
        r"data.path=.*\*.txt has no readable file; readable are .txt", tmp_path / "*.txt"
    )
    (tmp_path / "image.png").write_bytes(b"x")
    assert_refused(r"has no readable file; readable are .txt, .md, .py, .jsonl, .parq", tmp_path)
    assert_refused(r"image.png has no readable file", tmp_path / "image.png")
    assert_refused(r"only python:stdlib", "python:tests")
    assert_refused(r"no package 'not_there_at_all' is installed here", "package:not_there_at_all")
    assert_refused(r"data.path=package:json/nowhere does not exist", "package:json/nowhere")


def test_an_empty_corpus_and_one_of_empty_documents_are_named(tmp_path):
    (tmp_path / "a.txt").touch()
    assert_refused(r"holds no document: its files are empty", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").touch()
    assert_refused(r"holds no document", tmp_path / "a.jsonl")
    path = write_jsonl(tmp_path / "b.jsonl", ["", "  \n", ""])
    assert_refused(r"none of the 3 documents has enough text", path)
    with pytest.raises(InputError, match="none of the 3 documents"):
        list(documents(path))


def test_text_that_is_not_utf8_is_placed_and_can_be_skipped_or_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good text here")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    assert_refused(
        r"b.txt is not UTF-8: byte 0xe9 at offset 3; .*LATIN1.*data.on_bad_text=skip",
        tmp_path,
        length=64,
    )

    def read(how):
        config = DataConfig(path=str(tmp_path), on_bad_text=how)
        return [text for _, text in documents(config)]

    assert read("skip") == ["good text here"]
    assert read("replace") == ["good text here", "caf\ufffd"]
    (tmp_path / "b.txt").write_bytes("hello".encode("utf-16"))
    assert_refused(r"b.txt is not UTF-8: byte 0xff at offset 0; .*UTF-16", tmp_path, length=64)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    assert_refused(r"c.jsonl:2 is not UTF-8: byte 0xe9 at offset 28", path, length=64)


def test_a_bad_document_met_in_the_middle_of_training_is_the_same_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abcdefgh"] * 20)
    with open(path, "a") as file:
        file.write("broken\n")
    loader = make_loader(DataConfig(path=path, length=8, shuffle=False), Bytes(), 1)
    with pytest.raises(InputError, match=r"a.jsonl:21 is not JSON"):
        for _ in range(100):
            next(loader)


def test_bad_json_lines_are_placed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    assert_refused(
        r'a.jsonl:2 is not JSON: Expecting value at column \d+; .*\{"text": ...\}', path, length=64
    )
    path.write_text('["text"]\n')
    assert_refused(r"a.jsonl:1 is a JSON list, not an object", path)
    path.write_text('{"text": 3}\n')
    assert_refused(r"a.jsonl:1: field 'text' holds a int, not text", path)
    path.write_text(json.dumps({"body": "a", "id": 1}) + "\n")
    assert_refused(r"a.jsonl:1 has no field 'text'; it has body, id: .*text_field", path)


def test_a_missing_parquet_column_and_a_damaged_file_are_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    assert_refused(r"a.parquet has no field 'text'; it has body, id", path)
    path.write_bytes(path.read_bytes()[:-20])
    assert_refused(r"a.parquet is not a readable Parquet file", path)


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    assert_refused(r"a.jsonl.gz is damaged or cut short", path)
    path.write_bytes(b"no gzip at all")
    assert_refused(r"a.jsonl.gz is damaged or cut short", path)


def test_too_little_text_raises_an_error_with_numbers_and_the_fix(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abcd", "efgh"])
    config = DataConfig(path=path, length=32, add_bos=False, add_eos=False)
    with pytest.raises(InputError, match=r"holds 8 tokens, too few .* 64 .*data.repeat=8"):
        make_loader(config, Bytes(), 2)
    repeated = DataConfig(**vars(config) | {"repeat": 8})
    (batch,) = make_loader(repeated, Bytes(), 2)
    assert (batch["segments"] > 0).all()


def test_a_holdout_that_leaves_nothing_raises_input_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abcd" * 9])
    with pytest.raises(InputError, match=r"data.holdout=0.5 leaves no document for \w+ out of 1"):
        for split in ("train", "validation"):
            make_loader(DataConfig(path=path, length=8, holdout=0.5), Bytes(), 1, split=split)
    with pytest.raises(InputError, match=r"data.holdout=0.0 leaves nothing for validation"):
        make_loader(DataConfig(path=path, length=8), Bytes(), 1, split="validation")


@pytest.fixture
def with_bad_records(tmp_path):
    records = [{"text": "one"}, {"text": 2}, {"other": "x"}, ["text"], {"text": None}, "plain"]
    lines = [json.dumps(record) for record in records]
    lines[1:1] = ['{"text": "cut']
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": "last"}']))
    return str(tmp_path)


def test_a_bad_record_is_an_error_of_one_line_before_the_training(with_bad_records):
    with pytest.raises(InputError, match=r"a.jsonl:2 .*"):
        scan(DataConfig(path=with_bad_records))
    with pytest.raises(InputError, match=r"data.on_bad_record='x' must be one of error, skip"):
        DataConfig(path=with_bad_records, on_bad_record="x")


@pytest.mark.parametrize("stream", [False, True])
def test_bad_records_are_skipped_and_named(with_bad_records, stream, capsys):
    source = TextSource(with_bad_records, stream=stream)
    config = DataConfig(sources=[source], on_bad_record="skip")
    texts = [text for _, text in documents(config)]
    assert texts == ["one", "last"]
    named = capsys.readouterr().err
    assert [f"skipped bad record {n} of" in named for n in (1, 5, 6)] == [True, True, False]
    assert all(f"a.jsonl:{line}" in named for line in (2, 3, 4, 5, 7)) and "a.jsonl:6" not in named
    assert scan(config) == 8


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"path": "a", "sources": [TextSource("b")]}, "data.path=a and data.sources are both set"),
    ],
)
def test_settings_out_of_range_raise_input_error(fields, match):
    with pytest.raises(InputError, match=match):
        DataConfig(**fields)


def test_rows_must_be_those_of_the_batch(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abcd" * 9])
    config = DataConfig(path=path, length=8)
    for rows in ([], [3], [-1, 0]):
        with pytest.raises(InputError, match=r"rows=.* list of indices in 0 ... 2"):
            make_loader(config, Bytes(), 3, rows=rows)


def test_a_byte_order_mark_is_removed_where_bytes_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfon\xe9")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "tw\xe9"}')
    config = DataConfig(path=str(tmp_path), on_bad_text="replace")
    assert [text for _, text in documents(config)] == ["on\ufffd", "tw\ufffd"]
