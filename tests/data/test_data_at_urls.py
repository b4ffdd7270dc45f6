"""Data at URLs: the same documents and batches as on a local disk, read by ranges."""

import gzip
import json

import numpy as np
import pytest
from data_support import Bytes
from storage_support import failing, memory, upload, web_server

from lcjax.data import DataConfig, TextSource, TokenSource, documents, make_loader
from lcjax.data.prepare import PrepareConfig, prepare
from lcjax.errors import InputError
from lcjax.storage import StorageError

pa = pytest.importorskip("pyarrow")
FORMATS = ["texts", "texts/*.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"]
STREAMED = ["texts", "a.jsonl"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with the same documents in every format."""
    import pyarrow.parquet

    folder, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    texts = [f"{i}: " + "".join(rng.choice(list("abcdé\n"), 80)) for i in range(12)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "texts" / "more").mkdir(parents=True)
    for i, text in enumerate(texts):
        name = f"{i:02d}.txt" if i < 9 else f"more/{i:02d}.txt"
        (folder / "texts" / name).write_text(text, encoding="utf-8")
    (folder / "texts" / ".hidden.txt").write_text("not read")
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    parts = [lines[i : i + 300] for i in range(0, len(lines), 300)]
    (folder / "a.jsonl.zst").write_bytes(
        b"".join(pa.compress(part, "zstd", asbytes=True) for part in parts)
    )
    table = pa.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lcjax.data.prepare.load_tokenizer", lambda name: Bytes())
        prepare(prepare_config(folder / "a.jsonl", folder / "tokens"))
        (folder / "bare.bin").write_bytes((folder / "tokens" / "000000.bin").read_bytes())
    return folder


def prepare_config(path, out):
    return PrepareConfig(path=str(path), tokenizer="bytes", out=str(out), workers=1)


def rows_of(path, **more):
    loader = make_loader(DataConfig(path=str(path), length=32, repeat=2, **more), Bytes(), 2)
    return np.concatenate([batch["tokens"] for batch in loader])


@pytest.mark.parametrize("name", FORMATS)
def test_documents_and_batches_in_a_bucket_are_those_of_a_local_folder(corpora, name):
    bucket = upload(corpora, memory("corpora"))
    url = f"{bucket}/{name}"
    assert list(documents(url)) == list(documents(str(corpora / name)))
    np.testing.assert_array_equal(rows_of(url), rows_of(corpora / name))
    if name in STREAMED:
        sources = [TextSource(place, stream=True) for place in (url, str(corpora / name))]
        np.testing.assert_array_equal(*(rows_of("", sources=(s,)) for s in sources))


@pytest.mark.parametrize("name", ["tokens", "bare.bin"])
def test_token_ids_in_a_bucket_are_those_of_a_local_folder(corpora, name):
    bucket = upload(corpora, memory("corpora"))
    rows = [
        rows_of("", sources=(TokenSource(f"{place}/{name}", document_start=48),))
        for place in (corpora, bucket)
    ]
    assert len(rows[0]) > 5
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("name", FORMATS)
def test_documents_of_a_web_server_are_those_of_a_local_folder(corpora, name):
    pytest.importorskip("aiohttp")
    if "*" in name:
        pytest.skip("an index page of folders only")
    with web_server(corpora) as (url, requests):
        assert list(documents(f"{url}/{name}")) == list(documents(str(corpora / name)))
    assert any(span is not None for _, span in requests)


def test_a_state_of_the_loader_holds_for_a_copy_of_the_text(corpora):
    bucket = upload(corpora, memory("corpora"))
    configs = [
        DataConfig(path=path, length=32) for path in (str(corpora / "texts"), f"{bucket}/texts")
    ]
    local, remote = (make_loader(config, Bytes(), 2) for config in configs)
    for _ in range(3):
        next(local)
    remote.set_state(local.get_state())
    np.testing.assert_array_equal(next(remote)["tokens"], next(local)["tokens"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_store_that_does_not_answer_gives_no_bad_record(corpora, name):
    url = f"{upload(corpora, bucket := memory('corpora'))}/{name}"
    options = {"on_bad_record": "skip", "threads": 0, "prefetch": 0}
    with failing(bucket, "cat_file", call=1000) as reads:
        rows_of(url, **options)
    assert reads
    for call in range(1, len(reads) + 1):
        with (
            failing(bucket, "cat_file", call=call),
            pytest.raises(StorageError, match="connection reset"),
        ):
            rows_of(url, **options)


def test_faults_of_urls_are_one_line(corpora):
    bucket = upload(corpora, memory("corpora"))
    for path, match in [
        (f"{bucket}/none.jsonl", "does not exist"),
        (f"{bucket}/none*.jsonl", "no readable file"),
        ("nonsense://bucket/a.jsonl", "nonsense:// is unknown"),
        ("http://127.0.0.1:9/a.jsonl", r"http://127.0.0.1:9/a.jsonl.*: .*onnect"),
    ]:
        with pytest.raises(InputError, match=match) as caught:
            make_loader(DataConfig(path=path, length=8), Bytes(), 1)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="out=memory://x must be a local path: copy"):
        prepare_config(corpora / "a.jsonl", "memory://x").folder  # noqa: B018


def test_a_server_without_ranges_raises_input_error(corpora):
    pytest.importorskip("aiohttp")
    with (
        web_server(corpora, has_ranges=False) as (url, _),
        pytest.raises(InputError, match="its server reads no ranges"),
    ):
        next(make_loader(DataConfig(path=f"{url}/a.parquet", length=8), Bytes(), 1))
