"""Rows with retrieved passages: which ones, kills, what the loader gives, bad input."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from retrieval_support import WordEncoder, content, write_bert, write_corpus

pytest.importorskip("bm25s")

from lcjax import config as configs
from lcjax.checkpoints import ByteTokenizer
from lcjax.data import Chunks, DataConfig, RetrievedSource, TextConfig, TextSource, make_loader
from lcjax.data.__main__ import main as prepare_command
from lcjax.data.corpus import open_corpus
from lcjax.data.readers import unit_hash
from lcjax.errors import InputError
from lcjax.evaluation import RagLm
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.task import Limits
from lcjax.files import CHECKSUMS
from lcjax.retrieval import (
    BuildConfig,
    Chunking,
    ChunksConfig,
    Datastore,
    Retriever,
    Sparse,
    WindowsConfig,
    build,
    chunks,
    write_chunks,
    write_windows,
)
from lcjax.retrieval import __main__ as command

RETDOC = Chunks(count=3, length=40, text="retrieved")
RETRO = Chunks(count=8, length=24, text="retrieved", stride=16)  # 2 passages, 4 searches
TOKENIZER = ByteTokenizer()
PLAIN = {"length": 64, "threads": 0, "prefetch": 0, "shuffle": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`text`, `store` of its passages, and `tokenizer`."""
    out = tmp_path_factory.mktemp("chunks")
    path = write_corpus(out / "text", files=2, lines=4)
    build(BuildConfig(TextConfig(path), Chunking("words", 12), out=str(out / "store"), workers=1))
    TOKENIZER.save(out / "tokenizer")
    return out


def rows_config(folder, out, split=RETDOC, data=(), **changes):
    data = PLAIN | {"path": str(folder / "text"), "chunks": split, "repeat": 1} | dict(data)
    fields = {"tokenizer": str(folder / "tokenizer"), "store": str(folder / "store")}
    fields |= {"batch_size": 4, "save_every": 2, "query_tokens": 30} | changes
    return ChunksConfig(data=DataConfig(**data), out=str(out), **fields)


@pytest.fixture(scope="module")
def retdoc(folder):
    write_chunks(rows_config(folder, folder / "retdoc"))
    return folder / "retdoc"


@pytest.fixture(scope="module")
def retro(folder):
    write_chunks(rows_config(folder, folder / "retro", RETRO))
    return folder / "retro"


def training_config(out, split=RETDOC, **changes):
    plain = PLAIN | {"chunks": split, "repeat": 1, "sources": [RetrievedSource(str(out))]}
    return DataConfig(**plain | changes)


def read(config, tokenizer=TOKENIZER):
    batches = list(make_loader(config, tokenizer, 1))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def documents_of_tokens(folder):
    """The name of every token's document, with BOS and EOS, in the order of the rows."""
    names = []
    for name, text in open_corpus(TextSource(str(folder / "text"))):
        names += [name] * (len(text.encode()) + 2)
    return names


def expected_passages(retriever, query, names, k, length):
    """Brute force: tokens of the best k of all passages that are of other documents."""
    (hits,) = retriever.search([query], retriever.store.num_rows)
    others = [hit.passage for hit in hits if hit.passage.document not in names][:k]
    return [TOKENIZER.encode(passage.full_text)[:length] for passage in others]


def stored_passages(rows, row):
    pairs = zip(rows["chunks"][row], rows["chunk_mask"][row])
    return [tokens[mask].tolist() for tokens, mask in pairs]


def padded(passages, count):
    return passages + [[]] * (count - len(passages))


def test_a_row_has_the_best_passages_of_other_documents_for_its_first_tokens(folder, retdoc):
    stored, names = read(training_config(retdoc)), documents_of_tokens(folder)
    assert len(stored["tokens"]) > 20
    retriever, num_dropped = Retriever.open(folder / "store"), 0
    for row, tokens in enumerate(stored["tokens"]):
        row_names = set(names[64 * row : 64 * row + 64])
        query = TOKENIZER.decode(tokens[:30], skip_special=True)
        expected = expected_passages(retriever, query, row_names, 3, 40)
        assert stored_passages(stored, row) == padded(expected, 3)
        num_dropped += expected != expected_passages(retriever, query, (), 3, 40)
    assert num_dropped > 10  # the filter matters: passages of the same document fit best
    last = stored["chunk_mask"].cumsum(-1)[..., -1]
    np.testing.assert_array_equal(stored["chunk_mask"], np.arange(40) < last[..., None])


def test_every_stride_of_a_document_has_passages_of_its_own(folder, retro):
    stored, names = read(training_config(retro, RETRO)), documents_of_tokens(folder)
    retriever = Retriever.open(folder / "store")
    assert stored["segments"].max() > 1  # packed rows: chunks follow the documents' positions
    for row, tokens in enumerate(stored["tokens"]):
        row_names, expected = set(names[64 * row : 64 * row + 64]), []
        for segment in range(1, stored["segments"][row].max() + 1):
            text = tokens[stored["segments"][row] == segment]
            for start in range(0, len(text) - 15, 16):
                query = TOKENIZER.decode(text[start : start + 16], skip_special=True)
                expected += padded(expected_passages(retriever, query, row_names, 2, 24), 2)
        assert stored_passages(stored, row) == padded(expected, 8)


def test_a_vector_search_and_the_same_documents(folder, tmp_path, monkeypatch):
    encoder, store = WordEncoder(), str(tmp_path / "store")
    text = TextConfig(str(folder / "text"))
    config = BuildConfig(text, Chunking("words", 12), sparse=None, out=store, workers=1)
    build(config, encoder=encoder)
    monkeypatch.setattr(Datastore, "open_encoder", lambda *_: encoder)
    config = rows_config(folder, tmp_path / "rows", store=store, same_document=True, rows=5)
    assert write_chunks(config)["rows"] == 5
    stored, retriever = read(training_config(tmp_path / "rows")), Retriever.open(store)
    for row, tokens in enumerate(stored["tokens"]):
        query = TOKENIZER.decode(tokens[:30], skip_special=True)
        assert stored_passages(stored, row) == expected_passages(retriever, query, (), 3, 40)


def test_the_loader_gives_the_fields_and_types_of_other_chunks(folder, retdoc, retro):
    split = Chunks(count=3, length=40)
    plain = PLAIN | {"path": str(folder / "text"), "chunks": split, "length": 184}
    expected = next(make_loader(DataConfig(**plain), TOKENIZER, 2))
    batch = next(make_loader(training_config(retdoc), TOKENIZER, 2))
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }
    for out, split in ((retdoc, RETDOC), (retro, RETRO)):
        # The text is that of a training without chunks.
        plain = PLAIN | {"path": str(folder / "text"), "document_mask": split is RETRO}
        text = read(DataConfig(**plain | {"repeat": 1}))
        stored = read(training_config(out, split))
        for name, value in text.items():
            np.testing.assert_array_equal(stored[name], value, err_msg=name)
        by_path = training_config(out, split, sources=[], path=str(out))
        assert by_path.resolved_sources() == [RetrievedSource(str(out))]


def test_after_a_kill_the_same_command_makes_the_same_folder(folder, retdoc, tmp_path, monkeypatch):
    batches = []

    def killed(self, batch, add=chunks._RetrievedChunks.add):
        batches.append(batch)
        if len(batches) == 4:
            raise KeyboardInterrupt
        return add(self, batch)

    config = rows_config(folder, tmp_path / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(chunks._RetrievedChunks, "add", killed)
        with pytest.raises(KeyboardInterrupt, match="8 rows are in .*; the same command resumes"):
            write_chunks(config)
    with pytest.raises(InputError, match=r"is not finished: run the same `python -m lcjax.retrie"):
        make_loader(training_config(tmp_path / "rows"), TOKENIZER, 1)
    (tmp_path / "rows" / "000001.bin.tmp").write_bytes(b"half")
    write_chunks(config)
    assert content(tmp_path / "rows") == content(retdoc)
    shards = [f"{i:06d}.bin" for i in range(6)]
    assert content(retdoc).keys() == {*shards, "retrieved.json", CHECKSUMS}
    monkeypatch.setattr(chunks._RetrievedChunks, "add", None)
    write_chunks(config)  # a complete folder is not written again


@pytest.mark.parametrize("rows", [None, 11])
def test_parts_make_the_same_folder(folder, tmp_path, rows, monkeypatch):
    whole = rows_config(folder, tmp_path / "whole", rows=rows)
    write_chunks(whole)
    config = dataclasses.replace(whole, out=str(tmp_path / "parts"))
    for part in ("2/3", "0/3"):
        assert write_chunks(config, part=part) is None
    # The last shard of a whole text is empty.
    names = {f"{i:06d}.{end}" for i in range(7 if rows is None else 2) for end in ("bin", "json")}
    names = {name for name in names if int(name[:6]) % 3 != 1}
    assert content(tmp_path / "parts").keys() == names | {"retrieved_plan.json"}
    if rows is None:  # otherwise the call without a part writes the missing shards
        write_chunks(config, part="1/3")
        monkeypatch.setattr(chunks._RetrievedChunks, "add", None)
    index = write_chunks(config)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert write_chunks(config) == index


def test_the_command_writes_parts(folder, tmp_path, capsys):
    words = [f"--{key}={folder / key}" for key in ("tokenizer", "store")]
    words += [f"--data.path={folder / 'text'}", f"--out={tmp_path / 'rows'}", "--data.length=64"]
    words += ["--data.repeat=1", "--data.chunks.count=2", "--data.chunks.length=24"]
    words = ["chunks", *words, "--data.chunks.text=retrieved", "--save_every=3"]
    for part in ("0/2", "1/2"):
        assert command.main([*words, "--part", part]) == 0
        assert f"part {part} is written; when all are" in capsys.readouterr().out
    assert command.main(words) == 0 and "rows; read them with" in capsys.readouterr().out
    assert (
        command.main([*words, "--part=2/2"]) == 2
        and "part=2/2 must be i/n" in capsys.readouterr().err
    )


def test_other_passages_or_settings_do_not_resume_in_the_same_folder(folder, retdoc, tmp_path):
    text = TextConfig(str(folder / "text"))
    out = str(tmp_path / "store")
    config = BuildConfig(text, Chunking("words", 12), Sparse(k1=0.9), out=out, workers=1)
    build(config)
    for changes, what in [
        ({"query_tokens": 20}, "query_tokens 30, which is 20 now"),
        ({"store": str(tmp_path / "store")}, "passages of the datastore .* now"),
        ({"split": dataclasses.replace(RETDOC, length=41)}, "chunks .*'length': 41.* now"),
        ({"data": {"seed": 1}}, "data.seed 0, which is 1 now"),
    ]:
        with pytest.raises(InputError, match=f"was made with {what}: name another folder"):
            write_chunks(rows_config(folder, retdoc, **changes))


def test_a_deleted_passage_changes_the_rows(folder, tmp_path):
    text, out = TextConfig(str(folder / "text")), str(tmp_path / "store")
    build(BuildConfig(text, Chunking("words", 12), out=out, workers=1))
    config = rows_config(folder, tmp_path / "rows", store=out)
    write_chunks(config)
    store = Datastore(out)
    store.delete([store.passages([0])[0].id])
    with pytest.raises(InputError, match="was made with passages of the datastore"):
        write_chunks(config)


class Other(ByteTokenizer):
    fingerprint = "other"


def test_rows_of_another_shape_or_tokenizer_raise_input_error(retdoc, retro):
    for config, match in [
        (
            training_config(retdoc, dataclasses.replace(RETDOC, length=41)),
            r"data.chunks=3 x 41, text=retrieved is not that of .*; set it to {count: 3, length: 40"
            r", text: retrieved}",
        ),
        (training_config(retdoc, Chunks(3, 8)), r"data.chunks=3 x 8, text=before is not that"),
        (training_config(retdoc, None), r"data.chunks=null is not that of the rows"),
        (
            training_config(retro, dataclasses.replace(RETRO, stride=8)),
            r"stride=8 is not that of .*, stride: 16}",
        ),
        (training_config(retdoc, length=80), r"data.length=80 is not that of .*; set it to 64"),
    ]:
        with pytest.raises(InputError, match=match) as caught:
            make_loader(config, TOKENIZER, 1)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"with the tokenizer of .*tokenizer \(.*\(other\)"):
        make_loader(training_config(retdoc), Other(), 1)


def test_a_training_needs_rows_of_one_kind(folder, retdoc):
    config = training_config(retdoc, sources=[], path=str(folder / "text"))
    with pytest.raises(InputError, match=r"text=retrieved: .* has no passages; write rows with"):
        make_loader(config, TOKENIZER, 1)
    both = [RetrievedSource(str(retdoc)), TextSource(str(folder / "text"))]
    with pytest.raises(InputError, match=r"data.sources.1 is not of type retrieved, and others"):
        training_config(retdoc, sources=both)
    with pytest.raises(InputError, match=r"type retrieved: its rows are stored; leave stride out"):
        RetrievedSource("a", stride=4)


def test_windows_have_whole_passages_for_their_beginnings_and_a_task_reads_them(
    folder, tmp_path, monkeypatch
):
    searched, search = [], Retriever.search

    def counting_search(retriever, queries, *args, **options):
        searched.append(len(queries))
        return search(retriever, queries, *args, **options)

    monkeypatch.setattr(Retriever, "search", counting_search)
    out, length = str(tmp_path / "windows.jsonl"), 48
    fields = vars(rows_config(folder, out, data={"path": "", "sources": [
        TextSource(str(folder / "text" / f"{i}.jsonl")) for i in range(2)
    ]}, rows=5, same_document=True))  # fmt: skip
    fields["data"] = dataclasses.replace(fields["data"], chunks=Chunks(3, length, text="retrieved"))
    assert write_windows(WindowsConfig(**fields)) == 10
    assert sum(searched) == 10, "a window that is not written is not searched for"
    lines = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert [line["domain"] for line in lines] == ["0.jsonl"] * 5 + ["1.jsonl"] * 5
    retriever, counts = Retriever.open(folder / "store"), []
    for line in lines:
        assert len(line["input_ids"]) == 64
        query = TOKENIZER.decode(line["input_ids"][:30], skip_special=True)
        (hits,) = retriever.search([query], retriever.store.num_rows)
        chunks = [(TOKENIZER.encode(hit.passage.full_text)[:length], hit.score) for hit in hits[:6]]
        chunks = [{"ids": ids, "score": score} for ids, score in chunks if len(ids) == length]
        assert line["chunks"] == chunks[:3]
        counts.append(len(line["chunks"]))
    assert max(counts) == 3
    task = RagLm(path=out, decoder=64, scored=34, chunk=length)
    limits = Limits((64, 64 + 3 * length), 1, None, None, 0)
    corpus = TokenizedCorpus([], TOKENIZER)
    assert len(task.plan(corpus, 64, limits)) == 10
    planned = task.plan(corpus, 64 + 3 * length, limits)
    assert len(planned) == sum(count == 3 for count in counts)
    single = dataclasses.replace(fields["data"], length=1000, pack="single")
    for changes, match in (
        ({"out": str(tmp_path / "windows")}, "must be a file of JSON lines, such as"),
        ({"data": single, "batch_size": 1}, "0.jsonl has no window of 1000 tokens; lower data"),
        ({"data": dataclasses.replace(fields["data"], chunks=RETRO)}, "one query for a window"),
    ):
        with pytest.raises(InputError, match=match):
            write_windows(WindowsConfig(**fields | changes))


@pytest.mark.slow
def test_the_five_steps_of_cepes_retrieval_run_on_the_standard_library(tmp_path, capsys):
    """The configs of RedPajama with other paths and sizes; a training and a task read all."""
    TOKENIZER.save(tmp_path / "tokenizer")
    encoder = write_bert(tmp_path / "bert", ["self", "def", "return", "if", "import", "="])
    read = f"--tokenizer={tmp_path / 'tokenizer'}"
    hashes = {"train": "[0.01, 0.02]", "test": "[0.0, 0.01]", "store": "[0.505, 0.51]"}
    folders = {name: str(tmp_path / name) for name in (*hashes, "rows")}
    folders["windows"] = str(tmp_path / "windows.jsonl")

    def source(name):
        return f"sources=[{{path: 'python:stdlib', hashes: {hashes[name]}}}]"

    for name in ("train", "test"):
        words = ["prepare", f"--config=lcjax:data/redpajama_{name}", f"--{source(name)}", read]
        assert prepare_command([*words, f"--out={folders[name]}", "--workers=1"]) == 0
    words = [f"--data.{source('store')}", f"--encoder.path={encoder}", f"--out={folders['store']}"]
    words += [f"--chunking.tokenizer={tmp_path / 'tokenizer'}", "--chunking.size=32"]
    assert command.main(["build", "--config=lcjax:data/redpajama_store", *words]) == 0
    shared = [f"--store={folders['store']}", read, "--query_tokens=32", "--mesh.data=8"]
    small = ["--rows=64", "--batch_size=32"]
    rows = f"--data.sources=[{{type: tokens, path: {folders['train']}}}]"
    words = ["--data.length=128", "--data.chunks.count=4", "--data.chunks.length=32", rows]
    words += [f"--out={folders['rows']}", *small, *shared]
    assert command.main(["chunks", "--config=lcjax:data/retdoc_redpajama", *words]) == 0
    windows = f"--data.sources=[{{type: tokens, path: {folders['test']}}}]"
    words = ["--data.length=64", "--data.chunks.count=5", "--data.chunks.length=32", windows]
    words += [f"--out={folders['windows']}", *small, *shared]
    assert command.main(["windows", "--config=lcjax:data/redpajama_retrieved", *words]) == 0
    assert f"{folders['windows']}: 64 windows" in capsys.readouterr().out

    store = Datastore(folders["store"])
    entry = store.encoder_entry()
    assert (entry["pooling"], entry["dtype"]) == ("mean", "bfloat16")
    passages = store.passages(range(store.num_rows))
    assert all(0.505 <= unit_hash(passage.document) < 0.51 for passage in passages)
    config = DataConfig(
        length=128, chunks=Chunks(4, 32, text="retrieved"), repeat=1,
        sources=[RetrievedSource(folders["rows"])],
    )  # fmt: skip
    batch = next(make_loader(config, TOKENIZER, 8))
    texts = {TOKENIZER.decode(ids[mask]) for ids, mask in zip(
        batch["chunks"].reshape(-1, 32), batch["chunk_mask"].reshape(-1, 32))}  # fmt: skip
    full = {passage.full_text[:32] for passage in passages}
    assert all(any(one.startswith(text) for one in full) for text in texts) and len(texts) > 4
    task = RagLm(path=folders["windows"], decoder=64, scored=32, chunk=32)
    limits = Limits((64, 64 + 32 * 4), 1, None, None, 0)
    units = task.plan(TokenizedCorpus([], TOKENIZER), 64 + 32 * 4, limits)
    scores = [[span.score for span in unit.prompt.passages] for unit in units]
    assert len(units) > 30 and all(None not in row for row in scores)


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ({"stride": 16, "count": 6}, r"count=6 must be a multiple of the 4 searches.*nearest: 8"),
        ({"stride": 65}, r"multiple of the 0 searches .* nearest: a smaller stride"),
        ({"text": "before", "stride": 8}, r"chunks.stride=8 is for chunks.text=retrieved"),
        ({"learned": True}, r"chunks.learned=true adds targets .*text=retrieved has none"),
    ],
)
def test_chunks_that_cannot_be_raise_input_error(split, match):
    with pytest.raises(InputError, match=match):
        training_config("rows", dataclasses.replace(RETDOC, **split))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"query_tokens": 0}, r"query_tokens=0 must be"),
        ({"split": Chunks(1, 8)}, r"data.chunks must give .* with text: retrieved"),
        ({"data": {"repeat": None}}, r"rows=null with data.repeat=null has no end"),
        ({"kind": "dense"}, r"has no vectors|has no encoder|has vectors of none|no vectors"),
        ({"store": "nowhere"}, r"nowhere holds no datastore"),
        ({"out": "text"}, r"out=.*rows lies in the data folder"),
        ({"tokenizer": "nowhere"}, r"^tokenizer=nowhere: no such file or folder"),
    ],
)
def test_invalid_settings_raise_input_error(fields, match, folder, tmp_path):
    fields = {"out": tmp_path / "out"} | fields
    if fields["out"] == "text":
        fields["out"] = folder / "text" / "rows"
    with pytest.raises(InputError, match=match) as caught:
        write_chunks(rows_config(folder, **fields))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_datastore_without_words_or_hits_raises_input_error(folder, tmp_path):
    (tmp_path / "other.txt").write_text("zebra yak xylophone " * 30)
    out, other = str(tmp_path / "store"), TextConfig(str(tmp_path / "other.txt"))
    build(BuildConfig(other, Chunking("words", 12), out=out, workers=1))
    with pytest.raises(InputError, match=r"store has no passage for the first 4 searches"):
        write_chunks(rows_config(folder, tmp_path / "rows", store=out))
    dense = str(tmp_path / "dense")
    config = BuildConfig(other, Chunking("words", 12), sparse=None, out=dense, workers=1)
    build(config, encoder=WordEncoder())
    with pytest.raises(InputError, match=r"has no index of words \(sparse=null\)"):
        write_chunks(rows_config(folder, tmp_path / "rows", store=dense, kind="sparse"))


def test_documents_without_names_raise_input_error(folder, tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    config = rows_config(folder, tmp_path / "out", data={"path": str(tmp_path / "a.bin")})
    with pytest.raises(InputError, match=r"a.bin does not name the documents .*same_document=tr"):
        write_chunks(config)


def test_the_command_reads_a_file(folder, tmp_path, capsys):
    file = tmp_path / "rows.yaml"
    file.write_text(
        f"data: {{path: {folder / 'text'}, length: 64, chunks: {{count: 2, length: 8, text:"
        f" retrieved}}}}\nstore: {folder / 'store'}\ntokenizer: {folder / 'tokenizer'}\n"
        f"out: {tmp_path / 'rows'}\nrows: 3\n"
    )
    config = configs.parse(ChunksConfig, ["--config", str(file), "--query_tokens=9"])
    assert (config.query_tokens, config.rows) == (9, 3)
    assert command.main(["chunks", "--config", str(file)]) == 0
    assert "3 rows; read them with data.sources: [{type: retrieved" in capsys.readouterr().out
    assert command.main(["chunks", "--config", str(file), "--data.chunks.count=0"]) == 2
    assert "error: chunks.count=0" in capsys.readouterr().err.replace("data.", "")
