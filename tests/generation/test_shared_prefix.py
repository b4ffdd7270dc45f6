"""What prompts begin with is read once, and no answer shows it."""

import jax
import numpy as np
import pytest
from tiny_lm import ids, sharp_decoder, sharper

from lcjax.attention import (
    Causal,
    DualChunk,
    InfLLM,
    Landmark,
    LMInfinite,
    SelfExtend,
    Streaming,
    VerticalSlash,
)  # fmt: skip
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation import session
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.shared_prefix import (
    CachedPrefix,
    PrefixReader,
    group_by_prefix,
    read_prefix,
)
from lcjax.models import LayerKind, preset
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Default, DynamicNTK

TEXT = ids(1, 300)
PROMPTS = [TEXT[:200] + ids(2, 9), TEXT[:200] + ids(3, 90), TEXT[:200] + ids(4, 1)]
OPTIONS = [[ids(5, 1)], [ids(7, 8)], [ids(8, 3)]]
WRITE = Sampling(max_new_tokens=6, min_new_tokens=6)
LEAST = 16
PATTERNS = [
    Streaming(sinks=4, recent=40),
    Landmark(block=8, top_k=62, train_length=512, token=258),
    InfLLM(window=64, sinks=4, block=8, chunk=16),
    VerticalSlash(),
]
SECTION = ModelSection(preset="tiny", rope=DynamicNTK(factor=2.0))


@pytest.fixture(scope="module")
def lm():
    return sharper(LanguageModel.load(SECTION)).with_method(length=512)


@pytest.fixture
def read(monkeypatch):
    """Rows and tokens of every call that reads."""
    calls, prefill = [], session._step_in_place

    def counted(model, params, cache, tokens, *rest, **options):
        if tokens.ndim == 2:  # a prompt
            calls.append(tokens.shape)
        return prefill(model, params, cache, tokens, *rest, **options)

    monkeypatch.setattr(session, "_step_in_place", counted)
    return calls


def assert_same(reader, lm, prompts):
    """Texts and scores, with the beginning read or not."""
    found = reader.generate(prompts, WRITE)
    assert found == lm.generate(prompts, WRITE) and len(set(found)) == 3
    scored, wanted = (one.continuations(prompts, OPTIONS) for one in (reader, lm))
    for (one,), (other,) in zip(scored, wanted, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, atol=1e-5)
        assert one.greedy == other.greedy


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        Causal(),
        # A cache of unrotated keys, and a rotation that is that of the length.
        SelfExtend(group=4, window=32, scale_base=64),
        DualChunk(chunk=48, local=16, train_length=64),
    ],
    ids=["causal", "group", "chunks"],
)
def test_batches_read_common_prefixes_once_with_equal_answers(lm, pattern, read):
    lm = lm.with_method(pattern=pattern, length=512)
    reader = PrefixReader(lm, least=LEAST)
    reader.generate(PROMPTS, WRITE)
    # 192 of 200 tokens, and up to 98 behind them.
    assert read == [(1, 64)] * 3 + [(3, 128)]
    # The row of 290 tokens reads 128 of them, so every row does.
    fewer = 209 + 290 + 201 - 3 * 128
    assert reader.saved_tokens == fewer - 192
    read.clear()
    reader.continuations(PROMPTS, OPTIONS)
    assert read == [(3, 128)] and reader.saved_tokens == 2 * fewer - 192
    assert_same(reader, lm, PROMPTS)
    # Others leave the text earlier, and the next ones later.
    assert_same(reader, lm, [TEXT[:176] + ids(seed, 114) for seed in (5, 6, 7)])
    read.clear()
    reader.generate([TEXT[:224] + ids(seed, 100) for seed in (5, 6, 7)], WRITE)
    assert read == [(1, 16)] * 2 + [(3, 128)]
    assert_same(reader, lm, [TEXT[:224] + ids(seed, 100) for seed in (5, 6, 7)])


def test_layers_that_read_the_keys_of_others_share_a_whole_prefix():
    lm = sharp_decoder(preset("tiny").replace(layers=(LayerKind(), LayerKind(keys_of=0))))
    prefix = read_prefix(lm, TEXT[:64])
    assert prefix.is_whole and session.can_share_prefix(lm.config)
    prompts = [TEXT[:64] + ids(2, 9), TEXT[:64] + ids(3, 30)]
    options = OPTIONS[:2]
    together, alone = (lm.continuations(prompts, options, prefix=x) for x in (prefix, None))
    for (score,), (expected,) in zip(together, alone, strict=True):
        np.testing.assert_allclose(score.nll, expected.nll, atol=1e-5)


@pytest.mark.slow
def test_prompts_that_extend_each_other_have_equal_answers(lm):
    prompts = [TEXT[:cut] + ids(cut, 20) + TEXT[cut:] for cut in (64, 192, 128)]
    reader = PrefixReader(lm, prompts, least=LEAST)
    found = {
        row: reader.generate([prompts[row]], WRITE)[0] for row in group_by_prefix(prompts, LEAST)[0]
    }
    wanted = [lm.generate([prompt], WRITE)[0] for prompt in prompts]
    assert [found[row] for row in range(3)] == wanted and len(set(wanted)) == 3
    assert reader.saved_tokens == 64 + 128 and reader._cache is None


def test_single_prompts_keep_the_prefix_of_the_next_prompt(lm, read):
    # As needles in one text, at several places.
    prompts = [TEXT[:cut] + ids(cut, 20) + TEXT[cut:] for cut in (64, 192, 128)]
    (order,) = group_by_prefix(prompts, LEAST)
    reader = PrefixReader(lm, prompts, least=LEAST)
    for row in order:
        reader._prefix([prompts[row]], [6])
    assert sum(tokens for _, tokens in read) == 128 and reader.saved_tokens == 64 + 128


def test_a_prefix_is_as_long_as_prompts_to_come_share(lm, read):
    prompts = [TEXT[:100] + ids(50, 380), TEXT[:100] + ids(51, 379), ids(52, 480), ids(53, 480)]
    reader = PrefixReader(lm, prompts, least=LEAST)
    for row in (0, 1):
        assert reader._prefix([prompts[row]], [6]).tokens == 96
        assert reader._cache.capacity == 128
        reader._release_if_unused()
        assert (reader._cache is None) == (row == 1)


@pytest.mark.slow
def test_equal_prompts_one_at_a_time_are_read_once(lm, read):
    reader = PrefixReader(lm, [TEXT[:200]] * 3, least=LEAST)
    for left in (2, 1, 0):
        assert reader._prefix([TEXT[:200]], [6]).tokens == 192
        reader._release_if_unused()
        assert (reader._cache is None) == (not left)
    assert read == [(1, 64)] * 3
    assert reader.saved_tokens == 3 * (200 - 64) - 192


@pytest.mark.slow
def test_a_prompt_that_is_a_prefix_of_others_reads_its_last_token(lm, read):
    reader = PrefixReader(lm, least=LEAST)
    assert_same(reader, lm, [TEXT[:192], *PROMPTS[:2]])
    assert len(reader._ids) == 176


def test_a_beginning_that_is_read_again_anyway_is_not_read_apart(lm, read):
    prompts = [TEXT[:50] + ids(seed, 200) for seed in (60, 61, 62)]
    reader = PrefixReader(lm, prompts, least=LEAST)
    # Of 250 tokens the last 202 are read by a program for 256.
    assert reader._prefix(prompts, [6] * 3) is None and not read and reader.saved_tokens == 0


@pytest.mark.slow
def test_a_prefix_shorter_than_the_tokens_read_again_changes_nothing(lm, read):
    reader = PrefixReader(lm, least=LEAST)
    prompts = [TEXT[:50] + ids(seed, 200) for seed in (60, 61, 62)]
    prefix = reader._prefix(PROMPTS, [6] * 3)._replace(ids=np.array(TEXT[:48]))
    scored, wanted = (lm.continuations(prompts, OPTIONS, prefix=p) for p in (prefix, None))
    for (one,), (other,) in zip(scored, wanted, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-6)  # chunks of other sizes


def test_a_prefix_that_could_not_be_read_is_dropped(lm, monkeypatch):
    reader = PrefixReader(lm, least=LEAST)
    kept = reader._prefix(PROMPTS, [6] * 3)
    assert kept.tokens == 192
    calls, prefill = [], session._step_in_place

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return prefill(*arguments, **options)

    monkeypatch.setattr(session, "_step_in_place", failing)
    others = [TEXT[:64] + ids(70, 136) + ids(seed, 30) for seed in (71, 72, 73)]
    with pytest.raises(MemoryError):
        reader._prefix(others, [6] * 3)
    assert reader._cache is None
    assert reader._prefix(PROMPTS, [6] * 3).tokens == 192
    assert len(calls) == 2 + 3, "all of it is read anew"


REFUSED = [
    ({"prompts": [TEXT[:9]]}, r"prompts\[0\] must begin with the 9 tokens of prefix and go on"),
    ({"prompts": [TEXT[:20], ids(80, 20)]}, r"prompts\[1\] must begin with the 9 tokens"),
    ({"context": [[]]}, "prefix was read without context; leave one of the two out"),
    ({"exact": True}, "prefix was read without exact=True"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_prefix_that_does_not_fit_raises_input_error(lm, options, words):
    prefix = CachedPrefix(None, np.array(TEXT[:9]), lm, 512)
    options = {"prompts": [TEXT[:20]]} | options
    if "context" in options:
        options["context"] = lm.encode_contexts([[]])
    with pytest.raises(InputError, match=words):
        lm.stream(prefix=prefix, **options)
    if "exact" not in options:
        options["continuations"] = [[[5]]] * len(options["prompts"])
        with pytest.raises(InputError, match=words):
            lm.continuations(prefix=prefix, **options)


def test_a_prefix_raises_input_error_for_patterns_that_choose_keys_by_content(lm):
    prefix = CachedPrefix(None, np.array(TEXT[:9]), lm, 512)
    for pattern in PATTERNS[1:]:
        with pytest.raises(InputError, match=f"prefix: with {type(pattern).__name__} the keys"):
            lm.with_method(pattern=pattern).stream([TEXT[:20]], prefix=prefix)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [90, 1500])  # all of which the ring holds, or the last ones
@pytest.mark.parametrize("pattern", [PATTERNS[0], LMInfinite(window=30, sinks=4)], ids=str)
def test_a_prefix_of_which_the_last_tokens_are_visible_is_continued(pattern, tokens):
    lm = LanguageModel.load(ModelSection(preset="tiny", pattern=pattern))
    prefix = ids(40, tokens)
    prompts = [prefix + ids(seed, seed) for seed in (3, 17, 40)]
    continuations = [[ids(41, 5)]] * 3
    read = read_prefix(lm, prefix)
    expected = lm.continuations(prompts, continuations)
    for (one,), (other,) in zip(lm.continuations(prompts, continuations, prefix=read), expected):
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-5)


def refused(prefix, lm, words, prompt):
    """`lm` generates and scores nothing after a prefix whose keys are not its own."""
    with pytest.raises(InputError, match=words):
        lm.stream([prompt], WRITE, prefix=prefix)
    with pytest.raises(InputError, match=words):
        lm.continuations([prompt], [[ids(5, 6)]], prefix=prefix)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope": Default(theta=1e4)}, "prefix was read with rope=DynamicNTK.*Default"),
        ({"pattern": SelfExtend(group=4, window=32)}, "prefix was read with pattern=Causal"),
    ],
)
def test_a_prefix_of_another_method_raises_input_error(lm, changes, words):
    prefix = CachedPrefix(None, np.array(TEXT[:9]), lm, 512)
    refused(prefix, lm.with_method(**changes, length=512), words, TEXT[:20])


def test_a_prefix_of_another_model_raises_input_error(lm):
    prefix = CachedPrefix(None, np.array(TEXT[:9]), lm, 512)
    refused(prefix, LanguageModel.load(SECTION), "prefix was read by another model", TEXT[:20])


def test_a_prefix_whose_rotation_is_not_that_of_the_request_raises_input_error():
    rope = DynamicNTK(factor=4.0, original_length=16)
    lm = LanguageModel.load(ModelSection(preset="tiny", rope=rope)).with_method(length=100)
    prefix = read_prefix(lm, TEXT[:64])
    assert prefix.length == 100
    words = r"for 100 tokens, and a prompt .* for 126; .* lm.with_method\(length=126\)"
    refused(prefix, lm, words, TEXT[:120])
    refused(prefix, lm.with_method(length=126), words, TEXT[:90])
    # 94 + 6 tokens, which is what the keys are rotated for, with a least length or without it
    for one in (lm, lm.with_method()):
        found = one.continuations([TEXT[:94]], [[ids(5, 6)]], prefix=prefix)[0][0].nll
        wanted = one.continuations([TEXT[:94]], [[ids(5, 6)]])[0][0].nll
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_prefix_serves_requests_of_other_lengths_whose_rotation_is_the_same():
    # Dynamic NTK changes nothing up to 400 tokens, and an unscaled rope never.
    for rope in (DynamicNTK(factor=4.0, original_length=400), Default(theta=1e4)):
        lm = LanguageModel.load(ModelSection(preset="tiny", rope=rope)).with_method(length=100)
        CachedPrefix(None, np.array(TEXT[:80]), lm, 100).check_keys(lm, [126, 300])


def test_invalid_requests_raise_input_error_as_without_a_prefix(lm):
    reader = PrefixReader(lm, PROMPTS, least=LEAST)
    for prompts in ([], [[]], [TEXT, []]):
        for one in (reader, lm):
            with pytest.raises(InputError, match="prompts must be a non-empty list of non-empty"):
                one.generate(prompts, WRITE)
    with pytest.raises(InputError, match="continuations=0 lists for 0 prompts"):
        reader.continuations([], [])
    for call in (PrefixReader, group_by_prefix):
        with pytest.raises(InputError, match="least=0 must be a whole number of at least 1"):
            call(*[lm] * (call is PrefixReader), PROMPTS, least=0)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
def test_patterns_without_shared_prefixes_read_every_prompt(lm, pattern, read):
    reader = PrefixReader(lm.with_method(pattern=pattern, length=512), PROMPTS, least=LEAST)
    assert reader._prefix(PROMPTS, [6] * 3) is None and not read


def test_a_rotation_that_differs_between_rows_shares_nothing(lm, read):
    free = lm.with_method()
    reader = PrefixReader(free, PROMPTS, least=LEAST)
    assert reader._prefix(PROMPTS, [6] * 3) is None and not read
    # Rows of one length have one rotation, and those of another length begin anew.
    for length in (90, 91, 90):
        prompts = [TEXT[:200] + ids(seed, length) for seed in (30, 31, 32)]
        assert reader.generate(prompts, WRITE) == free.generate(prompts, WRITE)
    assert reader.saved_tokens == sum(3 * (200 + length - 128) - 192 for length in (90, 91, 90))


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
    assert reader.saved_tokens == 209 + 290 + 201 - 3 * 128 - 192


def test_prompts_that_begin_alike_stand_together_in_the_order_of_their_first():
    first, second = ids(40, 60), ids(41, 60)
    prompts = [
        ids(42, 50), [*first, 1], [*second, 1], ids(43, 50), first + [2] * 30, second, [*first, 0],
    ]  # fmt: skip
    assert group_by_prefix(prompts, LEAST) == [[0, 3], [6, 1, 4], [5, 2]]
    assert group_by_prefix(prompts, 61) == [list(range(7))]
    # Of a long prompt a small part is not worth a stem.
    assert group_by_prefix([first + ids(44, 600), first + ids(45, 600)], LEAST) == [[0, 1]]
    assert group_by_prefix([], LEAST) == []


def test_whole_chunks_of_a_prefix_run_one_program_also_with_loaded_weights(lm, monkeypatch):
    monkeypatch.setattr("lcjax.generation.shared_prefix.prefill_chunk_size", lambda _: 48)
    assert jax.tree.leaves(lm.params)[0].committed  # as loaded weights are
    before = session._step_in_place._cache_size()
    read_prefix(lm.with_method(length=512), TEXT[:144])
    assert session._step_in_place._cache_size() == before + 1
