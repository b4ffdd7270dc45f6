"""Runs benchmarks of miniature files with a model whose answers are written down."""

import types

from evaluation_support import ByteTokenizer

from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.task import Limits
from lcjax.generation.scorer import Scorer

TOKENIZER = ByteTokenizer()
# RULER's tasks that hide needles in essays.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


class Scripted(Scorer):
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self, answer):
        self.tokenizer, self.answer, self.seen = TOKENIZER, answer, []
        self.config = types.SimpleNamespace(max_length=4096, memory=None)

    def with_method(self, **_):
        return self

    nll = None  # not called

    def generate(self, prompts, sampling):
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.seen += [(text, sampling) for text in texts]
        return [self.answer(text) for text in texts]


def plan(task, length=4000, *, texts=(), tokenizer=TOKENIZER, seed=0):
    """Units at one length, of settings that are checked first."""
    limits = Limits((length,), seed=seed)
    task.check(limits, "tasks.0")
    return task.plan(TokenizedCorpus(texts, tokenizer), length, limits)


def plan_at(task, lengths, texts=()):
    """Units at several lengths, as a run has them."""
    limits, corpus = Limits(tuple(lengths)), TokenizedCorpus(texts, TOKENIZER)
    return [task.plan(corpus, length, limits) for length in lengths]


def scored(task, units, answer):
    """Records of units, each answered by `answer(prompt)` or, as a list, one after another."""
    found = []
    for index, unit in enumerate(units):
        one = (lambda _, text=answer[index]: text) if isinstance(answer, list) else answer
        (record,) = task.score(Scripted(one), [unit], 1)
        fields = {"method": "m", "length": 4000, "window": unit.index}
        found.append({**fields, **unit.fields, **record})
    return found
