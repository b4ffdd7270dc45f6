"""A language model with contexts: encoded once, read by scores, prompts and conversations."""

import dataclasses
import functools

import cepe_golden as golden
import jax
import numpy as np
import pytest
from memory_support import assert_most_probable, assert_reads
from tiny_lm import generated, ids, sharp_lm

from lcjax.attention import Landmark
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.memory import CepeSection
from lcjax.models import Decoder
from lcjax.parallel.sharding import Mesh

SECTION = CepeSection(encoder="tiny-encoder", output_share=1.0)
GREEDY = Sampling(max_new_tokens=6, min_new_tokens=6)


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(memory=SECTION)


TOKENS = np.array([ids(1, 20), ids(2, 20), ids(3, 20)])
CONTEXT = [[ids(4, 150), ids(5, 9)], [], [ids(6, 70)]]
CHUNKS = [  # of 64 tokens, the odd one first
    [ids(4, 150)[:22], ids(4, 150)[22:86], ids(4, 150)[86:], ids(5, 9)],
    [],
    [ids(6, 70)[:6], ids(6, 70)[6:]],
]


@pytest.mark.slow
def test_contexts_of_any_number_and_length_are_read_as_the_model_reads_their_chunks(lm):
    assert_reads(lm, TOKENS, CONTEXT, CHUNKS)


@pytest.mark.parametrize("context", [[], [[], [], []], [[""], [[]], []]], ids=str)
def test_an_empty_context_is_the_plain_decoder_bit_for_bit(lm, context):
    np.testing.assert_array_equal(lm.nll(TOKENS, context=context), lm.nll(TOKENS))
    assert lm.encode_contexts(context).encoded is None


def test_a_text_is_read_as_its_tokens_without_bos(lm):
    text = "The harbour was quiet that morning." * 3
    whole = lm.encode_contexts([text, [text], lm.tokenizer.encode(text)])
    assert whole.tokens == (105,) * 3 and whole.chunks == (2, 2, 2)
    states = np.asarray(whole.encoded.states)
    np.testing.assert_allclose(states[1:], states[:1].repeat(2, 0), atol=1e-4)


def test_chunks_are_encoded_a_few_at_a_time_by_few_programs(lm, encoded):
    document = [ids(7, 64 * 11), *(ids(8 + i, 20 + i) for i in range(5))]
    few = lm.encode_contexts([document, []], batch_tokens=256)
    shapes = [mask.shape for mask, *_ in encoded]
    assert shapes == [(8, 32)] + [(4, 64)] * 3 and few.tokens[0] == 64 * 11 + 5 * 20 + 10
    whole = lm.encode_contexts([document, []])
    used = np.asarray(few.encoded.mask)
    assert used[0, : few.tokens[0]].all() and used.sum() == few.tokens[0], "without gaps"
    where = used[0]
    np.testing.assert_allclose(
        few.encoded.states[0, where], whole.encoded.states[0, where], atol=1e-5
    )


@pytest.mark.parametrize("projected", [False, True], ids=["states", "projected"])
def test_contexts_added_later_equal_contexts_encoded_at_once(lm, projected):
    first = lm.encode_contexts([[], ids(1, 64)], projected=projected)
    before = jax.tree.map(np.array, first.encoded)
    second = lm.encode_contexts([ids(2, 64), []], after=first)
    third = lm.encode_contexts([[], ids(3, 64)], after=second)
    assert (first.tokens, second.tokens, third.tokens) == ((0, 64), (64, 64), (64, 128))
    whole = lm.encode_contexts(
        [ids(2, 64), [ids(1, 64), ids(3, 64)]], projected=projected, batch_tokens=64
    )
    assert (whole.tokens, whole.chunks) == (third.tokens, third.chunks) == ((64, 128), (1, 2))
    jax.tree.map(np.testing.assert_array_equal, third.encoded, whole.encoded)
    jax.tree.map(np.testing.assert_array_equal, before, first.encoded)  # still of use


@pytest.mark.slow
def test_kept_keys_and_values_give_the_same_and_are_larger(lm):
    states, keys = lm.encode_contexts(CONTEXT), lm.encode_contexts(CONTEXT, projected=True)
    assert keys.nbytes > 2 * states.nbytes
    wanted = lm.nll(TOKENS, context=states)
    np.testing.assert_allclose(lm.nll(TOKENS, context=keys), wanted, atol=5e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_keys_and_values_are_not_rounded_on_accelerators(lm, dtype):
    config, encoded = lm.config.replace(dtype=dtype), lm.encode_contexts(CONTEXT[:1]).encoded

    def project(params, encoded):
        return config.memory.project_states(params, config, encoded).layers

    text = jax.jit(project).lower(lm.params, encoded).as_text()
    products = text.count("dot_general")
    assert products == 2 * sum(config.memory.reader_layers(config.num_layers))
    exact = text.count("precision = [HIGHEST, HIGHEST]")
    assert exact == (products if dtype == "float32" else 0)


def test_one_context_serves_many_texts(lm):
    found = lm.nll(TOKENS[[0, 0, 0]], context=lm.encode_contexts(CONTEXT[:1]))
    wanted = lm.nll(TOKENS, context=CONTEXT)[[0, 0, 0]]
    np.testing.assert_allclose(found, wanted, atol=5e-5)


class Endless(ByteTokenizer):
    eos_ids = ()


@pytest.mark.slow
def test_text_with_a_cache_equals_the_released_code():
    with jax.default_matmul_precision("highest"):
        model, params = golden.model("decode_cache")
        io = golden.arrays("decode_cache")
        lm = LanguageModel(model, params, Endless())
        prompts, text = io["input_ids"], io["generated"]
        chunks, mask = golden.context("decode_cache")
        context = [
            [c[m] for c, m in zip(*row, strict=True)] for row in zip(chunks, mask, strict=True)
        ]
        sampling = Sampling(max_new_tokens=text.shape[1] - prompts.shape[1])
        result = generated(lm, prompts.tolist(), sampling, context=context)
        assert result == text[:, prompts.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("projected", [False, True], ids=["states", "projected"])
def test_text_with_a_cache_equals_text_without_for_unequal_prompts_and_contexts(lm, projected):
    prompts = [ids(1, 50), ids(2, 5), ids(3, 33)]
    context = lm.encode_contexts(CONTEXT, projected=projected)
    result = generated(lm, prompts, GREEDY, context=context, prefill_chunk=32)
    assert_most_probable(lm, prompts, result, CHUNKS)


def test_a_chat_reads_documents_beside_its_turns(lm, monkeypatch):
    given = []

    def generate(self, prompts, sampling, *, context, **options):
        given.append(context)
        return [""]

    monkeypatch.setattr(LanguageModel, "generate", generate)
    encoded = lm.encode_contexts(CONTEXT[:1])
    rows = ["a text", CONTEXT[0]]
    for context in (None, *rows, encoded):
        lm.chat("What?", GREEDY, context=context)
    assert given[0] is None and given[3] is encoded
    for row, found in zip(rows, given[1:3], strict=True):
        wanted = lm.encode_contexts([row])
        jax.tree.map(np.testing.assert_array_equal, found.encoded, wanted.encoded)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 2, 1, 4)], ids=str)
def test_contexts_on_a_mesh_equal_those_of_one_device(lm, sizes):
    spread = sharp_lm(memory=SECTION, mesh=Mesh(*sizes))
    prompts = [ids(1, 70), ids(2, 5), ids(3, 33)]
    for projected in (False, True):
        context = spread.encode_contexts(CONTEXT, projected=projected)
        wanted = lm.nll(TOKENS, context=CONTEXT)
        np.testing.assert_allclose(spread.nll(TOKENS, context=context), wanted, atol=2e-4)
        assert generated(spread, prompts, GREEDY, context=context) == generated(
            lm, prompts, GREEDY, context=CONTEXT
        )


@pytest.mark.slow
def test_contexts_in_bfloat16_are_near_those_in_float32(lm):
    half = LanguageModel.load(ModelSection(preset="tiny", memory=SECTION, dtype="bfloat16"))
    half.params = lm.params
    context = half.encode_contexts(CONTEXT)
    assert context.encoded.states.dtype == "bfloat16"
    found, wanted = half.nll(TOKENS, context=context), lm.nll(TOKENS, context=CONTEXT)
    assert np.abs(found - wanted).mean() < 0.1 < np.abs(lm.nll(TOKENS) - wanted).mean()


def test_attention_to_long_contexts_can_be_sharpened(lm):
    memory = dataclasses.replace(lm.config.memory, trained_context=100)
    context = lm.encode_contexts(CONTEXT)  # 159, 0 and 70 tokens
    found = lm.with_method(memory=memory).nll(TOKENS, context=context)
    wanted = lm.nll(TOKENS, context=context)
    np.testing.assert_allclose(found[1:], wanted[1:], atol=5e-5)
    assert np.abs(found[0] - wanted[0]).max() > 1e-3
    other = lm.with_method()  # by hand: queries that are longer
    other.params = {**lm.params}
    for name in ("layers_0", "layers_1"):
        branch = dict(other.params[name]["memory"])
        branch["query"] = {"kernel": branch["query"]["kernel"] * (0.1 * np.log(1.59) + 1) ** 2}
        other.params[name] = other.params[name] | {"memory": branch}
    np.testing.assert_allclose(found[0], other.nll(TOKENS, context=CONTEXT)[0], atol=5e-5)


def test_a_saved_model_sharpens_as_before(lm, tmp_path):
    memory = dataclasses.replace(lm.config.memory, trained_context=100)
    sharper = lm.with_method(memory=memory)
    with pytest.warns(UserWarning, match="will read model.memory.trained_context=100 as null"):
        sharper.save(tmp_path / "model")
    found = LanguageModel.load(tmp_path / "model").nll(TOKENS, context=CONTEXT)
    np.testing.assert_allclose(found, sharper.nll(TOKENS, context=CONTEXT), atol=5e-5)


def another(lm):
    other = lm.with_method()
    other.params = {**lm.params}
    return other


def without_memory(lm):
    return LanguageModel(Decoder(lm.config.replace(memory=None)), lm.params, lm.tokenizer)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: lm.encode_contexts([["a"]], chunk=65), "chunk=65 is more than the 64 tokens"),
        (lambda lm: lm.encode_contexts([["a"]], chunk=0), "chunk=0 must be a whole number"),
        (lambda lm: lm.encode_contexts("a"), "an entry for each row"),
        (lambda lm: lm.encode_contexts([[[3, 260]]]), "token=260 must lie between 0 and 258"),
        (lambda lm: lm.encode_contexts([[[3, 0.5]]]), "token=0.5 must be a whole number"),
        (lambda lm: lm.encode_contexts([[[[3], [4, 5]]]]), "must be a list of token ids"),
        (lambda lm: lm.encode_contexts([["a"]], batch_tokens=0), "batch_tokens=0"),
        (lambda lm: lm.nll(TOKENS[:2], context=CONTEXT), "3 rows for 2 texts"),
        (
            lambda lm: lm.encode_contexts([["a"]], after=lm.encode_contexts([[], []])),
            "after has 2 rows, and 1 rows are given",
        ),
        (
            lambda lm: another(lm).nll(TOKENS, context=lm.encode_contexts(CONTEXT)),
            "by another model",
        ),
        (
            lambda lm: without_memory(lm).nll(TOKENS, context=[["a"]] * 3),
            "no memory to read it with",
        ),
        (
            lambda lm: lm.with_method(
                memory=dataclasses.replace(lm.config.memory, trained_context=0)
            ),
            "trained_context=0 must be a whole number of at least 1",
        ),
    ],
)
def test_contexts_that_cannot_be_read_raise_input_error(lm, call, words):
    with pytest.raises(InputError, match=words) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_memory_takes_an_empty_context(lm):
    plain = without_memory(lm)
    found = plain.nll(TOKENS, context=[[], [], []])
    np.testing.assert_array_equal(found, lm.nll(TOKENS))


def test_chunks_and_masks_that_do_not_fit_raise_input_error(lm):
    def encode(lm, chunks, mask):
        shapes = (np.zeros(chunks, np.int32), np.ones(mask, bool))
        apply = functools.partial(lm.model.apply, method="encode")
        return jax.eval_shape(apply, {"params": lm.params}, *shapes)

    good = encode(lm, (1, 2, 64), (1, 2, 64))
    assert good.states.shape == (1, 128, 32)
    for model, chunks, mask, words in (
        (lm, (1, 2, 64), (1, 128), r"\(1, 2, 64\) with a mask of shape \(1, 128\)"),
        (lm, (2, 64), (2, 64), "must be .rows"),
        (lm, (1, 1, 65), (1, 1, 65), "65 tokens are longer than the 64"),
        (without_memory(lm), (1, 2, 64), (1, 2, 64), "no memory"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            encode(model, chunks, mask)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_model_with_landmarks_reads_contexts_as_well(lm):
    marked = lm.with_method(pattern=Landmark(block=8, top_k=1, train_length=32, token=258))
    found, plain = marked.nll(TOKENS, context=CONTEXT), marked.nll(TOKENS)
    np.testing.assert_array_equal(found[1], plain[1])
    assert np.abs(found - plain).max(1)[[0, 2]].min() > 0.05
    assert (
        generated(marked, TOKENS.tolist(), GREEDY, context=CONTEXT)[1]
        == generated(marked, TOKENS.tolist(), GREEDY)[1]
    )
