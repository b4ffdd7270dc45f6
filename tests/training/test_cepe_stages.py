"""CEPE's training stages, from a random encoder to a distilled decoder, and input errors."""

import numpy as np
import pytest
from process_support import Job
from training_support import tiny

from lcjax.checkpoints.build import ModelSection, build
from lcjax.data import Chunks, DataConfig, Masking, Noise, TeacherSource, make_loader
from lcjax.data.stored_rows import row_type
from lcjax.data.teacher import TeacherConfig, write_teacher_rows
from lcjax.errors import InputError
from lcjax.memory import CepeSection
from lcjax.models.distill import Distill
from lcjax.parallel.sharding import Mesh
from lcjax.training import loop, run
from lcjax.training.language_modelling import LanguageModelTask
from lcjax.training.tracking import read
from lcjax.tree import flatten, split

BOTH = ("encoder", "cross_attention")
BEFORE = Chunks(count=4, length=4)  # 16 tokens before 8
NOISY = Chunks(count=4, length=4, noise=Noise(rate=0.5))


pytestmark = pytest.mark.usefixtures("compiled_once")


def rows(chunks, **more):
    return {"length": 24, "chunks": chunks, "document_mask": False} | more


def taught(out, **more):
    return {"path": "", "length": 24, "chunks": BEFORE, "sources": [TeacherSource(str(out))]} | more


def stopped_at(config, step):
    """The run up to `step`, as if SIGTERM had come then."""
    original = loop.StopRequest.should_stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.StopRequest, "should_stop", lambda self, at: at == step or original(self, at)
        )
        patch.setattr(loop.Training, "_finish_early", lambda *args: {})
        run(config)


def losses(folder, name="loss"):
    lines = read(folder / "metrics.jsonl")
    return np.array([line[name] for line in lines if name in line])


def parts(path):
    """(decoder, encoder, cross-attention) of a model folder, by path."""
    _, params, _ = build(ModelSection(path=str(path)))
    encoder, rest = split(params, lambda path: path.startswith("encoder/"))
    crossing, decoder = split(rest, lambda path: "/memory/" in path)
    return [flatten(tree) for tree in (decoder, encoder, crossing)]


def equal_leaves(a, b):
    return [np.array_equal(a[path], b[path]) for path in a]


@pytest.mark.slow
def test_the_stages_chain_and_the_decoder_stays_unchanged(corpus, tmp_path):
    mlm = tiny(
        *(tmp_path / "mlm", corpus), data={"masking": Masking()}, model={"preset": "tiny-encoder"}
    )
    run(mlm)
    assert losses(tmp_path / "mlm")[-3:].mean() < losses(tmp_path / "mlm")[:2].mean()

    memory = CepeSection(encoder=str(tmp_path / "mlm" / "model"))
    warm = tiny(
        tmp_path / "warm", corpus, trainable=BOTH, model={"preset": "tiny", "memory": memory},
        data=rows(Chunks(count=6, length=4, text="same")),
    )  # fmt: skip
    run(warm)
    initial = {"path": str(tmp_path / "warm" / "model")}
    decoder, encoder, crossing = parts(initial["path"])
    _, params, _ = build(ModelSection(preset="tiny"))
    assert all(equal_leaves(flatten(params), decoder))
    assert not any(equal_leaves(parts_of(tmp_path / "mlm" / "model"), encoder))

    main = tiny(tmp_path / "main", corpus, model=initial, trainable=BOTH, data=rows(NOISY))
    whole = tiny(tmp_path / "whole", corpus, model=initial, trainable=BOTH, data=rows(NOISY))
    stopped_at(main, 5)
    run(main)
    run(whole)
    np.testing.assert_array_equal(losses(tmp_path / "main"), losses(tmp_path / "whole"))

    data = DataConfig(path=str(corpus), length=24, chunks=BEFORE, document_mask=False)
    shape = {"rows": 40, "batch_size": 8, "top": 9, "mesh": Mesh(data=2, fsdp=2, tensor=2)}
    # The student's own folder: without a context it is the original decoder.
    write_teacher_rows(
        TeacherConfig(data, str(tmp_path / "rows"), model=ModelSection(**initial), **shape)
    )
    for name in ("distilled", "undisturbed"):
        config = tiny(
            *(tmp_path / name, ""), model=initial, trainable=BOTH, data=taught(tmp_path / "rows"),
            distill=Distill(top=9), accumulation=2,
        )  # fmt: skip
        if name == "distilled":
            stopped_at(config, 7)
        run(config)
    folder = tmp_path / "distilled"
    np.testing.assert_array_equal(losses(folder), losses(tmp_path / "undisturbed"))
    ce, kl = losses(folder, "ce"), losses(folder, "kl")
    np.testing.assert_allclose(losses(folder), ce + 2 * kl, rtol=1e-5)
    # Without weight on it the divergence is only watched.
    actual = parts(folder / "model")
    assert all(equal_leaves(decoder, actual[0]))
    assert not any(equal_leaves(encoder, actual[1])) and not any(equal_leaves(crossing, actual[2]))


def parts_of(encoder):
    """Of an encoder's folder what CEPE takes: all but the head, by CEPE's paths."""
    _, params, _ = build(ModelSection(path=str(encoder)))
    return {f"encoder/{path}": x for path, x in flatten(params).items() if "mlm/" not in path}


@pytest.mark.slow
def test_an_encoder_that_is_left_out_of_training_stays_as_it_is(corpus, tmp_path):
    model = {"preset": "tiny", "memory": CepeSection(encoder="tiny-encoder")}
    frozen = tiny(
        *(tmp_path / "run", corpus), model=model, trainable=("cross_attention",), data=rows(NOISY)
    )
    run(frozen)
    _, encoder, crossing = parts(tmp_path / "run" / "model")
    _, params, _ = build(ModelSection(**model))
    initial = {f"encoder/{path}": x for path, x in flatten(params["encoder"]).items()}
    assert all(equal_leaves(initial, encoder))
    initial_memory = flatten(split(params, lambda path: "/memory/" in path)[0])
    assert not any(equal_leaves(initial_memory, crossing))


@pytest.fixture(scope="module")
def stored(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher") / "rows"
    data = DataConfig(path=str(corpus), length=24, chunks=BEFORE, document_mask=False)
    shape = {"rows": 16, "batch_size": 8, "top": 5, "mesh": Mesh(data=8, fsdp=1)}
    write_teacher_rows(TeacherConfig(data, str(out), model=ModelSection(preset="tiny"), **shape))
    return out


WITH_MEMORY = {"preset": "tiny", "memory": CepeSection(encoder="tiny-encoder")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "distill", "match"),
    [
        (
            "text",
            Distill(),
            r"train.distill needs a teacher's rows, and data.sources are none; make",
        ),
        ("rows", None, r"hold a teacher's probabilities, and train.distill is null"),
        ("rows", Distill(), r"train.distill.top=50 is more than the 5 probabilities that .* set"),
        ("longer", Distill(top=5), r"data.length=40 is not that of the rows of .*; set it to 24"),
        ("missing", Distill(), r"has no teacher.json; name a folder that `python -m lcjax.data"),
    ],
)
def test_rows_and_settings_that_do_not_belong_together_raise_input_error_before_a_model_is_read(
    data, distill, match, corpus, stored, tmp_path, monkeypatch
):
    monkeypatch.setattr(LanguageModelTask, "load", None)
    data = {
        "text": rows(BEFORE),
        "rows": taught(stored),
        "longer": taught(stored, length=40),
        "missing": taught(tmp_path / "nowhere"),
    }[data]
    path = corpus if "sources" not in data else ""
    config = tiny(tmp_path / "run", path, data=data, model=WITH_MEMORY, distill=distill)
    with pytest.raises(InputError, match=match) as caught:
        run(config)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_batch_of_a_teachers_rows_lies_over_the_mesh(stored, tmp_path):
    import jax

    from lcjax.checkpoints import ByteTokenizer
    from lcjax.checkpoints.build import model_config
    from lcjax.models import preset
    from lcjax.parallel.sharding import make_mesh
    from lcjax.training import batches, compile_only

    config = tiny(
        *(tmp_path / "run", ""), data=taught(stored), model=WITH_MEMORY, distill=Distill(top=5)
    )
    mesh = make_mesh(config.mesh)
    model = model_config(config.model, preset("tiny"))
    loader = make_loader(config.data, ByteTokenizer(), config.train.batch_size)
    put = batches.put(next(loader), mesh)
    loader.close()
    described = compile_only.abstract_batch(config, model, mesh)
    assert {k: (v.shape, v.dtype, v.sharding) for k, v in put.items()} == {
        k: (v.shape, v.dtype, v.sharding) for k, v in described.items()
    }
    assert isinstance(put["teacher_ids"], jax.Array)


TEACHER = (
    "import sys; from lcjax.data.__main__ import main; sys.exit(main(['teacher', *sys.argv[1:]]))"
)


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(corpus, stored, tmp_path):
    data = DataConfig(path=str(corpus), length=24, chunks=BEFORE, document_mask=False)
    shape = {"rows": 16, "batch_size": 8, "top": 5, "mesh": Mesh(data=8, fsdp=1)}
    config = TeacherConfig(data, str(tmp_path / "rows"), model=ModelSection(preset="tiny"), **shape)
    for code, log in Job(config, tmp_path, tmp_path / "xla", code=TEACHER).end():
        assert code == 0, log[-3000:]
    actual, expected = (
        np.fromfile(folder / "000000.bin", row_type(4, 4, 8, 5, "uint16"))
        for folder in (tmp_path / "rows", stored)
    )
    for name in expected.dtype.names:
        np.testing.assert_allclose(
            actual[name].astype(np.float32), expected[name].astype(np.float32), rtol=2e-3
        )
