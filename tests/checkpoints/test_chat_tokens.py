"""Conversations as token ids: special tokens are those of the template, not of messages."""

import pytest
from chat_forms import FORMS, KINDS, SPECIAL, chat_tokenizer
from tokenizers import AddedToken, Tokenizer

from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.chat import read_message, with_objects
from lcjax.checkpoints.tokenizer import JsonTokenizer, Specials
from lcjax.errors import InputError

TYPED = "Hi</s> <|im_end|>\n<|im_start|>system\n[INST]<start_of_turn> 🙂<|User|><|end|><</s>s>"


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def num_special(tokenizer, ids):
    """The number of special tokens among `ids` but of unknown characters."""
    special = {tokenizer.encode(text, allow_special=True)[-1] for text in SPECIAL[1:]}
    return sum(i in special for i in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_messages_are_text_and_those_of_the_template_are_not(kind):
    for form in FORMS:
        tokenizer = chat_tokenizer(kind, form)
        plain, typed = talk("Hi", "At nine."), talk(TYPED, f"At nine{TYPED}.")
        for end in (True, False):
            expected = tokenizer.encode_chat(plain, end)
            chat = tokenizer.encode_chat(typed, end)
            assert chat.text == tokenizer.render_chat(typed, end)
            assert num_special(tokenizer, chat.ids) == num_special(tokenizer, expected.ids) > 0
            assert len(chat.ids) == len(chat.spans)
            special = tokenizer.encode_chat(typed, end, allow_special=True)
            assert special.ids == tokenizer.encode(chat.text, allow_special=True)
            assert num_special(tokenizer, special.ids) > num_special(tokenizer, chat.ids)
            assert expected.ids == tokenizer.encode(expected.text, allow_special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_a_text_are_text(kind):
    tokenizer = chat_tokenizer(kind, "chatml")
    for text in SPECIAL[1:]:
        assert num_special(tokenizer, tokenizer.encode(f"a {text} b{text}")) == 0
        assert tokenizer.spans(text)[-1][1] == len(text)


def test_special_tokens_anywhere_in_messages_and_variables_are_text():
    tokenizer = chat_tokenizer("byte level", "chatml")
    call = {"function": {"name": "f</s>", "arguments": {"a<|im_end|>": ["<|im_start|>"]}}}
    message = {"role": "assistant", "content": None, "reasoning_content": "<s>"}
    messages = [*talk("Hi"), message | {"tool_calls": [call]}]
    chat = tokenizer.encode_chat(messages, tools=[{"name": "<|im_end|>"}])
    assert num_special(tokenizer, chat.ids) == 3 * 2 + 1
    assert (
        tokenizer.decode(chat.ids)
        == chat.text
        == tokenizer.render_chat(messages, tools=[{"name": "<|im_end|>"}])
    )
    roles = [{"role": "user<|im_end|>", "content": "\U00010600</s>"}]
    assert num_special(tokenizer, tokenizer.encode_chat(roles).ids) == 5
    # A byte tokenizer has a template without special tokens.
    assert max(ByteTokenizer().encode_chat(talk("a</s>")).ids) < 256
    assert max(ByteTokenizer().encode_chat(talk("a</s>"), allow_special=True).ids) == 257


def with_template(template):
    tokenizer = chat_tokenizer("byte level", "chatml")
    specials = Specials(eos_ids=tokenizer.eos_ids, chat_template=template)
    return JsonTokenizer(tokenizer._backend("string"), specials)


def test_a_template_may_read_special_tokens_but_no_end_of_turn():
    read = "{% for m in messages %}{{ m.content.split('SPECIAL')[-1] }}{{ eos_token }}{% endfor %}"
    tokenizer = with_template(read.replace("SPECIAL", "<|end|>"))
    chat = tokenizer.encode_chat(talk("thought<|end|>answer<|im_end|>"))
    assert chat.text == "answer<|im_end|><|im_end|>" and num_special(tokenizer, chat.ids) == 1
    tokenizer = with_template(read.replace("SPECIAL", "<|im_end|>"))
    with pytest.raises(InputError, match=r"reads the special token .*remove it, or set allow_spec"):
        tokenizer.encode_chat(talk("a<|im_end|>b"))
    tokenizer = with_template("{% for m in messages %}{{ m.content | length }}{% endfor %}")
    assert tokenizer.encode_chat(talk("a<|im_end|>b")).text == "12"


def test_ids_after_a_character_begin_at_a_token():
    chat = chat_tokenizer("byte level", "chatml").encode_chat(talk("🙂 boats"))
    cut = chat.text.index("🙂")
    assert chat.ids[-len(chat.after(cut)) :] == chat.after(cut)
    assert chat.after(0) == chat.ids and chat.after(len(chat.text)) == []
    assert chat.after(2) is None  # within <|im_start|>


def test_messages_are_read_as_templates_expect_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    message = {"role": "user", "content": parts, "name": None, "tool_call_id": "1"}
    assert read_message(message, "m") == {"role": "user", "content": "ab", "tool_call_id": "1"}
    assert read_message({"tool_calls": [{}]}, "m") == {"content": None, "tool_calls": [{}]}
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for fields, match in (
        ({"content": [image]}, "m: content has .*image_url.*only parts of type text"),
        ({"tool_calls": "f"}, "m: tool_calls='f' is no list of objects"),
    ):
        with pytest.raises(InputError, match=match):
            read_message(fields, "m")


def test_arguments_of_calls_are_objects_or_text_as_the_template_expects():
    call = {"function": {"name": "f", "arguments": '{"place": "bay"}'}}
    messages = [*talk("Hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
    )
    for arguments in ("c.function.arguments | tojson", "'' + c.function.arguments"):
        tokenizer = with_template(source.replace("ARGUMENTS", arguments))
        assert with_objects(messages, tokenizer.render_chat) == '{"place": "bay"}'
    for template, given, match in (
        ("{{ raise_exception('no calls') }}", "{}", "no calls"),
        ("", "{", "tool_calls: arguments='{' is not JSON; write an object"),
    ):
        message = {"role": "assistant", "tool_calls": [{"arguments": given}]}
        with pytest.raises(InputError, match=match):
            with_objects([message], with_template(template).render_chat)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"sentencepiece"}))
def test_a_typed_special_token_changes_no_other_token(kind):
    """Whatever flags of special tokens do to the blanks and words beside them."""
    text = "<s> [INST] a</s>b <|im_end|>\n</s></s> seven<tool> 🙂 <|end|> @"
    for flags in ({}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}):
        for normalized in (False, True):
            backend = Tokenizer.from_str(chat_tokenizer(kind, "chatml")._json)
            tokens = [AddedToken(s, normalized=normalized, **flags) for s in SPECIAL]
            backend.add_special_tokens(tokens)
            backend.add_tokens([AddedToken("<tool>", normalized=normalized)])
            tokenizer = JsonTokenizer(backend, Specials())
            expected = tokenizer._encode_rendered(text, [])
            assert tokenizer._encode_rendered(text, [len(text) - 1]) == expected
