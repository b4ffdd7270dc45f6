"""Needles in a haystack, looked at token by token, and what their answers are worth."""

import functools
import json
import re
import types

import benchmark_support
import numpy as np
import pytest
from benchmark_support import TOKENIZER
from evaluation_support import BigramModel, ByteTokenizer

from lcjax.errors import InputError
from lcjax.evaluation.corpus import SentenceEnds, TokenizedCorpus
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.needles import Haystack, Niah, depth_grid

ESSAY = "One sentence is short. Another one, which follows it, is rather longer! Is a third one? "
TEXTS = [("a", ESSAY * 20), ("b", "Here begins the second text. " * 30), ("c", "tiny")]


plan = functools.partial(benchmark_support.plan, texts=TEXTS)


@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("needle", ["random", "kamradt"])
@pytest.mark.parametrize("length", [700, 3001])
def test_a_needle_follows_a_sentence_in_a_prompt_of_full_length(length, needle, template):
    units = plan(Niah(depths=5, trials=2, needle=needle, template=template), length)
    assert len(units) == 10
    for unit in units:
        assert len(unit.tokens) + 50 == unit.fields["size"] == length
        assert unit.tokens[0] == 0 and (unit.tokens == 0).sum() == 1
        text, sentence = TOKENIZER.decode(unit.tokens), unit.fields["needle"]
        assert text.count(sentence) == 1 and unit.fields["references"][0] in sentence
        start = unit.fields["needle_start"]
        assert TOKENIZER.decode(unit.tokens[start:]).startswith(" " + sentence)
        before = TOKENIZER.decode(unit.tokens[:start])
        assert re.search(r"([.!?]|\n\n)$", before) or unit.fields["depth"] == 1


def test_depths_are_even_up_to_a_sentence_and_the_last_one_is_the_end():
    units = plan(Niah(depths=11), 4000)
    spans = [next(s for s in u.prompt.spans if s.kind == "context_doc") for u in units]
    starts = [u.fields["needle_start"] - s.start for u, s in zip(units, spans)]
    assert starts == sorted(starts) and starts[0] == 0
    for unit, span, start in zip(units, spans, starts):
        room = span.stop - span.start - len(unit.fields["needle"]) - 1
        assert 0 <= unit.fields["depth"] * room - start <= 60
    text = TOKENIZER.decode(units[-1].tokens)
    assert f"{units[-1].fields['needle']}\n\nQuestion:" in text


# Hundredths of a percent in the names of LLMTest_NeedleInAHaystack's results for Claude 2.1 at
# 1,000 tokens (original_results/Anthropic_Original_Results): the first 27 of 35, and the last one.
CLAUDE_DEPTHS = (
    0, 89, 119, 160, 213, 284, 378, 501, 661, 868, 1131, 1462, 1868, 2356, 2926, 3570, 4270, 5000,
    5730, 6429, 7073, 7643, 8131, 8538, 8868, 9131, 9338, 10000,
)  # fmt: skip


def test_depths_on_a_sigmoid_are_those_of_the_published_run():
    depths = depth_grid(35, "sigmoid")
    names = [int(round(depth * 1e5) / 10) for depth in depths]  # the names cut further digits off
    assert (*names[:27], names[-1]) == CLAUDE_DEPTHS
    np.testing.assert_allclose(np.add(depths, depths[::-1]), 1, atol=1e-9)
    assert depth_grid(5, "linear") == [0, 0.25, 0.5, 0.75, 1]
    assert [depth_grid(1, spacing) for spacing in ("linear", "sigmoid")] == [[0.5], [0.5]]


def test_needles_are_hidden_at_depths_on_a_sigmoid():
    units = plan(Niah(depths=7, depth_spacing="sigmoid"), 4000)
    assert [unit.fields["depth"] for unit in units] == depth_grid(7, "sigmoid")
    starts = [unit.fields["needle_start"] for unit in units]
    even = [unit.fields["needle_start"] for unit in plan(Niah(depths=7), 4000)]
    assert starts == sorted(starts) and starts[1] < even[1] and starts[-2] > even[-2]
    with pytest.raises(InputError, match=r"tasks\.0\.depth_spacing='even' must be one of linear"):
        plan(Niah(depth_spacing="even"), 4000)


def test_the_haystack_is_the_documents_in_order_and_begins_again():
    haystack = Haystack(TokenizedCorpus(TEXTS, TOKENIZER), 10**6)
    whole = TOKENIZER.decode(haystack.first(5000))
    once = ESSAY * 20 + "\n\n" + TEXTS[1][1] + "\n\n"
    assert whole == (once * 3)[:5000]
    with pytest.raises(InputError, match="no document of the haystack"):
        Haystack(TokenizedCorpus(TEXTS[2:], TOKENIZER), 100)


def test_only_the_documents_that_a_length_needs_are_tokenised():
    class Counting(ByteTokenizer):
        def encode(self, text, *, allow_special=False):
            assert "second" not in text, "the first document is enough"
            return super().encode(text, allow_special=allow_special)

    assert plan(Niah(depths=2), 1500, tokenizer=Counting())


def test_the_same_seed_gives_the_same_needles_with_other_settings():
    def values(**fields):
        seed = fields.pop("seed", 0)
        found = plan(Niah(**fields), 1500, seed=seed)
        return {(u.fields["depth"], u.fields["trial"]): u.fields["references"][0] for u in found}

    more, fewer = values(depths=3, trials=3), values(depths=2, trials=1)
    assert {key: more[key] for key in fewer} == fewer
    assert len(set(more.values())) == 9 and values(depths=2, trials=1, seed=1) != fewer


def test_answers_are_scored_by_the_value_and_by_words():
    task = Niah(depths=1)
    (unit,) = plan(task, 1000)
    value = unit.fields["references"][0]
    right = task.score_answer(f" {value}.", unit, TOKENIZER)
    assert right["value_match"] == 1 and 0 < right["rouge1_f"] < 1
    whole = task.score_answer(unit.fields["needle"], unit, TOKENIZER)
    assert right["word_recall"] == right["word_recall_lceg"] == 1
    assert set(whole.values()) == {1.0}
    assert set(task.score_answer("no idea", unit, TOKENIZER).values()) == {0.0}


def test_the_share_of_found_needles_comes_from_the_records():
    model, task = BigramModel(trained=1000), Niah(depths=5, trials=2)
    cells, records = [], []
    for length in (700, 3000):
        units = plan(task, length)
        found = [
            {"method": "fake", "length": length, **u.fields, **score}
            for u, score in zip(units, task.score(model, units, len(units)))
        ]
        records += found
        cells.append({"method": "fake", "length": length, "trained": 1000, **task.summarise(found)})
    # The fake repeats the last number that it sees.
    assert cells[0]["value"] == 1.0 and 0 < cells[1]["value"] < 0.6
    found = task.aggregates(cells, records)["fake"]
    assert found["mean_within_trained"] == 1.0
    assert found["mean"] == pytest.approx(np.mean([c["value"] for c in cells]), abs=1e-4)


@pytest.mark.parametrize("end", ["\u3002", "\uff01", "\uff1f", ""])
def test_depths_are_those_asked_for_in_a_text_without_latin_sentence_ends(end):
    sentence = f"some words without an end{end}"
    ids = [ord(character) for character in sentence * 40]
    haystack = Haystack(TokenizedCorpus(TEXTS, TOKENIZER), 100)
    haystack._ends_sentence = SentenceEnds(
        types.SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    )
    for depth in (0.25, 0.5, 0.77):
        index = haystack.sentence_end(ids, depth)
        assert 0 <= int(depth * len(ids)) - index < len(sentence)
        assert not end or ids[index - 1] == ord(end)
    assert haystack.sentence_end(ids, 0.0) == haystack.sentence_end(ids, 0.01) - 10 * (not end) == 0


@pytest.mark.parametrize("name", ["value", "answer"])
def test_an_empty_text_that_every_answer_contains_raises_input_error(name, tmp_path):
    texts = {"instruction": "Read.", "sentence": "The {key} is {value}.", "question": "What?"}
    texts |= {"answer_prefix": "It is", "value": "{value}", "answer": "is {value}"}
    (tmp_path / "wording.json").write_text(json.dumps(texts | {name: " "}))
    task = Niah(wording=str(tmp_path / "wording.json"))
    with pytest.raises(InputError, match=f"wording.json: {name} is empty"):
        task.check(Limits((1000,)), "tasks.0")
