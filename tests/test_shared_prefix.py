"""What prompts begin with is read once, and no answer shows it."""

import numpy as np
import pytest
from tiny_lm import ids, sharper

from lcjax import shared_prefix
from lcjax.attention import (
    Causal,
    DualChunk,
    InfLLM,
    Landmark,
    SelfExtend,
    Streaming,
    VerticalSlash,
)  # fmt: skip
from lcjax.build import ModelSection
from lcjax.generate import Sampling
from lcjax.lm import LanguageModel
from lcjax.rope import DynamicNTK
from lcjax.sharding import Mesh
from lcjax.shared_prefix import PrefixReader, alike

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TEXT = ids(1, 300)
PROMPTS = [TEXT[:200] + ids(2, 9), TEXT[:200] + ids(3, 90), TEXT[:200] + ids(4, 1)]
OPTIONS = [[ids(5, 1)], [ids(7, 8)], [ids(8, 3)]]
WRITE = Sampling(max_new_tokens=6, min_new_tokens=6)
LEAST = 16
SECTION = ModelSection(preset="tiny", rope=DynamicNTK(factor=2.0))


@pytest.fixture(scope="module")
def lm():
    return sharper(LanguageModel.load(SECTION)).with_method(length=512)


@pytest.fixture
def read(monkeypatch):
    """Rows and tokens of every call that reads."""
    calls, prefill = [], shared_prefix.prefill

    def counted(model, params, cache, tokens, *rest, **options):
        calls.append(tokens.shape)
        return prefill(model, params, cache, tokens, *rest, **options)

    for module in ("shared_prefix", "generate"):
        monkeypatch.setattr(f"lcjax.{module}.prefill", counted)
    return calls


def assert_same(reader, lm, prompts):
    """Texts and scores, with the beginning read or not."""
    found = reader.generate(prompts, WRITE)
    assert found == lm.generate(prompts, WRITE) and len(set(found)) == 3
    scored, wanted = (one.continuations(prompts, OPTIONS) for one in (reader, lm))
    for (one,), (other,) in zip(scored, wanted, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, atol=1e-5)
        assert one.greedy == other.greedy


@pytest.mark.parametrize(
    "pattern",
    [
        Causal(),
        # A cache of unrotated keys, and a rotation that is that of the length.
        pytest.param(SelfExtend(group=4, window=32, scale_base=64), marks=pytest.mark.slow),
        pytest.param(DualChunk(chunk=48, local=16, train_length=64), marks=pytest.mark.slow),
    ],
    ids=["causal", "group", "chunks"],
)
def test_batches_read_what_they_begin_with_once_and_answer_the_same(lm, pattern, read):
    lm = lm.with_method(pattern=pattern, length=512)
    reader = PrefixReader(lm, least=LEAST)
    reader.generate(PROMPTS, WRITE)
    # 192 of 200 tokens, and up to 98 behind them.
    assert read == [(1, 64)] * 3 + [(3, 128)] and reader.saved == 2 * 192
    read.clear()
    reader.continuations(PROMPTS, OPTIONS)
    assert read == [(3, 128)] and reader.saved == 5 * 192
    assert_same(reader, lm, PROMPTS)
    # Others leave the text earlier, and the next ones later.
    assert_same(reader, lm, [TEXT[:176] + ids(seed, 114) for seed in (5, 6, 7)])
    read.clear()
    reader.generate([TEXT[:224] + ids(seed, 100) for seed in (5, 6, 7)], WRITE)
    assert read == [(1, 16)] * 2 + [(3, 128)]
    assert_same(reader, lm, [TEXT[:224] + ids(seed, 100) for seed in (5, 6, 7)])


def test_single_prompts_leave_what_the_next_one_begins_with(lm, read):
    # As needles in one text, at several places.
    prompts = [TEXT[:cut] + ids(cut, 40) + TEXT[cut:] for cut in (64, 192, 128)]
    (order,) = alike(prompts, LEAST)
    reader = PrefixReader(lm, prompts, least=LEAST)
    for row in order:
        reader._prefix([prompts[row]], [6])
    assert sum(tokens for _, tokens in read) == 128 and reader.saved == 64 + 128


@pytest.mark.parametrize(
    "pattern",
    [
        Streaming(sinks=4, recent=40),
        Landmark(block=8, top_k=62, train_length=512, token=258),
        InfLLM(window=64, sinks=4, block=8, chunk=16),
        VerticalSlash(),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_patterns_that_cannot_go_on_read_every_prompt(lm, pattern, read):
    reader = PrefixReader(lm.with_method(pattern=pattern, length=512), PROMPTS, least=LEAST)
    assert reader._prefix(PROMPTS, [6] * 3) is None


def test_a_rotation_that_differs_between_rows_shares_nothing(lm, read):
    free = lm.with_method()
    reader = PrefixReader(free, PROMPTS, least=LEAST)
    assert reader._prefix(PROMPTS, [6] * 3) is None
    # Rows of one length have one rotation, and those of another length begin anew.
    for length in (90, 91, 90):
        prompts = [TEXT[:200] + ids(seed, length) for seed in (30, 31, 32)]
        assert reader.generate(prompts, WRITE) == free.generate(prompts, WRITE)
    assert reader.saved == 3 * 2 * 192


def test_what_has_no_others_is_read_in_full(lm, read):
    reader = PrefixReader(lm, PROMPTS, least=LEAST)
    assert reader._prefix([ids(20, 100)], [6]) is None
    assert reader._prefix([ids(21, 100), ids(22, 100)], [6] * 2) is None
    assert not read


@pytest.mark.slow
def test_on_a_mesh_the_row_is_everywhere_and_nothing_changes(lm):
    spread = sharper(LanguageModel.load(SECTION, mesh=Mesh(data=2, fsdp=2, tensor=2)))
    reader = PrefixReader(spread.with_method(length=512), least=LEAST)
    found = reader.generate(PROMPTS * 2, WRITE)  # two rows on a device
    assert found == lm.generate(PROMPTS, WRITE) * 2
    assert reader.saved == 2 * 192


def test_prompts_that_begin_alike_stand_together_in_the_order_of_their_first():
    first, second = ids(40, 60), ids(41, 60)
    prompts = [
        ids(42, 50), [*first, 1], [*second, 1], ids(43, 50), first + [2] * 30, second, [*first, 0],
    ]  # fmt: skip
    assert alike(prompts, LEAST) == [[0, 3], [6, 1, 4], [5, 2]]
    assert alike(prompts, 61) == [list(range(7))]
    # Of a long prompt a small part is not worth a stem.
    assert alike([first + ids(44, 600), first + ids(45, 600)], LEAST) == [[0, 1]]
    assert alike([], LEAST) == []
