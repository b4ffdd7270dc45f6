"""RETRO: which token reads which neighbours, in training, packed rows, caches and folders."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from memory_support import assert_close, assert_trained_alike_on, batch, gradients, read, tiny_model
from tiny_lm import text

import lcjax
from lcjax import config as configs
from lcjax.checkpoints.build import ModelSection, build
from lcjax.errors import InputError
from lcjax.memory import RetroSection
from lcjax.memory.retro import default_layers, last_tokens
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.layers import LayerInputs
from lcjax.models.memory import EncodedContext, TrainingRows
from lcjax.rope.rotation import no_rotation
from lcjax.training.loop import run
from lcjax.training.train_config import TrainConfig
from lcjax.tree import flatten, nest

pytestmark = pytest.mark.usefixtures("exact_products")

CHUNK = 5
SECTION = RetroSection(
    encoder_layers=1, chunk=CHUNK, neighbour_tokens=7, layers=(1, 2), output_share=1.0
)


@functools.partial(jax.jit, static_argnums=0)
def encode(model, params, neighbours, mask=None, segments=None):
    """The encoded context of neighbours [B, U, k, r] of U chunks."""
    rows, count, k, length = neighbours.shape
    mask = jnp.ones(neighbours.shape, bool) if mask is None else mask
    chunks, mask = (x.reshape(rows, count * k, length) for x in (neighbours, mask))
    numbers = jnp.broadcast_to(jnp.arange(count * k) // k, (rows, count * k))
    # Without numbers every chunk has as many neighbours as the memory says.
    numbers = None if k == model.config.memory.neighbours else numbers
    options = {"numbers": numbers, "segments": segments, "method": "encode"}
    return model.apply({"params": params}, chunks, mask, **options)


def logits(tokens, neighbours, segments=None, section=SECTION):
    model, params = tiny_model(section)
    memory = encode(model, params, neighbours, segments=segments)
    return np.asarray(read(model, params, tokens, memory, {"segments": segments})[0])


def changed(found, wanted):
    """The tokens whose logits differ in any row."""
    return np.flatnonzero(np.abs(found - wanted).max((0, 2)) > 1e-6).tolist()


# Who reads what


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_neighbours_of_a_chunk_change_nothing_before_its_last_token(chunk):
    tokens, neighbours = text(0, 2, 23), text(1, 2, 4, 3, 7)
    wanted = logits(tokens, neighbours)
    neighbours[:, chunk, 1] = text(2, 2, 7)
    first = (chunk + 1) * CHUNK - 1
    assert changed(logits(tokens, neighbours), wanted) == list(range(first, 23))


def test_the_last_layer_alone_reads_one_chunk_of_neighbours():
    section = dataclasses.replace(SECTION, layers=None)  # the last of 2 layers
    tokens, neighbours = text(0, 2, 23), text(1, 2, 4, 3, 7)
    wanted = logits(tokens, neighbours, section=section)
    neighbours[:, 1] = text(2, 2, 3, 7)
    found = logits(tokens, neighbours, section=section)
    assert changed(found, wanted) == list(range(2 * CHUNK - 1, 3 * CHUNK - 1))


@pytest.mark.parametrize("token", [3, 4, 11])
def test_a_token_changes_nothing_before_it(token):
    tokens, neighbours = text(0, 2, 23), text(1, 2, 4, 2, 7)
    wanted = logits(tokens, neighbours)
    tokens[:, token] += 1
    assert changed(logits(tokens, neighbours), wanted)[0] == token


def test_layers_by_depth():
    assert default_layers(32) == (6, 9, 12, 15, 18, 21, 24, 27, 30)
    assert [default_layers(n) for n in (1, 5, 6, 8, 9)] == [(1,), (5,), (6,), (6,), (6, 9)]


def oracle(x, branch, states, mask, chunk, starts):
    """Chunked cross-attention in float64: x [T, D], states [U, M, E], mask [U, M] -> [T, D].

    `starts` are the first tokens of documents; chunks of the text are counted through the row.
    """
    x, states = x.astype(np.float64), states.astype(np.float64)
    norm = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * branch["norm"]["scale"]
    query, key, value, out = (
        np.asarray(branch[name]["kernel"], np.float64) for name in ("query", "key", "value", "out")
    )
    result, u, finished = np.zeros_like(x), None, 0
    for i in range(len(x)):
        start = max(s for s in starts if s <= i)
        u = None if i == start else u
        if (i - start + 1) % chunk == 0:
            u, finished = finished, finished + 1
        if u is None or u >= len(states) or not mask[u].any():
            continue
        visible = states[u][mask[u]]
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // key.shape[1])
            scores = (visible @ key[:, shared]) @ (norm[i] @ query[:, head])
            weights = np.exp(scores / np.sqrt(query.shape[2]))
            result[i] += weights / weights.sum() @ (visible @ value[:, shared]) @ out[head]
    return result


@functools.partial(jax.jit, static_argnums=0)
def attention_to_neighbours(config, branch, x, states, mask, starts):
    """Cross-attention of x [1, T, D] to states [1, U, M, D] where the mask [1, U, M] is true."""
    positions, memory = jnp.arange(x.shape[1])[None], config.memory
    segments = jnp.searchsorted(starts, positions, side="right")
    order = positions - starts[segments - 1]
    ends = last_tokens(jnp.arange(mask.shape[1])[None], memory.chunk, segments)
    index, documents = (jnp.repeat(end, mask.shape[2], axis=1) for end in ends)
    states, mask = states.reshape(1, -1, config.width), mask.reshape(1, -1)
    encoded = EncodedContext(mask, states, index=index, segments=documents).packed()
    context = LayerInputs(positions, segments, no_rotation(), order, memory=encoded)
    return memory.reader(config, None).apply({"params": branch}, x, context)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("starts", [(0, 29, 29, 29), (0, 8, 9, 17)])
def test_cross_attention_equals_a_float64_oracle(chunk, starts):
    model, params = tiny_model(SECTION)
    config, branch = model.config, params["layers_0"]["memory"]
    config = config.replace(memory=dataclasses.replace(config.memory, chunk=chunk))
    random = np.random.default_rng(chunk)
    x = random.normal(size=(1, 29, config.width)).astype(np.float32)
    states = random.normal(size=(1, 7, 4, config.width)).astype(np.float32)
    mask = random.random((1, 7, 4)) < 0.7
    actual = attention_to_neighbours(config, branch, x, states, mask, np.array(starts))
    wanted = oracle(x[0], branch, states[0], mask[0], chunk, starts)
    np.testing.assert_allclose(actual[0], wanted, atol=1e-5)
    assert (chunk < 9) == (np.abs(wanted).max() > 0.1)


@pytest.mark.slow
def test_packed_documents_equal_separate_ones():
    lengths = (13, 4, 10)  # 2, 0 and 2 whole chunks
    documents = [text(seed, 1, n) for seed, n in enumerate(lengths)]
    neighbours = text(9, 1, 4, 2, 7)
    tokens = np.concatenate([*documents, text(8, 1, 3)], axis=1)
    segments = np.repeat([1, 2, 3, 0], [*lengths, 3])[None].astype(np.int32)
    packed = logits(tokens, neighbours, segments)
    start = 0
    for document, (first, last) in zip(documents, [(0, 2), (2, 2), (2, 4)]):
        none = text(7, 1, 1, 2, 7)  # of a chunk that the document does not finish
        own = neighbours[:, first:last] if last > first else none
        alone = logits(document, own)
        assert_close(packed[:, start : start + document.shape[1]], alone)
        start += document.shape[1]


@pytest.mark.slow
def test_more_neighbours_than_chunks_of_the_row_are_not_read():
    tokens, neighbours = text(0, 1, 12), text(1, 1, 4, 2, 7)
    segments = np.array([[1] * 7 + [2] * 5], np.int32)
    wanted = logits(tokens, neighbours[:, :2], segments)
    assert_close(logits(tokens, neighbours, segments), wanted)


@pytest.mark.slow
def test_an_untrained_memory_leaves_the_decoder_as_it_is_bit_by_bit():
    section = dataclasses.replace(SECTION, output_share=0.0)
    model, params = tiny_model(section)
    config = model.config.replace(scan_layers=False)
    tokens, neighbours = text(0, 2, 23), text(1, 2, 4, 2, 7)
    memory = encode(Decoder(config), params, neighbours)
    found, _ = read(Decoder(config), params, tokens, memory, {})
    plain = {
        name: {key: part for key, part in layer.items() if key != "memory"}
        for name, layer in params.items()
        if name != "encoder"
    }
    wanted, _ = read(Decoder(config.replace(memory=None)), plain, tokens, None, {})
    np.testing.assert_array_equal(found, wanted)


# Caches and language models


@pytest.mark.slow_except("sizes0-projected", "sizes1-states")
@pytest.mark.parametrize("keys", ["states", "projected"])
@pytest.mark.parametrize("sizes", [(1,) * 26, (8, 1, 1, 8, 8)])
def test_decoding_with_a_cache_equals_reading_at_once(keys, sizes):
    stacked, params = tiny_model(SECTION)
    config = stacked.config.replace(scan_layers=False)
    tokens, neighbours = text(0, 2, 23), text(1, 2, 4, 2, 7)
    memory = encode(stacked, params, neighbours)
    if keys == "projected":
        memory = config.memory.project_states(params, config, memory)
    rows = np.pad(tokens, ((0, 0), (3, 0)))  # padding comes before prompts
    segments = (np.arange(26)[None] >= np.array([[3], [3]])).astype(np.int32)
    cache, start, actual = cache_lib.create(config, 2, 64), 0, []
    for size in sizes:
        part = slice(start, start + size)
        options = {"cache": cache, "segments": segments[:, part]}
        new, cache = read(Decoder(config), params, rows[:, part], memory, options)
        actual.append(np.asarray(new))
        start += size
    assert_close(np.concatenate(actual, axis=1)[:, 3:], logits(tokens, neighbours))


@functools.cache
def language_model():
    return lcjax.LanguageModel.load(ModelSection(preset="tiny", memory=SECTION))


def nested(neighbours):
    """Neighbours [U, k, r] as the context of a row."""
    return [[passage.tolist() for passage in group] for group in neighbours]


@pytest.mark.slow
def test_a_language_model_reads_the_neighbours_of_each_chunk():
    lm, tokens, neighbours = language_model(), text(0, 2, 23), text(1, 2, 4, 2, 7)
    context = [nested(neighbours[0]), [nested(neighbours[1])[0], [], nested(neighbours[1])[2]]]
    mask = np.ones(neighbours.shape, bool)
    mask[1, 1] = mask[1, 3] = False
    model = Decoder(lm.config.replace(scan_layers=False))
    memory = encode(model, lm.params, neighbours, mask)
    log_p = jax.nn.log_softmax(read(model, lm.params, tokens, memory, {})[0][:, :-1])
    wanted = -np.take_along_axis(np.asarray(log_p), tokens[:, 1:, None], -1)[..., 0]
    found = lm.nll(tokens, context=context)
    np.testing.assert_allclose(found[:, 1:], wanted, atol=5e-5)
    parts = lm.encode_contexts([row[:1] for row in context])
    parts = lm.encode_contexts([row[1:] for row in context], after=parts)
    np.testing.assert_allclose(lm.nll(tokens, context=parts), found, atol=1e-6)
    projected = lm.encode_contexts(context, projected=True)
    np.testing.assert_allclose(lm.nll(tokens, context=projected), found, atol=5e-5)


@pytest.mark.slow
def test_generated_tokens_are_the_most_probable_ones_beside_the_neighbours():
    lm, prompts = language_model(), [text(0, 6).tolist(), text(1, 13).tolist()]
    context = [nested(text(2, 4, 2, 7)), nested(text(3, 4, 1, 5))]
    sampling = lcjax.Sampling(max_new_tokens=8)
    written = [list(prompt) for prompt in prompts]
    for piece in lm.stream(prompts, sampling, context=context):
        written[piece.row] += piece.ids
    for row, prompt, own in zip(written, prompts, context):
        predicted = lm.logits(np.array([row]), context=[own])[0]
        predicted[:, list(lm.tokenizer.eos_ids)] = -np.inf
        assert len(row) > len(prompt)
        assert predicted[len(prompt) - 1 : -1].argmax(-1).tolist() == row[len(prompt) :]


def test_a_saved_model_is_the_same_model(tmp_path):
    lm, tokens = language_model(), text(0, 1, 23)
    context = [nested(text(1, 4, 2, 7))]
    other = lcjax.LanguageModel.load(str(lm.save(tmp_path / "model")))
    assert other.config.memory == lm.config.memory
    np.testing.assert_allclose(
        other.nll(tokens, context=context), lm.nll(tokens, context=context), atol=1e-6
    )


# Training


@pytest.mark.slow
def test_gradients_reach_the_memory_alone():
    model, params = tiny_model(SECTION)
    rows = batch(2, chunk=7)
    rows["chunks"] = text(4, 2, 6, 7)
    rows["chunk_mask"] = np.ones((2, 6, 7), bool)
    _, grads = gradients(model.config, params, ["memory"], rows)
    flat = flatten(grads)
    assert set(flat) == {
        path for path in flatten(params) if "/memory/" in path or path.startswith("encoder/")
    }
    assert all(np.abs(x).max() > 0 for x in flat.values())


@pytest.mark.slow
def test_packed_documents_are_trained_as_separate_ones():
    model, params = tiny_model(SECTION)
    row = batch(1, chunk=7) | {
        "segments": np.repeat([1, 2], [10, 6])[None].astype(np.int32),
        "positions": np.concatenate([np.arange(10), np.arange(6)])[None].astype(np.int32),
        "chunks": text(4, 1, 6, 7),  # of 2 chunks of the first document and 1 of the second
        "chunk_mask": np.ones((1, 6, 7), bool),
    }
    shifts = {"tokens": -10, "targets": -10, "chunks": -4}
    second = row | {name: np.roll(row[name], shift, axis=1) for name, shift in shifts.items()}
    separate = {name: np.concatenate([row[name], second[name]]) for name in row}
    is_text = np.arange(16) < np.array([[10], [6]])
    separate["segments"] = is_text.astype(np.int32)
    separate["positions"] = np.where(is_text, np.arange(16), 0).astype(np.int32)
    separate["weights"] = is_text.astype(np.float32)
    (loss, grads), (wanted, others) = (
        gradients(model.config, params, ["memory"], rows) for rows in (row, separate)
    )
    assert abs(loss - wanted) < 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, others)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), (2, 1, 1, 4)])
def test_a_mesh_trains_the_same(sizes):
    rows = batch(4, chunk=7)
    rows["chunks"] = text(4, 4, 6, 7)
    rows["chunk_mask"] = np.ones((4, 6, 7), bool)
    assert_trained_alike_on(sizes, SECTION, ["memory"], rows)


@pytest.mark.slow
def test_a_few_steps_learn_to_use_neighbours():
    """The neighbours of a chunk repeat the one token that the next chunk consists of."""
    section = dataclasses.replace(SECTION, output_share=0.0)
    model, params = tiny_model(section)
    config, chunks = model.config, 4

    def rows(seed):
        answers = 10 + text(seed, 8, chunks) % 6
        tokens = np.repeat(answers, CHUNK, axis=1)
        targets, weights = np.roll(tokens, -1, axis=1), np.zeros(tokens.shape, np.float32)
        weights[:, CHUNK - 1 : -1 : CHUNK] = 1  # the first token of each chunk but the first
        after = np.roll(answers, -1, axis=1)
        return batch(8, length=tokens.shape[1]) | {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "chunks": np.repeat(np.repeat(after, 2, axis=1)[..., None], 7, axis=2),
            "chunk_mask": np.ones((8, 2 * chunks, 7), bool),
        }

    optimizer, state, losses = optax.adam(1e-2), None, []
    for step in range(30):
        loss, grads = gradients(config, params, ["memory"], rows(step))
        state = optimizer.init(grads) if state is None else state
        updates, state = optimizer.update(grads, state)
        flat = flatten(params)
        flat |= {path: flat[path] + x for path, x in flatten(updates).items()}
        params = nest(flat)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1, losses
    held_out = rows(99)
    wrong = held_out | {"chunks": held_out["chunks"][::-1]}
    alone = held_out | {"chunk_mask": np.zeros_like(held_out["chunk_mask"])}
    own, other, without = (
        float(gradients(config, params, ["memory"], x)[0]) for x in (held_out, wrong, alone)
    )
    assert own < without - 0.5 and own < other - 0.5, (own, other, without)


@pytest.mark.slow
def test_train_trains_the_memory_and_freezes_the_decoder(tmp_path):
    (tmp_path / "book.txt").write_text("The harbour was quiet, and the gulls slept. " * 200)
    words = f"""
        --model.preset=tiny --model.memory.type=retro --model.memory.chunk=8
        --model.memory.neighbour_tokens=8 --model.memory.encoder_layers=1
        --data.path={tmp_path / "book.txt"} --data.length=80 --data.pack=windows
        --data.chunks.count=6 --data.chunks.length=8
        --train.steps=3 --train.warmup_steps=1 --train.batch_size=8 --train.trainable=[memory]
        --run.folder={tmp_path / "run"}
    """
    run(configs.parse(TrainConfig, words.split()))
    trained = lcjax.LanguageModel.load(str(tmp_path / "run" / "model"))
    section = RetroSection(encoder_layers=1, chunk=8, neighbour_tokens=8)
    first = lcjax.LanguageModel.load(ModelSection(preset="tiny", memory=section))
    before, after = flatten(first.params), flatten(trained.params)
    assert trained.config.memory.layers == (2,)
    for path, wanted in before.items():
        is_memory = "/memory/" in path or path.startswith("encoder/")
        assert np.array_equal(after[path], wanted) != is_memory, path


# Bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": (0,)}, r"model.memory.layers=\[0\] must be layers of the decoder"),
        ({"layers": (3,)}, r"some of 1 ... 2; null takes \[2\]"),
        ({"encoder_layers": 3}, "encoder_layers=3 must lie in 1 ... 2"),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    with pytest.raises(InputError, match=words):
        build(ModelSection(preset="tiny", memory=dataclasses.replace(SECTION, **changes)))


def test_chunks_that_are_no_multiple_of_the_neighbours_raise_input_error():
    memory = tiny_model(SECTION)[0].config.memory
    with pytest.raises(InputError, match="data.chunks.count=3 must be a multiple"):
        memory.check_training(TrainingRows(3))


@pytest.mark.parametrize(
    "change", [{"layers": None}, {"colour": 1}, {"chunk": "many"}, {"encoder": 3}]
)
def test_a_changed_config_raises_input_error(change, tmp_path):
    folder = language_model().save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["lcjax_retro"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        lcjax.LanguageModel.load(str(folder))


def test_a_row_without_lists_raises_input_error():
    with pytest.raises(InputError, match="context: a row='a document' must be a list"):
        language_model().encode_contexts(["a document"])
