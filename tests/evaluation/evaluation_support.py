"""A model whose losses are known in closed form, and a tokenizer of single bytes."""

import contextlib
import dataclasses
import html.parser
import json
import math
import re
import types
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from lcjax.data import TextConfig
from lcjax.evaluation import EvalConfig, Method, Passkey, Perplexity, RunSection, measure, run
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.generation.sampling import GeneratedText
from lcjax.generation.scorer import Scorer
from lcjax.generation.scoring import Continuation
from lcjax.models.model_config import PRESETS
from lcjax.rope import Linear

VOCAB = 257  # BOS and 256 bytes
TASKS = Perplexity(protocol="last_k", last=8), Passkey(depths=2, trials=2)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte: id 0 is BOS, byte b is id b + 1."""

    bos_id: int | None = 0
    fingerprint: str = "bytes"
    eos_ids: tuple[int, ...] = ()
    vocab_size: int = VOCAB
    add_bos: bool = True

    def encode(self, text, *, allow_special=False):
        if not allow_special:
            return [byte + 1 for byte in text.encode()]
        ids = []
        for index, part in enumerate(text.split("<s>")):
            ids += [0] * (index > 0) + [byte + 1 for byte in part.encode()]
        return ids

    def decode(self, ids, *, skip_special=False):
        return bytes(token - 1 for token in ids if token).decode(errors="replace")

    def render_chat(self, messages, add_generation_prompt=True):
        turns = "".join(f"[{m['role']}]{m['content']}[end]" for m in messages)
        return f"<s>{turns}[assistant]" if add_generation_prompt else f"<s>{turns}"


class BlankInFront(ByteTokenizer):
    """Writes a blank in front of any text, as sentencepiece does."""

    def encode(self, text, *, allow_special=False):
        return super().encode(" " + text, allow_special=allow_special)


def bigram_table(seed: int = 0) -> np.ndarray:
    """-log p(next | token), float64 [V, V]."""
    logits = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
    return np.log(np.exp(logits).sum(-1, keepdims=True)) - logits


TABLE = bigram_table()


def token_loss(context, token, bonus: float = 2.0) -> float:
    """The bigram's loss, and a part that shrinks with the length of the context."""
    return TABLE[context[-1], token] + bonus / len(context)


def losses_behind(prompt, tokens, bonus: float = 2.0) -> list[float]:
    ids = [*prompt, *tokens]
    return [token_loss(ids[:n], ids[n], bonus) for n in range(len(prompt), len(ids))]


class BigramModel(Scorer):
    """LanguageModel's protocol over `token_loss`; counts calls and can die or break on the way.

    Padding gets a huge loss, so that a runner that counts it cannot go unnoticed.
    """

    def __init__(self, tokenizer=None, *, bonus=2.0, trained=32, log=None, fail_after=None):
        self.tokenizer = tokenizer or ByteTokenizer()
        self.config = PRESETS["tiny"].replace(max_length=trained)
        self.bonus, self.length = bonus, None
        self.log = [] if log is None else log
        self.fail_after, self.broken = fail_after, None

    def with_method(self, rope=None, pattern=None, cache=None, length=None):
        bonus = self.bonus if rope is None else self.bonus / rope.factor
        copy = BigramModel(
            self.tokenizer,
            bonus=bonus,
            trained=self.config.max_length,
            log=self.log,
            fail_after=self.fail_after,
        )
        copy.length, copy.broken = length, self.broken
        return copy

    def nll(self, tokens, first=1, lengths=None):
        if self.fail_after is not None and len(self.log) >= self.fail_after:
            raise KeyboardInterrupt
        self.log.append((tokens.shape, first))
        losses = np.full(tokens.shape, 1e9, np.float64)
        losses[:, 1:] = TABLE[tokens[:, :-1], tokens[:, 1:]]
        losses[:, 1:] += self.bonus / self.seen(tokens.shape[1] - 1)
        losses[:, :first] = 0
        for row, size in enumerate(lengths):
            losses[row, size:] = 1e9
        if self.broken is not None:
            losses[tokens == self.broken] = np.nan
        return losses

    def seen(self, length):
        """How many tokens each of `length` tokens looks back on, itself included."""
        return np.arange(1, length + 1)

    def continuations(self, prompts, continuations):
        self.log.append(("continuations", len(prompts)))
        return [
            [Continuation(np.array(losses_behind(prompt, ids, self.bonus)), False) for ids in row]
            for prompt, row in zip(prompts, continuations, strict=True)
        ]

    def generate(self, prompts, sampling):
        """Answers with the last key of the prompt, if it lies within the trained length."""
        answers = []
        for prompt in prompts:
            text = self.tokenizer.decode(prompt[-self.config.max_length :])
            digits = "".join(c if c.isdigit() else " " for c in text).split()
            answer = f" {digits[-1]}." if digits else " unknown"
            answers.append(GeneratedText(answer, tuple(self.tokenizer.encode(answer)), "length"))
        return answers


class NotingModel:
    """A model with a memory that notes the arguments of its calls in `given`."""

    def __init__(self, trained=4096, chunk=256):
        memory = types.SimpleNamespace(
            default_chunk_size=chunk, max_chunk_size=10**6, is_prefix=False, by_chunk=False,
            check_chunk=lambda size, key: None,
        )  # fmt: skip
        self.config = types.SimpleNamespace(max_length=trained, memory=memory)
        self.tokenizer, self.given = ByteTokenizer(), []

    def with_method(self, **changes):
        self.length = changes["length"]
        return self

    def encode_contexts(self, contexts, chunk):
        return contexts, chunk

    def nll(self, tokens, *, context, **options):
        self.given.append((tokens, context, options))
        return np.ones(tokens.shape, np.float32)

    def generate(self, prompts, sampling, *, context=None):
        self.given.append((prompts, context, {}))
        return [""] * len(prompts)


@contextlib.contextmanager
def only_the_run():
    """Of a tiny run most time goes to measuring memory and to drawing figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_CLEAR", Path("not there"))
        patch.setattr(Figure, "savefig", lambda *_, **__: None)
        yield


def texts(sizes=(37, 24, 12, 51), seed=1):
    """Named random texts of so many characters."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefgh \n"))
    return [(f"text{i}", "".join(rng.choice(letters, size))) for i, size in enumerate(sizes)]


def documents(bos, corpus_texts=None, minimum=0):
    """Token lists of the texts that reach `minimum`, with or without BOS."""
    ids = [ByteTokenizer().encode(text) for _, text in corpus_texts or texts()]
    return [[0] * bos + tokens for tokens in ids if len(tokens) + bos >= minimum]


def slide_press(docs, length, stride):
    """Perplexity with the latest window that holds a token, one token after another."""
    losses = []
    for doc in docs:
        for place in range(1, len(doc)):
            start = 0
            while start + length <= place:
                start += stride
            losses.append(token_loss(doc[start:place], doc[place]))
    return math.exp(math.fsum(losses) / len(losses))


def score(task, limits, length=12, tokenizer=None, batch=3, corpus_texts=None, model=None):
    """What the runner does for one method and length, without its files."""
    tokenizer = tokenizer or ByteTokenizer()
    model = model or BigramModel(tokenizer)
    task.check(limits, "tasks.0")
    units = task.plan(TokenizedCorpus(corpus_texts or texts(), tokenizer), length, limits)
    records = []
    for shape in dict.fromkeys(unit.shape for unit in units):
        group = [unit for unit in units if unit.shape == shape]
        for start in range(0, len(group), batch):
            chunk = group[start : start + batch]
            scores = task.score(model, chunk, batch)
            for unit, found in zip(chunk, scores, strict=True):
                fields = {"method": "fake", "trained": 32, "window": unit.index}
                records.append({**fields, **unit.fields, **found})
    return records


def config_in(folder) -> EvalConfig:
    """A run of two methods at two lengths over `texts`, which are written into the folder."""
    (folder / "text").mkdir()
    for name, text in texts():
        (folder / "text" / f"{name}.txt").write_text(text)
    return EvalConfig(
        methods=(Method("base"), Method("linear", rope=Linear(factor=2.0))),
        lengths=(24, 12),
        data=TextConfig(path=str(folder / "text")),
        stride=4,
        batch_size=2,
        run=RunSection(str(folder / "out")),
    )


def run_of_three(folder, tasks, *, drawn=True) -> EvalConfig:
    """A finished run of three methods at two lengths, with its figures where they are `drawn`."""
    config = dataclasses.replace(config_in(folder), tasks=tasks, lengths=(500, 1000), stride=100)
    for name, text in texts((1500, 1400, 1300)):
        Path(folder, "text", f"long_{name}.txt").write_text(text)
    methods = (*config.methods, Method("a <b> & c", rope=Linear(factor=8.0)))
    config = dataclasses.replace(config, methods=methods, max_windows=4)
    draw = Figure.savefig
    with only_the_run(), pytest.MonkeyPatch.context() as patch:
        if drawn:
            patch.setattr(Figure, "savefig", draw)
        run(config, load=fake(trained=600, bonus=80.0))
    return config


def records(config, label="perplexity_slide_press"):
    with open(f"{config.run.folder}/records/{label}.jsonl") as file:
        return [json.loads(line) for line in file]


def fake(**settings):
    return lambda section: BigramModel(**settings)


def changed(config, **fields):
    return lambda: run(dataclasses.replace(config, **fields), load=fake())


def with_path(folder):
    """Names a model in the config of a run: what says where its tokenizer is."""
    file = folder / "config.yaml"
    file.write_text(re.sub(r"(?m)^  path: null", "  path: somewhere", file.read_text(), count=1))


class Page(html.parser.HTMLParser):
    """Notes names, links and what is open at the end; a tag that closes another one fails."""

    VOID = ("meta", "link", "br", "img", "hr", "path", "use", "image", "rect", "line", "stop")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.fetched, self.said = [], [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [v[1:] for k, v in attrs.items() if k == "href" and v.startswith("#")]
        self.fetched += [
            v for k, v in attrs.items() if k in ("src", "href", "action") and v[:1] != "#"
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, text):
        self.said += text


def check_page(path) -> Page:
    text = Path(path).read_text(encoding="utf-8")
    assert "://" not in text and "@import" not in text and "url(h" not in text
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "two things of one name"
    assert set(page.links) <= set(page.ids), "a link leads nowhere"
    assert all(url.startswith("data:") for url in page.fetched)
    return page
