"""Requests whose prompts begin with the same examples: these are read once, as records say."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

from lcjax.evaluation import EvalConfig, LmEval, RunSection, run
from lcjax.evaluation.lm_eval import harness
from lcjax.evaluation.lm_eval.requests import (
    GenerateUntil,
    Loglikelihood,
    LoglikelihoodRolling,
    prompts_of,
    respond,
)
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.scoring import Continuation
from lcjax.generation.shared_prefix import PrefixReader

LENGTH = 1300
SHOTS = (*ids(1, 1100),)
GREEDY = Sampling(max_new_tokens=4, min_new_tokens=4)


def question(seed, size=20):
    return (*SHOTS, *ids(seed, size))


ASKED = [
    Loglikelihood(question(2), (*ids(3, 5),)),
    GenerateUntil(question(4), GREEDY),
    Loglikelihood(question(5, 30), (*ids(6, 3),)),
    Loglikelihood((*ids(7, 40),), (*ids(8, 2),)),
    Loglikelihood(question(2), (*ids(9, 1),)),
    LoglikelihoodRolling((Loglikelihood(SHOTS[:1], (*ids(10, 40),)),)),
    GenerateUntil(question(11), GREEDY),
]


@pytest.fixture(scope="module")
def lm():
    return sharp_lm().with_method(length=LENGTH)


@pytest.fixture
def alone(monkeypatch):
    """Calls a function while no prompt goes on from another."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "shares_prefixes", False)
            return function(*arguments)

    return call


def test_requests_with_common_examples_are_batched_together(lm, monkeypatch):
    asked = []

    def continuations(self, prompts, options, prefix=None):
        asked.append(([*prompts], prefix and prefix.tokens))
        return [[Continuation(np.ones(len(ids)), False) for ids in row] for row in options]

    def stream(self, prompts, sampling, prefix=None):
        asked.append(([*prompts], prefix and prefix.tokens))
        return [Piece(row, str(len(prompt)), (), "stop") for row, prompt in enumerate(prompts)]

    monkeypatch.setattr(PrefixReader, "_read_prefix", lambda *_: None)
    for kind, answer in (("continuations", continuations), ("stream", stream)):
        monkeypatch.setattr(LanguageModel, kind, answer)
    requests = [request for request in ASKED if not isinstance(request, LoglikelihoodRolling)]
    heard = {}
    found = respond(lm, requests, 2, heard.__setitem__)
    assert found == [(-5.0, False), "1120", (-3.0, False), (-2.0, False), (-1.0, False), "1120"]
    assert found == [heard[number] for number in range(6)]
    other = ASKED[3].prompt
    assert sorted(prompts == [other] * 2 for prompts, _ in asked) == [False, False, True]
    assert [tokens for prompts, tokens in asked if prompts != [other] * 2] == [1024, 1024]


@pytest.mark.slow
def test_examples_before_several_questions_are_read_once_and_answers_stay(lm, alone):
    reader = PrefixReader(lm, prompts_of(ASKED))
    found = respond(reader, ASKED, 2)
    # All but the end is read once; rows read that again, in programs for 128 and 96 tokens.
    scored, written = (len(question(n, size)) for n, size in ((2, 20), (5, 30))), len(question(4))
    assert reader.saved_tokens == sum(scored) - 2 * 128 + 2 * (written - 96) - 1024
    assert reader._cache is None, "nobody goes on from it"
    wanted = alone(respond, lm, ASKED, 2)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert len({found[1], found[6]}) == 2


class Suite:
    """Two tasks of one set of examples: choices, and answers that are written."""

    def __init__(self, names, **settings):
        self.names = names

    def documents(self, chat, **more):
        fields = {"metric": "acc", "lower": [], "aggregation": {}, "by_size": True, "shots": 1}
        shots = "".join(map(chr, range(60, 120))) * 18
        for n in range(3):
            prompt = f"{shots} {chr(70 + n) * 9}"
            choices = [("loglikelihood", [prompt, f" {n * 7 + k}"], 1) for k in range(2)]
            write = [("generate_until", [prompt + "!", {"max_gen_toks": 3}], 1)]
            for name, asked in zip(self.names, (choices, write), strict=True):
                yield harness.HarnessDocument(name, name, n, asked, fields)

    def score_document(self, dataset, number, given):
        return {"acc,none": 1.0}


@pytest.mark.slow
def test_a_run_reads_examples_once_and_records_the_saved_tokens(lm, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "check_installed", lambda: None)
    monkeypatch.setattr(harness, "Suite", Suite)
    task = LmEval(tasks=("pick", "write"))
    config = EvalConfig(tasks=(task,), lengths=(LENGTH,), batch_size=2)

    def records(name):
        where = RunSection(str(tmp_path / name))
        run(dataclasses.replace(config, run=where), load=lambda _: lm)
        lines = (tmp_path / name / "records" / "lm_eval.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda record: record["window"])

    shared, plain = records("shared"), alone(records, "plain")
    sizes = [record["size"] for record in plain]
    assert [record["read"] for record in plain] == sizes and len(sizes) == 6
    assert sum(record["read"] for record in shared) < sum(sizes) / 3
    for one, other in zip(shared, plain, strict=True):
        for name in ("window", "digest", "scores", "correct", "answer"):
            assert one[name] == other[name]
        if one["task"] == "write":
            assert one["responses"] == other["responses"]
        else:
            np.testing.assert_allclose(one["responses"], other["responses"], atol=1e-4)
