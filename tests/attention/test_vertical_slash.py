"""Vertical-slash attention against its definition: what is chosen, and attention over it."""

import math

import attention_golden as golden
import jax
import numpy as np
import pytest
from sparse_golden import attend as run
from tiny_lm import ids, sharp_lm

from lcjax.attention import Causal, VerticalSlash
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.conversation import Conversation
from lcjax.generation.sampling import Sampling
from lcjax.training.train_config import TrainConfig

T, HEADS, SIZE = 450, 4, 16
PATTERN = VerticalSlash(vertical=40, slash=120)


def qkv(rows=1, length=T):
    """Keys of which a few draw attention from everywhere, and others from one distance."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, length, n, SIZE)) for n in (HEADS, 2, 2))
    q[..., 0], k[:, 100:104, :, 0] = 6.0, 6.0
    # The last 64 queries choose: the first of them a far key and the last its own, the one before
    # them another far key, which does not count.
    for feature, (query, key) in enumerate(((-64, -216), (-1, -1), (-65, -220)), 1):
        q[..., feature], q[:, query, :, feature], k[:, key, :, feature] = 0.0, 12.0, 12.0
    return [x.astype(np.float32) for x in (q, k, v)]


def naive(q, k, v, vertical, slash):
    """(out [T, N, H], seen [N, T, S]) of one row in float64, key by key and block by block."""
    (length, heads), keys = q.shape[1:3], k.shape[1]
    first = keys - length
    k, v = (np.repeat(x[0].astype(np.float64), heads // x.shape[2], axis=1) for x in (k, v))
    away = first + np.arange(length)[:, None] - np.arange(keys)[None]
    logits = np.einsum("tnh,snh->nts", q[0].astype(np.float64), k) / math.sqrt(SIZE)
    p = np.exp(np.where(away >= 0, logits, -np.inf))
    p = (p / p.sum(-1, keepdims=True))[:, -64:]
    seen = np.zeros((heads, length, keys), bool)
    for head in range(heads):
        columns = p[head].sum(0)
        columns[:30] = np.inf
        diagonals = np.array([p[head][away[-64:] == d].sum() for d in range(keys)])
        diagonals[:100] = np.inf
        seen[head][:, np.argsort(-columns, kind="stable")[:vertical]] = True
        for d in np.argsort(-diagonals, kind="stable")[:slash]:
            for start in range(0, length, 64):
                low = first + start - d
                for block in range(max(low // 64, 0), (low + 63) // 64 + 1):
                    seen[head][start : start + 64, block * 64 : block * 64 + 64] = True
    seen &= away >= 0
    weights = np.exp(np.where(seen, logits, -np.inf))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v), seen


@pytest.mark.slow_except("a chunk")
@pytest.mark.parametrize("queries", [T, 130], ids=["a whole prompt", "a chunk"])
def test_a_prompt_sees_the_chosen_columns_and_diagonals(queries):
    q, k, v = qkv()
    q = q[:, T - queries :]
    want, seen = naive(q, k, v, 40, 120)
    assert seen[:, -1, 100:104].all() and seen[:, -1].mean() < 0.9  # something is left out
    got = run(PATTERN, q, k, v)[0]
    np.testing.assert_allclose(got, want, **golden.TOLERANCE)
    for other in ((T, T), (45, 120), (40, 200)):
        assert np.abs(naive(q, k, v, *other)[0] - got).max() > 1e-3


@pytest.mark.parametrize(
    ("queries", "budgets", "least", "row_indices"),
    [
        (64, (40, 101), (40, 101), False),  # one diagonal is chosen beside the nearest 100
        (145, (1, 1), (30, 50), True),  # the least budgets; whole blocks of keys end at 49
    ],
)
def test_budgets_are_counted_exactly(queries, budgets, least, row_indices):
    q, k, v = qkv()
    q = q[:, T - queries :]
    got = run(VerticalSlash(*budgets), q, k, v, row_indices=row_indices)[0]
    np.testing.assert_allclose(got, naive(q, k, v, *least)[0], **golden.TOLERANCE)


@pytest.mark.slow
def test_padding_on_either_side_changes_nothing():
    q, k, v = qkv(2)
    q, k, v = (x[:, -300:] for x in (q, k, v))
    alone = run(PATTERN, *(x[:1] for x in (q, k, v)))[0]
    segments = np.zeros((2, 364), np.int32)
    segments[0, :300] = segments[1, 64:] = 1  # whole blocks: those of the slashes stay the same
    rows = [np.zeros((2, 364, *x.shape[2:]), np.float32) for x in (q, k, v)]
    for padded, x in zip(rows, (q, k, v), strict=True):
        padded[0, :300] = padded[1, 64:] = x[0]
    out = run(PATTERN, *rows, segments)
    for row in range(2):
        np.testing.assert_allclose(out[row][segments[row] != 0], alone, rtol=1e-5, atol=2e-6)
        assert not out[row][segments[row] == 0].any()


def test_few_queries_see_everything():
    q, k, v = qkv()
    for pattern in (PATTERN, VerticalSlash(vertical=T)):
        got = run(pattern, q[:, -63:], k, v)
        np.testing.assert_allclose(got, run(Causal(), q[:, -63:], k, v), rtol=1e-5, atol=2e-6)


@pytest.fixture(scope="module")
def lm():
    """The nearest and the first keys of a prompt are seen, and 15 columns that are chosen."""
    return sharp_lm(pattern=VerticalSlash(vertical=45, slash=50))


GREEDY = Sampling(max_new_tokens=4, min_new_tokens=4)
PROMPT = ids(0, 448)  # whole blocks, which the padding of a prompt does not move


def logprobs(lm, **options):
    """log p of the tokens after the prompt."""
    pieces = lm.stream([PROMPT], GREEDY, top_logprobs=0, **options)
    return [float(entry.logprob) for piece in pieces for entry in piece.logprobs]


def test_the_end_of_a_prompt_chooses_for_all_of_it_however_much_is_read_at_once(lm):
    whole = logprobs(lm)
    assert len(whole) == 4
    for chunk in (100, 10**6):
        assert logprobs(lm, prefill_chunk=chunk) == whole


def test_a_turn_of_a_conversation_chooses_as_a_prompt(lm):
    talk = Conversation(lm, length=512, prefill_chunk=64)
    talk.read(PROMPT)
    first = jax.nn.log_softmax(talk._read_text()[0]).max()
    assert first == pytest.approx(logprobs(lm)[0], abs=1e-4)


@pytest.mark.parametrize("field", ["vertical", "slash"])
def test_budgets_out_of_range_raise_input_error(field):
    with pytest.raises(InputError, match=f"pattern.{field}=0 must be a whole number of at least 1"):
        VerticalSlash(**{field: 0})
    assert VerticalSlash() == VerticalSlash(vertical=1000, slash=6096)  # of the released code


def test_no_loss_is_taken_under_a_pattern_that_looks_ahead(lm):
    assert VerticalSlash.needs_whole_prompt and not VerticalSlash.is_causal
    with pytest.raises(InputError, match="vertical_slash.*nothing can be trained"):
        TrainConfig(model=ModelSection(preset="tiny", pattern=VerticalSlash()))
    with pytest.raises(InputError, match="vertical_slash.*no score"):
        lm.nll(np.ones((1, 8)))
