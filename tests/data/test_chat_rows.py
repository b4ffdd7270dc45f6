"""Rows of conversations: the ids of the rendered text, and the tokens of answers learned."""

import functools
import json
from collections import Counter

import numpy as np
import pytest
from chat_forms import FORMS, KINDS, chat_tokenizer
from data_support import rows_of

from lcjax.data import ChatSource, DataConfig, make_loader
from lcjax.data.chat import ChatTokenise, PromptAnswer, answer_spans
from lcjax.errors import InputError

SOURCE = ChatSource("x.jsonl")
TEXTS = (
    "When? ", " At seven.\n", "🙂 Zürich <b>", "a", "", "seven {x}", "user", "\n\n12 \\n", "日本語",
    "  ",
)  # fmt: skip


def talk(*contents, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def talks():
    """Conversations of one to five questions, of blanks, emoji and nothing."""
    for count, system in ((1, None), (5, None), (3, " kind")):
        contents = [TEXTS[(i * 3 + count) % len(TEXTS)] for i in range(2 * count)]
        yield talk(*contents, system=system)


@functools.cache
def spans_of_talks(form):
    """For each of the talks where its answers are, or None if the template refuses it."""
    spans, render = [], chat_tokenizer("byte level", form).render_chat
    for messages in talks():
        try:
            spans.append(spans_by_prefixes(render, messages))
        except InputError:  # the template refuses a system message
            spans.append(None)
    return spans


def spans_by_prefixes(render, messages):
    """Where each answer is, by the definition; None if the template changes earlier turns."""
    text, spans = render(messages, False), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            before, after = render(messages[:index], True), render(messages[: index + 1], False)
            if not after.startswith(before) or not text.startswith(after):
                return None
            spans.append((len(before), len(after)))
    return spans


def learned_by_definition(tokenizer, ids, token_spans, answers):
    """Which tokens have a part of an answer, up to its last EOS."""
    learned = np.zeros(len(ids), bool)
    for first, stop in answers:
        inside = [
            i
            for i, (a, b) in enumerate(token_spans)
            if (a < stop and b > first) or first <= a == b < stop
        ]
        ends = [i for i in inside if ids[i] in tokenizer.eos_ids]
        learned[[i for i in inside if not ends or i <= ends[-1]]] = True
    return learned


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_chat_are_the_ids_of_the_rendered_text(kind):
    results = Counter()
    for form in FORMS:
        tokenizer = chat_tokenizer(kind, form)
        for messages, answers in zip(talks(), spans_of_talks(form), strict=True):
            if answers is None:
                with pytest.raises(InputError, match=r"^x:1: (the chat template changes|chat_tem)"):
                    ChatTokenise(tokenizer, SOURCE)("x:1", messages)
                results[form, False] += 1
                continue
            ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", messages)
            text = tokenizer.render_chat(messages, False)
            assert ids.tolist() == tokenizer.encode(text, allow_special=True)
            spans = tokenizer.encode_chat(messages, False).spans
            expected = learned_by_definition(tokenizer, ids, spans, answers)
            np.testing.assert_array_equal(learned, expected)
            results[form, True] += 1
    assert all(results[form, True] for form in FORMS)
    assert {form for form in FORMS if results[form, False]} == {"qwen3", "mistral1", "mistral3"}


def test_what_is_learned_reads_as_the_answers():
    messages = talk("When?", "At seven.", "And boats?", "At nine.")
    for kind, form, expected in (
        ("byte level", "chatml", "At seven.<|im_end|>At nine.<|im_end|>"),
        ("byte level", "llama2", " At seven. </s> At nine. </s>"),
        ("byte level", "phi3", "At seven.<|end|>At nine.<|end|>"),
        ("byte level", "vicuna", " At seven.</s> At nine.</s>"),
        ("byte level", "generation", "At seven.<|im_end|>At nine.<|im_end|>"),
    ):
        tokenizer = chat_tokenizer(kind, form)
        ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", messages)
        assert tokenizer.decode(ids[learned]) == expected


@pytest.mark.parametrize("form", sorted({*FORMS} - {"qwen3"}))
def test_a_long_conversation_is_rendered_a_few_times(form):
    tokenizer, count = chat_tokenizer("byte level", form), []

    def render(*args, **variables):
        count.append(1)
        return tokenizer.render_chat(*args, **variables)

    messages = talk(*(f"{TEXTS[i % 4]}{i}" for i in range(60)))
    if form == "chatml":
        for i in range(1, 60, 2):
            arguments = {"place": f"bay {i}", "depth": [i, i / 2, True]}
            call = {"id": f"{i:09}", "function": {"name": "f", "arguments": arguments}}
            messages[i] = messages[i] | {"reasoning_content": f"so {i}", "tool_calls": [call]}
    answers = list(range(1, 60, 2))
    text = tokenizer.render_chat(messages, False)
    expected = spans_by_prefixes(tokenizer.render_chat, messages)
    assert answer_spans(render, messages, text, answers) == expected
    assert len(count) <= 7


def test_weights_choose_answers_also_of_templates_that_change_earlier_turns():
    messages = talk("Q", "wrong answer", "again", "right answer")
    for form in ("chatml", "generation", "llama2", "qwen3"):
        tokenizer = chat_tokenizer("byte level", form)
        for key, no, yes in (("weight", 0, 1), ("train", False, True), ("loss", 0.0, 1.0)):
            weighted = [{**messages[1], key: no}, {**messages[3], key: yes}]
            chat = [messages[0], weighted[0], messages[2], weighted[1]]
            ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", chat)
            text = tokenizer.decode(ids[learned])
            assert "right answer" in text and "wrong" not in text and "again" not in text
            assert "wrong answer" in tokenizer.decode(ids)
    everything = ChatSource("x.jsonl", learn="all")
    tokenizer = chat_tokenizer("byte level", "chatml")
    ids, learned = ChatTokenise(tokenizer, everything)("x:1", chat)
    text = tokenizer.decode(ids[learned])
    assert "wrong" not in text and "again" in text and "right" in text
    for fields, match in (
        ({"role": "user", "content": "Q", "weight": 1}, "weight=1 of a message with the role user"),
        ({"role": "assistant", "content": "A", "weight": 0.5}, "weight=0.5 .* must be 0 or 1"),
        ({"role": "assistant", "content": "A", "train": "no"}, "train='no' .* must be 0 or 1"),
    ):
        with pytest.raises(InputError, match=match):
            ChatTokenise(tokenizer, SOURCE)("x:1", [messages[0], fields])


def test_special_tokens_typed_in_messages_stay_text_in_rows():
    tokenizer = chat_tokenizer("byte level", "chatml")
    messages = talk("Hi<|im_end|>", "At nine<|im_end|> or ten.")
    ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", messages)
    assert sum(ids == tokenizer.eos_ids[0]) == 3  # the template's, of the system message too
    assert tokenizer.decode(ids[learned]) == "At nine<|im_end|> or ten.<|im_end|>"
    special = ChatSource("x.jsonl", allow_special=True)
    ids, _ = ChatTokenise(tokenizer, special)("x:1", messages)
    assert sum(ids == tokenizer.eos_ids[0]) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_answer_are_one_text(kind):
    tokenizer = chat_tokenizer(kind, "chatml")
    for prompt, answer in (("Q: x\nA:", " At seven."), ("Q: ", "At"), ("Q🙂", "🙂 a"), ("Q", "")):
        pair = PromptAnswer(prompt, answer)
        ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", pair)
        assert ids.tolist() == tokenizer.encode(prompt + answer)
        spans = tokenizer.spans(prompt + answer)
        area = [(len(prompt), len(prompt + answer))]
        expected = learned_by_definition(tokenizer, ids, spans, area)
        np.testing.assert_array_equal(learned, expected)
        assert learned.any() == bool(answer)
    ids, learned = ChatTokenise(tokenizer, SOURCE)("x:1", PromptAnswer(np.array([5, 6]), "a"))
    assert ids[:2].tolist() == [5, 6] and learned.tolist() == [False] * 2 + [True] * (len(ids) - 2)


def read(tmp_path, *records, tokenizer=None, suffix=".jsonl", **options):
    """The texts of rows of records, and what is learned of each."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow.parquet")
        pyarrow.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = tokenizer or chat_tokenizer("byte level", "chatml")
    config = DataConfig(
        sources=[ChatSource(str(path), **options)], length=256, pack="single", shuffle=False,
        repeat=1, overlong="truncate",
    )  # fmt: skip
    rows = rows_of(config, tokenizer)
    texts = []
    for row in range(len(rows["tokens"])):
        tokens = rows["tokens"][row][rows["segments"][row] > 0]
        learned = rows["targets"][row][rows["weights"][row] > 0]
        texts.append((tokenizer.decode(tokens), tokenizer.decode(learned)))
    return texts


CALL = {"type": "function", "function": {"name": "depth", "arguments": {"place": "bay"}}}
TOOL = {"type": "function", "function": {"name": "depth", "description": "<how deep>"}}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_all_that_messages_carry_reaches_the_template(tmp_path, suffix):
    messages = [
        {"role": "user", "content": "Q", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "9", "tool_call_id": "1"},
        {"role": "assistant", "content": "Nine."},
    ]
    records = {"messages": messages, "tools": [TOOL]}, {"messages": messages, "tools": []}
    tokenizer = chat_tokenizer("byte level", "chatml")
    texts = read(tmp_path, *records, suffix=suffix)
    for record, (text, learned) in zip(records, texts, strict=True):
        assert text == tokenizer.render_chat(messages, False, tools=record["tools"])
        call = '<call>{"name": "depth", "arguments": {"place": "bay"}}</call>'
        assert learned == f"<think>hm</think>{call}<|im_end|>Nine.<|im_end|>"
    assert TOOL["function"]["description"] in texts[0][0]


def test_other_ways_to_write_a_conversation_are_read(tmp_path):
    question, answer = talk("Q", "A")
    as_json = {**CALL, "function": {"name": "depth", "arguments": '{"place": "bay"}'}}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    parts = [{"type": "text", "text": "A"}]
    sharegpt = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    call_text = {"from": "function_call", "value": json.dumps(CALL["function"])}
    render = chat_tokenizer("byte level", "chatml").render_chat
    for record, messages, variables in (
        ({"messages": sharegpt}, [question, answer], {}),
        ({"messages": [question, {"role": "Assistant", "content": "A"}]}, [question, answer], {}),
        ({"messages": [question, {"role": "model", "content": parts}]}, [question, answer], {}),
        ({"messages": [question, called | {"tool_calls": [as_json]}]}, [question, called], {}),
        ({"messages": [sharegpt[0], call_text]}, [question, called], {}),
        ({"messages": sharegpt, "tools": json.dumps([TOOL])}, [question, answer],
         {"tools": [TOOL]}),
        ({"messages": sharegpt, "system": "S"}, talk("Q", "A", system="S"), {}),
        ({"messages": [question, {"role": "critic", "content": "C"}, answer]},
         [question, {"role": "critic", "content": "C"}, answer], {}),
    ):  # fmt: skip
        ((text, learned),) = read(tmp_path, record)
        assert text == render(messages, False, **variables)
        assert learned.endswith("<|im_end|>") and len(learned) > len("<|im_end|>")
    kwargs = {"messages": sharegpt, "chat_template_kwargs": {"tools": [TOOL]}}
    assert read(tmp_path, kwargs)[0][0] == render([question, answer], False, tools=[TOOL])


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "Bard", "content": "A"}]},
         r"a.jsonl:1: no message has the role assistant, the roles are user, Bard: rename"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
         r"a.jsonl:1: message 1: content has .*image.*only parts of type text"),
        ({"messages": talk("Q", "A"), "tools": "["}, "a.jsonl:1: field 'tools' is not JSON"),
        ({"messages": talk("Q", "A"), "tools": {"a": 1}}, "field 'tools' is no list of objects"),
        ({"messages": talk("Q", "A"), "chat_template_kwargs": {"messages": []}},
         "a.jsonl:1: chat_template_kwargs: messages is no variable"),
        ({"messages": talk("Q", None)}, "message 2 has content, role, not role and content"),
        ({"messages": [*talk("Q"), {"from": "function_call", "value": "f(x)"}]},
         "message 2: function_call is not JSON"),
        ({"messages": [*talk("Q"), {"from": "function_call", "value": "3"}]},
         r"message 2: function_call holds \[3\], no object"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"},
         "has no field 'messages'; it has chosen, prompt, rejected"),
    ],
)  # fmt: skip
def test_conversations_that_would_lose_something_are_refused(tmp_path, record, match):
    with pytest.raises(InputError, match=match) as caught:
        read(tmp_path, record)
    assert "\n" not in str(caught.value)


def test_a_position_in_rows_of_other_ids_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk("Q", "A")}) + "\n")
    config = DataConfig(sources=[ChatSource(str(path))], length=16, repeat=None)
    state = (loader := make_loader(config, chat_tokenizer("byte level", "chatml"), 1)).get_state()
    loader.set_state(state)
    old = json.loads(json.dumps(state).replace("; ids of the whole text", ""))
    assert old != state
    with pytest.raises(InputError, match="restore it, or start the data again"):
        loader.set_state(old)


def test_a_list_is_no_text_of_a_prompt(tmp_path):
    record = {"q": talk("Q"), "output": "A"}
    with pytest.raises(InputError, match=r"a.jsonl:1: field 'q' holds a list, not text"):
        read(tmp_path, record, prompt="{q}")


def test_conversations_without_anything_to_learn_are_named(tmp_path, capsys):
    long = talk("Q" * 300, "A")
    records = [talk("Q"), [], talk("Q", "A"), long, [{**talk("Q", "A")[1]}]]
    assert len(read(tmp_path, *({"messages": messages} for messages in records))) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert sorted(line.split(" (")[0] for line in lines) == [
        "left out a.jsonl:1: no answer to learn",
        "left out a.jsonl:2: no answer to learn",
        "left out a.jsonl:4: no answer in its first data.length=256 tokens",
        "left out a.jsonl:5: no answer to learn",
    ]
