"""A byte tokenizer and small corpora for the data tests."""

import json

import numpy as np

from lcjax.data import Chunks, make_loader
from lcjax.data.chunks import cut_context

BOS, EOS = 256, 257


class Bytes:
    """Bytes as tokens, with BOS and EOS."""

    bos_id, eos_ids, vocab_size, fingerprint = BOS, (EOS,), 258, "bytes"
    add_bos = True

    def encode(self, text):
        return list(text.encode())

    def spans(self, text):
        return [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder):
        folder.mkdir(exist_ok=True)


class Plain(Bytes):
    """The same without special tokens."""

    bos_id, eos_ids, add_bos = None, (), False


def make_texts(count, seed=0, low=1, high=90):
    """Different documents of lower-case letters, with their number in front."""
    rng = np.random.default_rng(seed)
    return [
        f"{i}:" + "".join(rng.choice(list("abcdefghij"), rng.integers(low, high)))
        for i in range(count)
    ]


def write_jsonl(path, texts, field="text"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({field: t, "id": i}) + "\n" for i, t in enumerate(texts)))
    return str(path)


def rows_of(config, tokenizer=None, **more):
    """All rows that a loader gives: each key as one array."""
    batches = list(make_loader(config, tokenizer or Bytes(), 1, **more))
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def split_documents(batches):
    """Tokens of every segment of every row, in order, as tuples."""
    pieces = []
    for batch in batches:
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
            for segment in range(1, segments.max() + 1):
                pieces.append(tuple(tokens[segments == segment].tolist()))
    return pieces


def split_context(tokens, num_chunks, chunk_length, decoder_length):
    """Chunks, their mask, and the decoder's tokens of consecutive tokens."""
    row = {"tokens": tokens.astype(np.int32), "segments": np.ones(len(tokens), np.int32)}
    row = cut_context(row, Chunks(num_chunks, chunk_length), decoder_length)
    return row["chunks"], row["chunk_mask"], row["tokens"][row["segments"] > 0]


def assert_same(left, right):
    """Equal lists of batches, bit for bit."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
