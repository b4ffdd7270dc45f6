"""The tokenizer protocol: special strings, streaming, chat templates, identity."""

import contextlib
import json
import os
import pickle
import threading
import time
import warnings

import numpy as np
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


@pytest.mark.parametrize("files", ["list", "jinja"])
def test_with_tools_the_template_named_tool_use_is_used_and_all_are_saved(tmp_path, files):
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
    tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if files == "list":
        settings["chat_template"] = [{"name": k, "template": t} for k, t in templates.items()]
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(templates["tool_use"])
    file.write_text(json.dumps(settings))
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    message = [{"role": "user", "content": "hi"}]
    for folder in (tmp_path, tmp_path / "saved"):
        t = load_tokenizer(folder)
        assert t.render_chat(message) == t.render_chat(message, tools=None) == "hi"
        assert t.render_chat(message, tools=[{}, {}]) == "2 tools"
    t = tokenizer(chat_template={"rag": "x", "tool_use": "y"})
    with pytest.raises(InputError, match="only templates named rag, tool_use"):
        t.render_chat(message)


PLACES = {
    "added_tokens_decoder": {"added_tokens_decoder": {"261": {"content": "<new>"}}},
    "additional_special_tokens": {"additional_special_tokens": ["<new>"]},
    "extra_special_tokens": {"extra_special_tokens": ["<new>"]},
    "extra_special_tokens by name": {"extra_special_tokens": {"audio_token": "<new>"}},
    "pad_token": {"pad_token": {"content": "<new>", "__type": "AddedToken"}},
    "image_token": {"image_token": "<new>"},
    "added_tokens.json": {"<new>": 261},
    "special_tokens_map.json": {"eos_token": "<new>"},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_token_that_any_file_adds_is_one_token(tmp_path, place):
    tokenizer().save(tmp_path)
    is_file = place.endswith(".json")
    file = tmp_path / (place if is_file else "tokenizer_config.json")
    values = {} if is_file else json.loads(file.read_text())
    file.write_text(json.dumps(values | PLACES[place]))
    t = load_tokenizer(tmp_path)
    assert t.vocab_size == 262
    assert t.encode("a<new>", allow_special=True)[1:] == [261]
    if place == "special_tokens_map.json":
        assert t.eos_ids == (261,)  # it comes first, as in transformers
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 261}')
    with pytest.warns(UserWarning, match="left out 1 added tokens"):
        assert load_tokenizer(tmp_path).vocab_size == 261


def test_the_post_processor_of_a_saved_tokenizer_adds_bos(tmp_path):
    """transformers 5 ignores `add_bos_token` beside a tokenizer.json."""
    ByteTokenizer().save(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == [256, 97]
    assert load_tokenizer(tmp_path).add_bos


def test_byte_tokenizers_of_older_versions_have_bos_without_a_post_processor(tmp_path):
    ByteTokenizer().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    again = load_tokenizer(tmp_path)
    assert again.add_bos and again.fingerprint == ByteTokenizer().fingerprint


def test_of_several_definitions_of_a_new_token_the_last_one_decides(tmp_path):
    tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    strips = {"content": "<new>", "lstrip": True, "__type": "AddedToken"}
    for definitions, is_stripped in (
        ({"pad_token": strips, "mask_token": "<new>"}, False),
        ({"pad_token": "<new>", "mask_token": strips}, True),
        ({"mask_token": strips, "extra_special_tokens": ["<new>"]}, False),
    ):
        file.write_text(json.dumps(settings | definitions))
        ids = load_tokenizer(tmp_path).encode("a <new>", allow_special=True)
        assert len(ids) == 3 - is_stripped


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
    # transformers 5 would replace the pre-tokenizer for another class
    assert (kept["tokenizer_class"], kept["other"]) == ("PreTrainedTokenizerFast", 1)


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


UNREADABLE = "tokenizer.json: not a readable tokenizer"
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        *((name, slice(-20), f"{name}: not .*truncated") for name in (JSON, CONFIG)),
        # Of the normalizers the package panics at the first and refuses the others.
        *(
            (JSON, {"normalizer": {"type": kind, **fields}}, UNREADABLE)
            for kind, fields in (
                ("Precompiled", {"precompiled_charsmap": "AAAA"}),
                ("Precompiled", {"precompiled_charsmap": "BAAAAAAAAAA="}),
                ("Replace", {"pattern": {"String": ""}, "content": "b"}),
            )
        ),
        (JSON, {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}}, UNREADABLE),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("additional_chat_templates/a.jinja", b"\xff", "a.jinja is not UTF-8"),
        (CONFIG, b'{"chat_template": "\xff"}', "tokenizer_config.json: not JSON"),
        (CONFIG, b'{"bos_token": "\\ud800"}', "surrogates not allowed"),
    ],
    ids=str,
)
def test_damaged_files_are_named(tmp_path, name, content, match):
    tokenizer().save(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if isinstance(content, slice):
        content = file.read_bytes()[content]
    elif isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content).encode()
    file.write_bytes(content)
    with pytest.raises(InputError, match=match):
        load_tokenizer(tmp_path).encode("abc")


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
        render_template(source, [{"content": "<é>"}], bos_token="<s>").text
        == '<s>  {"content": "<é>"}\n'
    )
    assert render_template("{{ strftime_now('%Y') | length }}", []).text == "4"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "chat_template: roles must alternate"),
        ("{% for %}", "chat_template: "),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        *(
            (template, "chat_template: line 1 reads another file")
            for template in (
                "{% include '/etc/passwd' %}", "{% import 'other' as other %}",
                "{% from 'other' import m %}", "{% extends 'other' %}",
                "{% if false %}{% include 'x' ignore missing %}{% endif %}",
            )
        ),
        *(
            (template, "chat_template: ")
            for template in (
                "{{ messages[0]['content'] + 5 }}", "{{ 1 / 0 }}",
                "{{ messages[99]['content'] }}", "{{ missing.attribute }}",
                "{{ 'a' | no_such_filter }}", "{" * 10_000, "{{ " + "(" * 10_000,
            )
        ),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_reaches_out_is_an_input_error(template, words):
    with pytest.raises(InputError, match=words) as error:
        render_template(template, [{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_no_template_reaches_an_object_of_python():
    for expression in (
        "lipsum.__globals__", "cycler.__init__.__globals__.os.popen('id').read()",
        "joiner.__init__.__globals__['os']", "namespace.__init__.__globals__",
        "namespace(__class__=1)", "(messages | attr('__class__')).x", "self.__init__.__globals__",
        "''['format']('{0.__class__.x}', messages)", "'{0.__class__.x}'.format(messages)",
        "'{0.__class__}' | format(messages) | replace('{0.__class__}', '')",
        "messages | map(attribute='__class__.x') | list | first | length",
            "messages[0].pop('role')",
        "raise_exception.__globals__", "strftime_now.__code__", "dict.__subclasses__()",
        "''.__class__.__mro__[1].__subclasses__()", "messages.append.__globals__", "dict.mro()",
        "(messages | tojson).__class__.x", "loop.__class__", "cycler(1).__class__.__mro__",
    ):  # fmt: skip
        with contextlib.suppress(InputError):
            text = render_template(f"{{{{ {expression} }}}}", [{"role": "user"}]).text
            assert text == "", expression


DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = GROWN %}{% endfor %}"
)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
HUGE = 10**11
# The system bounds time and memory of all operations alike: a few of each kind.
RUNAWAYS = [
    NESTED.replace("BODY", ""),
    NESTED.replace("BODY", "{{ i }}"),
    NESTED.replace("BODY", "text"),
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for m in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
    *(
        DOUBLING.replace("GROWN", grown)
        for grown in ("ns.x ~ ns.x", "[ns.x, ns.x] | join", "ns.x | replace('a', ns.x)")
    ),
    DOUBLING.replace("GROWN", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "{% set _ = __step__(-10**15) %}" + NESTED.replace("BODY", ""),  # no name is special
    *(
        f"{{{{ {expression} }}}}"
        for expression in (
            f"'a' * {HUGE}", f"['a'] * {HUGE}", f"9 ** {HUGE}", "(9 ** (9 ** 7)) | string | length",
            f"'a' | center({HUGE})", "('a ' * 10**7) | wordwrap(1)", f"'%{HUGE}d' % 5",
            f"[1] | tojson(indent={HUGE})", f"range({HUGE}) | list", f"lipsum(n={HUGE})",
            "cycler(*range(99999)) and ('ab' * 10**8).translate({97: 'x' * 10**4})",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("template", RUNAWAYS)
def test_a_template_that_loops_or_grows_is_stopped(monkeypatch, template):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(InputError, match="chat_template: ") as error:
        render_template(template, [{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 10 and "\n" not in str(error.value)


def test_a_long_conversation_is_rendered():
    source = (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% if loop.index0 == messages |"
        " length - 1 %}[end]{% endif %}{{ '<' ~ m.role + '>' }}{{ m.content | trim }}{% set ns.last"
        " = m.content.split('</think>')[-1].replace('a', 'b') %}{{ m | tojson }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"turn {n} " + "a" * 200} for n in range(1000)]
    assert len(render_template(source, messages).text) > 400_000
    long = [{"role": "user", "content": "a" * 3_000_000}]
    assert len(render_template(source, long).text) > 6_000_000


def test_spans_of_generated_text_are_those_of_transformers():
    from transformers import PreTrainedTokenizerFast

    source = (
        "{{ '<é>' }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "aßcd")]
    rendered = render_template(source, messages)
    assert [rendered.text[slice(*span)] for span in rendered.generated] == ["ß<end>", "d<end>"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend()).apply_chat_template(
        messages,
        chat_template=source,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    marked = [any(a <= i < b for a, b in rendered.generated) for i, _ in theirs[0].offsets]
    assert marked == list(map(bool, theirs["assistant_masks"]))


def test_a_macro_has_no_spans_and_blocks_inside_blocks_are_one_span():
    macro = "{% macro m(t) %}[{% generation %}{{ t }}{% endgeneration %}]{% endmacro %}"
    body = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    assert render_template(macro + body + "{{ m('x') }}", []) == ("ab[x]", ())
    assert render_template("x" + body, []) == ("xab", ((1, 3),))


def test_variables_are_plain_data():
    class Word(str):
        pass

    shared = [1, 2.5, None, True, {"a": Word("b")}, (1, "\ud800")]
    text = render_template("{{ v }}", [], v={3: [shared, shared]}).text
    assert text == str({3: [shared] * 2}).replace("Word", "")
    cyclic = []
    cyclic.append(cyclic)
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    assert render_template("{{ v | length }}", [], v=laughs).text == "2"
    for value, words in (
        (b"x", "v holds a bytes"),
        ([{"when": np.int64(3)}], "v holds a int64"),
        (len, "v holds a builtin"),
        (cyclic, "v is nested too deeply"),
    ):
        with pytest.raises(InputError, match=f"chat_template: the variable {words}"):
            render_template("{{ v }}", [], v=value)


def test_threads_and_processes_render_at_the_same_time():
    def render(n):
        for i in range(20):
            assert render_template("{{ v }}", [], v=f"{n} {i}").text == f"{n} {i}"
        done.append(n)

    done = []
    threads = [threading.Thread(target=render, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forks
        pid = os.fork()
    if pid == 0:
        try:
            render(9)
            os._exit(0)
        finally:
            os._exit(1)
    render(10)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_template_process_that_others_end_is_started_again():
    for number in range(2):
        render_template("a", [])
        chat_template._process._process.kill()
        if number:
            chat_template._process._process.wait()
        assert render_template("b", []).text == "b"


def test_byte_chat_is_plain_text():
    chat = ByteTokenizer().render_chat([{"role": "user", "content": "hi"}])
    assert chat == "user: hi\nassistant: "
