"""Token folders: what prepare writes, how it goes on after a kill, what reading it gives."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, split_documents, write_jsonl

import lcjax
from lcjax.checkpoints import load_tokenizer
from lcjax.data import (
    Chunks,
    DataConfig,
    Share,
    TextConfig,
    TextSource,
    TokenSource,
    Upsample,
    documents,
    jobs,
    make_loader,
    prepare,
)
from lcjax.data import __main__ as command
from lcjax.data.corpus import check_outside_data, open_corpus
from lcjax.data.data_config import LengthShare
from lcjax.data.readers import unit_hash
from lcjax.errors import InputError
from lcjax.files import CHECKSUMS
from lcjax.retrieval import Chunking, read_documents


@pytest.fixture(autouse=True)
def byte_tokenizer(monkeypatch):
    monkeypatch.setattr(prepare, "load_tokenizer", lambda name: Bytes())
    monkeypatch.setattr(jobs, "_MIN_JOB_BYTES", 400)  # several shards of tiny texts


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    for i, name in enumerate(("books", "web")):
        (folder / name).mkdir(parents=True)
        write_jsonl(folder / name / "a.jsonl", make_texts(30, seed=2 * i))
        write_jsonl(folder / name / "b.jsonl", make_texts(20, seed=2 * i + 1, high=200))
    return str(folder)


def run(text, out, **more):
    fields = {"path": text, "out": str(out), "tokenizer": "bytes", "workers": 1}
    return prepare.prepare(prepare.PrepareConfig(**fields | more))


def content(folder):
    """Name and bytes of every file."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def rows_of(source, **more):
    config = DataConfig(**{"sources": [source], "length": 32, "repeat": 1} | more)
    return list(make_loader(config, Bytes(), 4))


def test_tokens_give_the_batches_that_the_text_gives(text, tmp_path):
    index = run(text, tmp_path / "out", shuffle=False)
    assert len(index["shards"]) > 8 and index["dtype"] == "uint16"
    assert index["tokens"] == sum(len(t.encode()) for _, t in open_corpus(TextSource(text)))
    source = TokenSource(str(tmp_path / "out"))
    assert DataConfig(path=source.path).resolved_sources() == [source]
    for more in ({}, {"pack": "best_fit"}, {"holdout": 0.3}, {"add_bos": False}):
        assert_same(rows_of(TextSource(text), **more), rows_of(source, **more))
    config = {"length": 32, "holdout": 0.3}
    assert_same(
        *(
            list(make_loader(DataConfig(sources=[s], **config), Bytes(), 4, split="validation"))
            for s in (TextSource(text), source)
        )
    )


def test_sources_with_disjoint_ranges_of_hashes_share_no_document(text, tmp_path):
    """Ranges choose the same documents in memory, as a stream, prepared, and in a datastore."""
    ranges = [(0.0, 0.2), (0.2, 0.6), (0.6, 1.0)]
    everything, parts = dict(open_corpus(TextSource(text))), []
    for number, hashes in enumerate(ranges):
        part = dict(open_corpus(TextSource(text, hashes=hashes)))
        assert part == dict(open_corpus(TextSource(text, hashes=hashes, stream=True)))
        assert all(hashes[0] <= unit_hash(name) < hashes[1] for name in part)
        out = tmp_path / f"{number}"
        run("", out, sources=[TextSource(text, hashes=hashes)], shuffle=False)
        stored = [Bytes().decode(ids) for _, ids in open_corpus(TokenSource(str(out)))]
        assert stored == list(part.values())
        source = TextConfig(sources=[TextSource(text, hashes=hashes)])
        cut = read_documents(source, Chunking("words", 4))
        assert {document.name: document.text for document in cut} == part
        parts.append(part)
    assert min(map(len, parts)) > 5 and sum(map(len, parts)) == len(everything)
    held = DataConfig(sources=[TextSource(text, hashes=ranges[1])], holdout=0.4)
    sides = [dict(documents(held, side)) for side in ("train", "validation")]
    assert sides[0] | sides[1] == parts[1] and all(sides)
    assert all(unit_hash(name) < 0.4 for name in sides[1])
    for hashes in ((0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(InputError, match=r"^hashes=\[.*\] must be two numbers in \[0, 1\]"):
            TextSource(text, hashes=hashes)
    with pytest.raises(InputError, match="or no name has a hash in"):
        open_corpus(TextSource(text, hashes=(0.0, 1e-9)))


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte(text, tmp_path):
    run(text, tmp_path / "one", workers=1)
    run(text, tmp_path / "two", workers=2)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert one == two
    assert not [name for name in one if name.endswith(".tmp")]


def test_a_shuffled_folder_lies_in_the_order_in_which_a_stream_reads_the_text(text, tmp_path):
    run(text, tmp_path / "out", seed=7)
    ids = [i for _, ids in open_corpus(TokenSource(str(tmp_path / "out"))) for i in ids.tolist()]
    config = DataConfig(
        sources=[TextSource(text, stream=True)], length=32, seed=7, repeat=1, add_bos=False
    )
    config = replace(config, add_eos=False)
    rows = np.concatenate([b["tokens"][b["segments"] > 0] for b in make_loader(config, Bytes(), 1)])
    assert rows.tolist() == ids


def test_upsampling_in_prepare_equals_upsampling_in_training(text, tmp_path):
    shares = [Share("books", 0.5), Share("web", 0.5)]
    chosen = Upsample(tokens=600, ratio=0.3, below=20, shares=shares)
    source = TextSource(text, upsample=chosen)
    run("", tmp_path / "out", sources=[source], seed=3)
    prepared = [bytes(ids.tolist()) for _, ids in open_corpus(TokenSource(str(tmp_path / "out")))]
    config = DataConfig(sources=[source], length=256, pack="first_fit", seed=3, repeat=1)
    config = replace(config, add_bos=False, add_eos=False)
    trained = [bytes(d) for d in split_documents(make_loader(config, Bytes(), 1))]
    assert 5 < len(prepared) < 60 and sorted(prepared) == sorted(trained)
    # and tokens that were all kept can be up-sampled later, by the characters they had
    run(text, tmp_path / "all", seed=3)
    tokens = TokenSource(str(tmp_path / "all"), upsample=chosen)
    later = [d.value.tolist() for d, _, _ in open_corpus(tokens).read(shuffle=False, repeat=1)]
    assert sorted(map(bytes, later)) == sorted(prepared)


def test_the_labels_of_a_folder_can_be_read_alone_and_are_reported(text, tmp_path, capsys):
    run(text, tmp_path / "out")
    printed = capsys.readouterr().out
    by_label = {}
    for label in ("books", "web"):
        corpus = open_corpus(TokenSource(str(tmp_path / "out"), labels=[label]))
        by_label[label] = sum(len(ids) for _, ids in corpus)
        found = {bytes(ids.tolist()).decode() for _, ids in corpus}
        assert found == {t for _, t in open_corpus(TextSource(f"{text}/{label}"))}
        assert re.search(rf"\| {label} \| 50 \| {by_label[label]:,} \|", printed)
    assert f"| all | 100 | {sum(by_label.values()):,} | 100.00% |" in printed
    assert (tmp_path / "out" / "report.md").read_text().strip() in printed
    with pytest.raises(InputError, match=r"labels=\['code'\] are not in .*, which has books, web"):
        open_corpus(TokenSource(str(tmp_path / "out"), labels=["code"]))


def test_what_is_finished_is_not_made_again(text, tmp_path, monkeypatch):
    whole = run(text, tmp_path / "whole")
    write, made = prepare.Worker.write, []

    def stop_after_five(worker, job, taken):
        if len(made) == 5:
            raise InputError("killed")
        made.append(job.number)
        return write(worker, job, taken)

    monkeypatch.setattr(prepare.Worker, "write", stop_after_five)
    with pytest.raises(InputError, match="killed"):
        run(text, tmp_path / "out")
    with pytest.raises(InputError, match=r"is not finished: run the same .* prepare` once more"):
        open_corpus(TokenSource(str(tmp_path / "out")))
    made.clear()
    monkeypatch.setattr(prepare.Worker, "write", lambda *a: made.append(a[1].number) or write(*a))
    assert run(text, tmp_path / "out") == whole
    assert made == list(range(5, len(whole["shards"])))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    made.clear()
    assert run(text, tmp_path / "out") == whole and not made


def children(process):
    """Processes that `process` started; nothing where the system does not tell."""
    file = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in file.read_text().split()] if file.is_file() else []


def runs(process):
    """Whether a process is alive and no zombie."""
    file = Path(f"/proc/{process}/stat")
    return file.is_file() and file.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_killed_run_resumes_and_leaves_no_process(text, tmp_path):
    code = (
        "import time, data_support, lcjax.data.jobs as jobs, lcjax.data.prepare as p\n"
        "class Slow(data_support.Bytes):\n"
        "    def encode(self, text): time.sleep(0.02); return list(text.encode())\n"
        "if __name__ == '__main__':\n"
        "    p.load_tokenizer = lambda name: Slow()\n"
        "    jobs._MIN_JOB_BYTES = 400\n"
        f"    p.prepare(p.PrepareConfig(path={text!r}, out={str(tmp_path / 'out')!r},"
        " tokenizer='x', workers=2))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    folders = [str(Path(lcjax.__file__).parent.parent), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    first = subprocess.Popen([sys.executable, str(script)], env=env)
    while not (shards := list((tmp_path / "out").glob("*.json"))[1:]) and first.poll() is None:
        time.sleep(0.02)
    workers = children(first.pid)
    first.send_signal(signal.SIGKILL)
    first.wait()
    for _ in range(200):
        if not any(map(runs, workers)):
            break
        time.sleep(0.05)
    assert not any(map(runs, workers))
    assert shards and not (tmp_path / "out" / "index.json").exists()
    subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=120)
    run(text, tmp_path / "whole")
    of_path = {"index.json": b"", "report.md": b"", CHECKSUMS: b""}
    assert content(tmp_path / "out") | of_path == content(tmp_path / "whole") | of_path


def test_other_settings_other_text_and_other_folders_raise_input_error(text, tmp_path):
    out = tmp_path / "out"
    run(text, out)
    with pytest.raises(InputError, match=r"was made with seed 0, which is 1 now"):
        run(text, out, seed=1)
    with open(f"{text}/web/a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputError, match=r"was made with text of the corpus \['.*'\], which is"):
        run(text, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(InputError, match=r"other exists and is not empty: name another folder"):
        run(text, tmp_path / "other")
    with pytest.raises(InputError, match=r"no document is left .*min_document_tokens=1000"):
        run(text, tmp_path / "none", min_document_tokens=1000)


def test_ids_of_another_tokenizer_and_changed_shards_raise_input_error(text, tmp_path):
    run(text, tmp_path / "out")
    source = TokenSource(str(tmp_path / "out"))

    class Other(Bytes):
        fingerprint = "other"

    with pytest.raises(InputError, match=r"tokenizer of bytes \(bytes\), .*\(other\)"):
        make_loader(DataConfig(sources=[source], length=8), Other(), 1)
    shard = tmp_path / "out" / "000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"000001.bin has .*, and .* entries of 2 take .* was cut"):
        open_corpus(source)
    (tmp_path / "out" / "index.json").write_text("{}")
    with pytest.raises(InputError, match=r"index.json is not as it was written: .*; copy it again"):
        open_corpus(source)
    (tmp_path / "out" / CHECKSUMS).unlink()  # as in a folder of an older version
    with pytest.raises(InputError, match=r"is no index of format 1: write it again"):
        open_corpus(source)
    with pytest.raises(InputError, match=r"holds no tokens: give a folder"):
        open_corpus(TokenSource(text))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda index: index["shards"][0].update(name="../../etc/passwd"),
            "must be a file of this",
        ),
        (lambda index: index["shards"][0].update(name="/etc/passwd"), "must be a file of this"),
        (lambda index: index["shards"][0].update(tokens="many"), "was changed: its fields"),
        (lambda index: index["shards"].append(3), "was changed: its fields"),
        (lambda index: index.update(dtype="float64"), "was changed: its fields"),
        (lambda index: index.pop("shards"), "was changed: its fields"),
        (lambda index: index["shards"][0].update(documents=0), "was changed: its fields"),
    ],
)
def test_a_changed_index_is_an_error_and_names_no_file_elsewhere(text, tmp_path, change, match):
    run(text, tmp_path / "out")
    (tmp_path / "out" / CHECKSUMS).unlink()
    file = tmp_path / "out" / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match=match):
        open_corpus(TokenSource(str(tmp_path / "out")))


def _shifted(table, row, start):
    table["start"][row] = start
    return table


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda table: np.array([{"a": 1}], object), "cannot be read .*prepare the text again"),
        (lambda table: table[:-1], r"documents, and index.json says"),
        (lambda table: table["start"], "is no table of documents"),
        (lambda table: _shifted(table, 3, 10**6), "document 4 begins at id 1000000 .* must rise"),
        (lambda table: _shifted(table, -1, 2**62), "must rise from 0 to"),
        (lambda table: _shifted(table, 0, 1), "document 1 begins at id 1 .* must rise from 0"),
        (lambda table: _shifted(table, 2, -(2**63)), "document 2 begins .* must rise"),
        (lambda table: table[::-1], "must rise from 0 to"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_table_of_documents_is_refused_without_sums_too(
    text, tmp_path, damage, match, stream
):
    run(text, tmp_path / "out")
    (tmp_path / "out" / CHECKSUMS).unlink()
    file = tmp_path / "out" / "000001.npy"
    np.save(file, damage(np.load(file)), allow_pickle=True)
    with pytest.raises(InputError, match=f"000001.npy .*{match}"):
        rows_of(TokenSource(str(tmp_path / "out"), stream=stream))


def test_a_folder_of_an_older_version_without_sums_is_read(text, tmp_path):
    run(text, tmp_path / "out")
    source = TokenSource(str(tmp_path / "out"))
    rows = rows_of(source)
    (tmp_path / "out" / CHECKSUMS).unlink()
    assert_same(rows, rows_of(source))


def test_results_do_not_go_into_a_data_folder(text, tmp_path):
    config = DataConfig(path=text)
    check_outside_data("run.folder", tmp_path / "run", config)
    for folder in (Path(text), Path(text) / "run", Path(text) / "a" / ".." / "run"):
        with pytest.raises(InputError, match=r"run.folder=.* lies in the data folder"):
            check_outside_data("run.folder", folder, config)


def test_a_vocabulary_decides_how_wide_ids_are(text, tmp_path, monkeypatch):
    class Large(Bytes):
        vocab_size = 70_000

    monkeypatch.setattr(prepare, "load_tokenizer", lambda name: Large())
    with pytest.raises(InputError, match=r"dtype=uint16 holds 65536 ids, .* has 70000: set"):
        run(text, tmp_path / "out", dtype="uint16")
    index = run(text, tmp_path / "out")
    assert index["dtype"] == "uint32"
    data = (tmp_path / "out" / "000000.bin").read_bytes()
    assert len(data) == 4 * index["shards"][0]["tokens"]


def test_the_command_prints_errors_in_one_line(tmp_path, capsys):
    for words, match in [
        ([], "error: no command; write: python -m lcjax.data prepare --help"),
        (["prep"], "error: prep is not a command"),
        (["prepare", "--path=a"], "error: tokenizer is empty: give --tokenizer="),
        (["prepare", "--tokenizer=a"], "error: give --path= or sources"),
        (["prepare"], "error: give --path= or sources"),
        (
            ["prepare", "--path=a", "--tokenizer=b", "--out=c", "--dtype=int8"],
            "dtype='int8' must be one of",
        ),
    ]:
        assert command.main(words) == 2
        error = capsys.readouterr().err
        assert match in error and error.count("\n") == 1
    assert command.main(["--help"]) == 0 and "lcjax.data prepare|teacher" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["prepare", "--help"])
    assert "--sources.0.upsample.ratio" in capsys.readouterr().out


def test_a_tokenizer_that_is_not_there_is_named_with_its_key(monkeypatch, capsys):
    monkeypatch.setattr(prepare, "load_tokenizer", load_tokenizer)
    assert command.main(["prepare", "--path=a", "--tokenizer=nope", "--out=c"]) == 2
    assert capsys.readouterr().err.startswith("error: tokenizer=nope: no such file or folder; give")


def write_bin(path, documents, dtype="<u2"):
    np.concatenate([np.array(d) for d in documents]).astype(dtype).tofile(path)
    return str(path)


def test_bare_files_are_cut_at_their_first_token(tmp_path):
    documents = [[256, *text.encode()] for text in make_texts(20)]
    for dtype, width in (("uint16", "<u2"), ("uint32", "<u4")):
        path = write_bin(tmp_path / f"{dtype}.bin", documents, width)
        corpus = open_corpus(TokenSource(path, dtype=dtype), tokenizer=Bytes())
        assert [ids.tolist() for _, ids in corpus] == documents
        assert corpus[3][0] == f"{dtype}.bin:4"
    text = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    assert_same(
        rows_of(TokenSource(str(tmp_path / "uint16.bin"))),
        rows_of(TextSource(text)),
    )


def test_bare_files_may_mark_the_ends_of_documents_or_nothing(tmp_path):
    documents = [[*text.encode(), 257] for text in make_texts(5)]
    path = write_bin(tmp_path / "a.bin", [*documents, [9, 9]])
    with pytest.raises(InputError, match=r"begins with token 48, not with one of \[256, 257\]"):
        open_corpus(TokenSource(path), tokenizer=Bytes())
    ends = open_corpus(TokenSource(path, document_end=257), tokenizer=Bytes())
    assert [ids.tolist() for _, ids in ends] == [*documents, [9, 9]]
    whole = open_corpus(TokenSource(path, document_start=-1), tokenizer=Bytes())
    assert len(whole) == 1 and len(whole[0][1]) == sum(map(len, documents)) + 2
    starts = open_corpus(TokenSource(path, document_start=9))
    assert [len(ids) for _, ids in starts] == [sum(map(len, documents)), 1, 1]
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match=r"odd.bin has 3 bytes, no whole number of uint16 ids"):
        open_corpus(TokenSource(str(tmp_path / "odd.bin")))
    high = write_bin(tmp_path / "high.bin", [[256, 300]])
    with pytest.raises(InputError, match=r"high.bin:1 has the token 300, and the tokenizer only"):
        rows_of(TokenSource(high))


def test_a_bare_file_cannot_be_upsampled(tmp_path):
    path = write_bin(tmp_path / "a.bin", [[256, 1]])
    with pytest.raises(InputError, match=r"a.bin has ids only, and upsample counts .*prepare it"):
        open_corpus(TokenSource(path, upsample=Upsample()))


@pytest.mark.parametrize("stride", [None, 8])
@pytest.mark.parametrize("kind", ["folder", "bare"])
def test_rows_are_cut_once_where_documents_run_together(kind, stride, text, tmp_path):
    if kind == "folder":
        run(text, tmp_path / "out", shuffle=False)
        path, texts = str(tmp_path / "out"), [t for _, t in open_corpus(TextSource(text))]
    else:
        texts = make_texts(60)
        path = write_bin(tmp_path / "a.bin", [[256, *t.encode(), 257] for t in texts])
    source = TokenSource(path, rows=True, stride=stride)
    flat = [token for t in texts for token in (256, *t.encode(), 257)]
    ordered = rows_of(source, shuffle=False)
    tokens = np.concatenate([b["tokens"] for b in ordered])
    wanted = [flat[i : i + 32] for i in range(0, len(flat) - 32, stride or 32)]
    assert tokens[: len(wanted)].tolist() == wanted
    assert len(tokens) - len(wanted) < 4  # rows of padding in the last batch
    if stride is None:  # the same rows as packing gives, but for the last one
        packed = rows_of(
            TextSource(text) if kind == "folder" else replace(source, rows=False), shuffle=False
        )
        for key in packed[0]:
            a, b = (np.concatenate([x[key] for x in y])[: len(wanted)] for y in (ordered, packed))
            np.testing.assert_array_equal(a, b, err_msg=key)
    shuffled = np.concatenate([b["tokens"] for b in rows_of(source)])
    assert shuffled.tolist() != tokens.tolist()
    assert sorted(shuffled.tolist()) == sorted(tokens.tolist())
    long = replace(source, min_document_tokens=60)
    wanted = [token for t in texts if len(t) >= 60 for token in (256, *t.encode(), 257)]
    rows = np.concatenate([b["tokens"] for b in rows_of(long, shuffle=False)])
    assert rows.ravel()[:64].tolist() == wanted[:32] + wanted[stride or 32 : (stride or 32) + 32]


def test_cut_rows_resume_and_reject_unsupported_settings(text, tmp_path):
    run(text, tmp_path / "out")
    source = TokenSource(str(tmp_path / "out"), rows=True)
    config = DataConfig(sources=[source], length=32, repeat=2)
    loader = make_loader(config, Bytes(), 4)
    batches = [next(loader) for _ in range(9)]
    state = json.loads(json.dumps(loader.get_state()))
    batches += list(loader)
    resumed = make_loader(config, Bytes(), 4)
    resumed.set_state(state)
    assert_same(batches[9:], list(resumed))
    with pytest.raises(InputError, match=r"tokens fill no row of data.length=10000; lower it"):
        rows_of(source, length=10_000, repeat=20)
    for key, value in (("pack", "windows"), ("stream", True), ("upsample", Upsample())):
        with pytest.raises(InputError, match=rf"rows=true cuts rows .* leave {key} out"):
            TokenSource("a", rows=True, **{key: value})


def test_cut_rows_ignore_the_packing_of_other_sources(text, tmp_path):
    run(text, tmp_path / "out")
    source = TokenSource(str(tmp_path / "out"), rows=True)
    whole = rows_of(source)
    for pack in ("single", "first_fit", "windows"):
        assert_same(whole, rows_of(source, pack=pack, overlong="truncate"))
    sources = [source, TextSource(text)]
    mixed = rows_of(None, sources=sources, pack="best_fit", overlong="truncate")
    assert {batch["tokens"].shape for batch in mixed} == {(4, 32)}
    with pytest.raises(InputError, match=r"rows=true cuts rows .* leave max_document_tokens out"):
        replace(source, max_document_tokens=20)
    with pytest.raises(InputError, match=r"length_shares needs rows of one document"):
        shares = [LengthShare(16, 0.5), LengthShare(32, 0.5)]
        DataConfig(sources=[source], length=32, pack="single", length_shares=shares)
    chunks = Chunks(count=2, length=8)
    assert not DataConfig(sources=[source], length=32, pack="single", chunks=chunks).document_mask


def test_an_empty_file_of_tokens_is_left_out(tmp_path):
    (tmp_path / "map").mkdir()
    write_bin(tmp_path / "map" / "b.bin", [[256, *range(99)]])
    full = rows_of(TokenSource(str(tmp_path / "map")), repeat=2)
    (tmp_path / "map" / "a.bin").write_bytes(b"")
    assert_same(full, rows_of(TokenSource(str(tmp_path / "map")), repeat=2))
    (tmp_path / "map" / "b.bin").write_bytes(b"")
    with pytest.raises(InputError, match="map holds no document: its files are empty"):
        rows_of(TokenSource(str(tmp_path / "map")))


def test_a_folder_that_another_process_writes_is_refused(text, tmp_path, monkeypatch):
    finish = prepare._finish

    def run_twice(*args):
        with pytest.raises(InputError, match=r"^out=.* is in use by process"):
            run(text, tmp_path / "out")
        return finish(*args)

    monkeypatch.setattr(prepare, "_finish", run_twice)
    index = run(text, tmp_path / "out")
    assert index == run(text, tmp_path / "out")
    assert not (tmp_path / "out" / "lock.json").exists()


def test_a_failed_prepare_does_not_block_its_correction(text, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no document is left"):
        run(text, tmp_path / "out", min_document_tokens=10**6)
    assert list((tmp_path / "out").iterdir()) == []
    bad = Path(text) / "web" / "b.jsonl"
    bad.write_bytes(bad.read_bytes().replace(b"aa", b"a\xff", 1))
    with pytest.raises(InputError, match="UTF-8"):
        run(text, tmp_path / "out", shuffle=False)
    made, write = [], prepare.Worker.write
    monkeypatch.setattr(prepare.Worker, "write", lambda *args: made.append(1) or write(*args))
    index = run(text, tmp_path / "out", shuffle=False, on_bad_text="replace")
    assert 0 < len(made) < len(index["shards"])  # finished shards have no bad text
    run(text, tmp_path / "whole", shuffle=False, on_bad_text="replace")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_full_disk_leaves_no_part_of_a_file_and_names_it(text, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    words = [f"--path={text}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--workers=1"]
    assert command.main(["prepare", *words]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: .*No space left.*000000\.npy'; make room, then run .*", error)
    assert not list((tmp_path / "out").glob("*.tmp"))


@pytest.mark.parametrize("seed", ["-1", str(2**32), "x"])
def test_a_seed_that_is_none_is_one_line(seed, capsys):
    assert command.main(["prepare", "--path=a", "--out=b", "--tokenizer=c", f"--seed={seed}"]) == 2
    assert "seed=" in capsys.readouterr().err
