"""A language model that reads trees: built once, searched again, in prompts and conversations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_support import assert_most_probable, assert_reads
from tiny_lm import generated, ids, sharp_lm

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation import contexts
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.memory import QueryAware, Random, Right, SharedLlmSection
from lcjax.parallel.sharding import Mesh

MEMORY = SharedLlmSection(
    layers=2, chunk=32, ratios=(4, 2, 1), policy=QueryAware(), output_share=1.0
)
GREEDY = Sampling(max_new_tokens=6, min_new_tokens=6)
TOKENS = np.array([ids(1, 20), ids(2, 20), ids(3, 20)])
CONTEXT = [[ids(4, 75), ids(5, 9)], [], [ids(6, 64)]]
CHUNKS = [  # of 32 tokens, the odd one first
    [ids(4, 75)[:11], ids(4, 75)[11:43], ids(4, 75)[43:], ids(5, 9)],
    [],
    [ids(6, 64)[:32], ids(6, 64)[32:]],
]


@functools.cache
def loaded(policy):
    return sharp_lm(memory=dataclasses.replace(MEMORY, policy=policy))


SLOWER = pytest.param(Right(), marks=pytest.mark.slow)


@pytest.fixture(params=[SLOWER, QueryAware()], ids=["right", "query"])
def lm(request):
    return loaded(request.param)


@pytest.fixture
def asking():
    return loaded(QueryAware())


@pytest.mark.slow
def test_contexts_of_any_number_and_length_are_read_as_the_model_reads_their_chunks(lm):
    assert_reads(lm, TOKENS, CONTEXT, CHUNKS, first=12)


@pytest.mark.slow
def test_text_with_a_cache_equals_text_without_for_unequal_prompts_and_contexts(lm):
    prompts = [ids(1, 50), ids(2, 5), ids(3, 33)]
    result = generated(lm, prompts, GREEDY, context=CONTEXT, prefill_chunk=32)
    assert_most_probable(lm, prompts, result, CHUNKS)


@pytest.mark.slow
def test_fewer_tokens_than_a_chunk_are_one_smaller_tree(lm):
    context = lm.encode_contexts([ids(4, 3)], query=[ids(1, 5)])
    assert context.chunks == (1,) and context.tokens == (3,)
    assert context.encoded.mask.sum() in (2, 3) and context.encoded.num_chunks.tolist() == [1]


@pytest.mark.slow
def test_chunks_are_encoded_a_few_at_a_time_and_as_at_once(lm, encoded):
    document, question = [ids(7, 32 * 9 + 5)], [ids(1, 9), ids(2, 9)]
    few = lm.encode_contexts([document, []], batch_tokens=128, query=question)
    assert [mask.shape for mask, *_ in encoded] == [(4, 32), (4, 32), (2, 32)] and few.chunks == (
        10,
        0,
    )
    whole = lm.encode_contexts([document, []], query=question)
    np.testing.assert_array_equal(few.encoded.mask, whole.encoded.mask)
    there = np.asarray(few.encoded.mask)[:, None, :, None]
    for own, other in zip(few.encoded.layers, whole.encoded.layers, strict=True):
        for a, b in zip(own, other, strict=True):
            np.testing.assert_allclose(np.where(there, a, 0), np.where(there, b, 0), atol=2e-4)


def assert_same(a, b):
    """Two contexts are the same where anything is kept."""
    np.testing.assert_array_equal(a.encoded.mask, b.encoded.mask)
    np.testing.assert_array_equal(a.encoded.num_chunks, b.encoded.num_chunks)
    there = np.asarray(a.encoded.mask)[:, None, :, None]
    for own, other in zip(a.encoded.layers, b.encoded.layers, strict=True):
        for x, y in zip(own, other, strict=True):
            np.testing.assert_allclose(np.where(there, x, 0), np.where(there, y, 0), atol=2e-4)


@pytest.mark.slow
def test_contexts_added_later_equal_contexts_encoded_at_once(lm):
    question = [ids(1, 9), ids(2, 9)]
    first = lm.encode_contexts([[], ids(1, 32)], query=question)
    before = jax.tree.map(np.array, first.encoded)
    second = lm.encode_contexts([ids(2, 40), []], after=first)
    third = lm.encode_contexts([[], ids(3, 32)], after=second)
    whole = lm.encode_contexts([ids(2, 40), [ids(1, 32), ids(3, 32)]], query=question)
    assert (whole.tokens, whole.chunks) == (third.tokens, third.chunks) == ((40, 64), (2, 2))
    assert_same(third, whole)
    jax.tree.map(np.testing.assert_array_equal, before, first.encoded)  # still of use


@pytest.mark.slow
def test_one_context_serves_many_questions(lm):
    found = lm.nll(TOKENS, context=lm.encode_contexts(CONTEXT[:1]), first=12)
    wanted = lm.nll(TOKENS, context=[CONTEXT[0]] * 3, first=12)
    np.testing.assert_allclose(found, wanted, atol=5e-5)


@pytest.mark.slow
def test_another_question_encodes_only_new_nodes(asking, encoded):
    # The second passage is no full chunk, but one of which a half can be encoded alone.
    document, questions = [[ids(8, 32 * 12 + 7), ids(9, 24)]], [[ids(s, 9)] for s in range(1, 5)]
    fresh = 32 * 12 + 7 + 24
    found = asking.encode_contexts(document, query=questions[0])
    again = asking.search_contexts(found, questions[0])
    assert_same(again, found)
    assert sum(m.sum() for m, *_ in encoded) == fresh, "the same question encodes nothing"
    seen = set()
    for question in questions[1:]:
        encoded.clear()
        previous, found = found, asking.search_contexts(found, question)
        assert_same(found, asking.encode_contexts(document, query=question))
        paths = [
            (len(new.tokens), old.path.tolist(), new.path.tolist())
            for old, new in zip(previous.source, found.source, strict=True)
        ]
        wanted = 0
        for size, old, new in paths:
            if old[0] != new[0] or (size % 8 and old != new):
                wanted += size
            elif old != new:
                wanted += size // 2
        assert sum(mask.sum() for mask, *_ in encoded) == wanted + fresh and wanted < fresh
        seen |= {tree.depth for _, _, tree, _ in encoded if tree is not None}
    assert 2 in seen, "some chunks changed below their first level only"


@pytest.mark.slow
def test_new_questions_need_few_programs_and_then_none(asking):
    programs = contexts._encode, contexts._choose, contexts._embed
    found = asking.encode_contexts([ids(8, 32 * 8)], query=[ids(1, 9)])

    def counted(questions):
        nonlocal found
        for question in questions:
            found = asking.search_contexts(found, [question])
        return [program._cache_size() for program in programs]

    before = counted([])
    for level in (1, 2):  # below which 1, 2, 4 or 8 chunks have changed
        for count in (1, 2, 4, 8):
            source = list(found.source)
            for index in range(count):
                path = source[index].path.copy()
                path[level - 1] ^= True
                source[index] = dataclasses.replace(source[index], path=path)
            found = dataclasses.replace(found, source=tuple(source))
            counted([ids(1, 9)])
    every = counted([])
    assert every[0] - before[0] <= 2 * 4 and every[1:] == before[1:]
    assert counted([ids(seed, 9) for seed in range(2, 32)]) == every


@pytest.mark.slow
def test_a_function_chooses_where_no_policy_does(asking):
    def left(level):
        return jnp.zeros(level.left.shape, bool)

    chunk = ids(4, 32)
    chosen = dataclasses.replace(asking.config.memory, policy=left)
    found = asking.with_method(memory=chosen).encode_contexts([chunk])
    options = {"method": "encode", "path": np.zeros((1, 1, 2), bool)}
    tokens, there = np.array([[chunk]]), np.ones((1, 1, 32), bool)
    wanted = asking.model.apply({"params": asking.params}, tokens, there, **options)
    count = int(wanted.mask.sum())
    for own, other in zip(found.encoded.layers, wanted.layers, strict=True):
        for x, y in zip(own, other, strict=True):
            np.testing.assert_allclose(x[:, :, :count], y[:, :, :count], atol=2e-5)
    with pytest.raises(InputError, match="must be a policy, such as Right"):
        dataclasses.replace(chosen, policy=3)


@pytest.mark.slow
def test_a_random_policy_reads_a_text_alike_in_every_row():
    lm, (a, b) = loaded(Random()), ([ids(seed, 32 * 4)] for seed in (8, 9))
    one, other = (lm.encode_contexts(rows).encoded.layers for rows in ([a, b], [b, a]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[::-1], atol=2e-5), one, other)


@pytest.mark.slow
def test_contexts_are_read_as_they_were_encoded_or_refused(asking):
    lm = loaded(Right())
    found = lm.encode_contexts([CONTEXT[0]])
    for change in ({"placement": "top"}, {"positions": "released"}, {"policy": QueryAware()}):
        changed = lm.with_method(memory=dataclasses.replace(lm.config.memory, **change))
        name = next(iter(change))
        with pytest.raises(InputError, match=rf"encoded with model\.memory\.{name}=.*has {name}="):
            changed.nll(TOKENS[:1], context=found, first=12)
        with pytest.raises(InputError, match=f"has {name}="):
            changed.encode_contexts([[]], after=found)
    with pytest.raises(InputError, match="another model"):
        asking.search_contexts(found, [ids(1, 9)])


@pytest.mark.slow
def test_what_is_added_with_a_new_question_searches_all_for_it(asking):
    first = asking.encode_contexts([ids(4, 64)], query=[ids(1, 9)])
    both = asking.encode_contexts([ids(5, 64)], after=first, query=[ids(2, 9)])
    whole = asking.encode_contexts([[ids(4, 64), ids(5, 64)]], query=[ids(2, 9)])
    assert_same(both, whole)
    kept = asking.encode_contexts([[ids(4, 64), ids(5, 64)]], query=[ids(1, 9)])
    assert [c.path.tolist() for c in kept.source] != [c.path.tolist() for c in whole.source]


@pytest.mark.slow
def test_a_random_policy_chooses_the_same_however_chunks_are_put_together():
    lm = loaded(Random())
    document = ids(8, 32 * 6)
    few, whole = (lm.encode_contexts([[document]], batch_tokens=size) for size in (64, None))
    assert_same(few, whole)
    begun = lm.encode_contexts([[document[: 32 * 2]]])
    assert_same(lm.encode_contexts([[document[32 * 2 :]]], after=begun), whole)


@pytest.mark.slow
def test_a_conversation_searches_its_context_for_every_turn(asking):
    talk = Conversation(asking, context=[ids(4, 75)], length=128)
    assert talk.context.needs_query
    for turn, seed in enumerate((1, 2)):
        talk.read(ids(seed, 9))
        said = talk.tokens
        talk.write(GREEDY)
        assert_same(talk.context, asking.encode_contexts([[ids(4, 75)]], query=[said]))
        if turn == 0:
            expected = generated(asking, [said], GREEDY, context=[[ids(4, 75)]])[0]
            assert talk.tokens[len(said) :] == expected
    talk.add_context([ids(5, 32)])
    assert talk.context.chunks == (4,)
    talk.read(ids(3, 5))
    said = talk.tokens
    talk.write(GREEDY)
    document = [[ids(4, 75), ids(5, 32)]]
    assert_same(talk.context, asking.encode_contexts(document, query=[said]))
    talk.write(GREEDY, query=ids(7, 9))
    assert_same(talk.context, asking.encode_contexts(document, query=[ids(7, 9)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: lm.encode_contexts([["a"]], chunk=33), "chunk=33 is more than the 32 tokens"),
        (lambda lm: lm.encode_contexts([["a"]], chunk=20), "chunk=20 must be.*nearest: 16, 24"),
        (lambda lm: lm.encode_contexts([["a"]], query=[[]]), r"query\[0\] is empty"),
        (lambda lm: lm.encode_contexts([["a"]], query="b"), "an entry for each row"),
        (lambda lm: lm.encode_contexts([["a"]], query=["b", "c"]), "each of the 1 rows"),
        (lambda lm: lm.encode_contexts([["a"]]).rows(1, 0), "there is no question yet"),
        (lambda lm: lm.nll(TOKENS, context=[["a"], ["b"]]), "2 rows"),
    ],
)
def test_contexts_that_cannot_be_read_raise_input_error(asking, call, words):
    with pytest.raises(InputError, match=words) as caught:
        call(asking)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 2, 1, 4)], ids=str)
def test_contexts_on_a_mesh_equal_those_of_one_device(asking, sizes):
    spread = sharp_lm(memory=MEMORY, mesh=Mesh(*sizes))
    prompts = [ids(1, 70), ids(2, 5), ids(3, 33)]
    wanted = asking.nll(TOKENS, context=CONTEXT)
    np.testing.assert_allclose(spread.nll(TOKENS, context=CONTEXT), wanted, atol=2e-4)
    context = spread.encode_contexts(CONTEXT, query=prompts)
    assert generated(spread, prompts, GREEDY, context=context) == generated(
        asking, prompts, GREEDY, context=CONTEXT
    )


@pytest.mark.slow
def test_contexts_in_bfloat16_are_near_those_in_float32():
    lm = loaded(Right())
    section = dataclasses.replace(MEMORY, policy=Right())
    half = LanguageModel.load(ModelSection(preset="tiny", memory=section, dtype="bfloat16"))
    half.params = lm.params
    context = half.encode_contexts(CONTEXT)
    assert context.encoded.layers[0][0].dtype == "bfloat16"
    found, wanted = half.nll(TOKENS, context=context), lm.nll(TOKENS, context=CONTEXT)
    assert np.abs(found - wanted).mean() < 0.15 < np.abs(lm.nll(TOKENS) - wanted).mean()
