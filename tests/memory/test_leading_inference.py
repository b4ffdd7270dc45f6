"""A language model behind a memory: contexts of any length, prompts, conversations."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from memory_support import assert_close
from tiny_lm import ids, sharper

from lcjax.build import ModelSection
from lcjax.conversation import Conversation
from lcjax.errors import InputError
from lcjax.evaluation.split import ContextSplit
from lcjax.generate import Sampling
from lcjax.lm import LanguageModel
from lcjax.memory import AutoCompressorSection, BeaconSection
from lcjax.models import Decoder
from lcjax.rope import Linear
from lcjax.sharding import Mesh

pytestmark = pytest.mark.usefixtures("compiled_quickly", "exact_products")

SECTIONS = {
    "beacon": BeaconSection(chunk=16, ratio=4, ratios=(2, 4)),
    "auto_compressor": AutoCompressorSection(chunk=16, summary=3),
}
GREEDY = Sampling(max_new_tokens=4, min_new_tokens=4)
TOKENS = np.array([ids(1, 12), ids(2, 12), ids(3, 12)])
CONTEXT = [[ids(4, 39), ids(5, 6)], [], [ids(6, 16)]]
CHUNKS = [  # of 16 tokens, the odd one first
    [ids(4, 39)[:7], ids(4, 39)[7:23], ids(4, 39)[23:], ids(5, 6)],
    [],
    [ids(6, 16)],
]
OTHER = Linear(factor=2.0)  # than the one that the model was made with


@functools.cache
def loaded(name):
    model = LanguageModel.load(ModelSection(preset="tiny", memory=SECTIONS[name]))
    return sharper(model).with_method(rope=OTHER)


@pytest.fixture(params=["beacon", pytest.param("auto_compressor", marks=pytest.mark.slow)])
def lm(request):
    return loaded(request.param)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, chunks, mask):
    """float32 [B, T, V], all windows read in one program; chunks int32 [B, C, P]."""
    memory = model.apply({"params": params}, chunks, mask, method="encode")
    hidden, _ = model.apply({"params": params}, tokens, memory=memory)
    return model.apply({"params": params}, hidden, method="logits")


def by_hand(lm, tokens, chunks=CHUNKS):
    count = max(map(len, chunks))
    filled, mask = (
        np.zeros((len(chunks), count, 16), np.int32),
        np.zeros((len(chunks), count, 16), bool),
    )
    for row, own in enumerate(chunks):
        for i, chunk in enumerate(own):
            filled[row, i, : len(chunk)], mask[row, i, : len(chunk)] = chunk, True
    model = Decoder(lm.config.replace(remat="none", scan_layers=False))
    return np.array(logits_of(model, lm.params, np.asarray(tokens), filled, mask))


def picked(lm, prompts, **options):
    rows = [[] for _ in prompts]
    for piece in lm.stream(prompts, GREEDY, **options):
        rows[piece.row] += piece.ids
    return rows


def test_contexts_of_any_length_are_read_window_by_window_under_the_ropes_own_rotation(lm):
    found, plain = lm.nll(TOKENS, context=CONTEXT), lm.nll(TOKENS)
    log_p = jax.nn.log_softmax(by_hand(lm, TOKENS)[:, :-1])
    wanted = -np.take_along_axis(np.asarray(log_p), TOKENS[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(found[:, 1:], wanted, atol=5e-4)
    np.testing.assert_array_equal(found[1], plain[1])  # the row without a context
    assert np.abs(found - plain).max(1)[[0, 2]].min() > 0.05, "it does listen"


def test_text_is_written_with_a_cache_as_without_for_unequal_prompts(lm):
    prompts = [ids(1, 30), ids(2, 5), ids(3, 18)]
    found = picked(lm, prompts, context=CONTEXT, prefill_chunk=16)
    tokens = np.zeros((3, 34), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt) + 4] = prompt + found[row]
    logits = by_hand(lm, tokens)
    logits[..., list(lm.tokenizer.eos_ids)] = -np.inf
    for row, prompt in enumerate(prompts):
        best = logits[row, len(prompt) - 1 : len(prompt) + 3].argmax(-1)
        assert found[row] == best.tolist()


@pytest.mark.slow
def test_windows_may_come_later_and_a_few_rows_at_a_time(lm, encoded):
    whole = lm.encode_contexts(CONTEXT)
    first = lm.encode_contexts([CONTEXT[0][:1], [], []])
    calls = len(encoded)
    later = lm.encode_contexts([CONTEXT[0][1:], [], CONTEXT[2]], after=first, batch_tokens=16)
    assert later.chunks == whole.chunks and later.tokens == whole.tokens
    assert [mask.shape[0] for mask, *_ in encoded[calls:]] == [1, 1]
    room = lm.config.memory.room
    assert whole.encoded.mask.sum(1).tolist() == [
        sum(room(len(chunk)) for chunk in row) for row in CHUNKS
    ]
    for context in (later, whole.repeated(3)):
        assert_close(lm.nll(TOKENS, context=context), lm.nll(TOKENS, context=whole), 5e-4)


@pytest.mark.slow
def test_on_a_mesh_it_reads_the_same(lm):
    name = "beacon" if hasattr(lm.config.memory, "ratio") else "auto_compressor"
    section = ModelSection(preset="tiny", memory=SECTIONS[name])
    other = sharper(LanguageModel.load(section, mesh=Mesh(data=2, fsdp=2, tensor=2)))
    found = other.with_method(rope=OTHER).nll(TOKENS, context=CONTEXT)
    np.testing.assert_allclose(found, lm.nll(TOKENS, context=CONTEXT), atol=1e-3)


@pytest.mark.slow
def test_a_conversation_reads_its_text_again_behind_a_context_that_has_grown(lm):
    talk = Conversation(lm, context=[ids(4, 20)])
    talk.read(ids(1, 9))
    talk.write(GREEDY)
    talk.add_context([ids(5, 16)])
    talk.read(ids(2, 3))
    so_far = talk.tokens
    talk.write(GREEDY)
    wanted = picked(lm, [so_far], context=[[ids(4, 20), ids(5, 16)]])[0]
    assert talk.tokens[len(so_far) :][: len(wanted)] == wanted


def test_a_ratio_is_chosen_when_a_text_is_read():
    lm = loaded("beacon")
    subject = ContextSplit(decoder=8, ratio=8).of(lm, 40)
    assert subject.config.memory == dataclasses.replace(lm.config.memory, ratio=8)
    assert ContextSplit().tokens(lm, 100) == 16, "a window like those before it"
    with pytest.raises(InputError, match="chunk=16 must be a multiple of 3.*nearest: 15, 18"):
        ContextSplit(ratio=3).of(lm, 40)
    with pytest.raises(InputError, match="context.ratio=8 is a setting of Beacon"):
        ContextSplit(ratio=8).of(loaded("auto_compressor"), 40)
    with pytest.raises(InputError, match="chunk=10 must be a multiple of 4.*nearest: 8, 12"):
        lm.encode_contexts([ids(4, 39)], chunk=10)
