"""Patterns that learn which keys they read: their losses, on devices, and a run of both stages."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_support import losses, tiny

from lcjax.attention import DSA, MSA, NSA, QSA, Causal, SeerAttention, SeerAttentionR
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder, preset
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.rope.positions import PlainPositions
from lcjax.training import run
from lcjax.training.objective import language_model
from lcjax.tree import flatten, split

CONFIG = preset("tiny").replace(num_layers=2, num_heads=4, num_kv_heads=2)
SIZE = CONFIG.head_dim
PATTERNS = {
    "dsa": DSA(heads=3, head_dim=SIZE, top_k=20),
    "qsa": QSA(heads=3, head_dim=SIZE, top_k=16, run=4),
    "msa": MSA(8, 3, SIZE),
    "seer_r": SeerAttentionR(block=8, top_k=3, gate_dim=SIZE),
}
PATTERNS["seer"] = SeerAttention(block=8, gate_dim=8, dense=True)
# QSA is DSA with other features, and those of seer_r are like those of msa.
SLOW = dict.fromkeys(("qsa", "seer_r"), pytest.mark.slow)
INDEXERS = pytest.mark.parametrize(
    "pattern", [pytest.param(x, id=n, marks=SLOW.get(n, ())) for n, x in PATTERNS.items()]
)


@functools.cache
def decoder_params(config):
    init = jax.jit(Decoder(config).init)
    return init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def batch(rows=2, length=64):
    rng = np.random.default_rng(5)
    tokens = jnp.asarray(rng.integers(0, 256, (rows, length)))
    segments = np.repeat([1, 2], [27, length - 27])[None].repeat(rows, 0)
    segments[0, -5:] = 0
    positions = np.maximum(np.arange(length), 0)[None].repeat(rows, 0)
    weights = (segments != 0).astype(np.float32)
    fields = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segments": segments}
    fields |= {"positions": positions, "weights": weights}
    return {name: jnp.asarray(x) for name, x in fields.items()}


def loss_and_gradients(config, params, mesh=None):
    """With all parameters trained, and the parts of the loss."""
    objective = language_model(config, PlainPositions(), mesh=mesh)

    @jax.jit
    def run(params):
        def loss(params):
            total, count, parts = objective(params, {}, batch(), jax.random.key(0))
            return total / count, parts

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, parts), gradients = run(params)
    return loss, parts, flatten(gradients)


@INDEXERS
def test_one_loss_trains_the_model_and_its_indexer_apart(pattern):
    config = CONFIG.replace(pattern=pattern)
    params = decoder_params(config)
    loss, parts, gradients = loss_and_gradients(config, params)
    np.testing.assert_allclose(
        loss * batch()["weights"].sum(), parts["ce"] + parts["divergence"], rtol=1e-5
    )
    # Without the divergence the rest has the same gradients, and the indexer has none.
    off = config.replace(pattern=replace(pattern, divergence_factor=0.0))
    _, _, plain = loss_and_gradients(off, params)
    for path, gradient in gradients.items():
        if "/pattern/" in path:
            assert np.abs(gradient).max() > 0 and not np.any(plain[path])
        else:
            np.testing.assert_array_equal(gradient, plain[path])


@INDEXERS
def test_the_first_stage_leaves_attention_full_and_lowers_the_divergence(pattern):
    config = CONFIG.replace(pattern=replace(pattern, dense=True))
    full = CONFIG.replace(pattern=Causal())
    params = decoder_params(config)
    _, parts, gradients = loss_and_gradients(config, params)
    _, _, want = loss_and_gradients(full, params)
    for path, gradient in gradients.items():
        if "/pattern/" not in path:
            np.testing.assert_array_equal(gradient, want[path])
    # Trained alone, the indexer needs no logits, and learns the same.
    trained, frozen = split(params, lambda path: "/pattern/" in path)
    objective = language_model(config, PlainPositions())

    @jax.jit
    def step(trained):
        def loss(trained):
            total, count, parts = objective(trained, frozen, batch(), jax.random.key(0))
            return total / count, parts

        (loss, alone), slopes = jax.value_and_grad(loss, has_aux=True)(trained)
        moved = jax.tree.map(lambda x, slope: x - 0.01 * jnp.sign(slope), trained, slopes)
        return moved, loss, alone, slopes

    trained, first, alone, slopes = step(trained)
    assert set(alone) == {"divergence"}
    np.testing.assert_allclose(alone["divergence"], parts["divergence"], rtol=1e-5)
    for path, slope in flatten(slopes).items():
        np.testing.assert_allclose(slope, gradients[path], rtol=1e-4, atol=1e-8)
    for _ in range(30):
        trained, last, *_ = step(trained)
    assert last < 0.8 * first


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(2, 2, 2, 1),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (Mesh(1, 1, 8, 1), Mesh(1, 2, 2, 2))),
    ],
)
@INDEXERS
def test_eight_devices_have_the_loss_and_gradients_of_one(pattern, mesh):
    config, devices = CONFIG.replace(pattern=pattern), make_mesh(mesh)
    params = decoder_params(config)
    want, _, expected = loss_and_gradients(config, params)
    params = jax.device_put(params, param_shardings(devices, params))
    loss, _, gradients = loss_and_gradients(config, params, devices)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient,
            expected[path],
            rtol=1e-4,
            atol=2e-5 * np.abs(expected[path]).max(),
            err_msg=path,
        )


@pytest.mark.usefixtures("compiled_once")
def test_a_run_of_two_stages_converts_a_dense_model(tmp_path, corpus):
    first, second = tmp_path / "first", tmp_path / "second"
    dense = DSA(heads=2, head_dim=SIZE, top_k=12, dense=True)
    model = {"preset": "tiny", "pattern": dense}
    run(tiny(first, corpus, model=model, trainable=("pattern",), lr=0.02))
    logged = losses(first)
    assert logged[max(logged)] < logged[min(logged)]
    lm = LanguageModel.load(first / "model")
    assert lm.config.pattern == dense
    # The rest is as it was, and without its pattern the model is a plain one.
    plain = LanguageModel.load(ModelSection(preset="tiny"))
    want, have = flatten(plain.params), flatten(lm.params)
    assert {path for path in have if path not in want} == {
        path for path in have if "/pattern/" in path
    }
    for path, x in want.items():
        np.testing.assert_array_equal(x, have[path])
    causal = LanguageModel.load(first / "model", pattern=Causal())
    assert jax.tree.structure(causal.params) == jax.tree.structure(plain.params)
    # Second stage
    sparse = DSA(heads=2, head_dim=SIZE, top_k=12)
    model = {"path": str(first / "model"), "pattern": sparse}
    run(tiny(second, corpus, model=model, steps=4))
    trained = LanguageModel.load(second / "model")
    assert trained.config.pattern == sparse
    changed = flatten(trained.params)
    assert all(np.any(changed[path] != x) for path, x in have.items() if "/pattern/" in path)


@pytest.mark.usefixtures("compiled_once")
def test_a_run_trains_the_gates_of_branches_with_the_model(tmp_path, corpus):
    pattern = NSA(block=8, top_k=3, window=8)
    run(tiny(tmp_path, corpus, model={"preset": "tiny", "pattern": pattern}, steps=4))
    assert all(np.isfinite(loss) for loss in losses(tmp_path).values())
    trained = LanguageModel.load(tmp_path / "model")
    assert trained.config.pattern == pattern
    gates = {path: x for path, x in flatten(trained.params).items() if "/pattern/" in path}
    assert {path.rpartition("/")[2] for path in gates} == {"branch_gate", "branch_scale"}
    for path, x in gates.items():  # those of the start are 0, and (0, 2, 0)
        assert np.all(np.asarray(x)[..., 1] != (2 if "scale" in path else 0))


@pytest.mark.usefixtures("compiled_once")
def test_a_run_trains_gates_of_blocks_that_prompts_are_read_by(tmp_path, corpus):
    dense = SeerAttention(block=8, gate_dim=8, share=0.4, dense=True)
    model = {"preset": "tiny", "pattern": dense}
    run(tiny(tmp_path, corpus, model=model, trainable=("pattern",), lr=0.02))
    logged = losses(tmp_path)
    assert logged[max(logged)] < logged[min(logged)]
    lm = LanguageModel.load(tmp_path / "model")
    assert lm.config.pattern == dense
    reads = LanguageModel.load(tmp_path / "model", pattern=replace(dense, dense=False))
    jax.tree.map(np.testing.assert_array_equal, reads.params, lm.params)
    want, have = flatten(LanguageModel.load(ModelSection(preset="tiny")).params), flatten(lm.params)
    for path, x in want.items():
        np.testing.assert_array_equal(x, have[path])


@pytest.mark.usefixtures("compiled_once")
def test_new_indexers_are_not_left_untrained(tmp_path, corpus):
    model = {"preset": "tiny", "pattern": PATTERNS["dsa"]}
    with pytest.raises(
        InputError, match=r"trainable=\['lora'\] leaves new .* add the rule pattern"
    ):
        run(tiny(tmp_path / "run", corpus, model=model, lora=LoRA(rank=2)))
