"""SharedLLM equals the repaired released code, and its memory has no side effects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import memory_support
import numpy as np
import pytest
import sharedllm_golden as golden
import tree_oracle as oracle
from memory_support import assert_close, read, tiny_model
from tiny_lm import text

from lcjax.checkpoints.hf_names import entries
from lcjax.memory import QueryAware, Random, shared_llm
from lcjax.models import Decoder, head
from lcjax.models.loss import cross_entropy

pytestmark = pytest.mark.usefixtures("exact_products")
SLOW = pytest.mark.slow


@functools.partial(jax.jit, static_argnums=0)
def encode(model, params, chunks, mask, options):
    return model.apply({"params": params}, chunks, mask, method="encode", **options)


@functools.partial(jax.jit, static_argnums=0)
def asked(model, params, tokens, at):
    return model.apply({"params": params}, tokens, at, method="embed_query")


def of_golden(name, step=1):
    """What the model of a case reads of its chunks with the numbers 0, step, 2 step, ..."""
    model, params = golden.model(name)
    text, chunks = golden.tokens(name)
    options = {"numbers": step * np.arange(chunks.shape[1], dtype=np.int32)[None]}
    if model.config.memory.query_dependent:
        at = golden.arrays(name)["query_length"].astype(np.int32) - 1
        options["query"] = asked(model, params, text, at)
    return encode(model, params, chunks, np.ones(chunks.shape, bool), options)


@pytest.mark.parametrize("name", [pytest.param(golden.CASES[0], marks=SLOW), golden.CASES[1]])
def test_keys_and_values_of_trees_equal_the_released_code(name):
    chunks = golden.tokens(name)[1]
    actual = of_golden(name, step=0)
    assert actual.mask.all() and (actual.num_chunks == chunks.shape[1]).all()
    for layer, pair in enumerate(actual.layers):
        for kind, x in zip("kv", pair, strict=True):
            wanted = golden.arrays(name)[f"tree_{kind}_layer{layer}"]  # [C, K, M, H]
            assert_close(x[0], wanted.swapaxes(0, 1).reshape(x.shape[1:]))


@pytest.mark.parametrize("name", golden.CASES)
def test_logits_equal_the_released_code(name):
    model, params = golden.model(name)
    text = golden.tokens(name)[0]
    assert_close(read(model, params, text, of_golden(name), {})[0], golden.arrays(name)["logits"])


def test_positions_as_released_number_chunks_by_their_collected_tokens():
    """Its keys of chunk i are rotated to i // M, M tokens collected of a chunk, queries to n + 1.

    The stored keys are those before chunks are rotated.
    """
    name = golden.CASES[1]
    (model, params), (tokens, chunks) = golden.model(name), golden.tokens(name)
    memory = dataclasses.replace(model.config.memory, positions="released")
    released = Decoder(model.config.replace(memory=memory))
    at = golden.arrays(name)["query_length"].astype(np.int32) - 1
    options = {"query": asked(model, params, tokens, at)}
    mask, size = np.ones(chunks.shape, bool), memory.num_slots(memory.chunk)
    numbers = np.array([[0, size - 1, size, 3 * size - 1]], np.int32)
    found = encode(released, params, chunks, mask, options | {"numbers": numbers})
    places = np.repeat([0, 0, 1, 2], size)
    for layer, (keys, _) in enumerate(found.layers):
        stored = golden.arrays(name)[f"tree_k_layer{layer}"]  # [C, K, M, H]
        stored = stored.transpose(0, 2, 1, 3).reshape(len(places), *keys.shape[1::2])
        wanted = oracle.turned(stored, places, model.config.rope.theta)
        assert_close(keys[0], wanted.swapaxes(0, 1))
    found = encode(released, params, chunks, mask, options)
    paper = encode(model, params, chunks, mask, options | {"numbers": np.zeros((1, 4), np.int32)})
    paper = dataclasses.replace(paper, num_chunks=paper.num_chunks + 1)
    wanted = read(model, params, tokens, paper, {})[0]
    assert_close(read(released, params, tokens, found, {})[0], wanted)
    assert np.abs(wanted - golden.arrays(name)["logits"]).max() > 1e-3


@pytest.mark.slow
def test_loss_equals_the_released_code():
    model, params = golden.model("paper_lm_n3")
    text = golden.tokens("paper_lm_n3")[0]

    @jax.jit
    def loss(params, memory):
        hidden = model.apply({"params": params}, text, memory=memory).hidden
        weights = jnp.ones(text[:, 1:].shape)
        return cross_entropy(hidden[:, :-1], head(params, model.config), text[:, 1:], weights)

    total, count = loss(params, of_golden("paper_lm_n3"))
    assert_close(total / count, golden.arrays("paper_lm_n3")["loss"])


SECTION = dataclasses.replace(memory_support.SECTION, noise=None)


def small(**changes):
    return tiny_model(dataclasses.replace(SECTION, **changes))


def run(model, params, tokens, chunks=None, mask=None, **options):
    """Logits [B, T, V] with the context of `chunks`, or without any."""
    memory = None
    if chunks is not None:
        mask = np.ones(chunks.shape, bool) if mask is None else mask
        if model.config.memory.query_dependent:
            at = np.full(len(tokens), tokens.shape[1] - 1, np.int32)
            options["query"] = asked(model, params, tokens, at)
        memory = encode(model, params, chunks, mask, options)
    return np.asarray(read(model, params, tokens, memory, {})[0])


def test_zeros_in_the_output_projection_change_nothing():
    model, params = small(output_share=0.0)
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    np.testing.assert_array_equal(run(model, params, tokens, chunks), run(model, params, tokens))


@pytest.mark.parametrize(
    "positions",
    ["paper", pytest.param("released", marks=SLOW), pytest.param("chunk_index", marks=SLOW)],
)
def test_the_same_number_added_to_all_chunks_changes_nothing(positions):
    model, params = small(positions=positions)
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    memory = encode(model, params, chunks, np.ones(chunks.shape, bool), {})
    wanted = read(model, params, tokens, memory, {})[0]
    step = 7 * (model.config.memory.tree.max_selected(16) if positions == "released" else 1)
    numbers = np.array([[0, 1, 2]] * 2, np.int32) + step
    moved = encode(model, params, chunks, np.ones(chunks.shape, bool), {"numbers": numbers})
    moved = dataclasses.replace(moved, num_chunks=memory.num_chunks + 7)
    assert_close(read(model, params, tokens, moved, {})[0], wanted)
    moved = dataclasses.replace(moved, num_chunks=memory.num_chunks + 9)
    assert np.abs(read(model, params, tokens, moved, {})[0] - wanted).max() > 1e-4


def test_without_positions_of_chunks_all_are_the_first_and_queries_stand_at_0():
    model, params = small()
    without = Decoder(
        model.config.replace(memory=dataclasses.replace(model.config.memory, positions="none"))
    )
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    numbers = {"numbers": np.zeros((2, 3), np.int32)}
    memory = encode(model, params, chunks, np.ones(chunks.shape, bool), numbers)
    memory = dataclasses.replace(memory, num_chunks=memory.num_chunks * 0)
    expected = read(model, params, tokens, memory, {})[0]
    assert_close(run(without, params, tokens, chunks), expected)
    assert np.abs(run(model, params, tokens, chunks) - expected).max() > 1e-4


@pytest.mark.slow
def test_chunks_have_an_order_in_the_paper_and_none_in_the_released_code_or_without_positions():
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    ordered_by = {"paper": True, "chunk_index": True, "released": False, "none": False}
    for positions, ordered in ordered_by.items():
        model, params = small(positions=positions)
        found, other = (run(model, params, tokens, c) for c in (chunks, chunks[:, [2, 0, 1]]))
        assert (np.abs(found - other).max() > 1e-4) == ordered


@pytest.mark.parametrize("policy", ["right", pytest.param("query", marks=SLOW)])
def test_padding_wherever_it_is_changes_nothing(policy):
    model, params = small(**({} if policy == "right" else {"policy": QueryAware()}))
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    mask = np.ones(chunks.shape, bool)
    mask[:, 0, :5] = False  # as data are cut
    mask[1, 2, 11:] = False  # as contexts are encoded
    found = run(model, params, tokens, chunks, mask)
    other = np.where(mask, chunks, 10**6).astype(np.int32)
    np.testing.assert_array_equal(run(model, params, tokens, other, mask), found)
    wide = np.zeros((2, 5, 16), np.int32)
    there = np.zeros(wide.shape, bool)
    for row in range(2):  # two chunks of padding, and text at the other end of the others
        for place, chunk in enumerate((0, 2, 4)):
            own = chunks[row, place][mask[row, place]]
            part = slice(None, len(own)) if place == 0 else slice(16 - len(own), None)
            wide[row, chunk, part], there[row, chunk, part] = own, True
    assert_close(run(model, params, tokens, wide, there), found)


def test_no_context_is_the_model_bit_for_bit_and_rows_are_independent():
    model, params = small()
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    plain = Decoder(model.config.replace(memory=None, scan_layers=False))
    bare = {name: branch for name, branch in params.items() if name != "encoder"}
    bare = {
        name: {key: part for key, part in branch.items() if key != "memory"}
        for name, branch in bare.items()
    }
    wanted = run(plain, bare, tokens)
    np.testing.assert_array_equal(run(model, params, tokens), wanted)
    mask = np.ones(chunks.shape, bool)
    mask[1] = False
    actual = run(model, params, tokens, chunks, mask)
    np.testing.assert_array_equal(actual[1], wanted[1])
    assert_close(actual[0], run(model, params, tokens[:1], chunks[:1])[0])
    others = [np.stack([x[0], x[1][::-1]]) for x in (tokens, chunks)]
    np.testing.assert_array_equal(actual[0], run(model, params, *others)[0])
    assert np.abs(actual[0] - wanted[0]).max() > 1e-3, "it does listen"


def test_packing_the_context_changes_nothing():
    model, params = small()
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 16)
    mask = np.ones(chunks.shape, bool)
    mask[:, 0], mask[1, 1, 3:] = False, False
    encoded = encode(model, params, chunks, mask, {})
    packed = jax.jit(type(encoded).packed)(encoded)
    assert not np.array_equal(packed.mask, encoded.mask)
    assert_close(*(read(model, params, tokens, memory, {})[0] for memory in (packed, encoded)))


@pytest.mark.parametrize(
    ("positions", "noise"),
    [pytest.param("paper", None, marks=SLOW), ("paper", 2.0), ("chunk_index", 2.0)],
)
def test_what_is_kept_equals_nodes_that_are_read_one_after_the_other_in_float64(positions, noise):
    model, params = small(layers=2, noise=noise, policy=Random(), positions=positions)
    memory, config = model.config.memory, model.config.memory.states
    chunks, mask, key = text(1, 2, 3, 16), np.ones((2, 3, 16), bool), jax.random.key(3)
    mask[0, 0, :3], mask[1, 2, 9:] = False, False
    path = np.random.default_rng(2).random((2, 3, 2)) < 0.5
    found = encode(model, params, chunks, mask, {"path": path, "key": key})
    drawn = jax.jit(shared_llm._split_noise, static_argnums=(0, 2, 3))(memory.tree, key, 2, 3)
    moved = 0
    for row in range(2):
        wanted = []
        for number in range(3):
            ids = chunks[row, number][mask[row, number]].tolist()
            own = None if drawn is None else np.asarray(drawn)[row * 3 + number]
            nodes = oracle.by_hand(list(enumerate(ids)), memory.tree, path[row, number], own)
            even = oracle.by_hand(list(enumerate(ids)), memory.tree, path[row, number])
            moved += nodes != even
            wanted.append(oracle.tree_keys(params["encoder"], config, nodes, number, positions))
        for layer, pair in enumerate(found.layers):
            for x, parts in zip(pair, zip(*(w[layer] for w in wanted), strict=True), strict=True):
                here = np.asarray(x)[row].swapaxes(0, 1)[np.asarray(found.mask)[row]]
                assert_close(here, np.concatenate(parts))
    assert bool(moved) == (noise is not None), "splits are drawn"


def test_paths_equal_cosines_in_float64():
    model, params = small(layers=2, policy=QueryAware())
    memory, chunks, tokens = model.config.memory, text(1, 2, 6, 16), text(0, 2, 9)
    mask = np.ones(chunks.shape, bool)
    mask[:, 0, :5] = False

    @jax.jit
    def choose(params):
        at = np.array([8, 4], np.int32)
        query = model.apply({"params": params}, tokens, at, method="embed_query")
        method = functools.partial(_choose, chunks=chunks, mask=mask, query=query)
        return query, model.apply({"params": params}, method=method)

    query, path = choose(params)
    upper = {name: params[name] for name in ("embed", "final_norm")}
    upper["layers"] = jax.tree.map(lambda x: np.asarray(x)[None], params["layers_0"])
    first = memory.states.replace(num_layers=1)
    for row, at in enumerate((8, 4)):
        state = oracle.lower_model(upper, first, tokens[row, : at + 1])[1][-1]
        assert_close(query[row], state)
        for number in range(6):
            ids = chunks[row, number][mask[row, number]]
            wanted = oracle.searched(params["encoder"], memory.states, memory.tree, ids, state)
            assert path[row, number].tolist() == wanted
    assert path.any() and not path.all()


def _choose(model, *, chunks, mask, query):
    return model.encoder.choose(chunks, mask, query=query)


@pytest.mark.parametrize(
    ("placement", "reading"),
    [("bottom", "110000"), ("top", "000011"), ("interleaved", "100100")],
)
def test_layers_that_read_lie_where_they_are_said_to(placement, reading):
    memory = dataclasses.replace(small(layers=2)[0].config.memory, placement=placement)
    assert "".join(str(int(reads)) for reads in memory.reader_layers(6)) == reading


def test_a_model_whose_queries_have_a_bias_reads_with_it():
    config = small()[0].config
    config = config.replace(qkv_bias=True, memory=None)
    section = dataclasses.replace(SECTION, output_share=0.0)
    memory = section.memory(config)
    model = Decoder(config.replace(memory=memory, scan_layers=False))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    reader = shapes["layers_0"]["memory"]
    assert reader["query"]["bias"].shape == (4, 16) and set(reader) == {"norm", "query", "out"}
    names = {name for entry in entries(model.config) for name in entry.names}
    assert "model.layers.0.cross_attn.q_proj.bias" in names
