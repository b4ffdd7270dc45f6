"""A cache whose slots are split over the mesh axis `context` gives the numbers of one device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

from lcjax import cost
from lcjax.attention import Causal, DualChunk, LMInfinite, Sliding
from lcjax.attention.cache import FullCache, Tokens, by_part, write_tokens
from lcjax.cost import hlo
from lcjax.errors import InputError
from lcjax.generation import session as session_lib
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session
from lcjax.generation.shared_prefix import PrefixReader
from lcjax.models import Decoder, LayerKind, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, attention_layout, make_mesh

MESH = Mesh(fsdp=1, tensor=2, context=4)
SLOTS = 64


@pytest.fixture(scope="module")
def alone():
    return sharp_lm()


@pytest.fixture(scope="module")
def spread():
    return sharp_lm(mesh=MESH)


def logits_of(lm, sizes, prompts=(ids(1, 29), ids(2, 20)), new=3):
    """Logits after prompts, which are padded on the left and read by chunks, and after each of
    some new tokens; and the cache."""
    width = sum(sizes)
    padding = np.array([width - len(prompt) for prompt in prompts])
    tokens = np.array([[0] * n + prompt for n, prompt in zip(padding, prompts)], np.int32)
    segments = (np.arange(width) >= padding[:, None]).astype(np.int32)
    positions = np.maximum(np.arange(width) - padding[:, None], 0)
    cache = cache_lib.create(lm.model.config, len(prompts), SLOTS, chunk=max(sizes), mesh=lm.mesh)
    session = Session(lm.model, lm.params, cache, lm.rotation(SLOTS))
    logits = [session.read(tokens, segments, positions, sizes=sizes)]
    for step in range(new):
        position = (width + step - padding)[:, None]
        logits.append(session.read(np.full(len(prompts), 7 + step, np.int32), None, position))
    return np.array(logits), session.cache


METHODS = {
    "causal": {},
    "moved keys": {"pattern": DualChunk(chunk=16, local=4)},
    "window": {"pattern": Sliding(window=9)},
    "mixed": {"layers": (LayerKind(1, Sliding(window=4)), LayerKind(1, Causal()))},
    "chosen keys": {"pattern": LMInfinite(window=8, sinks=2)},
    "biases": {"position": "alibi"},
}


@pytest.mark.slow_except("causal")
@pytest.mark.parametrize("method", METHODS)
def test_prompts_by_chunks_and_new_tokens_have_the_logits_of_one_device(alone, spread, method):
    changes, sizes = METHODS[method], (14, 16)  # devices divide the second chunk only
    one, many = (
        LanguageModel(Decoder(lm.config.replace(**changes), lm.mesh), lm.params, lm.tokenizer)
        for lm in (alone, spread)
    )
    expected, _ = logits_of(one, sizes)
    actual, cache = logits_of(many, sizes)
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    for arrays, number in zip(cache.layers, cache.kind_by_layer, strict=True):
        keys, parts = arrays["keys"], cache.kinds[number].parts
        assert parts == (4 if type(cache.kinds[number]) is FullCache else 1)
        assert keys.addressable_shards[0].data.shape[2] == keys.shape[2] // parts


def traffic(lowered):
    """Bytes of the results of the collectives of a program, by kind."""
    received = {}
    for instruction, _ in hlo.Module(lowered.compile().as_text()).runs():
        kind = instruction.opcode.removesuffix("-start")
        if kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            arrays = re.findall(r"\[([\d,]*)\]", instruction.shape)
            size = sum(math.prod(map(int, filter(None, x.split(",")))) for x in arrays)
            received.setdefault(kind, []).append(4 * size)
    return received


@pytest.mark.parametrize("tokens", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_no_program_moves_the_cache_and_a_step_merges_a_layer_by_one_exchange(tokens):
    config, mesh = preset("tiny"), make_mesh(Mesh(fsdp=1, context=8))
    moved = traffic(session_lib.lower_read(config, mesh, 1, 4096, tokens))
    one_layer = 4 * 4096 * config.num_kv_heads * config.head_dim
    assert max(map(max, moved.values())) < one_layer / 8
    if tokens == 1:
        partials = 8 * 4 * config.num_heads * (config.head_dim + 1)
        assert moved["all-gather"] == [partials] * config.num_layers


@functools.cache
def _writer(parts):
    mesh = make_mesh(Mesh(fsdp=1, context=parts), jax.devices()[:parts])
    kind, layout = FullCache(parts=parts), attention_layout(mesh, "split_keys")
    return jax.jit(lambda cached, new, view: write_tokens(cached, new, view, layout)), kind


@pytest.mark.parametrize("length", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_tokens_are_written_to_the_parts_that_hold_their_slots(length):
    write, kind = _writer(4)
    new = np.arange(1, length + 1, dtype=np.float32).reshape(1, length, 1, 1)
    tokens = Tokens(*[jnp.ones((1, length), jnp.int32)] * 3)
    for start in range(16 - length + 1):
        view = kind.reserve(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kind.shared(1, 16)), tokens, start
        )
        expected = np.full(16, -1.0)
        expected[start : start + length] = new.ravel()
        actual = write(jnp.full((1, 1, 16, 1), -1.0), new, view)
        np.testing.assert_array_equal(actual.ravel(), by_part(expected, 4))


@pytest.mark.slow
def test_prompts_that_share_a_prefix_continue_its_split_slots(alone, spread):
    stem = ids(3, 150)
    prompts, six = [stem + ids(n, 5 + 3 * n) for n in range(3)], Sampling(max_new_tokens=6)
    reader = PrefixReader(spread, least=64)
    assert reader.generate(prompts, six) == alone.generate(prompts, six)
    assert reader.saved_tokens > 150


@pytest.mark.slow
def test_a_conversation_goes_on_and_texts_have_the_scores_of_one_device(alone, spread, tmp_path):
    turns, answers = [ids(4, 40), ids(5, 21)], []
    for lm in (alone, spread):
        talk = Conversation(lm, length=128)
        for turn in turns:
            talk.read(turn)
            answers.append(talk.write(Sampling(max_new_tokens=4)).ids)
            talk.save(tmp_path / "talk")
            talk = Conversation.open(lm, tmp_path / "talk")
    assert answers[:2] == answers[2:]
    with pytest.raises(InputError, match="written with another mesh"):
        Conversation.open(alone, tmp_path / "talk")
    rest = [[ids(6, 9), ids(7, 4)]] * 2
    for one, other in zip(alone.continuations(turns, rest), spread.continuations(turns, rest)):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(b.nll, a.nll, atol=1e-4)


def test_the_estimate_divides_slots_of_layers_that_share_them():
    config = preset("tiny").replace(layers=METHODS["mixed"]["layers"])
    one, many = (
        cost.generation_memory(config, 4096, 1, Mesh(fsdp=1, context=n), chunk=64).cache
        for n in (1, 8)
    )
    full = 2 * 4096 * config.num_kv_heads * config.head_dim * config.compute_dtype().itemsize
    assert one - many == full - full // 8
