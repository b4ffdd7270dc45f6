"""Perplexity with retrieved chunks, against the toy model's losses one by one."""

import dataclasses
import json
import math
import sys
import types

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan, plan_at
from evaluation_support import BigramModel, token_loss
from tiny_lm import sharp_lm

from lcjax.errors import InputError
from lcjax.evaluation import ContextSplit, ReplugSplit
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.rag_lm import RagLm
from lcjax.generation.replug import Replug
from lcjax.memory import CepeSection

SMALL = {"decoder": 12, "scored": 8, "chunk": 4}


def ids(seed, size):
    return np.random.default_rng(seed).integers(1, 257, size).tolist()


def write(folder, rows):
    path = folder / "chunks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def cell(task, units):
    model = BigramModel()
    found = [task.score(model, [unit], 2)[0] for unit in units]
    return task.summarise([{**unit.fields, **record} for unit, record in zip(units, found)])


def expected(tokens):
    losses = [
        token_loss(tokens[:place], tokens[place]) for place in range(len(tokens) - 8, len(tokens))
    ]
    return math.fsum(losses) / 8


def test_chunks_stand_before_the_text_the_best_next_to_it_and_only_its_end_is_scored(tmp_path):
    chunks = [{"ids": ids(i, 4), "score": score} for i, score in enumerate((0.5, 2.0, 1.0))]
    task = RagLm(path=write(tmp_path, [{"input_ids": ids(9, 12), "chunks": chunks}]), **SMALL)
    (unit,) = plan(task, 20)
    assert unit.tokens.tolist() == ids(2, 4) + ids(1, 4) + ids(9, 12)
    (far,) = plan(dataclasses.replace(task, best="first"), 20)
    assert far.tokens.tolist() == ids(1, 4) + ids(2, 4) + ids(9, 12)
    assert [passage.score for passage in far.prompt.passages] == [2.0, 1.0]
    (bare,) = plan(task, 12)
    assert bare.tokens.tolist() == ids(9, 12)
    for one in (unit, far, bare):
        assert cell(task, [one])["value"] == pytest.approx(math.exp(expected(one.tokens.tolist())))
        assert cell(task, [one])["tokens_scored"] == 8


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(memory=CepeSection(encoder="tiny-encoder", output_share=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [None, 5])
def test_a_memory_reads_each_chunk_and_replug_weighs_it_by_its_score(tmp_path, lm, decoder):
    chunks = [{"ids": ids(i, 4), "score": score} for i, score in enumerate((0.5, 2.0, 1.0))]
    task = RagLm(path=write(tmp_path, [{"input_ids": ids(9, 12), "chunks": chunks}]), **SMALL)
    (bare,), (unit,) = plan_at(task, (12, 20))
    best, text = [ids(2, 4), ids(1, 4)], np.array([ids(9, 12)])

    def score(split, unit, decoder=decoder):
        model = dataclasses.replace(split, decoder=decoder).reader(lm, len(unit.tokens))
        (record,) = task.score(model, [unit], 1)
        assert record["decoder"] == 12 and record["scored"] == 8
        return pytest.approx(record["nll"], abs=1e-3)

    context = ContextSplit(chunk=4)
    assert lm.nll(text, first=4, context=[best]).sum() == score(context, unit)
    assert lm.nll(text, first=4).sum() == score(context, bare)
    other = ContextSplit(chunk=4, source="foreign")
    foreign = other.reader(lm, 20).with_foreign_context(
        unit.tokens, [np.arange(20, dtype=np.int32)], [0], unit.prompt.passages
    )
    assert foreign.tolist() == [*range(8), *ids(9, 12)]
    replug = ReplugSplit(chunk=4, temperature=0.5)
    mixed = Replug(lm, 0.5).nll(text, first=4, context=[best], scores=[[1.0, 2.0]])
    alike = Replug(lm, 0.5).nll(text, first=4, context=[best])
    assert mixed.sum() == score(replug, unit, decoder or 6) != pytest.approx(float(alike.sum()))


def test_the_query_is_the_text_before_the_scored_tokens(tmp_path, monkeypatch):
    asked = []

    def search(queries, k):
        asked.append((queries, k))
        texts = ("abc", "wxyz!", "1234")  # the first has too few tokens
        hits = [types.SimpleNamespace(passage=types.SimpleNamespace(text=text), score=score)
                for text, score in zip(texts, (3.0, 2.0, 1.0))]  # fmt: skip
        return [hits for _ in queries]

    store = types.SimpleNamespace(search=search)
    module = types.SimpleNamespace(Retriever=types.SimpleNamespace(open=lambda *_, **__: store))
    monkeypatch.setitem(sys.modules, "lcjax.retrieval.retriever", module)
    path = write(tmp_path, [{"text": "abcdefghijklmnop"}])
    task = RagLm(path=path, retriever=RetrieverSection(str(tmp_path), k=7), **SMALL)
    (short,), (unit,) = plan_at(task, (12, 20))
    assert asked == [(["abcd"], 7)], "once for all lengths"
    assert TOKENIZER.decode(unit.tokens) == "1234wxyzabcdefghijkl"
    assert [passage.score for passage in unit.prompt.passages] == [1.0, 2.0]
    assert short.prompt.passages == ()
    # Without a file, texts are the beginnings of the run's documents.
    own = dataclasses.replace(task, path="")
    documents = [("short", "abc"), ("one", "abcdefghijklmnop"), ("two", "ABCDEFGHIJKLMNOP")]
    _, (first, second) = plan_at(own, (12, 20), documents)
    assert own.needs_data and not task.needs_data
    assert asked[1:] == [(["abcd", "ABCD"], 7)]
    assert first.tokens.tolist() == unit.tokens.tolist()
    assert TOKENIZER.decode(second.tokens) == "1234wxyzABCDEFGHIJKL"


def test_domains_count_alike_and_texts_are_tokenised(tmp_path):
    rows = [
        {"text": "abcdefghijklmnop", "chunks": [{"text": "wxyz!"}, {"text": "1234"}], "domain": d}
        for d in ("arxiv", "arxiv", "books")
    ]
    rows[2]["text"] = "ponmlkjihgfedcba"
    task = RagLm(path=write(tmp_path, rows), **SMALL)
    units = plan(task, 16)
    assert TOKENIZER.decode(units[0].tokens) == "wxyzabcdefghijkl"
    found = cell(task, units)
    values = [math.exp(expected(units[i].tokens.tolist())) for i in (0, 2)]
    assert found["value"] == pytest.approx(sum(values) / 2)
    assert found["domain:books"] == pytest.approx(values[1])


def test_rows_that_do_not_reach_are_left_out_and_named(tmp_path):
    good = {"input_ids": ids(1, 12), "chunks": [{"ids": ids(2, 4)}]}
    rows = [{**good, "input_ids": [1, 2]}, good, {**good, "chunks": [{"score": 1}]}, {"text": "a"}]
    rows += [{**good, "input_ids": [2**40] * 12}, {**good, "chunks": [{"ids": [-1] * 4}]}]
    task = RagLm(path=write(tmp_path, rows), **SMALL)
    with pytest.warns(UserWarning) as warned:
        assert len(plan(task, 16)) == 1
    texts = [str(warning.message) for warning in warned]
    assert all(any(f"chunks.jsonl:{n} " in text for text in texts) for n in (1, 3, 4, 5, 6))
    assert plan(RagLm(path=write(tmp_path, [good]), **SMALL), 20) == []
    assert task.longest_length(TokenizedCorpus([], TOKENIZER))[0] == 16


def test_the_file_is_read_once_for_all_lengths(tmp_path, monkeypatch):
    good = {"input_ids": ids(1, 12), "chunks": [{"ids": ids(2, 4)}]}
    read, rows = [], local_files.rows
    monkeypatch.setattr(local_files, "rows", lambda *a: read.append(a[0]) or rows(*a))
    short, long = plan_at(RagLm(path=write(tmp_path, [good]), **SMALL), (12, 16))
    assert len(short[0].tokens) == 12 and len(long[0].tokens) == 16 and len(read) == 1


@pytest.mark.parametrize(
    ("length", "fields", "words"),
    [
        (18, {}, "nearest: 20"),
        (8, {}, "nearest: 12"),
        (12, {"scored": 12}, "must be below"),
        (12, {"path": "nowhere"}, "is no file"),
        (12, {"chunk": 0}, "chunk"),
        (12, {"best": "next"}, "best"),
    ],
)
def test_settings_that_cannot_work_raise_input_error(tmp_path, length, fields, words):
    path = write(tmp_path, [{"input_ids": ids(1, 12), "chunks": []}])
    task = RagLm(**{"path": path, **SMALL, **fields})
    with pytest.raises(InputError, match=words):
        task.check(Limits((length,)), "tasks.0")
