"""Prompts of typed segments: what is counted, what is cut, what goes beside the decoder."""

import types

import numpy as np
import pytest
from evaluation_support import BlankInFront, ByteTokenizer, NotingModel

from lcjax.checkpoints.tokenizer import encode_mid_text
from lcjax.errors import InputError
from lcjax.evaluation.prompt import Budget, PromptEncoder, Segment, cut_text, fit
from lcjax.evaluation.split import ContextSplit, ReplugSplit, generate
from lcjax.generation.sampling import Sampling

TOKENIZER = ByteTokenizer()


def segments(*documents, demo=()):
    return [
        Segment("instruction", "Be brief.Read."),
        *(Segment("context_doc", text) for text in documents),
        *(Segment("demo", text) for text in demo),
        Segment("question", "\nWho?"),
        Segment("answer_prefix", "\nAnswer:"),
    ]


def text(prompt, tokenizer=TOKENIZER):
    return tokenizer.decode(prompt.ids)


def slice_of(prompt, span):
    return TOKENIZER.decode(prompt.ids[span.start : span.stop])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("none", "Be brief.Read. one two\nWho?\nAnswer:"),
        ("chat", "[user]Be brief.Read. one two\nWho?[end][assistant]\nAnswer:"),
    ],
)
def test_segments_stand_in_their_turns_behind_one_bos(template, expected):
    prompt = PromptEncoder(TOKENIZER, template).prompt(segments(" one", " two"))
    assert text(prompt) == expected
    assert prompt.ids[0] == TOKENIZER.bos_id and (prompt.ids == TOKENIZER.bos_id).sum() == 1
    joined = np.concatenate([prompt.ids[s.start : s.stop] for s in prompt.spans])
    np.testing.assert_array_equal(joined, prompt.ids)
    assert [slice_of(prompt, s) for s in prompt.spans if s.kind == "context_doc"] == [
        " one",
        " two",
    ]


def test_a_text_cannot_end_a_turn_and_blanks_in_front_are_written_once():
    prompt = PromptEncoder(TOKENIZER, "chat").prompt([Segment("context_doc", "<s> a"), *segments()])
    assert (prompt.ids == 0).sum() == 1 and "<s> a" in text(prompt)
    found = PromptEncoder(BlankInFront(), "chat").prompt(segments("one"))
    assert text(found).count(" ") == 1  # the one in "Be brief."


def test_blanks_at_the_end_of_a_piece_go_in_front_of_the_next_word():
    found = PromptEncoder(TOKENIZER).prompt(
        [Segment("instruction", "Read: "), Segment("context_doc", "one")]
    )
    assert [slice_of(found, span) for span in found.spans] == ["", "Read:", " one"]
    last = PromptEncoder(TOKENIZER).prompt([Segment("answer_prefix", "are: ")])
    assert text(last) == "are: "


def test_ids_stand_as_they_are_and_may_not_hold_bos():
    ids = encode_mid_text(TOKENIZER, "xyz")
    prompt = PromptEncoder(TOKENIZER).prompt([Segment("context_doc", ids=ids), *segments()])
    assert prompt.start("context_doc") > 0 and "xyz" in text(prompt)
    with pytest.raises(InputError, match="hold BOS"):
        PromptEncoder(TOKENIZER).prompt([Segment("context_doc", ids=[0, 5])])
    with pytest.raises(InputError, match="kind='story'"):
        Segment("story", "once")


def test_a_budget_names_the_parts_that_it_counts():
    prompt = PromptEncoder(TOKENIZER, "chat").prompt(segments("one"))
    whole = Budget(500, 20)
    assert whole.used(prompt) == len(prompt.ids) + 20 and whole.left(prompt) == 500 - whole.used(
        prompt
    )
    assert whole.counts == "bos+template+prompt+answer_prefix+new"
    ruler = Budget(500, 20, bos=False)
    assert ruler.used(prompt) == whole.used(prompt) - 1
    longbench = Budget(500, 20, bos=False, prompt_only=True)
    assert longbench.used(prompt) == len("Be brief.Read.one\nWho?\nAnswer:")
    assert longbench.counts == "prompt+answer_prefix"


@pytest.mark.parametrize(
    ("how", "head", "tail"), [("middle", 25, 24), ("left", 0, 49), ("right", 49, 0)]
)
@pytest.mark.parametrize("template", ["none", "chat"])
def test_documents_are_cut_and_nothing_else(how, head, tail, template):
    letters = "".join(chr(97 + i % 26) for i in range(80))
    docs = letters[:30], letters[30:]
    whole = PromptEncoder(TOKENIZER, template).prompt(segments(*docs))
    budget = Budget(len(whole.ids) - 31 + 8, 8)
    found = fit(whole, budget, TOKENIZER, how)
    assert budget.used(found) == budget.length and found.truncated == 31
    assert letters[:head] + letters[80 - tail :] in text(found)
    for kind in ("instruction", "question", "answer_prefix", "template", "bos"):
        assert found.tokens(kind) == whole.tokens(kind)
    kept = whole.start("context_doc") + head
    np.testing.assert_array_equal(found.ids[:kept], whole.ids[:kept])
    assert fit(found, budget, TOKENIZER, how) is found


@pytest.mark.parametrize("document", ["äöü€🙂" * 30, "日本語" * 60, "\ufffd" * 99])
@pytest.mark.parametrize("how", ["middle", "left", "right"])
def test_no_character_is_split(document, how):
    whole = PromptEncoder(TOKENIZER).prompt(segments(document))
    for over in range(1, 40):
        budget = Budget(len(whole.ids) - over, 0)
        found = fit(whole, budget, TOKENIZER, how)
        assert budget.length - 6 <= budget.used(found) <= budget.length
        if "\ufffd" not in document:
            assert "\ufffd" not in text(found)


def test_a_budget_that_the_rest_exceeds_names_the_least_length_that_works():
    whole = PromptEncoder(TOKENIZER).prompt(segments("x" * 50))
    least = len(whole.ids) - 50 + 7
    with pytest.raises(InputError, match=f"mine.*at least {least}"):
        fit(whole, Budget(least - 1, 7), TOKENIZER, "middle", "mine")
    assert fit(whole, Budget(least, 7), TOKENIZER, "middle").truncated == 50
    with pytest.raises(InputError, match=f"at least {least + 50}"):
        fit(whole, Budget(least, 7), TOKENIZER, "refuse")


def test_longbenchs_own_cut_keeps_both_halves_of_the_text_and_counts_bos():
    assert cut_text(TOKENIZER, "x" * 99, 100) == ("x" * 99, 0)
    found, lost = cut_text(TOKENIZER, "abcdefghij" * 10, 50)
    assert found == ("abcdefghij" * 10)[:24] + ("abcdefghij" * 10)[-25:] and lost == 51


def read(ids):
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("kept", "chunks", "unread"),
    [(None, ["a" * 4, "a" * 8, "b" * 5], 0), (1, ["b" * 5], 12), (0, [], 17)],
)
def test_the_earliest_documents_go_beside_and_instruction_and_question_stay(kept, chunks, unread):
    prompt = PromptEncoder(TOKENIZER).prompt(segments("a" * 12, "b" * 12, demo=["c" * 5]))
    model, decoder = NotingModel(), len(prompt.ids) + 6 - 17
    split = ContextSplit(decoder=decoder, chunk=8, chunks=kept).reader(model, 100)
    generate(split, [prompt], Sampling(max_new_tokens=6))
    (((ids,), ((context,), _), _),) = model.given
    assert ids[0] == 0 and len(ids) + 6 == decoder
    assert read(ids) == "Be brief.Read." + "b" * 7 + "c" * 5 + "\nWho?\nAnswer:"
    assert [read(chunk) for chunk in context] == chunks
    assert split.num_unread(len(prompt.ids) + 6, prompt.movable) == unread


def test_a_decoder_without_room_for_instruction_and_question_raises_input_error():
    prompt = PromptEncoder(TOKENIZER).prompt(segments("a" * 12))
    fixed = len(prompt.ids) - 12 + 6
    split = ContextSplit(decoder=fixed - 1, chunk=8).reader(NotingModel(), 100)
    with pytest.raises(InputError, match="leaves no room"):
        generate(split, [prompt], Sampling(max_new_tokens=6))
    split = ContextSplit(decoder=fixed, chunk=8).reader(NotingModel(), 100)
    generate(split, [prompt], Sampling(max_new_tokens=6))


def test_replug_reads_every_passage_behind_the_instruction(monkeypatch):
    given = {}

    def write(prompts, sampling, context, scores):
        given.update(prompts=prompts, context=context, scores=scores)
        return [""] * len(prompts)

    fake = types.SimpleNamespace(generate=write)
    monkeypatch.setattr("lcjax.evaluation.split.Replug", lambda *_: fake)
    prompt = PromptEncoder(TOKENIZER).prompt(segments("a" * 12, "b" * 4))
    short = PromptEncoder(TOKENIZER).prompt(segments("b"))
    decoder = len(prompt.ids) + 2 - 14
    split = ReplugSplit(decoder=decoder, chunk=8).reader(NotingModel(), 100)
    generate(split, [prompt, short], Sampling(max_new_tokens=2))
    first, second = given["prompts"]
    assert read(first) == "bb\nWho?\nAnswer:" and second == short.ids.tolist()
    head = "Be brief.Read."
    assert [read(p) for p in given["context"][0]] == [head + "a" * 4, head + "a" * 8, head + "bb"]
    assert given["context"][0][0][0] == 0 and given["context"][1] == []
    assert given["scores"] == [[0.0] * 3, []], "chunks of a document count alike"


def question(count=4, scores=None):
    """Two demonstrations with a passage each, `count` passages and a question."""
    demos = [Segment("demo", f"<demo{n}>") for n in range(2)]
    scores = scores or [None] * count
    passages = [Segment("passage", f"<pass{n}>", score=scores[n]) for n in range(count)]
    parts = [Segment("instruction", "Read."), *demos, *passages, Segment("question", "Who?")]
    return PromptEncoder(TOKENIZER).prompt(parts)


HEAD = "Read.<demo0><demo1>"


@pytest.mark.parametrize(
    ("settings", "text", "chunks"),
    [
        # Shorter than its decoder: who reads what depends on no length.
        ({"decoder_passages": 2}, "<pass0><pass1>", ["<pass2>", "<pass3>"]),
        ({"decoder_passages": 0}, "", [f"<pass{n}>" for n in range(4)]),
        ({}, "<pass0><pass1><pass2><pass3>", []),
        ({"decoder_passages": 1, "chunks": 1}, "<pass0>", ["<pass1>"]),
        # 24 characters, BOS and 3 new tokens leave the decoder space for one passage and a half.
        ({"decoder": 38}, "<pass0>", ["<pass1>", "<pass2>", "<pass3>"]),
    ],
)
def test_the_decoder_reads_demonstrations_and_the_best_passages_and_the_memory_whole_others(
    settings, text, chunks
):
    prompt, model = question(), NotingModel()
    split = ContextSplit(**{"decoder": 80, "chunk": 8, **settings}).reader(model, 200)
    generate(split, [prompt], Sampling(max_new_tokens=3))
    (((ids,), ((context,), _), _),) = model.given
    assert read(ids) == HEAD + text + "Who?" and ids[0] == 0
    assert [read(chunk) for chunk in context] == chunks
    unread = len(prompt.ids) - len(ids) - sum(map(len, context))
    size, in_decoder = len(prompt.ids) + 3, text.count("<")
    assert split.num_unread(size, prompt.movable, prompt.passages) == unread
    assert split.num_decoder_passages(size, prompt.passages) == in_decoder


def test_demonstrations_that_leave_the_decoder_no_room_raise_input_error():
    split = ContextSplit(decoder=27, chunk=8).reader(NotingModel(), 200)
    with pytest.raises(InputError, match="leaves no room"):
        generate(split, [question()], Sampling(max_new_tokens=4))


@pytest.mark.parametrize(
    ("scores", "weights"), [([3.0, 1.0, 2.5], [3.0, 1.0, 2.5]), ([3.0, None, 2.0], [0.0] * 3)]
)
def test_every_pass_of_replug_has_the_demonstrations_and_one_passage(monkeypatch, scores, weights):
    given = {}

    def write(prompts, sampling, context, scores):
        given.update(prompts=prompts, context=context, scores=scores)
        return [""]

    fake = types.SimpleNamespace(generate=write)
    monkeypatch.setattr("lcjax.evaluation.split.Replug", lambda *args: given.update(a=args) or fake)
    split = ReplugSplit(decoder=80, chunk=8, temperature=0.5, marginal="sequence").reader(
        NotingModel(), 200
    )
    generate(split, [question(3, scores)], Sampling(max_new_tokens=2))
    assert [read(ids) for ids in given["prompts"]] == ["Who?"]
    assert [read(p) for p in given["context"][0]] == [f"{HEAD}<pass{n}>" for n in range(3)]
    assert given["scores"] == [weights] and given["a"][1:] == (0.5, 1, "sequence")
