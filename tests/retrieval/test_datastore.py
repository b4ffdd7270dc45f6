"""Datastores: built in any way byte for byte the same, appended to, deleted from, damaged."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from retrieval_support import WordEncoder, content, write_corpus

import lcjax
from lcjax.data import TextConfig, TextSource, Upsample, jobs
from lcjax.data.data_config import TeacherSource
from lcjax.errors import InputError
from lcjax.files import seal
from lcjax.retrieval import BuildConfig, Chunking, Datastore, Document, Sparse, build, build_store

pytest.importorskip("bm25s")


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch):
    monkeypatch.setattr(jobs, "_MIN_JOB_BYTES", 1500)


@pytest.fixture
def text(tmp_path):
    return write_corpus(tmp_path / "text")


def settings(text, out, **changes):
    fields = {"data": TextConfig(path=text), "out": str(out), "workers": 1}
    fields["chunking"] = Chunking("sentences", 22, title_field="title")
    return BuildConfig(**fields | changes)


def built(text, out, encoder=None, **changes):
    build(settings(text, out, **changes), encoder=encoder)
    return Datastore(out)


def best_ids(store, queries, k=5):
    _, rows = store.sparse().search(queries, k, valid=store.valid)
    return [[p.id for p in store.passages(row[row >= 0])] for row in rows]


def test_a_datastore_holds_all_passages_and_their_vectors(text, tmp_path):
    encoder = WordEncoder()
    store = built(text, tmp_path / "out", encoder)
    assert len(store) == store.num_rows == store.index["passages"] > 100
    assert store.index["documents"] == 40 and len(store.index["shards"]) > 4
    assert store.valid is None
    passages = store.passages(range(len(store)))
    assert len({p.id for p in passages}) == len(passages)
    records = [json.loads(line) for f in sorted(Path(text).iterdir()) for line in f.open()]
    assert " ".join(p.text for p in passages) == " ".join(r["text"] for r in records)
    assert {p.title for p in passages} == {r["title"] for r in records}
    assert {p.source for p in passages} == {text}
    vectors = store.vectors(encoder)
    assert isinstance(vectors, np.memmap) and vectors.dtype == np.float32
    expected = encoder.encode_passages([p.text for p in passages], [p.title for p in passages])
    np.testing.assert_array_equal(vectors, expected)
    assert [i for i, _ in store.texts()] == [p.id for p in passages]
    files = {path.name for path in store.folder.iterdir()}
    other = {f"vectors-{encoder.fingerprint}.bin", "index.json", f"sparse-{len(store)}"}
    assert files == other | {f"{shard['name']}.parquet" for shard in store.index["shards"]}
    assert store.check_files() > len(store.index["shards"])
    bfloat16 = built(text, tmp_path / "half", encoder, dtype="bfloat16").vectors()
    np.testing.assert_array_equal(bfloat16, expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("is_dense", [False, True])
def test_parts_and_executors_write_the_same_bytes(is_dense, text, tmp_path, monkeypatch):
    encoder = WordEncoder() if is_dense else None
    built(text, tmp_path / "whole", encoder)
    whole = content(tmp_path / "whole")
    for parts in (("2/3", "0/3"), ("2/3", "0/3", "1/3")):
        out = tmp_path / f"parts{len(parts)}"
        config = settings(text, out)
        for part in parts:
            assert build(config, part=part, encoder=encoder) is None
        with pytest.raises(InputError, match="is not finished: run the same"):
            Datastore(out)
        with monkeypatch.context() as patch:
            if len(parts) == 3:  # all shards are written, and none is written again
                patch.setattr(build_store._ShardWriter, "write", None)
            index = build(config, encoder=encoder)
        assert content(out) == whole and build(config, encoder=encoder) == index
    for number, executor in enumerate((ThreadPoolExecutor(3), InOrder())):
        with executor:
            out = tmp_path / str(number)
            assert build(settings(text, out), executor=executor, encoder=encoder) == index
        assert content(out) == whole
    for part in ("3/3", "1", "a/b", "-1/2", "0/0"):
        with pytest.raises(InputError, match=f"part={part} must be i/n"):
            build(config, part=part, encoder=encoder)


class InOrder(ThreadPoolExecutor):
    """Pickles what is sent, as executors of other machines do."""

    def submit(self, function, *args):
        import pickle

        return super().submit(*pickle.loads(pickle.dumps((function, *args))))


def test_shards_that_an_executor_writes_elsewhere_are_missing(text, tmp_path):
    class OtherStorage(ThreadPoolExecutor):
        def submit(self, function, *args):
            return super().submit(lambda: {"passages": 1})

    match = r"(\d+) of \1 shards are missing, such as 0: the workers"
    with OtherStorage(1) as executor, pytest.raises(InputError, match=match):
        build(settings(text, tmp_path / "out"), executor=executor)


@pytest.mark.slow
def test_processes_write_the_same_bytes(text, tmp_path):
    built(text, tmp_path / "one", WordEncoder())
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        build(settings(text, tmp_path / "two"), executor=executor, encoder=WordEncoder())
    built(text, tmp_path / "three", WordEncoder(), workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "three")


@pytest.mark.slow
def test_a_build_that_is_killed_anywhere_resumes_to_the_same_bytes(text, tmp_path):
    """Kills by SIGKILL after random times, until a run is complete."""
    built(text, tmp_path / "whole", WordEncoder())
    out = tmp_path / "killed"
    code = (
        "import sys, time, numpy, lcjax.files as files\n"
        "from retrieval_support import WordEncoder\n"
        "import lcjax.data.jobs as jobs\n"
        "from lcjax.data import TextConfig\n"
        "from lcjax.retrieval import *\n"
        "class Slow(WordEncoder):\n"
        "    def encode_passages(self, *texts):\n"
        "        time.sleep(0.05)\n"
        "        return super().encode_passages(*texts)\n"
        "def slow_replace(self, target, replace=files.Path.replace):\n"
        "    time.sleep(0.02)\n"
        "    return replace(self, target)\n"
        "files.Path.replace = slow_replace\n"
        "jobs._MIN_JOB_BYTES = 1500\n"
        f"data = TextConfig(path={text!r})\n"
        "chunking = Chunking('sentences', 22, title_field='title')\n"
        f"config = BuildConfig(data=data, chunking=chunking, out={str(out)!r}, workers=1)\n"
        "print('start', flush=True)\n"
        "build(config, encoder=Slow())\n"
    )
    folders = [str(Path(lcjax.__file__).parent.parent), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    generator, kills = random.Random(0), 0
    for _ in range(5):
        run = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        run.stdout.readline()
        if kills < 2:
            time.sleep(generator.uniform(0.1, 0.5))
            kills += run.poll() is None
            run.send_signal(signal.SIGKILL)
        run.wait(timeout=60)
        if run.returncode == 0:
            break
        assert not (out / "index.json").exists()
    assert run.returncode == 0 and kills == 2
    assert content(out) == content(tmp_path / "whole")


def test_a_build_that_is_killed_before_any_step_of_the_end_resumes(text, tmp_path, monkeypatch):
    """Ends the last step at every replacement of a file in turn."""
    encoder = WordEncoder()
    built(text, tmp_path / "whole", encoder)
    config = settings(text, tmp_path / "out")
    build(config, part="0/1", encoder=encoder)
    replace, rename, unlink, steps = Path.replace, Path.rename, Path.unlink, []

    class Killed(BaseException):
        pass

    def at_step(number):
        steps.clear()

        def counted(function):
            def call(path, *args, **options):
                if path.name not in ("lock.json", "lock.json.guard"):
                    steps.append(path.name)
                    if len(steps) == number:
                        raise Killed
                return function(path, *args, **options)

            return call

        for name, function in (("replace", replace), ("rename", rename), ("unlink", unlink)):
            monkeypatch.setattr(Path, name, counted(function))

    for number in range(1, 100):
        at_step(number)
        try:
            build(config, encoder=encoder)
        except Killed:
            continue
        break
    assert number > 6
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_appended_passages_are_found_as_if_they_had_been_built(text, tmp_path):
    encoder = WordEncoder()
    addition = write_corpus(tmp_path / "addition", files=1, lines=6, seed=7)
    (tmp_path / "addition" / "0.jsonl").rename(tmp_path / "addition" / "9.jsonl")
    both = tmp_path / "both"
    both.mkdir()
    for folder in (text, addition):
        for file in Path(folder).iterdir():
            (both / file.name).write_bytes(file.read_bytes())
    whole = built(str(both), tmp_path / "whole", encoder)
    store = built(text, tmp_path / "out", encoder)
    reader, before = Datastore(tmp_path / "out"), len(store)
    old_vectors, old_index = reader.vectors(), reader.sparse()
    from lcjax.retrieval import read_documents

    chunking = Chunking(**store.index["chunking"])
    added = store.append(read_documents(TextConfig(path=addition), chunking), encoder=encoder)
    assert added == len(store) - before > 10
    for opened in (store, Datastore(tmp_path / "out")):
        assert [p.id for p in opened.passages(range(len(opened)))] == [
            p.id for p in whole.passages(range(len(whole)))
        ]
        np.testing.assert_array_equal(opened.vectors(), whole.vectors())
        queries = ["quiet harbour", "Item3 letter", "Title 0 5"]
        for a, b in zip(opened.sparse().search(queries, 9), whole.sparse().search(queries, 9)):
            np.testing.assert_array_equal(a, b)
        assert opened.check_files()
    assert opened.index["documents"] == 46
    assert len(old_vectors) == len(old_index) == before  # readers keep what they opened
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert f"sparse-{before}" not in names and not [n for n in names if n.endswith(".tmp")]
    assert "lock.json" not in names
    saved = content(tmp_path / "out")
    with pytest.raises(InputError, match=r"passage 9.jsonl:1#.* exists in .*: delete it first"):
        store.append(read_documents(TextConfig(path=addition), chunking), encoder=encoder)
    assert content(tmp_path / "out").keys() == saved.keys()
    assert seal(Datastore(tmp_path / "out").index) == json.loads(saved["index.json"])


def test_an_append_that_is_killed_leaves_the_old_datastore(text, tmp_path, monkeypatch):
    encoder = WordEncoder()
    store = built(text, tmp_path / "out", encoder)
    before, ids = len(store), best_ids(store, ["quiet harbour"])
    new = [Document("new", "A quiet harbour and a quiet harbour again today."), Document("e", " ")]
    import lcjax.retrieval.datastore as module

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            store.append(new, encoder=encoder)
    store = Datastore(tmp_path / "out")
    assert len(store) == before and best_ids(store, ["quiet harbour"]) == ids
    assert store.append(new, encoder=encoder) == 1
    assert best_ids(store, ["quiet harbour"])[0][0] == "new#0-48"
    assert store.check_files() and len(store.vectors()) == before + 1
    assert store.append([], encoder=encoder) == 0


def test_deleted_passages_are_never_found_and_k_others_are(text, tmp_path):
    store = built(text, tmp_path / "out", WordEncoder())
    (before,) = best_ids(store, ["quiet harbour"], k=20)
    assert store.delete(before[:3]) == 3
    for opened in (store, Datastore(tmp_path / "out")):
        assert len(opened) == opened.num_rows - 3
        assert best_ids(opened, ["quiet harbour"], k=17) == [before[3:]]
    store.delete(before[5:7])
    assert best_ids(Datastore(tmp_path / "out"), ["quiet harbour"], k=3) == [
        [*before[3:5], before[7]]
    ]
    for unknown in (before[0], "nothing"):  # a deleted one, too
        with pytest.raises(InputError, match=f"has no passage {unknown.split('#')[0]}"):
            store.delete([before[9], unknown])
    for wrong in (None, 7, "harbour", b"x", [None], [1.5]):
        for method in (store.passages, store.rows, store.delete):
            with pytest.raises(InputError, match="must be a list, such as"):
                method(wrong)
    assert len(store) == store.num_rows - 5
    # a deleted document can come back
    (passage,) = [p for p in store.passages(range(store.num_rows)) if p.id == before[0]]
    document = Document("x", passage.text)
    assert store.append([document], encoder=WordEncoder()) == 1
    assert "x" in {p.document for p in store.passages(range(store.num_rows))}
    with pytest.raises(InputError, match="would be empty: delete the folder"):
        valid = np.flatnonzero(store.valid)
        store.delete([p.id for p in store.passages(valid)])


def test_another_encoder_raises_input_error_by_name_and_can_be_added(text, tmp_path):
    encoder, other = WordEncoder(), WordEncoder(dim=8, seed=1)
    store = built(text, tmp_path / "out", encoder)
    with pytest.raises(InputError, match=r"was built by the encoder words .*, and encoder=words"):
        store.vectors(other)
    with pytest.raises(InputError, match="was built by words, which has no path: pass the encoder"):
        store.open_encoder()
    with pytest.raises(InputError, match="was built by the encoder"):
        store.append([Document("n", "text")], encoder=other)
    store.encode(other, dtype="bfloat16")
    assert store.vectors(other).shape == (len(store), 8)
    np.testing.assert_array_equal(Datastore(store.folder).vectors(encoder), store.vectors(encoder))
    with pytest.raises(InputError, match="has vectors of words .*, words .*: name one of them"):
        store.vectors()
    assert store.append([Document("n", "some text")], encoder=[other, encoder]) == 1
    assert len(store.vectors(other)) == len(store.vectors(encoder)) == len(store)
    assert store.check_files()
    words = built(text, tmp_path / "words")
    with pytest.raises(InputError, match="has no vectors: build it with an encoder"):
        words.vectors()
    vectors = built(text, tmp_path / "vectors", encoder, sparse=None)
    with pytest.raises(InputError, match="has no index of words"):
        vectors.sparse()


def test_bad_input_is_one_line_and_nothing_is_overwritten(text, tmp_path):
    encoder = WordEncoder()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match="mine exists and is not empty: name another folder"):
        build(settings(text, tmp_path / "mine"))
    assert content(tmp_path / "mine") == {"thesis.txt": b"years"}
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InputError, match="hold no text: nothing was built"):
        build(settings(str(tmp_path / "empty.txt"), tmp_path / "none"))
    with pytest.raises(InputError, match="lies in the data folder"):
        build(settings(text, Path(text) / "out"))
    out = tmp_path / "out"
    built(text, out, encoder)
    before = content(out)
    for changes, match in [
        ({"chunking": Chunking("words", 9)}, "was made with chunking"),
        ({"sparse": Sparse(k1=0.9)}, "was made with sparse"),
        ({"dtype": "bfloat16"}, "was made with dtype float32, which is bfloat16 now"),
    ]:
        with pytest.raises(InputError, match=match):
            build(settings(text, out, **changes), encoder=encoder)
    with pytest.raises(InputError, match="was made with encoder"):
        build(settings(text, out), encoder=WordEncoder(seed=1))
    with open(f"{text}/0.jsonl", "a") as file:
        file.write('{"text": "changes", "title": ""}\n')
    with pytest.raises(InputError, match="was made with text of the corpus"):
        build(settings(text, out), encoder=encoder)
    assert content(out) == before
    short = WordEncoder()
    short.max_tokens = 16
    with pytest.raises(InputError, match=r"size=22 words: passages would be longer than the 16"):
        build(settings(text, tmp_path / "short"), encoder=short)
    assert not (tmp_path / "short").exists()
    short.max_tokens, short.encode_passages = (
        None,
        lambda texts, titles: np.full((len(texts), 16), np.nan),
    )
    with pytest.raises(
        InputError, match="words gives a vector that is not finite for passage 0.js"
    ):
        build(settings(text, tmp_path / "nan"), encoder=short)
    short.encode_passages = lambda texts, titles: np.zeros((len(texts), 15))
    with pytest.raises(InputError, match=r"words returned vectors \[\d+, 15\], not \[\d+, 16\]"):
        build(settings(text, tmp_path / "dim"), encoder=short)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "retrieved.json").write_text("{}")
    for fields, match in [
        ({"data": TextConfig(str(tmp_path / "rows"))}, "rows has rows of type retrieved, which"),
        ({"workers": -1}, "workers=-1 must be"),
        (
            {"data": TextConfig(sources=[TeacherSource("x")])},
            "x has rows of type teacher, which",
        ),
        ({"data": TextConfig(sources=[TextSource("x", upsample=Upsample())])}, "leave it out"),
        ({"sparse": None}, "leave nothing to search by"),
        ({"faiss": "ivf"}, "faiss=ivf is an index of vectors: name an encoder"),
        ({"sparse": Sparse(stopwords="elvish")}, "sparse.stopwords=elvish"),
    ]:
        with pytest.raises(InputError, match=match):
            build(settings(text, **{"out": tmp_path / "bad"} | fields))
    assert not (tmp_path / "bad").exists()


def test_a_missing_extra_is_one_line_before_any_work(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(InputError, match=r"pip install 'bm25s>="):
        build(settings(text, tmp_path / "out"))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"faiss-cpu: pip install 'bm25s.* 'faiss-cpu"):
        build(settings(text, tmp_path / "out", faiss="ivf"), encoder=WordEncoder())
    assert not (tmp_path / "out").exists()


def test_a_damaged_name_of_a_column_is_named(text, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    store = built(text, tmp_path / "out", WordEncoder())
    file = store.folder / "000000.parquet"
    table = parquet.read_table(file)
    index = json.loads((store.folder / "index.json").read_text())
    for name in table.column_names:
        other = table.rename_columns([f"{x}x" if x == name else x for x in table.column_names])
        parquet.write_table(other, file)
        index["shards"][0]["bytes"] = file.stat().st_size
        (store.folder / "index.json").write_text(json.dumps(seal(index)))
        with pytest.raises(InputError, match=r"000000\.parquet is damaged \(its columns have"):
            Datastore(store.folder).passages([0])


def test_damaged_files_are_found(text, tmp_path):
    encoder = WordEncoder()
    store = built(text, tmp_path / "out", encoder)
    store.delete([store.passages([4])[0].id])
    vectors, shard = f"vectors-{encoder.fingerprint}.bin", "000001.parquet"

    def check_open(name, data, match):
        whole = (store.folder / name).read_bytes()
        (store.folder / name).write_bytes(data)
        with pytest.raises(InputError, match=match) as error:
            Datastore(store.folder)
        assert "\n" not in str(error.value) and name in str(error.value)
        (store.folder / name).write_bytes(whole)

    whole = (store.folder / vectors).read_bytes()
    check_open(vectors, whole[:-4], r"has [\d,]+ bytes, and [\d,]+ vectors of 16 take")
    check_open(vectors, b"x" + whole[1:], "is damaged: it has another header")
    check_open(shard, b"", "has 0 bytes, and")
    check_open("deleted.npy", b"x" * 99, "is damaged: copy it again, or remove it")
    check_open("index.json", b"{}", "is no index of a datastore of format 1")
    check_open("index.json", b"{", "not JSON")
    for name in (vectors, shard, f"sparse-{store.num_rows}/data.csc.index.npy"):
        file = store.folder / name
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 4
        original = file.read_bytes()
        file.write_bytes(whole)
        with pytest.raises(InputError, match="is not as it was written: another SHA-256"):
            Datastore(store.folder).check_files()
        file.write_bytes(original)
    assert Datastore(store.folder).check_files()
    with pytest.raises(InputError, match="holds no datastore: give a folder"):
        Datastore(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["shards"][0].update(name="../../etc/passwd"),
        lambda index: index["shards"][0].update(passages="many"),
        lambda index: index["shards"].clear(),
        lambda index: index["encoders"].update({"../x": {}}),
        lambda index: index["sparse"]["files"].update({"../x": ""}),
        lambda index: index.update(passages=3),
        lambda index: index.pop("chunking"),
    ],
)
def test_a_changed_index_is_an_error_and_names_no_file_elsewhere(text, tmp_path, change):
    built(text, tmp_path / "out", WordEncoder())
    file = tmp_path / "out" / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match="is not as it was written: another SHA-256 sum; copy it"):
        Datastore(tmp_path / "out")
    del index["sha256"]  # as in a datastore of an older version
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match="is no index of a datastore"):
        Datastore(tmp_path / "out")


def test_several_processes_can_begin_at_once(tmp_path):
    identity = {"a": 1}
    with ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda _: jobs.begin(tmp_path / "o", identity, "i", "p"), range(64))
        assert list(results) == [None] * 64
    assert content(tmp_path / "o") == {"p": json.dumps({"identity": identity}, indent=1).encode()}


def write_texts(path, count):
    lines = (
        json.dumps({"title": "A", "text": f"Text {i} of a file."}) + "\n" for i in range(count)
    )
    path.write_text("".join(lines))


def test_a_second_build_in_a_process_reads_the_text_anew(tmp_path):
    for count in (2, 3):
        write_texts(tmp_path / "a.jsonl", count)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert len(built(str(tmp_path / "a.jsonl"), tmp_path / "out")) == count


def test_an_executor_of_two_builds_reads_the_text_anew(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        for count in (2, 3):
            write_texts(tmp_path / "a.jsonl", count)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            config = settings(str(tmp_path / "a.jsonl"), tmp_path / "out")
            assert build(config, executor=executor)["passages"] == count


def test_appended_documents_without_text_add_no_shard(text, tmp_path, monkeypatch):
    store = built(text, tmp_path / "out")
    num_rows = store.num_rows
    monkeypatch.setattr("lcjax.retrieval.datastore._APPEND_CHARACTERS", 50)
    texts = (" " * 60, "A text after a blank document.", " " * 60)
    documents = [Document(f"new{i}", one) for i, one in enumerate(texts)]
    assert store.append(documents[:1]) == 0
    assert Datastore(tmp_path / "out").append(documents) == 1
    assert Datastore(tmp_path / "out").num_rows == num_rows + 1


def test_a_complete_datastore_with_the_folder_of_a_killed_append_is_complete(text, tmp_path):
    index = built(text, tmp_path / "out").index
    (tmp_path / "out" / "sparse.tmp").mkdir()
    assert built(text, tmp_path / "out").index == index
    assert Datastore(tmp_path / "out").append([Document("new", "A new text.")]) == 1
    assert not (tmp_path / "out" / "sparse.tmp").exists()
