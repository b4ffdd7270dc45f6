"""sentencepiece tokenizers, from `tokenizer.model` and from the pieces of a GGUF file."""

import io
import itertools
import json
import pickle

import pytest
import sentencepiece
from convert_support import TEXTS

from lcjax.checkpoints import TextStream, load_tokenizer
from lcjax.checkpoints.tokenizer import SentencePieceTokenizer, Specials, encode_mid_text
from lcjax.checkpoints.tokenizer_files import model_from_pieces
from lcjax.errors import InputError


@pytest.fixture(scope="module")
def model():
    """A byte-fallback BPE model with Llama-2's settings."""
    lines = (argument for argument in [*TEXTS, *io.open.__doc__.splitlines()] * 3)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=out,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return out.getvalue()


def test_ids_are_those_of_sentencepiece_and_decode_to_the_text(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = SentencePieceTokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), True)
    assert tokenizer.vocab_size == 420
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {1, 2} & set(ids)
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.finish() == text
        spans = tokenizer.spans(text)
        assert len(spans) == len(ids) and "".join(text[a:b] for a, b in spans) == text


def test_control_tokens_are_read_only_when_asked(model):
    tokenizer = SentencePieceTokenizer(model)
    ids = tokenizer.encode("<s>[INST] hi </s><s>", allow_special=True)
    assert ids[0] == 1 and ids[-2:] == [2, 1]
    assert ids[1:-2] == tokenizer.encode("[INST] hi ")
    # As in transformers, only the first word of a text loses the prefix space.
    assert tokenizer.decode(ids) == "<s> [INST] hi </s><s>"
    assert tokenizer.decode(ids, skip_special=True) == "[INST] hi "


def test_transformers_opens_what_is_saved_and_agrees(tmp_path, model):
    from transformers import AutoTokenizer

    ours = SentencePieceTokenizer(model, added={420: {"content": "<pad>", "special": True}})
    assert ours.vocab_size == 421
    ours.save(tmp_path)
    again, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == ours.fingerprint
    assert again.encode("a<pad>", allow_special=True)[-1] == 420
    assert again.decode([420]) == "<pad>"
    for text in TEXTS:
        # transformers' fast class reads special strings from any text, and adds no space before
        # a text that starts with one; sentencepiece, hence Meta's reference and this, does.
        if not text.startswith(" ") and "<" not in text:
            assert theirs(text, add_special_tokens=False)["input_ids"] == again.encode(text)
    chat = "<s>[INST] hi [/INST] yes </s><s>[INST] more [/INST]"
    theirs_ids = theirs(chat, add_special_tokens=False)["input_ids"]
    assert theirs_ids == again.encode(chat, allow_special=True)
    assert theirs("hi")["input_ids"] == [1, *again.encode("hi")]


def test_words_after_a_special_token_keep_their_space(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = SentencePieceTokenizer(model)
    ids = [*processor.encode("The ferry"), 2, *processor.encode("leaves"), 2, 2, 0]
    ids += processor.encode("port")
    assert tokenizer.decode(ids, skip_special=True) == "The ferry leaves port"
    assert tokenizer.decode(ids) == "The ferry</s> leaves</s></s><unk> port"
    stream = TextStream(tokenizer)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=True)


def test_added_tokens_take_spaces_away_and_read_from_ordinary_text_as_they_state(model):
    flags = {"content": "<x>", "lstrip": True, "special": False}
    tokenizer = SentencePieceTokenizer(model, added={420: flags})
    assert tokenizer.encode("hi  <x>") == [*tokenizer.encode("hi"), 420]
    assert tokenizer.spans("hi  <x>")[-1] == (2, 7)
    assert tokenizer.decode([420], skip_special=True) == "<x>"


def test_legacy_decides_about_the_space_after_a_special_token(tmp_path, model):
    tokenizer = SentencePieceTokenizer(model, legacy=False)
    tokenizer.save(tmp_path)
    for t in (tokenizer, load_tokenizer(tmp_path)):
        ids = t.encode("a</s>b", allow_special=True)
        assert ids == [*t.encode("a"), 2, *encode_mid_text(t, "b")]
        assert t.decode(ids) == "a</s>b"


def test_tokens_added_by_older_files_are_read(tmp_path, model):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 420}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "[PAD]", "add_bos_token": False, "eos_token": "</s>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.vocab_size, tokenizer.add_bos) == (420, 421, False)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


@pytest.mark.parametrize("others", [[], ["<new>"]])
def test_control_tokens_have_the_flags_of_the_model_unless_the_folder_has_others(
    tmp_path, model, others
):
    (tmp_path / "tokenizer.model").write_bytes(model)
    named = {"content": "</s>", "lstrip": True, "special": True, "__type": "AddedToken"}
    settings = {"eos_token": named} | ({"extra_special_tokens": others} if others else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    t = load_tokenizer(tmp_path)
    ids = t.encode("a" if others else "a ")
    assert t.encode("a </s>", allow_special=True) == [*ids, 2]


def test_an_added_token_without_a_row_is_left_out_with_a_warning(tmp_path, model):
    """Copies of Llama-2 have <pad> = 32000 beside 32,000 rows."""
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 420}')
    settings = {"pad_token": "<pad>", "add_bos_token": None, "added_tokens_decoder": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"vocab_size": 420, "pad_token_id": -1}')
    with pytest.warns(UserWarning, match=r"left out 1 added tokens \(<pad> = 420\).* 420 rows"):
        tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.vocab_size, tokenizer.add_bos) == (None, 420, True)
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint


def test_rows_that_only_pad_the_embedding_have_no_text(model):
    tokenizer = SentencePieceTokenizer(model)
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, 500, 31_999]) == "hello"


def test_the_model_is_rebuilt_from_its_pieces(model):
    """GGUF stores pieces, scores and types, not the model file."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = range(processor.get_piece_size())
    kinds = {"is_unknown": 2, "is_control": 3, "is_byte": 6}
    types = [next((k for f, k in kinds.items() if getattr(processor, f)(i)), 1) for i in size]
    rebuilt = SentencePieceTokenizer(
        model_from_pieces(
            [processor.id_to_piece(i) for i in size],
            [processor.get_score(i) for i in size],
            types,
            add_prefix=True,
        ),
        Specials(bos_id=1, eos_ids=(2,)),
    )
    original = SentencePieceTokenizer(model)
    assert rebuilt.fingerprint == original.fingerprint
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_a_worker_process_gets_a_working_copy(model):
    tokenizer = SentencePieceTokenizer(model)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_a_truncated_model_is_named(tmp_path, model):
    (tmp_path / "tokenizer.model").write_bytes(model[:-7])
    with pytest.raises(InputError, match=r"tokenizer\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match=r"tokenizer\.model is empty"):
        load_tokenizer(tmp_path)


def test_spans_count_characters_not_bytes(model):
    tokenizer = SentencePieceTokenizer(model)
    for text in TEXTS:
        spans = tokenizer.spans(text)
        assert not spans or (spans[0][0], spans[-1][1]) == (0, len(text))
        assert all(a <= b == c <= d for (a, b), (c, d) in itertools.pairwise(spans))
    text = "héllo 日本 🙂 x"
    parts = [text[start:end] for start, end in tokenizer.spans(text)]
    assert [part for part in parts if part] == ["h", "é", "l", "lo", *" 日本 🙂 x"]


def test_no_space_is_put_before_a_text_inside_a_longer_one(model):
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.encode("an")[0] not in tokenizer.encode("a")  # a token joins "a" and "n"
    for text in ("nother word", "7 days", " one", "\n\n", "", "日本", ", then"):
        ids = encode_mid_text(tokenizer, text)
        assert tokenizer.decode([*tokenizer.encode("see i"), *ids]) == "see i" + text
