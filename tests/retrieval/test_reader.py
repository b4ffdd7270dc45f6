"""Reading what a retriever finds equals reading the same passages by hand, however and whenever."""

import dataclasses
import functools
import types
import warnings

import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import GeneratedText, Sampling
from lcjax.memory import CepeSection, RetroSection
from lcjax.retrieval.reader import METHODS, RetrievalReader

GREEDY = Sampling(max_new_tokens=6, min_new_tokens=6)
TEXTS = ("the sea is deep", "a ship sails", "harbour lights", "an old master")


@dataclasses.dataclass
class Store:
    """Finds passages by the letters of a query, and notes the queries."""

    queries: list = dataclasses.field(default_factory=list)

    def search(self, queries, k):
        self.queries += queries
        return [self.hits(query)[:k] for query in queries]

    def hits(self, query):
        scores = [query.count(text[0]) + query.count(text[2]) / 2 for text in TEXTS]
        order = sorted(range(len(TEXTS)), key=lambda n: (-scores[n], n))
        return [hit(TEXTS[n], f"T{n}", scores[n]) for n in order]


class Nothing:
    def search(self, queries, k):
        return [[] for _ in queries]


def hit(text, title, score):
    passage = types.SimpleNamespace(text=text, title=title, id=title)
    return types.SimpleNamespace(passage=passage, score=score)


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(memory=CepeSection(encoder="tiny-encoder", output_share=1.0))


def encoded(lm, hits, *, blank=True):
    end = "\n\n" if blank else ""
    return [lm.tokenizer.encode(f"{h.passage.title}\n{h.passage.text}{end}") for h in hits]


def weights(hits):
    powers = np.exp(np.array([h.score for h in hits], np.float64))
    return powers / powers.sum()


def alone(lm, passage, text, first):
    """-log p of a text from `first` on behind a passage, float64."""
    whole = np.array([[*passage, *text]])
    return lm.nll(whole, first=len(passage) + first)[0, len(passage) + first :].astype(np.float64)


TOKENS = np.array([ids(1, 12), ids(2, 12)])
FIRST = 5


@pytest.mark.parametrize("how", ["rag_token", "mixture", "rag_sequence"])
def test_the_marginals_equal_the_sums_in_float64(lm, how):
    store, options = Store(), {"temperature": 0.5} if how == "mixture" else {}
    nll = RetrievalReader(lm, store, 3, how, **options).nll(TOKENS, first=FIRST)
    assert store.queries == [lm.tokenizer.decode(row[:FIRST].tolist()) for row in TOKENS]
    for row, text, query in zip(nll, TOKENS, store.queries, strict=True):
        hits = store.hits(query)[:3]
        p = weights(hits) if how != "mixture" else weights(
            [hit("", "", h.score / 0.5) for h in hits]
        )  # fmt: skip
        each = np.array([alone(lm, ids, text, FIRST) for ids in encoded(lm, hits)])
        assert not row[:FIRST].any()
        if how == "rag_sequence":
            expected = -np.log(p @ np.exp(-each.sum(1)))
            assert row.sum(dtype=np.float64) == pytest.approx(expected, abs=1e-3)
            of_tokens = -np.log(p @ np.exp(-each)).sum()
            assert abs(of_tokens - expected) > 0.01, "the two marginals differ"
        else:
            np.testing.assert_allclose(row[FIRST:], -np.log(p @ np.exp(-each)), atol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rag_token", "rag_sequence"])
def test_every_token_is_picked_from_the_marginal(lm, how):
    prompts = [ids(8, 7), ids(9, 4)]
    texts = RetrievalReader(lm, Store(), 2, how).generate(prompts, GREEDY)
    for prompt, text in zip(prompts, texts, strict=True):
        hits = text.passages[0].hits
        passages, p = encoded(lm, hits), weights(hits)
        for place, token in enumerate(text.ids):
            rows = [[*passage, *prompt, *text.ids[:place]] for passage in passages]
            logits = [lm.logits(np.array([row]))[0, -1].astype(np.float64) for row in rows]
            probs = np.array([np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in logits])
            mixed = p @ probs
            mixed[list(lm.tokenizer.eos_ids)] = 0
            assert mixed.argmax() == token
            if how == "rag_sequence":
                p = p * probs[:, token]
                p /= p.sum()


@pytest.mark.slow
def test_continuations_of_sequences_count_from_the_end_of_each_prompt(lm):
    prompts, options = [ids(3, 4), ids(4, 7)], [[ids(5, 3), ids(6, 2)], [ids(7, 3)]]
    store = Store()
    results = RetrievalReader(lm, store, 2, "rag_sequence").continuations(prompts, options)
    for prompt, query, row, scores in zip(prompts, store.queries, options, results, strict=True):
        hits = store.hits(query)[:2]
        for option, score in zip(row, scores, strict=True):
            each = [alone(lm, p, prompt + option, len(prompt)).sum() for p in encoded(lm, hits)]
            expected = -np.log(weights(hits) @ np.exp(-np.array(each)))
            assert score.nll.sum(dtype=np.float64) == pytest.approx(expected, abs=1e-3)


def test_text_is_read_behind_the_passages_and_bos_before_them(lm):
    bos, store, text = lm.tokenizer.bos_id, Store(), ids(3, 8)
    tokens = np.array([[bos, *text]])
    (generated,) = RetrievalReader(lm, store, 2).generate(tokens.tolist(), GREEDY)
    (query,) = store.queries
    assert query == lm.tokenizer.decode(text), "BOS is no text"
    best, second = encoded(lm, store.hits(query)[:2])
    (expected,) = lm.generate([[bos, *second, *best, *text]], GREEDY)
    assert generated == expected and generated.ids == expected.ids
    titles = [hit.passage.title for hit in generated.passages[0].hits]
    assert titles == [hit.passage.title for hit in store.hits(query)[:2]]
    reader = RetrievalReader(lm, store, 2, passage_tokens=3)
    # BOS alone is no query.
    np.testing.assert_array_equal(reader.nll(tokens, first=1), lm.nll(tokens, first=1))
    hits, blank = store.hits(lm.tokenizer.decode(text[:3]))[:2], lm.tokenizer.encode("\n\n")
    best, second = ([*ids[:3], *blank] for ids in encoded(lm, hits, blank=False))
    expected = alone(lm, [bos, *second, *best], text, 3)
    np.testing.assert_allclose(reader.nll(tokens, first=4)[0, 4:], expected, atol=1e-4)


def test_generated_texts_have_the_searches_that_they_were_read_with(lm):
    (generated,) = RetrievalReader(lm, Store(), 2, when=4).generate(["harbour"], GREEDY)
    assert [search.num_tokens for search in generated.passages] == [0, 4]
    (whole,) = RetrievalReader(lm, Store(), 2).generate(["harbour"], GREEDY)
    assert [search.query for search in whole.passages] == ["harbour"]


@pytest.mark.slow_except("input", "mixture", "rag_sequence", "rag_token")
@pytest.mark.parametrize("how", METHODS)
def test_strides_equal_reading_all_of_it_again(lm, how):
    prompts, store = [ids(8, 7), ids(9, 40)], Store()
    reader = RetrievalReader(lm, store, 2, how, when=4, query_tokens=6)
    texts = reader.generate(prompts, GREEDY)
    once = RetrievalReader(lm, Store(), 2, how)
    for prompt, text in zip(prompts, texts, strict=True):
        whole = list(prompt)
        for start, search in zip((0, 4), text.passages, strict=True):
            query = lm.tokenizer.decode(whole[-6:])
            assert search[0] == query and search.num_tokens == start
            assert search.hits and [h.score for h in search.hits] == [
                h.score for h in store.hits(query)[:2]
            ]
            size = min(4, 6 - start)
            stride = Sampling(max_new_tokens=size, min_new_tokens=size)
            whole += once.generate([whole], stride, queries=[query])[0].ids
        assert tuple(whole[len(prompt) :]) == text.ids and text.finish == "length"
    nll = reader.nll(TOKENS, first=3, lengths=np.array([12, 6]))
    for row, length in zip(range(2), (12, 6), strict=True):
        expected = np.zeros(12)
        for start in range(3, length, 4):
            stop = min(start + 4, length)
            hits = store.hits(lm.tokenizer.decode(TOKENS[row, max(start - 6, 0) : start].tolist()))
            fixed = types.SimpleNamespace(search=lambda queries, k, hits=hits: [hits[:k]])
            reread = RetrievalReader(lm, fixed, 2, how, query_tokens=6)
            part = reread.nll(TOKENS[row : row + 1, :stop], first=start)
            expected[start:stop] = part[0, start:]
        np.testing.assert_allclose(nll[row], expected, atol=3e-4)


def test_stops_and_seeds_of_strides_are_those_of_one_text(lm):
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=(3, 4))
    reader = RetrievalReader(lm, Nothing(), when=2)
    first, second = reader.generate([ids(8, 7), ids(9, 4)], sampling)
    again = reader.generate([ids(9, 4)], dataclasses.replace(sampling, seed=(4,)))
    assert again[0].ids == second.ids, "a text draws alike alone and in a batch"
    assert len(set(zip(first.ids[::2], first.ids[1::2]))) > 1
    (greedy,) = reader.generate([ids(8, 7)], GREEDY)
    stop = str(greedy)[2:4]
    (cut,) = reader.generate([ids(8, 7)], dataclasses.replace(GREEDY, stop=(stop,)))
    (expected,) = lm.generate([ids(8, 7)], dataclasses.replace(GREEDY, stop=(stop,)))
    assert (str(cut), cut.ids, cut.finish) == (str(expected), expected.ids, expected.finish)


@pytest.mark.parametrize("how", METHODS)
def test_without_hits_the_reader_is_the_model_bit_by_bit(lm, how):
    prompts, options = [ids(8, 7), ids(9, 4)], [[ids(1, 2)], [ids(2, 3), ids(3, 1)]]
    for store, k, when in ((Store(), 0, "once"), (Nothing(), 2, "once"), (Nothing(), 2, 3)):
        reader = RetrievalReader(lm, store, k, how, when)
        np.testing.assert_array_equal(reader.nll(TOKENS, first=2), lm.nll(TOKENS, first=2))
        if when == "once":
            texts, plain = reader.generate(prompts, GREEDY), lm.generate(prompts, GREEDY)
            assert texts == plain and [t.ids for t in texts] == [t.ids for t in plain]
            pairs = zip(reader.continuations(prompts, options), lm.continuations(prompts, options))
            for row, expected in pairs:
                for one, other in zip(row, expected, strict=True):
                    np.testing.assert_array_equal(one.nll, other.nll)
    assert Store().queries == []


def test_the_memory_reads_hits_as_chunks(lm):
    store = Store()
    reader = RetrievalReader(lm, store, 2, "context")
    tokens = TOKENS[:1]
    nll, (query,) = reader.nll(tokens, first=FIRST), store.queries
    context = encoded(lm, store.hits(query)[:2], blank=False)
    np.testing.assert_array_equal(nll, lm.nll(tokens, first=FIRST, context=[context]))
    assert not np.array_equal(nll, lm.nll(tokens, first=FIRST))
    fid = RetrievalReader(lm, store, 2, "fid", query_tokens=3).nll(tokens, first=FIRST)
    query = lm.tokenizer.decode(tokens[0, FIRST - 3 : FIRST].tolist())
    assert store.queries[-1] == query
    head = lm.tokenizer.encode(f"{query}\n")
    context = [head + ids for ids in encoded(lm, store.hits(query)[:2], blank=False)]
    np.testing.assert_array_equal(fid, lm.nll(tokens, first=FIRST, context=[context]))


@functools.cache
def retro():
    return sharp_lm(memory=RetroSection(chunk=4, neighbour_tokens=40, output_share=1.0))


def test_retro_reads_the_passages_of_every_complete_chunk():
    lm, store = retro(), Store()
    reader = RetrievalReader(lm, store, 2, "context")
    # The last chunk of the first row ends with the row, and predicts nothing.
    actual = reader.nll(TOKENS, first=FIRST, lengths=np.array([12, 11]))
    parts = [TOKENS[row, n : n + 4] for row in (0, 1) for n in (0, 4)]
    assert store.queries == [lm.tokenizer.decode(part.tolist()) for part in parts]
    hits = [encoded(lm, store.hits(query)[:2], blank=False) for query in store.queries]
    options = {"first": FIRST, "lengths": np.array([12, 11])}
    expected = lm.nll(TOKENS, context=[hits[:2], hits[2:]], **options)
    np.testing.assert_array_equal(actual, expected)
    foreign = reader.nll(TOKENS, searched=TOKENS[::-1], **options)
    expected = lm.nll(TOKENS, context=[hits[2:], hits[:2]], **options)
    np.testing.assert_array_equal(foreign, expected)
    assert not np.array_equal(actual, foreign)
    assert not np.array_equal(actual, lm.nll(TOKENS, **options))


@pytest.mark.slow
def test_generated_chunks_read_the_passages_of_the_previous_chunk():
    lm, store, prompts = retro(), Store(), [ids(8, 7), ids(9, 2)]
    reader = RetrievalReader(lm, store, 2, "context")
    for prompt, text in zip(prompts, reader.generate(prompts, GREEDY), strict=True):
        row = [*prompt, *text.ids]
        chunks = [row[n : n + 4] for n in range(0, len(row) - 4, 4)]
        assert [s.query for s in text.passages] == [lm.tokenizer.decode(c) for c in chunks]
        hits = [encoded(lm, search.hits, blank=False) for search in text.passages]
        for place in range(len(prompt), len(row)):
            context = [hits[: place // 4]] if place >= 4 else None
            logits = lm.logits(np.array([row[:place]]), context=context)[0, -1]
            logits[list(lm.tokenizer.eos_ids)] = -np.inf
            assert logits.argmax() == row[place]
        numbers = [search.num_tokens for search in text.passages]
        assert all(
            len(prompt) + n >= 4 * (u + 1) > len(prompt) + n - 4 or n == 0
            for u, n in enumerate(numbers)
        )
    (row,) = reader.continuations([prompts[0]], [[list(text.ids)]])
    alone = reader.nll(np.array([[*prompts[0], *text.ids]]), first=7)[0, 7:]
    np.testing.assert_array_equal(row[0].nll, alone)


@pytest.mark.slow
def test_passages_may_be_those_of_other_texts(lm):
    for how in METHODS:
        store = Store()
        actual = RetrievalReader(lm, store, 2, how).nll(TOKENS, first=FIRST, searched=TOKENS[::-1])
        queries = [lm.tokenizer.decode(row[:FIRST].tolist()) for row in TOKENS[::-1]]
        assert store.queries == queries

        class Swapped(Store):
            def search(self, queries, k):
                return super().search(queries[::-1], k)

        if how != "fid":  # whose chunks have the query
            expected = RetrievalReader(lm, Swapped(), 2, how).nll(TOKENS, first=FIRST)
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: RetrievalReader(retro(), Store(), how="context", when=4), "for every 4 tokens"),
        (lambda lm: Conversation(retro(), retriever=Store()), "searches once for a message"),
        (
            lambda lm: RetrievalReader(retro(), Store(), how="context").generate(
                ["a"], queries=["b"]
            ),
            "queries=1 texts",
        ),
        (lambda lm: RetrievalReader(lm, Store(), k=-1), "k=-1"),
        (lambda lm: RetrievalReader(lm, Store(), how="front"), "how='front'"),
        (lambda lm: RetrievalReader(lm, Store(), when=0), "when=0"),
        (lambda lm: RetrievalReader(lm, Store(), how="rag_token", temperature=2.0), "leave it out"),
        (lambda lm: RetrievalReader(lm, Store(), how="mixture", temperature=0.0), "temperature=0"),
        (lambda lm: RetrievalReader(lm, Store(), passage_tokens=0), "passage_tokens=0"),
        (lambda lm: RetrievalReader(lm, Store(), when=4).generate(["a"], queries=["b"]), "queries"),
        (lambda lm: RetrievalReader(lm, Store()).generate("a"), "prompts='a' must be a list"),
        (lambda lm: RetrievalReader(lm, "store"), "retriever='store' has no search"),
        (lambda lm: Conversation(lm, retriever="store"), "retriever='store' has no search"),
        (lambda lm: Replug(lm, marginal="word"), "marginal='word'"),
    ],
)
def test_invalid_arguments_raise_input_error(lm, call, words):
    with pytest.raises(InputError, match=words) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("scores", "is_flat"), [((0.03, 0.02), True), ((0.9, 0.5), False)])
def test_scores_that_make_all_weights_alike_are_a_warning(lm, scores, is_flat):
    hits = [hit(text, "", score) for text, score in zip(TEXTS, scores)]
    store = types.SimpleNamespace(search=lambda queries, k: [hits for _ in queries])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("input", "mixture", "rag_token", "rag_sequence"):
            RetrievalReader(lm, store, 2, how).nll(TOKENS[:1], first=FIRST)
    messages = [str(w.message) for w in caught if "count nearly alike" in str(w.message)]
    assert len(messages) == (3 if is_flat else 0)


@pytest.mark.parametrize("how", ["input", "mixture", "rag_sequence", "context"])
def test_passages_that_make_a_text_too_long_are_one_warning(lm, how, monkeypatch):
    """The tiny model was trained with 128 tokens. What it says of a text does not matter."""
    for scorer in (LanguageModel, Replug):
        monkeypatch.setattr(scorer, "nll", lambda *_, **__: 0)
        monkeypatch.setattr(
            scorer, "generate", lambda _, rows, *__, **___: [GeneratedText("")] * len(rows)
        )
        monkeypatch.setattr(scorer, "continuations", lambda *_, **__: [])
    hits = [hit(text * 4, "", score) for text, score in zip(("quiet harbour", "a horse"), (3, 1))]
    store = types.SimpleNamespace(search=lambda queries, k: [hits[:k] for _ in queries])
    size = sum(map(len, encoded(lm, hits))) if how == "input" else len(encoded(lm, hits)[0])
    size -= 1 + (how == "input")  # the line breaks after titles
    few = Sampling(max_new_tokens=4, min_new_tokens=4)

    def messages(other=lm, num_tokens=129 - size, length=None):
        reader = RetrievalReader(other, store, 2, how, length=length)
        tokens = ids(3, num_tokens)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            reader.nll(np.array([tokens]), first=num_tokens - 4)
            reader.generate([tokens[:-4], tokens[:-3]], few)
            reader.continuations([tokens[:-2]] * 2, [[ids(4, 3)]] * 2)
            reader.continuations([tokens[:-2]], [[ids(4, 3)]])
        return [str(w.message) for w in caught if "longer than the 128 tokens" in str(w.message)]

    assert not messages(num_tokens=128 - size)
    if how == "context":  # a memory reads chunks of its own
        assert not messages()
    else:
        (message,) = messages()
        assert message.startswith(f"how={how}, k=2: ") and "lower k or passage_tokens" in message
    # A method that was set up for longer texts, and a text that is too long by itself
    assert not messages(lm.with_method(length=200))
    assert not messages(length=200)
    assert not messages(num_tokens=140)


def test_a_memory_is_needed_for_a_context():
    lm = LanguageModel.load(ModelSection(preset="tiny"))
    with pytest.raises(InputError, match="no memory"):
        RetrievalReader(lm, Store(), how="context")


def test_a_retriever_that_returns_too_few_lists_raises_input_error(lm):
    few = types.SimpleNamespace(search=lambda queries, k: [[]])
    with pytest.raises(InputError, match="returned 1 lists of hits for 2 queries"):
        RetrievalReader(lm, few).generate(["sea", "ship"], GREEDY)
