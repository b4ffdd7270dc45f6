"""A teacher's rows: what is stored, that a kill costs nothing, and what reading them gives."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, rows_of, write_jsonl

from lcjax import config as configs
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection, build
from lcjax.data import Chunks, DataConfig, Noise, TeacherSource, TextSource, make_loader, teacher
from lcjax.data import __main__ as command
from lcjax.data.teacher import TeacherConfig, write_teacher_rows
from lcjax.errors import InputError
from lcjax.files import CHECKSUMS
from lcjax.models import Decoder, preset
from lcjax.parallel.sharding import Mesh, make_mesh

CHUNKS = Chunks(count=3, length=6)
MODEL = ModelSection(preset="tiny")
ROWS = 21  # the last batch of 8 is cut


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", make_texts(30, high=150))


def text_config(path, **more):
    plain = {"length": 28, "document_mask": False, "chunks": CHUNKS, "threads": 0, "prefetch": 0}
    return DataConfig(**{"sources": [TextSource(path, stride=14)]} | plain | more)


def config_for(path, out, **more):
    fields = {"rows": ROWS, "batch_size": 8, "save_every": 1, "top": 7, "mesh": Mesh(2, 2, 2)}
    data = more.pop("data", text_config(path))
    return TeacherConfig(model=MODEL, data=data, out=str(out), **fields | more)


@pytest.fixture(scope="module")
def made(path, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "rows"
    return out, write_teacher_rows(config_for(path, out))


def student_config(out, **more):
    plain = {"length": 28, "chunks": CHUNKS, "threads": 0, "prefetch": 0, "repeat": 1}
    return DataConfig(**plain | {"sources": [TeacherSource(str(out))], "shuffle": False} | more)


def test_rows_are_those_of_the_text_in_their_order(path, made):
    out, index = made
    assert index["rows"] == ROWS and [s["rows"] for s in index["shards"]] == [8, 8, 5]
    assert {file.name for file in out.iterdir()} == {
        *("000000.bin", "000001.bin", "000002.bin", "teacher.json", CHECKSUMS)
    }
    result = rows_of(student_config(out), ByteTokenizer())
    loader, wanted = make_loader(text_config(path), ByteTokenizer(), ROWS), None
    wanted = next(loader)
    loader.close()
    for name, value in wanted.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)
        assert result[name].dtype == value.dtype
    assert result["teacher_ids"].shape == result["teacher_probabilities"].shape == (ROWS, 10, 7)
    assert result["teacher_probabilities"].dtype == np.float16


@jax.jit
def _probabilities(params, tokens):
    model = Decoder(preset("tiny"))
    hidden = model.apply({"params": params}, tokens).hidden
    return jax.nn.softmax(model.apply({"params": params}, hidden, method="logits"))


def probabilities(texts):
    """Of the next token after every one of up to ROWS texts of up to 28 tokens."""
    filled = np.zeros((ROWS, 28), np.int32)
    for row, text in zip(filled, texts):
        row[: len(text)] = text
    return np.asarray(_probabilities(build(MODEL)[1], filled))


def assert_taught(found, p):
    """`found`, what is stored of rows, against the whole distributions."""
    ids, stored, rest = (found[f"teacher_{name}"] for name in ("ids", "probabilities", "rest"))
    close = {"rtol": 2e-3, "atol": 1e-6}  # half precision
    np.testing.assert_allclose(stored, -np.sort(-p, -1)[..., : stored.shape[-1]], **close)
    np.testing.assert_allclose(np.take_along_axis(p, ids, -1), stored, **close)
    np.testing.assert_allclose(rest, 1 - stored.astype(np.float32).sum(-1), atol=2e-3)


def test_probabilities_are_the_models_own_over_context_and_text_as_one(made):
    result = rows_of(student_config(made[0]), ByteTokenizer())
    assert result["chunk_mask"].all()  # one text without padding
    tokens = np.concatenate([result["chunks"].reshape(ROWS, -1), result["tokens"]], 1)
    assert_taught(result, probabilities(tokens)[:, 18:])


def test_a_context_that_is_not_full_is_read_without_its_padding(path):
    mesh = make_mesh(Mesh(2, 2, 2))
    model, params, _ = build(MODEL, mesh)
    config = config_for(path, "rows")
    loader = make_loader(config.data, ByteTokenizer(), 8)
    batch = next(loader)
    loader.close()
    missing = np.arange(8) * 18 // 7
    batch["chunk_mask"] = (np.arange(18) >= missing[:, None]).reshape(8, 3, 6)
    batch["segments"][:4, 7:] = 0  # and the text ends within the row
    fields = teacher._add_probabilities(model, params, config, list(range(8)), batch)
    contexts = (row.ravel()[gap:] for row, gap in zip(batch["chunks"], missing))
    p = probabilities([np.append(c, t) for c, t in zip(contexts, batch["tokens"])])
    stored = fields["teacher_probabilities"]
    fields |= {"teacher_probabilities": stored[..., :-1], "teacher_rest": stored[..., -1]}
    for row, gap in enumerate(missing):
        places = int((batch["segments"][row] > 0).sum())
        said = {name: value[row, :places] for name, value in fields.items()}
        assert_taught(said, p[row, 18 - gap : 18 - gap + places])


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_after_a_kill_the_same_command_makes_the_same_folder(path, made, tmp_path, monkeypatch):
    asked = []

    def killed(*args, ask=teacher._add_probabilities):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(*args)

    config = config_for(path, tmp_path / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(teacher, "_add_probabilities", killed)
        with pytest.raises(KeyboardInterrupt, match="16 rows are in .*; the same command resumes"):
            write_teacher_rows(config)
    with pytest.raises(InputError, match=r"rows is not finished: run the same .* once more"):
        make_loader(student_config(tmp_path / "rows"), ByteTokenizer(), 1)
    (tmp_path / "rows" / "000002.bin.tmp").write_bytes(b"half")
    write_teacher_rows(config)
    assert content(tmp_path / "rows") == content(made[0])
    monkeypatch.setattr(teacher, "_add_probabilities", None)
    assert write_teacher_rows(config)["rows"] == ROWS, "what is finished is not made again"


@pytest.mark.slow
def test_another_text_teacher_or_size_does_not_resume_in_the_same_folder(path, made):
    for more, what in [
        ({"top": 6}, "top 7, which is 6 now"),
        ({"rows": 30}, "rows 21, which is 30 now"),
        ({"data": text_config(path, seed=1)}, "data.seed 0, which is 1 now"),
    ]:
        with pytest.raises(InputError, match=f"was made with {what}: name another folder"):
            write_teacher_rows(config_for(path, made[0], **more))
    config = replace(config_for(path, made[0]), model=ModelSection(preset="tiny", seed=1))
    with pytest.raises(InputError, match=r"was made with weights of the teacher .* now"):
        write_teacher_rows(config)


def test_rows_resume_anywhere_are_shuffled_and_may_lose_context_to_noise(made):
    config = student_config(made[0], repeat=None, shuffle=True, holdout=0.2)
    loader = make_loader(config, ByteTokenizer(), 4)
    states, batches = [loader.get_state()], []
    for _ in range(9):
        batches.append(next(loader))
        states.append(json.loads(json.dumps(loader.get_state())))
    for step in (0, 3, 7):
        for rows in ([0, 1, 2, 3], [3]):
            resumed = make_loader(config, ByteTokenizer(), 4, rows=rows)
            resumed.set_state(states[step])
            assert_same([{k: v[rows] for k, v in batches[step].items()}], [next(resumed)])
            resumed.close()
    held = rows_of(replace(config, repeat=1), ByteTokenizer()), None
    validation = list(make_loader(config, ByteTokenizer(), 1, split="validation"))
    assert len(held[0]["tokens"]) + len(validation) == ROWS and validation
    noisy = replace(config, repeat=1, chunks=replace(CHUNKS, noise=Noise(rate=1.0)))
    assert rows_of(noisy, ByteTokenizer())["chunk_mask"].mean() < 0.7


def test_a_path_alone_may_be_such_a_folder(made):
    config = DataConfig(path=str(made[0]), length=28, chunks=CHUNKS, document_mask=False)
    assert config.resolved_sources() == [TeacherSource(str(made[0]))]


class Other(Bytes):
    fingerprint = "other"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"length": 29}, r"data.length=29 is not that of the rows of .*; set it to 28"),
        ({"chunks": None}, r"data.chunks=null is not that of .*; set it to {count: 3, length: 6}"),
        ({"chunks": Chunks(2, 9)}, r"data.chunks=2 x 9, text=before is not that of"),
    ],
)
def test_rows_of_another_shape_raise_input_error(fields, match, made):
    with pytest.raises(InputError, match=match) as caught:
        make_loader(student_config(made[0], **fields), ByteTokenizer(), 1)
    assert "\n" not in str(caught.value)


def test_rows_of_another_tokenizer_raise_input_error(made):
    with pytest.raises(InputError, match=r"with the tokenizer of random weights of tiny .*\(other"):
        make_loader(student_config(made[0]), Other(), 1)


def test_a_shard_that_was_cut_or_moved_raises_input_error(path, made, tmp_path):
    for name, data in content(made[0]).items():
        (tmp_path / name).write_bytes(data)
    config = student_config(tmp_path)
    shard = tmp_path / "000001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"000001.bin has [\d,]+ bytes, and 8 entries of .* take"):
        make_loader(config, ByteTokenizer(), 1)
    shard.unlink()
    with pytest.raises(InputError, match=r"000001.bin has 0 bytes, .*; copy it again"):
        make_loader(config, ByteTokenizer(), 1)
    (tmp_path / "teacher.json").write_text("{}")
    with pytest.raises(InputError, match=r"teacher.json is not as it was written: .*; copy it"):
        make_loader(config, ByteTokenizer(), 1)
    (tmp_path / CHECKSUMS).unlink()
    with pytest.raises(InputError, match=r"no index of format 1: write it again"):
        make_loader(config, ByteTokenizer(), 1)
    with pytest.raises(InputError, match=r"nowhere has no teacher.json; name a folder that"):
        make_loader(student_config(tmp_path / "nowhere"), ByteTokenizer(), 1)
    with pytest.raises(InputError, match=r"type teacher: its rows are stored; leave pack"):
        TeacherSource("a", pack="concat")
    with pytest.raises(InputError, match=r"data.sources.1 is not of type teacher, and others are"):
        student_config("a", sources=[TeacherSource("a"), TextSource(path)])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rows": None}, r"rows=null with data.repeat=null has no end: give --rows, or"),
        ({"data": {"chunks": None}}, r"data.chunks: the teacher reads a context"),
        ({"data": {"chunks": Chunks(3, 6, noise=Noise())}}, r"data.chunks.noise hides context"),
        (
            {"data": {"sources": [TeacherSource("a")]}},
            r"rows of type teacher are stored already",
        ),
        ({"top": 300}, r"top=300 is more than the 259 tokens of the model"),
        ({"batch_size": 6}, r"batch size 6 must be a positive multiple of .* = 4"),
        ({"rows": 2 * 10**9}, r"rows=2000000000: the missing ones take .* GB free; lower rows"),
    ],
)
def test_invalid_settings_raise_input_error(fields, match, path, tmp_path):
    data = text_config(path, **fields.pop("data", {}))
    with pytest.raises(InputError, match=match) as caught:
        write_teacher_rows(config_for(path, **{"out": tmp_path / "out", "data": data} | fields))
    assert "\n" not in str(caught.value)


def test_encoders_do_not_teach(path, tmp_path):
    config = replace(config_for(path, tmp_path / "out"), model=ModelSection(preset="tiny-encoder"))
    with pytest.raises(InputError, match=r"model.path=tiny-encoder gives no probabilities of the"):
        write_teacher_rows(config)


def test_the_command_reads_a_config_and_prints_errors(path, tmp_path, capsys):
    file = tmp_path / "teacher.yaml"
    file.write_text(
        f"model: {{preset: tiny}}\ndata: {{path: {path}, length: 28, document_mask: false,"
        f" chunks: {{count: 3, length: 6}}}}\nout: {tmp_path / 'rows'}\nrows: 8\n"
    )
    config = configs.parse(TeacherConfig, ["--config", str(file), "--top=9"])
    assert (config.top, config.rows, config.data.chunks) == (9, 8, CHUNKS)
    assert command.main(["teacher", "--config", str(file), "--data.chunks.count=9"]) == 2
    assert "error: data.length=28 leaves fewer than 2 tokens" in capsys.readouterr().err


def test_a_folder_that_another_process_writes_is_refused(path, tmp_path, monkeypatch):
    write_rows, config = teacher.write_rows, config_for(path, tmp_path / "out")

    def write_twice(*args):
        with pytest.raises(InputError, match=r"^out=.* is in use by process"):
            write_teacher_rows(config)
        return write_rows(*args)

    monkeypatch.setattr(teacher, "write_rows", write_twice)
    assert write_teacher_rows(config)["rows"] == ROWS
