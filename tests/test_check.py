"""`python -m lcjax.check`: damage of every kind of folder is found when it is opened, or by it."""

import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.check import main
from lcjax.checkpoints import ByteTokenizer, hf_names, load, orbax_io, save_hf
from lcjax.checkpoints.orbax_io import Checkpoints, load_state
from lcjax.checkpoints.run_folder import BaseModel
from lcjax.data import RetrievedSource, TextConfig, TokenSource, prepare
from lcjax.data.corpus import open_corpus
from lcjax.data.files import FileCache
from lcjax.data.stored_rows import StoredFiles, row_type
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, records
from lcjax.files import read_sums, sums_of, write_index, write_sums
from lcjax.models.model_config import PRESETS
from lcjax.retrieval import BuildConfig, Datastore, build
from lcjax.tree import nest

WORDS = ["quiet", "harbour", "letter", "morning", "boat", "island", "winter", "lamp"]


def write_text(folder):
    choose = random.Random(0)
    folder.mkdir()
    lines = (" ".join(choose.choices(WORDS, k=40)) for _ in range(30))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    return str(folder)


def make_tokens(folder):
    text = write_text(folder.with_name("text of tokens"))
    fields = {"path": text, "out": str(folder), "tokenizer": "bytes", "workers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "load_tokenizer", lambda name: ByteTokenizer())
        prepare.prepare(prepare.PrepareConfig(**fields))


def open_tokens(folder):
    return [(name, ids.tolist()) for name, ids in open_corpus(TokenSource(str(folder)))]


def make_rows(folder):
    shape = {"count": 1, "length": 4, "decoder": 6, "top": None, "ids": "uint16"}
    rows = np.zeros(5, row_type(**shape))
    rows["tokens"] = np.arange(30).reshape(5, 6)
    folder.mkdir()
    (folder / "000000.bin").write_bytes(rows.tobytes())
    index = {"format": 1, "stride": None, "shards": [{"name": "000000", "rows": 5}], **shape}
    write_index(folder / "retrieved.json", index, sums_of([folder / "000000.bin"], folder))


def open_rows(folder):
    files = StoredFiles(RetrievedSource(str(folder)))
    reader = files.open(0, FileCache())
    return [{k: v.tolist() for k, v in reader.record(i).items()} for i in range(len(reader))]


class Vectors:
    """An encoder whose vectors follow from the lengths of texts."""

    name, pooling, dim, fingerprint, max_tokens = "lengths", "mean", 4, "0" * 16, None

    def encode_passages(self, texts, titles=None):
        return np.array([[len(text), text.count("e"), 1, 2] for text in texts], np.float32)


def make_datastore(folder):
    text = write_text(folder.with_name("text of passages"))
    config = BuildConfig(data=TextConfig(path=text), out=str(folder), workers=1, faiss="ivf")
    build(config, encoder=Vectors())
    store = Datastore(folder)
    store.delete([store.passages([3])[0].id])


def open_datastore(folder):
    store = Datastore(folder)
    scores, rows = store.sparse().search(["quiet harbour", "lamp"], 5, valid=store.valid)
    queries = np.ones((2, 4), np.float32)
    near = [array.tolist() for array in store.faiss("ivf").search(queries, 4)]
    passages = store.passages(range(store.num_rows))
    return scores.tolist(), rows.tolist(), near, store.vectors().tolist(), passages


def make_evaluation(folder):
    for name, write in (("records", records.records_file), ("costs", records.costs_file)):
        (folder / name).mkdir(parents=True)
        rows = [{"method": "a", "length": 9, "window": n, "nll": n / 7} for n in range(4)]
        for task in ("one", "two"):
            rows = [row | {"task": task} for row in rows]
            write(folder, task).write_text(records.record_lines(rows))
    records.describe(folder, EvalConfig(), {"seed": 0})
    records.write_folder_sums(folder)


def open_evaluation(folder):
    marker = records.read_marker(folder)
    files = [folder / kind / "one.jsonl" for kind in ("records", "costs")]
    scores, damaged = records.parse(*(file.read_bytes() for file in files))
    if damaged:
        raise InputError("no record")
    return marker, scores


def make_model(folder):
    config = PRESETS["tiny"].replace(num_layers=1, vocab_size=ByteTokenizer().vocab_size)
    shapes = {entry.path: entry.shape for entry in hf_names.entries(config)}
    params = nest({path: np.full(shape, 0.5, np.float32) for path, shape in shapes.items()})
    save_hf(folder, params, config, ByteTokenizer(), checksums=True, max_shard_bytes=200_000)


def open_model(folder):
    params, config, _ = load(folder)
    return config, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def make_run(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(99.0)}, {"identity": {}, "position": {"next": 1}})
    BaseModel(None, None, 0, ("x",), False).write(folder)


def open_run(folder):
    target = {"x": jnp.zeros(99)}
    return BaseModel.read(folder), load_state(folder, target)["x"].tolist()


KINDS = {
    "tokens": (make_tokens, open_tokens),
    "rows": (make_rows, open_rows),
    "datastore": (make_datastore, open_datastore),
    "evaluation": (make_evaluation, open_evaluation),
    "model": (make_model, open_model),
    "run": (make_run, open_run),
}


def damaged_copies(folder, out, count, seed=0):
    """Yields (what, copy) for `count` flipped bits, some cut files and exchanged files."""
    choose = random.Random(seed)
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.stat().st_size]
    for number in range(count):
        shutil.rmtree(out, ignore_errors=True)
        copy = Path(shutil.copytree(folder, out))
        file = copy / files[number % len(files)].relative_to(folder)
        data = bytearray(file.read_bytes())
        other = copy / choose.choice(files).relative_to(folder)
        kind = choose.choice(("flip", "flip", "flip", "cut", "exchange"))
        if kind == "exchange" and data != other.read_bytes():
            file.write_bytes(other.read_bytes())
            other.write_bytes(data)
        elif kind == "cut":
            file.write_bytes(data[: choose.randrange(len(data))])
        else:
            place, kind = choose.randrange(len(data)), "flip"
            data[place] ^= 1 << choose.randrange(8)
            file.write_bytes(data)
        yield f"{kind} {file.relative_to(copy)}", copy


def outcome(copy, open_it, expected):
    """Returns how damage was found: opening, check, or what it did unnoticed."""
    try:
        is_equal = open_it(copy) == expected
    except InputError as error:
        assert "\n" not in str(error)
        return "opening"
    if main([str(copy)]):
        return "check"
    return "harmless" if is_equal else "silent"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:checkpoint .* is damaged")
def test_damage_of_any_file_is_found_when_a_folder_is_opened_or_by_check(
    kind, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(orbax_io, "_PAUSE", 0)
    make, open_it = KINDS[kind]
    make(tmp_path / "whole")
    expected = open_it(tmp_path / "whole")
    assert main([str(tmp_path / "whole")]) == 0 and "nothing is damaged" in capsys.readouterr().out
    assert "without checksums" not in capsys.readouterr().out
    for what, copy in damaged_copies(tmp_path / "whole", tmp_path / "copy", 12):
        assert outcome(copy, open_it, expected) in ("opening", "check"), what


def test_a_file_of_checksums_that_is_cut_behind_a_name_is_damaged(tmp_path):
    write_sums(tmp_path / "sums", {"a": "0" * 64, "state/b": "1" * 64})
    whole = (tmp_path / "sums").read_text()
    assert list(read_sums(tmp_path / "sums")) == ["a", "state/b"]
    (tmp_path / "sums").write_text(whole[:-1])
    with pytest.raises(InputError, match="sums is damaged: its last line is cut"):
        read_sums(tmp_path / "sums")
