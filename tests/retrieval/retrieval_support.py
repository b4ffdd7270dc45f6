"""A fake encoder and small corpora for the tests of datastores."""

import hashlib
import json

import numpy as np

from lcjax.checkpoints.bert_folder import bert_entries
from lcjax.checkpoints.safetensors_io import write_file
from lcjax.checkpoints.weights import TensorInfo
from lcjax.models.bert import BertConfig

WORDS = (
    *("harbour", "quiet", "morning", "letter", "captain", "river", "stone", "garden", "winter"),
    *("candle", "music", "horse", "paper", "silver", "window", "bridge", "market", "orchard"),
)


class WordEncoder:
    """The normalised sum of a random vector for each word."""

    max_tokens, pooling, name = None, "mean", "words"

    def __init__(self, dim=16, seed=0):
        self.dim, self._seed = dim, seed
        self.fingerprint = hashlib.sha256(f"{dim} {seed}".encode()).hexdigest()[:16]

    def _vector(self, text):
        total = np.full(self.dim, 1e-6)
        for word in text.lower().split():
            digest = hashlib.sha256(f"{self._seed} {word}".encode()).digest()
            total += np.random.default_rng(list(digest[:8])).normal(size=self.dim)
        return total / np.linalg.norm(total)

    def encode_queries(self, texts):
        return np.array([self._vector(t) for t in texts], np.float32).reshape(-1, self.dim)

    def encode_passages(self, texts, titles=None):
        titles = titles or [""] * len(texts)
        return self.encode_queries([f"{a} {b}" for a, b in zip(titles, texts, strict=True)])


def sentence(rng, number, length=9):
    words = [str(word) for word in rng.choice(WORDS, length)]
    return " ".join([f"Item{number}", *words]) + "."


def write_corpus(folder, files=4, lines=10, seed=0):
    """Writes JSON lines of {title, text}; every text has five sentences."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for i in range(files):
        records = []
        for j in range(lines):
            text = " ".join(sentence(rng, number + n) for n in range(5))
            records.append({"text": text, "title": f"Title {i} {j}"})
            number += 5
        (folder / f"{i}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def content(folder):
    """Path and bytes of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_bert(folder, words, seed=0, prefix="", **changes):
    """Writes a random BERT of two layers with a vocabulary of `words`, without pooling modules.

    The names of its tensors begin with `prefix`.
    """
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    sizes = dict(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=40)
    hf = {"model_type": "bert"} | sizes | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    rng, arrays = np.random.default_rng(seed), {}
    for entry in bert_entries(BertConfig.from_hf(hf)):
        for name in entry.names:
            noise = 0.2 * rng.normal(size=entry.tensor_shape)
            arrays[prefix + name] = (noise + ("LayerNorm.weight" in name)).astype(np.float32)
    infos = {name: TensorInfo(x.shape, "float32") for name, x in arrays.items()}
    write_file(folder / "model.safetensors", infos, iter(arrays.items()))
    return folder
