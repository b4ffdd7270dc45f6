"""The tokenizer protocol: special strings, streaming, chat templates, identity."""

import json
import pickle
import time

import pytest
from convert_support import TEXTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import lcjax.checkpoints.tokenizer as protocol
from lcjax.checkpoints import ByteTokenizer, TextStream, chat_template, load_tokenizer
from lcjax.checkpoints.chat_template import render_template
from lcjax.checkpoints.tokenizer import JsonTokenizer, Specials
from lcjax.errors import InputError

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def backend(merges=(("h", "e"),)):
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(m) for m in merges]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return made


def tokenizer(**changes):
    ids = backend().get_vocab()
    fields = {
        "bos_id": ids["<s>"],
        "eos_ids": (ids["<|im_end|>"],),
        "pad_id": ids["<|pad|>"],
        "chat_template": TEMPLATE,
    }
    return JsonTokenizer(backend(), Specials(**fields | changes))


@pytest.fixture(params=["bytes", "json"])
def any_tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else tokenizer()


def test_every_tokenizer_follows_the_protocol(any_tokenizer):
    assert isinstance(any_tokenizer, protocol.Tokenizer)
    for text in TEXTS:
        ids = any_tokenizer.encode(text)
        assert any_tokenizer.decode(ids) == text
        assert all(0 <= i < any_tokenizer.vocab_size for i in ids)
        assert any_tokenizer.bos_id not in ids and any_tokenizer.eos_ids[0] not in ids
        spans = any_tokenizer.spans(text)
        assert len(spans) == len(ids) and all(a <= b for a, b in spans)
        characters = {i for a, b in spans for i in range(a, b)}
        assert characters == set(range(len(text)))


def test_special_strings_in_a_text_are_text_unless_asked_otherwise():
    t = tokenizer()
    ids = t.encode("a<|im_end|>b")
    assert t.eos_ids[0] not in ids and t.decode(ids, skip_special=True) == "a<|im_end|>b"
    special = t.encode("a<|im_end|>b", allow_special=True)
    assert special[1:-1] == list(t.eos_ids)
    assert t.encode("a<|im_end|>b") == ids  # the other mode left nothing behind
    assert t.decode(special) == "a<|im_end|>b" and t.decode(special, skip_special=True) == "ab"
    assert ByteTokenizer().encode("a</s>", allow_special=True) == [97, 257]
    assert ByteTokenizer().decode([97, 257]) == "a</s>"
    assert ByteTokenizer().decode([97, 257], skip_special=True) == "a"


def test_a_worker_process_keeps_special_strings_text():
    t = tokenizer()
    t.encode("warm")
    copy = pickle.loads(pickle.dumps(t))
    assert copy.encode("<|im_end|>") == t.encode("<|im_end|>") != [t.eos_ids[0]]
    assert copy.fingerprint == t.fingerprint


def test_an_id_that_no_token_has_is_named():
    with pytest.raises(InputError, match="id=259 must be below 259"):
        ByteTokenizer().decode([65, 259])


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_whole_characters_and_make_the_text(any_tokenizer, text):
    stream = TextStream(any_tokenizer)
    pieces = [*map(stream.push, any_tokenizer.encode(text)), stream.finish()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_shows_a_character_only_when_it_is_complete():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert [stream.push(0xF0), stream.finish()] == ["", "\ufffd"]
    assert [stream.push(0xF0), stream.push(97)] == ["", "\ufffda"]  # never became one
    assert TextStream(ByteTokenizer()).push(257) == ""


def test_a_saved_tokenizer_comes_back_the_same(tmp_path):
    t = tokenizer(add_bos=True, max_length=77)
    t.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == t.fingerprint
    for name in ("bos_id", "eos_ids", "pad_id", "add_bos", "vocab_size"):
        assert getattr(again, name) == getattr(t, name)
    messages = [{"role": "user", "content": "hi"}]
    assert again.render_chat(messages) == t.render_chat(messages)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 77


def test_settings_of_the_folder_are_kept_and_other_files_may_name_ids(tmp_path):
    t = tokenizer()
    t.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer", "other": 1}
    settings["eos_token"] = {"content": "<|im_end|>", "lstrip": False}
    del settings["chat_template"], settings["add_bos_token"]
    file.write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    again = load_tokenizer(tmp_path)
    assert again.eos_ids == (*t.eos_ids, 5, 6)
    assert again.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    again.save(tmp_path)
    kept = json.loads(file.read_text())
    assert (kept["tokenizer_class"], kept["other"]) == ("Qwen2Tokenizer", 1)


def test_an_added_token_without_a_row_is_left_out_with_a_warning(tmp_path):
    made = backend()
    rows = made.get_vocab_size()
    made.add_special_tokens([AddedToken("<new>", special=True, normalized=False)])
    JsonTokenizer(made, Specials(pad_id=rows)).save(tmp_path)
    assert load_tokenizer(tmp_path).pad_id == rows
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows, "eos_token_id": rows}))
    with pytest.warns(UserWarning, match=rf"left out 1 added tokens \(<new> = {rows}\)"):
        tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (None, (), rows)
    tokenizer.save(tmp_path / "again")
    assert "<new>" not in (tmp_path / "again" / "tokenizer_config.json").read_text()
    assert load_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint


def test_tokens_that_only_the_older_file_names_are_found(tmp_path):
    t = tokenizer()
    t.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"})
    )
    again = load_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_ids) == (t.bos_id, t.eos_ids)


def test_whether_texts_start_with_bos_is_read_from_the_post_processor(tmp_path):
    made = backend()
    bos = made.token_to_id("<s>")
    tokenizer().save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).add_bos is False
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    again = load_tokenizer(tmp_path)
    assert again.add_bos is True and bos not in again.encode("text")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_tokenizer_file_is_named(tmp_path, name):
    tokenizer().save(tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text()[:-20])
    with pytest.raises(InputError, match=f"{name}: not .*truncated"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_to_copy(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer\.json and no tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_fingerprints_differ_when_ids_differ():
    other = JsonTokenizer(backend(merges=(("h", "e"), ("l", "l"))), Specials())
    cut = backend()
    cut.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    prints = [t.fingerprint for t in (tokenizer(), other, JsonTokenizer(cut, Specials()))]
    assert len({*prints, ByteTokenizer().fingerprint}) == 4


def test_templates_are_rendered_as_transformers_does():
    text = tokenizer().render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    source = "{{ bos_token }}{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}"
    assert (
        render_template(source, [{"content": "<é>"}], bos_token="<s>")
        == '<s>  {"content": "<é>"}\n'
    )
    assert render_template("{{ strftime_now('%Y') | length }}", []) == "4"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "chat_template: roles must alternate"),
        ("{% for %}", "chat_template: "),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_input_error(template, words):
    with pytest.raises(InputError, match=words):
        render_template(template, [{"role": "user", "content": "x"}])


DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = GROWN %}{% endfor %}"
)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
HUGE = 10**11
RUNAWAYS = [
    NESTED.replace("BODY", ""),
    NESTED.replace("BODY", "{{ i }}"),
    NESTED.replace("BODY", "text"),
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for m in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
    *(
        DOUBLING.replace("GROWN", grown)
        for grown in (
            "ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x] | join",
            "ns.x | replace('a', ns.x)", "ns.x.replace('a', ns.x)", "ns.x.join([ns.x, ns.x])",
            "'%s%s' % (ns.x, ns.x)", "'{0}{0}'.format(ns.x)", "'%s%s' | format(ns.x, ns.x)",
        )
    ),
    DOUBLING.replace("GROWN", "[ns.x, ns.x]") + "{{ ns.x }}",
    DOUBLING.replace("GROWN", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    f"{{{{ 'a' * {HUGE} }}}}",
    f"{{{{ ['a'] * {HUGE} }}}}",
    f"{{{{ 9 ** {HUGE} }}}}",
    f"{{{{ 'a' | center({HUGE}) }}}}",
    f"{{{{ 'a'.ljust({HUGE}) }}}}",
    f"{{{{ 'a\nb' | indent({HUGE}) }}}}",
    f"{{{{ '%{HUGE}d' % 5 }}}}",
    f"{{{{ '%*d' % ({HUGE}, 5) }}}}",
    f"{{{{ '{{:{HUGE}}}'.format(5) }}}}",
    f"{{{{ [1] | tojson(indent={HUGE}) }}}}",
    f"{{{{ range({HUGE}) | list }}}}",
]  # fmt: skip


# With a tenth of the budget a template must be stopped in a tenth of the time.
@pytest.mark.parametrize(
    ("template", "share"),
    [(RUNAWAYS[0], 1.0)]
    + [(template, 0.1) for template in RUNAWAYS]
    + [pytest.param(template, 1.0, marks=pytest.mark.slow) for template in RUNAWAYS[1:]],
)
def test_a_template_that_loops_or_grows_is_stopped(monkeypatch, template, share):
    monkeypatch.setattr(chat_template, "_BUDGET", share * chat_template._BUDGET)
    start = time.thread_time()
    with pytest.raises(InputError, match="chat_template: ") as error:
        render_template(template, [{"role": "user", "content": "x"}])
    assert time.thread_time() - start < 15 * share and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'other' as other %}",
        "{% from 'other' import m %}",
        "{% extends 'other' %}",
        "{% if false %}{% include 'x' ignore missing %}{% endif %}",
    ],
)
def test_a_template_that_reads_another_file_is_refused(template):
    with pytest.raises(InputError, match="chat_template: line 1 reads another file"):
        render_template(template, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + 5 }}",
        "{{ 1 / 0 }}",
        "{{ messages[99]['content'] }}",
        "{{ missing.attribute }}",
        "{{ 'a' | no_such_filter }}",
        "{" * 10_000,
        "{{ " + "(" * 10_000,
    ],
)
def test_whatever_a_template_raises_is_one_line(template):
    with pytest.raises(InputError, match="chat_template: ") as error:
        render_template(template, [{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_a_long_conversation_is_rendered():
    source = (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% if loop.index0 == messages |"
        " length - 1 %}[end]{% endif %}{{ '<' ~ m.role + '>' }}{{ m.content | trim }}{% set ns.last"
        " = m.content.split('</think>')[-1].replace('a', 'b') %}{{ m | tojson }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"turn {n} " + "a" * 200} for n in range(1000)]
    assert len(render_template(source, messages)) > 400_000
    long = [{"role": "user", "content": "a" * 3_000_000}]
    assert len(render_template(source, long)) > 6_000_000


def test_byte_chat_is_plain_text():
    chat = ByteTokenizer().render_chat([{"role": "user", "content": "hi"}])
    assert chat == "user: hi\nassistant: "
