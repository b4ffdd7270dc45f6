"""What holds for each of the patterns for prompts only."""

import functools

import jax
import numpy as np
import pytest
from sparse_golden import attend
from tiny_lm import ids, sharp_lm

from lcjax.attention import FlexPrefill, TriShape, XAttention
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.conversation import Conversation
from lcjax.generation.sampling import Sampling
from lcjax.training.train_config import TrainConfig

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 8
LENGTHS = (61, 29)  # no whole blocks
PATTERNS = {
    "xattention": XAttention(threshold=0.5, stride=2, block=BLOCK),
    "flex_prefill vertical": FlexPrefill(tau=0, block=BLOCK, min_budget=BLOCK),
    "flex_prefill query-aware": FlexPrefill(gamma=0.6, tau=1, block=BLOCK, min_budget=BLOCK),
    "tri_shape": TriShape(sinks=2, window=6, last=BLOCK),
}
# The same patterns with as much as there is
WHOLE = {
    "xattention": XAttention(threshold=1.1, stride=2, block=BLOCK),
    "flex_prefill vertical": FlexPrefill(tau=0, block=BLOCK, min_budget=61),
    "flex_prefill query-aware": FlexPrefill(gamma=0.6, tau=1, block=BLOCK, min_budget=61),
    "tri_shape": TriShape(sinks=2, window=6, last=61),
}
EVERY = pytest.mark.parametrize("name", PATTERNS)
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def qkv(length, seed=0, rows=1):
    """Keys of which some blocks draw more attention than others, differently in each head."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(rows, length, n, SIZE)) for n in (HEADS, KV_HEADS, KV_HEADS))
    q += 1.5 * rng.normal(size=(1, 1, HEADS, SIZE))
    k += (
        1.5 * rng.normal(size=(1, -(-length // BLOCK), KV_HEADS, SIZE)).repeat(BLOCK, 1)[:, :length]
    )
    return [x.astype(np.float32) for x in (q, k, v)]


def full(q, k, v):
    """Full causal attention in float64, of the last queries."""
    k, v = (np.repeat(x[0].astype(np.float64), q.shape[2] // x.shape[2], axis=1) for x in (k, v))
    logits = np.einsum("tnh,snh->nts", q[0].astype(np.float64), k) / np.sqrt(SIZE)
    is_past = np.tril(np.ones(logits.shape[1:], bool), len(k) - q.shape[1])
    weights = np.exp(np.where(is_past, logits, -np.inf))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


def rows_of(documents, segments):
    """Rows [B, T] of documents, whose numbers the segments are; padding has noise."""
    rng = np.random.default_rng(9)
    rows = [rng.normal(size=(*segments.shape, *x.shape[2:])) for x in documents[0]]
    for row, line in enumerate(segments):
        for number in set(line) - {0}:
            for padded, x in zip(rows, documents[number - 1], strict=True):
                padded[row, line == number] = x[0]
    return [x.astype(np.float32) for x in rows]


@EVERY
def test_documents_packed_padded_or_alone_have_the_same_output(name):
    first, second = LENGTHS
    documents = [qkv(length, seed) for seed, length in enumerate(LENGTHS)]
    pad = 13
    length = first + second + pad
    segments = np.zeros((4, length), np.int32)
    segments[0, :first], segments[0, first : first + second] = 1, 2
    segments[1, length - first :] = 1  # padding before it
    segments[2, :first] = 1  # and behind it
    segments[3, 3 : 3 + second], segments[3, 3 + second : 3 + second + first] = 2, 1
    out = np.asarray(attend(PATTERNS[name], *rows_of(documents, segments), segments))
    for number, document in enumerate(documents, 1):
        alone = np.asarray(attend(PATTERNS[name], *document))[0]
        assert np.abs(alone - full(*document)).max() > 1e-3  # something is hidden
        for row, line in enumerate(segments):
            if number in line:
                np.testing.assert_allclose(out[row, line == number], alone, **CLOSE)
    assert not out[segments == 0].any()


@EVERY
def test_a_pattern_that_chooses_everything_is_full_attention(name):
    x = qkv(LENGTHS[0])
    np.testing.assert_allclose(attend(WHOLE[name], *x)[0], full(*x), **CLOSE)


@EVERY
def test_every_query_head_chooses_for_itself(name):
    q, k, v = qkv(LENGTHS[0])
    got = attend(PATTERNS[name], q, k, v)
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    one = [attend(PATTERNS[name], *(x[:, :, [n]] for x in (q, k, v))) for n in range(HEADS)]
    np.testing.assert_allclose(np.concatenate(one, 2), got, **CLOSE)


@EVERY
def test_short_calls_and_short_rows_see_everything(name):
    pattern, (q, k, v) = PATTERNS[name], qkv(LENGTHS[0])
    for last in (1, BLOCK - 1):
        x = q[:, -last:], k, v
        np.testing.assert_allclose(attend(pattern, *x)[0], full(*x), **CLOSE)
    short = [x[:, : BLOCK - 3] for x in (q, k, v)]
    np.testing.assert_allclose(attend(pattern, *short)[0], full(*short), **CLOSE)


GREEDY = Sampling(max_new_tokens=2, min_new_tokens=2)
PROMPTS = [ids(0, 131), ids(1, 90)]


@functools.cache
def lm_with(name):
    return sharp_lm(pattern=PATTERNS[name])


def logprobs(lm, prompts, **options):
    """log p of the tokens after each prompt."""
    rows = [[] for _ in prompts]
    for piece in lm.stream(prompts, GREEDY, top_logprobs=0, **options):
        rows[piece.row] += [float(entry.logprob) for entry in piece.logprobs]
    return rows


@pytest.mark.slow
@EVERY
def test_a_prompt_in_a_batch_or_in_chunks_has_the_answer_that_it_has_alone(name):
    lm = lm_with(name)
    alone = logprobs(lm, PROMPTS[:1])
    np.testing.assert_allclose(logprobs(lm, PROMPTS)[:1], alone, atol=2e-4)
    assert logprobs(lm, PROMPTS[:1], prefill_chunk=32) == alone


@pytest.mark.slow
@EVERY
def test_a_prompt_of_a_conversation_is_read_at_once(name):
    lm = lm_with(name)
    talk = Conversation(lm, length=256, prefill_chunk=32)
    talk.read(PROMPTS[0])
    first = jax.nn.log_softmax(talk._read_text()[0]).max()
    assert first == pytest.approx(logprobs(lm, PROMPTS[:1])[0][0], abs=2e-4)


@EVERY
def test_no_loss_is_taken_under_a_pattern_that_looks_ahead(name):
    pattern, kind = PATTERNS[name], name.split()[0]
    assert pattern.needs_whole_prompt and not pattern.is_causal
    with pytest.raises(InputError, match=f"{kind}.*nothing can be trained"):
        TrainConfig(model=ModelSection(preset="tiny", pattern=pattern))
    with pytest.raises(InputError, match=f"{kind}.*no score"):
        pattern.check_scores()
