"""The harness's tasks through a run, with a model and a harness that are known in closed form."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
from evaluation_support import BigramModel, only_the_run, token_loss

from lcjax.attention import VerticalSlash
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, LmEval, Method, RunSection, command, lm_eval, run
from lcjax.evaluation.lm_eval import harness
from lcjax.evaluation.lm_eval.requests import Encoder, respond
from lcjax.evaluation.split import ReplugSplit, SplitModel
from lcjax.evaluation.task import Limits
from lcjax.generation.scoring import Continuation
from lcjax.rope import Linear

LENGTH = 40


class Model(BigramModel):
    """Also scores continuations, one token after another, and notes the prompts it is given."""

    def with_method(self, **changes):
        copy = super().with_method(**changes)
        return Model(bonus=copy.bonus, log=self.log)

    def continuations(self, prompts, continuations):
        self.log.append([len(prompt) for prompt in prompts])
        found = []
        for prompt, row in zip(prompts, continuations, strict=True):
            texts = [[*prompt, *ids] for ids in row]
            losses = [np.array(losses_of(text, len(prompt), self.bonus)) for text in texts]
            found.append([Continuation(loss, bool(loss.sum() < 9)) for loss in losses])
        return found


def losses_of(text, first, bonus=2.0):
    return [token_loss(text[:place], text[place], bonus) for place in range(first, len(text))]


CHOICES = {"pick": ["bxq", "ccy", "dzd"], "pick_more": ["xq", "yy"]}


def questions():
    """Task, number, context and choices: the first is right, and comes in turn."""
    for name, choices in CHOICES.items():
        for number in range(len(choices)):
            context = f"{name} {'long ' * number}is"
            yield name, number, context, choices[number:] + choices[:number]


class Suite:
    """Two tasks of choices in a group, one of whole texts, one of written answers."""

    opened = 0

    def __init__(self, names, **settings):
        type(self).opened += 1
        self.names, self.settings = names, settings

    def documents(self, chat, **more):
        found = []
        fields = {"metric": "acc", "lower": [], "aggregation": {}, "by_size": True, "shots": 0}
        for name, number, context, choices in questions():
            asked = [("loglikelihood", [context, f" {choice}"], 1) for choice in choices]
            more = {"references": [choices[0]]}
            found.append(harness.HarnessDocument("both", name, number, asked, fields | more))
        fields = {"metric": "word_perplexity", "lower": ["word_perplexity"], "by_size": True}
        fields |= {"aggregation": {"word_perplexity": "weighted_perplexity"}, "shots": 0}
        asked = [("loglikelihood_rolling", ["a text of words, " * 5], 1)]
        found.append(harness.HarnessDocument("texts", "texts", 0, asked, fields))
        fields = {"metric": "hit", "lower": [], "aggregation": {"hit": "own"}, "by_size": True}
        asked = [("generate_until", ["The key is 123", {"max_gen_toks": 4}], 2)]
        found.append(harness.HarnessDocument("write", "write", 0, asked, fields | {"shots": 0}))
        return [d for d in found if d.task in self.names]

    def score_document(self, dataset, number, given):
        if dataset == "write":
            return {"hit,none": [text == " 123." for text in given[0]]}
        if dataset == "texts":
            return {"word_perplexity,none": [given[0][0], 20]}
        return {"acc,none": float(np.argmax([row[0][0] for row in given]) == 0)}

    def aggregate(self, dataset, metric, values):
        assert (dataset, metric) == ("write", "hit")
        return float(np.mean(values))


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(harness, "check_installed", lambda: None)
    monkeypatch.setattr(harness, "Suite", Suite)
    return LmEval(tasks=("both", "texts", "write"))


def run_of(task, folder):
    methods = (Method("base"), Method("half", rope=Linear(factor=2.0)))
    where = RunSection(str(folder), "resume")
    return EvalConfig(methods=methods, tasks=(task,), lengths=(LENGTH,), batch_size=2, run=where)


def wanted(bonus):
    """(accuracy of the choices, perplexity of the text) by brute force."""
    encoder, right = Encoder(Model().tokenizer, LENGTH), []
    for _, _, context, choices in questions():
        pairs = [encoder.pair(context, f" {choice}") for choice in choices]
        sums = [sum(losses_of([*a, *b], len(a), bonus)) for a, b in pairs]
        right.append(float(np.argmin(sums) == 0))
    ids, total = encoder.ids("a text of words, " * 5), 0.0
    for start in range(0, len(ids), LENGTH):
        end = min(start + LENGTH, len(ids))
        read = [0, *ids][max(end - LENGTH, 0) : end + 1]
        total += sum(losses_of(read, len(read) - (end - start), bonus))
    return np.mean(right), np.exp(total / 20)


def test_a_run_has_the_numbers_of_brute_force_by_method_and_task(task, tmp_path):
    log: list = []
    with only_the_run():
        report = run(run_of(task, tmp_path), load=lambda section: Model(log=log))
    for cell, bonus in zip(report.cells, (2.0, 1.0), strict=True):
        accuracy, perplexity = wanted(bonus)
        assert cell["both:acc"] == pytest.approx(accuracy)
        assert cell["texts:word_perplexity"] == pytest.approx(perplexity)
        assert cell["write:hit"] == 1.0
        assert cell["value"] == pytest.approx((accuracy + 1) / 2)  # less of the third is better
    assert "| both (acc) | texts (word_perplexity) | write (hit) |" in report.text
    assert 0 < wanted(2.0)[0] < 1
    asked = [sizes for sizes in log if isinstance(sizes, list)]
    assert all(len(sizes) == 2 for sizes in asked)  # one compiled shape
    assert asked[:3] == sorted(asked[:3], reverse=True)  # the longest first


def test_a_stopped_run_resumes(task, tmp_path):
    dies = Model(log=[], fail_after=None)
    calls = []

    def stop(self, prompts, continuations):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Model.continuations(dies, prompts, continuations)

    class Stopped(Model):
        continuations = stop

        def with_method(self, **changes):
            return self

    with only_the_run(), pytest.raises(KeyboardInterrupt):
        run(run_of(task, tmp_path), load=lambda section: Stopped())
    path = tmp_path / "records" / "lm_eval.jsonl"
    before = path.read_text().splitlines()
    assert 0 < len(before) < 14
    with only_the_run():
        run(run_of(task, tmp_path), load=lambda section: Model())
    lines = path.read_text().splitlines()
    assert lines[: len(before)] == before and len(lines) == 14
    record = next(row for row in map(json.loads, lines) if row["dataset"] == "pick")
    assert len(record["responses"]) == 3 and record["references"][0] in CHOICES["pick"]
    assert record["correct"] == (record["answer"].strip() == record["references"][0])


def test_the_harness_is_opened_once_for_all_lengths_and_methods(task, tmp_path):
    Suite.opened = 0
    made = dataclasses.replace(run_of(task, tmp_path), lengths=(32, LENGTH))
    with only_the_run():
        run(made, load=lambda section: Model())
    assert Suite.opened == 1


def test_numbers_of_which_less_is_better_must_be_named(task, tmp_path):
    alone = dataclasses.replace(task, tasks=("texts",))
    with pytest.raises(InputError, match="name them, .*texts:word_perplexity"):
        run(run_of(alone, tmp_path), load=lambda section: Model())
    named = dataclasses.replace(task, tasks=("texts:word_perplexity",))
    assert named.metric.lower_is_better and not task.metric.lower_is_better
    with only_the_run():
        report = run(run_of(named, tmp_path), load=lambda section: Model())
    assert report.cells[0]["value"] == pytest.approx(wanted(2.0)[1])


@pytest.fixture
def suite(monkeypatch):
    """Opens a suite over tasks that know nothing but their metrics: a tag of two, and a group."""

    def task(*metrics):
        return types.SimpleNamespace(
            aggregation=lambda: dict.fromkeys(metrics, np.mean),
            higher_is_better=lambda: {"loss": False},
            get_config=lambda key: 0,
            set_config=lambda key, value: None,
        )

    rule = types.SimpleNamespace(metric="acc", weight_by_size=True)
    group = types.SimpleNamespace(aggregate_metric_list=[rule])
    loaded = {
        "tag": {"tasks": {"one": task("acc", "loss"), "two": task("acc", "loss")}, "groups": {}},
        "group": {"tasks": {"x": task("acc"), "y": task("f1")}, "groups": {"group": group}},
    }
    manager = types.SimpleNamespace(task_index=loaded, all_tasks=list(loaded))
    modules = {
        "lm_eval": {},
        "lm_eval.tasks": {"TaskManager": lambda include_path: manager},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"AGGREGATION_REGISTRY": {"mean": np.mean}},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "check_installed", lambda: None)
    monkeypatch.setattr(harness.Suite, "_load", staticmethod(lambda _, name: loaded[name]))
    return harness.Suite


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pattern": VerticalSlash()}, "a text has no score under it"),
        ({"position": "learned"}, f"{LENGTH} positions; use at most {LENGTH - 1}"),
    ],
)
def test_unsupported_requests_raise_input_error_before_any_prompt(task, tmp_path, config, message):
    model = Model(trained=LENGTH)
    model.config = model.config.replace(**config)
    model.with_method = lambda **changes: model
    with pytest.raises(InputError, match=message):
        run(run_of(task, tmp_path), load=lambda section: model)
    assert not model.log and not (tmp_path / "records").exists()


def test_scoring_whole_texts_raises_input_error_for_methods_with_a_context():
    encoder, model = Encoder(Model().tokenizer, LENGTH), Model()
    asked = [
        encoder.request("loglikelihood", ["ab", " c"]),
        encoder.request("loglikelihood_rolling", ["some words"]),
    ]
    split = SplitModel(model, ReplugSplit(decoder=20, chunk=8), 20, 8)
    with pytest.raises(InputError, match="of which the decoder of this method reads only"):
        respond(split, asked, 2)
    assert not model.log


def test_a_metric_after_a_name_applies_to_all_its_tasks(suite):
    opened = suite(["tag", "group"], metrics={"tag": "loss"})
    shown = {
        name: opened._record_fields(name, task)["metric"] for name, task in opened._tasks.items()
    }
    assert shown == {"one": "loss", "two": "loss", "x": "acc", "y": "acc"}


@pytest.mark.parametrize(
    ("name", "wrong", "known"),
    [("tag:acc_nrm", "one", "acc, loss"), ("group:em", "group", "acc, f1")],
)
def test_a_metric_that_a_task_does_not_have_raises_input_error_before_a_model_is_asked(
    suite, name, wrong, known
):
    metric = name.partition(":")[2]
    with pytest.raises(InputError, match=f"tasks: {wrong} has no metric {metric}; known: {known}"):
        LmEval(tasks=(name,)).check(Limits((LENGTH,)), "tasks.0")
    LmEval(tasks=("group:f1",)).check(Limits((LENGTH,)), "tasks.0")  # one of its tasks has it


def test_a_group_is_the_mean_of_its_tasks_weighted_or_not():
    rows = [("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)]
    records = [
        {"task": "g", "dataset": name, "scores": {"acc,none": value}, "aggregation": {}}
        for name, value in rows
    ]
    for by_size, value in ((True, 0.75), (False, 0.5)):
        sized = [record | {"by_size": by_size} for record in records]
        scores = harness.task_numbers(sized, task_aggregation=None)
        assert scores == {"g": {"acc,none": value}}


@pytest.mark.parametrize("rule", ["weighted_perplexity", "bits_per_byte", "perplexity", "mean"])
def test_a_loss_that_is_no_number_makes_none_of_the_task(rule):
    values = [-1.0, None] if rule in ("perplexity", "mean") else [[-1.0, 3], [None, 4]]
    record = {"dataset": "a", "aggregation": {"m": rule}}
    records = [record | {"scores": {"m,none": value}} for value in values]
    assert np.isnan(harness.dataset_numbers(records, task_aggregation=None)["a"]["m,none"])


def test_answers_keep_the_order_of_mixed_requests():
    encoder, model = Encoder(Model().tokenizer, LENGTH), Model()
    requests = [
        encoder.request("generate_until", ["key 7", {"max_gen_toks": 3}]),
        encoder.request("loglikelihood", ["ab", " c"]),
        encoder.request("loglikelihood_rolling", ["some words"]),
        encoder.request("loglikelihood", ["a longer context", " d"]),
        encoder.request("loglikelihood", ["ab", " ef"]),
    ]
    reported = {}
    answers = respond(model, requests, 2, reported.__setitem__)
    assert answers == [reported[number] for number in range(5)] and answers[0] == " 7."
    for number in (1, 3, 4):
        text = [*requests[number].prompt, *requests[number].continuation]
        total = sum(losses_of(text, len(requests[number].prompt)))
        assert answers[number][0] == pytest.approx(-total)
    assert model.log[0] == [17, 3]  # of three prompts two are the same, and read once


def test_what_is_drawn_depends_on_seed_and_prompt_and_not_on_the_batch():
    encoder, seeds = Encoder(Model().tokenizer, LENGTH), []

    class Drawing(Model):
        def generate(self, prompts, sampling):
            seeds[-1] |= zip(map(tuple, prompts), sampling.seed, strict=True)
            return super().generate(prompts, sampling)

    heat = {"do_sample": True, "max_gen_toks": 3}
    for batch, repeat in ((1, 0), (4, 0), (4, 1)):
        seeds.append({})
        asked = [
            encoder.request("generate_until", [f"{'long ' * n}key {n}", heat], repeat)
            for n in range(5)
        ]
        respond(Drawing(), asked, batch)
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 5
    assert not set(seeds[1].values()) & set(seeds[2].values())


def test_names_on_the_command_line_are_those_of_the_first_task(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(command.distributed, "main", lambda cls, run, words: seen.append(words))
    command.main(["--config", "x.yaml", "--tasks", "piqa,hellaswag", "--include_path=mine"])
    command.main(["run", "--tasks=[{type: passkey}]"])
    assert seen == [
        ["--config", "x.yaml", "--tasks.0.tasks", "piqa,hellaswag", "--tasks.0.include_path=mine"],
        ["--tasks=[{type: passkey}]"],
    ]


def test_without_the_harness_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs lm-evaluation-harness; pip install"):
        harness.check_installed()
    with pytest.raises(InputError, match="pip install"):
        getattr(lm_eval, "HarnessModel")  # noqa: B009
