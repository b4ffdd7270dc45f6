"""Packed files, and how many files are open: what reading costs beside the text itself."""

import gzip
import json
import os
import sys
import threading

import numpy as np
import pytest
from data_support import Bytes, make_texts, write_jsonl

from lcjax.checkpoints.hub import find_checkpoint, find_encoder
from lcjax.config import read_yaml
from lcjax.data import DataConfig, documents, files, make_loader, prepare
from lcjax.data.corpus import open_corpus
from lcjax.data.data_config import TextSource
from lcjax.data.readers import unit_hash
from lcjax.errors import InputError
from lcjax.files import read_json, sha256
from lcjax.parallel.run_lock import RunLock
from lcjax.retrieval.datastore import Datastore
from lcjax.storage import map_file

pa = pytest.importorskip("pyarrow")
SKIPPABLE = (0x184D2A5E).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"


def frame(data):
    """One frame with its content's size in the header."""
    return pa.compress(data, codec="zstd", asbytes=True)


def streamed(data):
    """One frame whose header does not know the content's size."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def lines_of(texts):
    return "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()


def write_frames(path, data, size, pack=frame):
    """Frames of `size` bytes of content each, which cut lines anywhere; one to be skipped."""
    pieces = [pack(data[i : i + size]) for i in range(0, len(data), size)]
    path.write_bytes(SKIPPABLE.join(pieces) + SKIPPABLE)
    return str(path)


@pytest.mark.parametrize("pack", [frame, streamed])
@pytest.mark.parametrize("size", [7, 100, 10**6])
def test_lines_are_found_in_zstd_files_wherever_the_frames_are_cut(size, pack, tmp_path):
    texts = make_texts(30)
    path = write_frames(tmp_path / "a.jsonl.zst", lines_of(texts), size, pack)
    corpus = open_corpus(TextSource(path))
    order = np.random.default_rng(0).permutation(30)
    assert [corpus[int(i)][1] for i in order] == [texts[i] for i in order]
    text = tmp_path / "b.txt.zst"
    write_frames(text, texts[0].encode(), size, pack)
    assert list(documents(str(text))) == [("b.txt.zst", texts[0])]


def test_frames_end_at_the_sizes_in_their_headers():
    rng = np.random.default_rng(0)
    contents = [b"", b"a", b"a" * 300_000, rng.bytes(70_000), rng.bytes(300_000)]
    packed = [make(data) for data in contents for make in (frame, streamed)]
    ends = np.cumsum([len(p) for p in packed]).tolist()
    assert [end for _, end in files.frame_bounds(b"".join(packed))] == ends
    assert files.frame_bounds(SKIPPABLE * 2) == []


def test_only_the_frames_of_a_document_are_unpacked_and_they_are_kept(tmp_path, monkeypatch):
    texts = [f"{i:09d}" for i in range(20)]  # lines of equal length: two in a frame
    line = len(lines_of(texts[:1]))
    corpus = open_corpus(
        TextSource(write_frames(tmp_path / "a.jsonl.zst", lines_of(texts), 2 * line))
    )
    unpacked = []
    original = files.ZstdContent.unpack
    monkeypatch.setattr(
        files.ZstdContent, "unpack", lambda self, i: unpacked.append(i) or original(self, i)
    )
    assert [corpus[i][1] for i in (6, 7, 19, 6)] == [texts[i] for i in (6, 7, 19, 6)]
    assert unpacked == [3, 9]


def test_a_zstd_frame_too_large_to_be_read_for_one_document_raises_input_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "LARGEST_FRAME", 1000)
    data = lines_of(make_texts(40))
    write_frames(tmp_path / "a.jsonl.zst", data, 1000)
    assert len(list(documents(str(tmp_path / "a.jsonl.zst")))) == 40
    write_frames(tmp_path / "a.jsonl.zst", data, len(data))
    with pytest.raises(InputError, match=r"frame at byte 0 unpacks to more .*split -C") as caught:
        open_corpus(TextSource(str(tmp_path / "a.jsonl.zst")))
    assert "\n" not in str(caught.value)


def test_damaged_zstd_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    whole = frame(lines_of(make_texts(40)))
    hurt = bytearray(whole)
    hurt[10:16] = b"\xff" * 6  # how the first block is packed
    dictionary = bytearray(whole)
    dictionary[4] |= 1
    for data, match in [
        (whole[:-3], "is damaged or cut short: the frame at byte 0 exceeds"),
        (whole[:5], "is damaged or cut short: it ends inside a frame"),
        (whole + whole[:2], "is damaged or cut short: it ends inside a frame"),
        (b"no zstd file", "is damaged or cut short: no zstd frame begins at byte 0"),
        (bytes(hurt), "is damaged at byte 0"),
        (bytes(dictionary), "needs a dictionary; unpack it first"),
    ]:
        path.write_bytes(data)
        with pytest.raises(InputError, match=match):
            open_corpus(TextSource(str(path)))
    path.write_bytes(b"")
    with pytest.raises(InputError, match="holds no document"):
        open_corpus(TextSource(str(path)))


@pytest.fixture
def few_open_files():
    """Lets this process open 40 files more than it has open."""
    resource = pytest.importorskip("resource")
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files cannot be counted here")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (numbers + 40, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_more_shards_than_files_may_be_open(suffix, tmp_path, few_open_files, monkeypatch):
    monkeypatch.setattr(files, "_MAX_OPEN", 8)
    import pyarrow.parquet

    texts = make_texts(120, low=5)
    for i, text in enumerate(texts):
        path, data = tmp_path / f"{i:03d}{suffix}", lines_of([text])
        match suffix:
            case ".parquet":
                pyarrow.parquet.write_table(pa.table({"text": [text]}), path)
            case ".jsonl":
                path.write_bytes(data)
            case _:
                path.write_bytes((gzip.compress if suffix.endswith("gz") else frame)(data))
    assert [text for _, text in documents(str(tmp_path))] == texts
    config = DataConfig(path=str(tmp_path), length=64, repeat=1, threads=4)
    assert sum(int((b["segments"] > 0).sum()) for b in make_loader(config, Bytes(), 4)) == sum(
        len(text) + 2 for text in texts
    )


def test_recent_values_are_kept_within_the_limit_and_one_always():
    made = []
    cache = files.LRUCache(10, size=len)

    def get(key, size):
        return cache.get(key, lambda: made.append(key) or key * size)

    for key, size in [("a", 4), ("b", 4), ("a", 4), ("c", 4), ("b", 4), ("d", 11), ("d", 11)]:
        assert get(key, size) == key * size
    # c pushes b out, which was used before a; b then a; d all of them.
    assert made == ["a", "b", "c", "b", "d"]
    get("a", 4)
    assert made[-1] == "a"


def test_threads_read_the_right_lines_while_files_are_closed_under_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_OPEN", 1)
    texts = make_texts(60)
    for i in range(6):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i::6])
    corpus = open_corpus(TextSource(str(tmp_path)))
    wanted = [corpus[i][1] for i in range(60)]
    assert sorted(wanted) == sorted(texts)
    wrong = []

    def read(seed):
        for i in np.random.default_rng(seed).integers(0, 60, 500):
            if corpus[int(i)][1] != wanted[i]:
                wrong.append(int(i))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="file names of other systems are UTF-8")
def test_names_of_files_need_not_be_utf8(tmp_path, monkeypatch):
    for number, text in enumerate(make_texts(20, low=40)):
        name = os.fsdecode(b"b\xfccher/%d\xfc.txt" % number)
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text)
    config = DataConfig(path=str(tmp_path / "text"), length=32, holdout=0.5, repeat=1)
    numbers = next(make_loader(config, Bytes(), 4, documents=True))["documents"]
    assert len(np.unique(numbers)) > 1
    monkeypatch.setattr(prepare, "load_tokenizer", lambda name: Bytes())
    out = tmp_path / "out"
    prepare.prepare(prepare.PrepareConfig(config.path, tokenizer="b", out=str(out), workers=1))
    assert "| b?cher | 20 |" in (out / "report.md").read_text()
    assert unit_hash("bücher") == unit_hash("bücher".encode())


def test_pipes_devices_and_broken_links_are_named_and_never_opened(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    specials = {
        "b.txt": os.mkfifo,
        "c.jsonl": lambda path: path.symlink_to("/dev/zero"),
        "d.parquet": lambda path: path.symlink_to(tmp_path / "gone"),
        "e.txt.gz": lambda path: path.symlink_to(path),
    }
    for name, make in specials.items():
        make(tmp_path / name)
        words = "regular file" if name < "d" else "link to a file that does not exist"
        for source in (tmp_path, tmp_path / "*"):
            with pytest.raises(InputError, match=f"{name}.*{words}"):
                files.find_files(str(source))
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "tokenizer.json")  # no data, but a part of a checkpoint
    assert len(files.find_files(str(tmp_path))) == 1
    for open_folder in (find_checkpoint, find_encoder, RunLock(tmp_path).__enter__, Datastore):
        arguments = () if open_folder.__name__ == "__enter__" else (tmp_path,)
        with pytest.raises(InputError, match=r"tokenizer\.json is a pipe"):
            open_folder(*arguments)
    for read in (read_yaml, read_json, map_file, sha256):
        with pytest.raises(InputError, match=r"tokenizer\.json is a pipe"):
            read(tmp_path / "tokenizer.json")
