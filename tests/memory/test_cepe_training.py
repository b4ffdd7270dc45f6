"""CEPE's stages: what the recipes promise, what is trained in each, and the loss with a teacher."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import text

from lcjax import config as configs
from lcjax import cost
from lcjax.attention import Bidirectional
from lcjax.checkpoints.build import ModelSection, build
from lcjax.data.stored_rows import row_type
from lcjax.data.teacher import TeacherConfig
from lcjax.errors import InputError
from lcjax.memory import CepeSection
from lcjax.models import preset
from lcjax.models.distill import Distill
from lcjax.rope.positions import PlainPositions
from lcjax.training import compile_only, estimate
from lcjax.training.objective import language_model
from lcjax.training.optim import schedule
from lcjax.training.train_config import TrainConfig, trainable

ROOT = Path(__file__).resolve().parents[2]
BOTH = ("encoder", "cross_attention")


@pytest.fixture
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def read(name, *overrides):
    file = ROOT / "configs" / f"{name}.yaml"
    return configs.parse(TrainConfig, ["--config", str(file), *overrides])


@pytest.mark.parametrize(
    ("name", "steps", "batch", "lr", "warmup", "tokens", "chunks", "text", "noise", "trained"),
    [
        ("cepe_mlm_encoder", 100_000, 2048, 1e-3, 4000, 512, None, None, None, ("all",)),
        ("cepe_warmup_7b", 4000, 128, 5e-4, 160, 256, (4, 64), "same", None, BOTH),
        ("ceped_warmup_7b_chat", 4000, 128, 5e-4, 160, 256, (4, 64), "same", None, BOTH),
        ("cepe_7b", 20_000, 128, 3e-4, 800, 4096, (16, 256), "before", (0.3, 0.1, 0), BOTH),
        ("ceped_7b_chat", 20_000, 128, 3e-4, 800, 2048, (8, 256), "before", None, BOTH),
    ],
)
def test_recipes_have_the_papers_settings(
    name, steps, batch, lr, warmup, tokens, chunks, text, noise, trained
):
    recipe = read(name)
    train, data = recipe.train, recipe.data
    assert (train.steps, train.batch_size, train.lr, train.warmup_steps) == (
        *(steps, batch, lr, warmup),
    )
    assert (train.betas, train.eps, train.weight_decay, train.clip) == ((0.9, 0.999), 1e-8, 0, 1)
    rate = schedule(train)
    assert rate(warmup) == pytest.approx(lr) and rate(steps) == pytest.approx(0, abs=1e-12)
    assert rate((steps + warmup) // 2) == pytest.approx(lr / 2, rel=1e-3), "a cosine to 0"
    assert data.decoder_length == tokens and train.rules() == trained
    if chunks is None:
        assert data.masking.rate == 0.3 and data.masking.token is None
        return
    assert ((data.chunks.count, data.chunks.length), data.chunks.text) == (chunks, text)
    found = data.chunks.noise
    assert (found and (found.rate, found.whole, found.leave)) == noise


def test_ceped_reads_the_rows_that_its_teacher_makes():
    student = read("ceped_7b_chat")
    file = ROOT / "configs" / "data" / "ceped_teacher_7b_chat.yaml"
    teacher = configs.parse(TeacherConfig, ["--config", str(file)])
    assert student.train.distill == Distill(ce=1.0, kl=2.0, mode="drop", top=50)
    assert student.data.sources[0].path == teacher.out and teacher.top == 50
    assert (student.data.length, student.data.chunks) == (teacher.data.length, teacher.data.chunks)
    assert teacher.rows == student.train.steps * student.train.batch_size
    assert teacher.data.sources == read("cepe_7b").data.sources
    assert teacher.model.path == read("ceped_warmup_7b_chat").model.path
    size = row_type(8, 256, 2048, 50, "uint16").itemsize
    assert f"{size:,} bytes a row" in file.read_text()
    small = file.with_name("ceped_teacher_smollm2.yaml")
    small, student = configs.parse(TeacherConfig, ["--config", str(small)]), read("ceped_smollm2")
    assert student.data.sources[0].path == small.out
    assert (student.data.length, student.data.chunks) == (small.data.length, small.data.chunks)


@pytest.mark.parametrize(
    ("name", "overrides", "trained"),
    [
        ("cepe_warmup_7b", (), 1_777_780_736),
        ("cepe_7b", (), 1_777_780_736),
        ("cepe_7b", ("--train.trainable=[cross_attention]",), 1_342_308_352),
        ("ceped_7b_chat", (), 1_777_780_736),
        ("cepe_mlm_encoder", (), 435_472_384 + 1024 * 1025 + 1024 + 32_001),
    ],
)
def test_what_a_recipe_trains_has_the_papers_size(name, overrides, trained, at_the_root):
    recipe = read(name, *overrides)
    shapes = cost.parameter_shapes(estimate.model_of(recipe))
    chosen = trainable(shapes, recipe.train.rules())
    assert sum(math.prod(leaf.shape) for path, leaf in shapes.items() if chosen(path)) == trained


def test_recipes_start_from_the_result_of_the_previous_recipe(at_the_root, tmp_path, monkeypatch):
    for name, before in [("cepe_7b", "cepe_warmup_7b"), ("cepe_smollm2", "cepe_smollm2_warmup")]:
        recipe, warmup = read(name), read(before)
        assert recipe.model.path == f"{warmup.run.folder}/model" == f"runs/{before}/model"
        assert recipe.model.memory is None and warmup.model.memory is not None
        assert estimate.model_of(recipe).memory == estimate.model_of(warmup).memory
    assert estimate.model_of(read("cepe_7b")).memory.states == preset("cepe-encoder")
    assert estimate.model_of(read("cepe_smollm2")).memory.states == preset("smollm2-encoder")
    assert estimate.model_of(read("cepe_mlm_encoder")).pattern == Bidirectional()
    monkeypatch.chdir(tmp_path)  # a recipe of the library is known in any folder
    memory = estimate.model_of(read("cepe_7b")).memory
    assert memory == estimate.model_of(read("cepe_warmup_7b")).memory
    with pytest.raises(InputError, match=r"runs/unknown/model is not on this machine"):
        estimate.model_of(read("cepe_7b", "--model.path=runs/unknown/model"))


def switches(name):
    """The overrides that a recipe's header names."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text().split("\n\n")[0]
    text = " ".join(line.removeprefix("#").strip() for line in text.splitlines())
    text = text.split("Choices:")[1].split("Command:")[0]
    return re.findall(r'"(--[^"]*)"', text) + re.findall(
        r'(?<!")(--[\w.]+=[^\s;,)"]*[^\s;,)".:])', text
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [("cepe_warmup_7b", 4), ("cepe_7b", 5), ("ceped_7b_chat", 3), ("cepe_smollm2", 3)],
)
def test_every_switch_in_a_header_parses(name, count):
    found = switches(name)
    assert len(found) == count
    for switch in found:
        assert read(name, switch) != read(name), switch


def test_the_ablations_are_switches(at_the_root):
    memory = "--model.memory={type: cepe, encoder: hyen/LLaMA-MLM-Large}"
    bare = read("cepe_7b", "--model.path=meta-llama/Llama-2-7b-hf", memory)
    assert bare.model.memory == CepeSection(encoder="hyen/LLaMA-MLM-Large"), "no warm-up"
    assert estimate.model_of(bare).memory == estimate.model_of(read("cepe_7b")).memory
    random = read("cepe_warmup_7b", "--model.memory.encoder=cepe-encoder")
    assert random.model.memory.encoder == "cepe-encoder"
    assert read("cepe_7b", "--data.chunks.noise=null").data.chunks.noise is None
    assert read("cepe_7b", "--data.chunks.noise.leave=1").data.chunks.noise.leave == 1
    assert read("ceped_7b_chat", "--train.distill.kl=0").train.distill.kl == 0


def taught_batch(rows=4, length=12, top=5):
    random = np.random.default_rng(7)
    p = np.sort(random.dirichlet(np.ones(top + 1), (rows, length)))[..., ::-1]
    return {
        "tokens": text(2, rows, length),
        "targets": text(3, rows, length),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        "weights": (random.random((rows, length)) < 0.8).astype(np.float32),
        "chunks": text(4, rows, 2, 6),
        "chunk_mask": random.random((rows, 2, 6)) < 0.8,
        "teacher_ids": np.argsort(random.random((rows, length, 250)))[..., :top].astype(np.int32),
        "teacher_probabilities": p[..., :-1].astype(np.float16),
        "teacher_rest": p[..., -1].astype(np.float16),
    }


@pytest.mark.slow
def test_the_loss_with_a_teacher_is_both_losses_over_the_same_tokens():
    section = CepeSection(encoder="tiny-encoder", output_share=1.0)
    model, params, _ = build(ModelSection(preset="tiny", memory=section))
    batch, config = taught_batch(), Distill(ce=0.5, kl=3.0, top=5)
    objective = language_model(model.config, PlainPositions(), distill=config)

    def plain(params):
        """By the formulas, with all logits at once."""
        whole = jax.tree.map(jnp.asarray, batch)
        memory = model.apply(
            {"params": params}, whole["chunks"], whole["chunk_mask"], method="encode"
        )
        hidden = model.apply({"params": params}, whole["tokens"], memory=memory).hidden
        logits = model.apply({"params": params}, hidden, method="logits")
        log_q = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(log_q, whole["targets"][..., None], -1)[..., 0]
        p = whole["teacher_probabilities"].astype(jnp.float32)
        log_q = jnp.take_along_axis(log_q, whole["teacher_ids"], -1)
        kl = (p * (jnp.log(p) - log_q)).sum(-1)
        ce, kl = ((whole["weights"] * x).sum() for x in (nll, kl))
        return 0.5 * ce + 3 * kl, {"ce": ce, "kl": kl}

    @jax.jit
    def both(params):
        return objective(params, {}, batch, jax.random.key(0)), plain(params)

    (loss, tokens, parts), (wanted, wanted_parts) = both(params)
    assert tokens == batch["weights"].sum()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert parts.keys() == {"ce", "kl"}
    for name, value in wanted_parts.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-5)


def test_the_compile_check_knows_the_shapes_of_a_teachers_rows(at_the_root):
    recipe = read("ceped_7b_chat", "--train.batch_size=2", "--train.distill.top=5")
    from lcjax.parallel.sharding import Mesh, make_mesh

    mesh = make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    shapes = compile_only.abstract_batch(recipe, estimate.model_of(recipe), mesh)
    found = {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items() if "teacher" in name}
    assert found == {
        "teacher_ids": ((2, 2048, 5), jnp.int32),
        "teacher_probabilities": ((2, 2048, 5), jnp.float16),
        "teacher_rest": ((2, 2048), jnp.float16),
    }
    assert shapes["chunks"].shape == (2, 8, 256)
