"""Long texts are tokenised in pieces, with the ids of the whole text."""

import io
import random
import re

import numpy as np
import pytest

from lcjax.checkpoints import ByteTokenizer, long_text
from lcjax.checkpoints.tokenizer import JsonTokenizer, SentencePieceTokenizer, Specials
from lcjax.errors import InputError

tokenizers = pytest.importorskip("tokenizers")
STEPS = (5003, 10007, 20011, 40009)  # primes
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["the", "of", "def", "self", "x", "日本語", "のテキスト", "привет", "naïve", "1234"]


def long_string(seed: int, size: int = 16_000, *, runs: bool = True) -> str:
    """Words, code, Chinese without blanks, digits, marks, emoji, and long runs of characters."""
    r, parts = random.Random(seed), []
    kinds = [
        lambda: " ".join(r.choice(WORDS) for _ in range(r.randrange(1, 400))) + r.choice(". \n"),
        lambda: "".join(r.choice("日本語テキスト長い文章、。") for _ in range(r.randrange(3_000))),
        lambda: "".join(r.choice("0123456789") for _ in range(r.randrange(3_000))),
        lambda: "".join(r.choice("abcXYZ012+/") for _ in range(r.randrange(3_000))),
        lambda: "".join(r.choice("aoe\u0301\u0308ﬁⅣ🙂\0") for _ in range(r.randrange(200))),
        lambda: "".join(r.choice([" ", "  ", "\n", "\t", "\r\n"]) for _ in range(300)),
        lambda: r.choice("a1 \n-日") * r.randrange(3_000),
    ]
    while sum(map(len, parts)) < size:
        parts.append(r.choice(kinds if runs else kinds[:6])())
    return "".join(parts)


def trained(model, trainer, pre=None, normalizer=None, added=()):
    """A tokenizer that learned from another such text."""
    backend = tokenizers.Tokenizer(model)
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(re.findall(r"(?s).{1,60}", long_string(99, 8_000)), trainer)
    backend.add_tokens(list(added))
    return JsonTokenizer(backend, Specials())


def bpe(pre=None, normalizer=None, added=(), **options):
    alphabet = [] if options else tokenizers.pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 600, "max_token_length": 16, "initial_alphabet": alphabet}
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<unk>"], show_progress=False, **settings
    )
    return trained(tokenizers.models.BPE(**options), trainer, pre, normalizer, added)


def unigram(pre=None):
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return trained(tokenizers.models.Unigram(), trainer, pre)


def word_piece():
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]"], show_progress=False
    )
    bert = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.normalizers.BertNormalizer()
    return trained(tokenizers.models.WordPiece(unk_token="[UNK]"), trainer, *bert)


def sentencepiece(kind):
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    model, text = io.BytesIO(), long_string(98, 12_000).replace("\0", "")
    trainer.train(
        sentence_iterator=iter(re.findall(r"[^\n]{1,60}", text)), model_writer=model,
        vocab_size=400, model_type=kind, byte_fallback=True, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


def kinds():
    pre, norm = tokenizers.pre_tokenizers, tokenizers.normalizers
    regex = pre.Split(tokenizers.Regex(LLAMA3), "isolated")
    metaspace = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    added = tokenizers.AddedToken
    return {
        "bytes": ByteTokenizer,
        "gpt2": lambda: bpe(pre.ByteLevel()),
        "llama3": lambda: bpe(pre.Sequence([regex, pre.ByteLevel(use_regex=False)])),
        "digits": lambda: bpe(pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel()])),
        "llama2": lambda: bpe(
            None, metaspace, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        ),
        "normalized": lambda: bpe(
            pre.ByteLevel(), norm.Sequence([norm.NFKC(), norm.Lowercase(), norm.Strip()])
        ),
        "added": lambda: bpe(
            pre.ByteLevel(add_prefix_space=False),
            added=[added("  "), added("self", lstrip=True, rstrip=True, normalized=False)],
        ),
        "unigram": lambda: unigram(pre.Metaspace()),
        "word_piece": word_piece,
        "sentencepiece_bpe": lambda: sentencepiece("bpe"),
        "sentencepiece_unigram": lambda: sentencepiece("unigram"),
    }


def joined(tokenizer, text, steps=STEPS):
    """Ids and spans of all pieces, and the number of pieces."""
    pieces = list(long_text.pieces(tokenizer, text, steps=steps))
    spans = []
    for piece in pieces:
        window = tokenizer.spans(text[piece.start : piece.stop])[piece.first : piece.last]
        spans += [(start + piece.start, end + piece.start) for start, end in window]
    return np.concatenate([piece.ids for piece in pieces]).tolist(), spans, len(pieces)


@pytest.mark.parametrize("kind", kinds())
def test_pieces_have_the_ids_and_spans_of_the_whole_text(kind):
    tokenizer = kinds()[kind]()
    # In a run, unigram models choose between splits of equal probability by rounding.
    text = long_string(1, runs="unigram" not in kind)
    ids, spans, count = joined(tokenizer, text)
    assert ids == tokenizer.encode(text)
    assert spans == [tuple(span) for span in tokenizer.spans(text)]
    assert count > 1


def test_a_run_of_equal_characters_has_the_tokens_of_the_whole_run():
    for tokenizer in (bpe(None, None, unk_token="<unk>"), unigram()):
        for text in ("a" * 20_011, "a" * 13_000 + " b" * 200 + "1" * 5_007):
            ids, _, _ = joined(tokenizer, text)
            whole = tokenizer.encode(text)
            assert sorted(ids) == sorted(whole)  # equal but for the order of equal splits


def test_a_text_without_a_safe_place_raises_input_error():
    with pytest.raises(InputError, match="book: the tokens from character .* divide it"):
        list(long_text.pieces(word_piece(), "a" * 30_000, name="book", steps=(5003, 10007)))
