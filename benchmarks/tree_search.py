"""Measures whether SharedLLM's tree search finds a password that a question refers to.

    python benchmarks/tree_search.py            # SmolLM2-135M, 17 minutes on 2 CPU cores

A document consists of notes. Each note begins and ends with its subject; the rest is text of
Python's language reference. One note contains a password, which is a noun. A chunk holds two notes:
its tree keeps all of the chosen half, and one token of the other. The question ends with the
subject, because a search compares the last token of the question with the last token of each half,
which depend on the other tokens through one layer only (arXiv 2410.19318, sec. 3.2).

First, cross-attention is trained to read such notes (configs/study/tree_search.yaml), with searches
for the question. Then new documents have a password that was not in training, in the left or in the
right half of a chunk. The table shows how often it is repeated, by policy and length, also for
notes that end with any word, as ordinary texts do.
"""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import numpy as np

RECIPE = "configs/study/tree_search.yaml"
SUBJECTS = """lighthouse harbor garden bridge castle river forest village market school church
    library hospital museum theater station airport island valley mountain desert ocean factory
    kitchen tower temple palace prison farm mill"""
PASSWORDS = """apple banana lemon orange peach cherry melon grape tiger lion wolf bear eagle whale
    shark horse sheep goat rabbit turtle monkey elephant dragon silver gold copper iron steel glass
    paper cotton silk leather hammer basket bottle candle mirror violin piano guitar trumpet rocket
    engine camera telephone pencil carpet blanket umbrella"""


class Notes:
    """Draws documents of notes as token ids."""

    def __init__(self, tokenizer, chunk: int, seed):
        from pydoc_data.topics import topics

        from lcjax.checkpoints.tokenizer import encode_mid_text

        self.encode = lambda text: encode_mid_text(tokenizer, text)
        self.tokenizer, self.size, self.rng = tokenizer, chunk // 2, np.random.default_rng(seed)
        self.subjects, self.passwords = map(self._single, (SUBJECTS, PASSWORDS))
        text = " ".join(map(topics.get, sorted(topics))).split()
        words = [word for word in text if re.fullmatch(r"[A-Za-z]+[,.]?", word)]
        known = {word: self.encode(" " + word) for word in set(words)}
        self.words = [known[word] for word in words]
        self.short = next(ids for ids in self.words if len(ids) == 1)

    def _single(self, words: str) -> list[str]:
        """Returns the words that are one token."""
        return [word for word in words.split() if len(self.encode(" " + word)) == 1]

    def filler(self, count: int) -> list[int]:
        """Returns `count` tokens of running text from a random place."""
        ids, index = [], int(self.rng.integers(len(self.words) - count))
        while len(ids) < count:
            word = self.words[index]
            ids += word if len(ids) + len(word) <= count else self.short
            index += 1
        return ids

    def note(self, subject: str, key: str | None, closed: bool) -> list[int]:
        begin = f"\nThe {subject}" + (f" password is {key}." if key else "")
        begin, end = self.encode(begin), self.encode(f" {subject}") if closed else []
        return begin + self.filler(self.size - len(begin) - len(end)) + end

    def document(
        self, chunks: int, *, half: int, closed: bool = True, seen: bool = False
    ) -> tuple[list[int], str]:
        """Returns the tokens of a document with its question, and the answer.

        The document has `chunks` chunks, and one more that the decoder reads with the question. The
        password is in the left (0) or right (1) `half` of one of the `chunks`. It is one of the
        passwords for training if `seen`, otherwise one of the others.
        """
        subject, *others = self.rng.permutation(self.subjects)
        key, notes = str(self.rng.choice(self.passwords[not seen :: 2])), []
        place = 2 * int(self.rng.integers(chunks)) + half
        for number in range(2 * chunks + 2):
            has_password = number == place
            topic = subject if has_password else others[int(self.rng.integers(len(others)))]
            notes += self.note(topic, key if has_password else None, closed)
        return notes + self.encode(f"\nThe {subject}"), f" password is {key}."


def train(seed: int) -> Path:
    """Trains a model to read notes; returns its folder."""
    from lcjax.checkpoints.load import load_tokenizer
    from lcjax.config import parse
    from lcjax.training import TrainConfig, run

    config = parse(TrainConfig, ["--config", RECIPE])
    file = Path(config.data.sources[0].path)
    notes = Notes(load_tokenizer(config.model.path), config.model.memory.chunk, seed)
    count, rows = config.data.chunks.count, config.train.steps * config.train.batch_size
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        for row in range(rows):
            ids, answer = notes.document(count, half=row % 2, seen=True)
            prompt = notes.tokenizer.decode(ids)
            assert notes.encode(prompt) == ids, "as text it has other tokens"
            out.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    run(config)
    return Path(config.run.folder) / "model"


def found(args, lm, policy, chunks: int, closed: bool) -> list[float]:
    """Returns the shares of passwords found in the left and in the right half of a chunk."""
    from lcjax.generation.sampling import Sampling

    memory = dataclasses.replace(lm.config.memory, policy=policy)
    reader, shares = lm.with_method(memory=memory), []
    num_context = chunks * memory.chunk  # tokens of the context; the decoder reads the rest
    for half in (0, 1):
        notes, right = Notes(lm.tokenizer, memory.chunk, [args.seed, 1, chunks, half]), 0
        drawn = [notes.document(chunks, half=half, closed=closed) for _ in range(args.samples)]
        for start in range(0, args.samples, args.batch):
            documents, answers = zip(*drawn[start : start + args.batch], strict=True)
            length = max(len(notes.encode(answer)) for answer in answers)
            context = reader.encode_contexts([[ids[:num_context]] for ids in documents])
            prompts = [ids[num_context:] for ids in documents]
            texts = reader.generate(prompts, Sampling(max_new_tokens=length), context=context)
            right += sum(a.strip() in b for a, b in zip(answers, texts, strict=True))
        shares.append(right / args.samples)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 16], help="4 in training")
    parser.add_argument("--samples", type=int, default=32, help="documents of each kind")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from lcjax.generation.language_model import LanguageModel
    from lcjax.memory import QueryAware, Random, Right

    lm = LanguageModel.load(str(train(args.seed)))
    print("| context tokens | notes end with | policy | found in left half | in right half |")
    print("|--:|---|---|--:|--:|")
    for chunks in args.chunks:
        for closed in (True, False):
            for policy in (QueryAware(), Right(), Random()):
                left, right = found(args, lm, policy, chunks, closed)
                end = "their subject" if closed else "any word"
                name = type(policy).__name__
                print(
                    f"| {chunks * lm.config.memory.chunk:,} | {end} | {name} | {left:.0%}"
                    f" | {right:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
