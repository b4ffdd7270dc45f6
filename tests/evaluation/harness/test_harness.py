"""Beside the harness itself: its own model of transformers, and its own program."""

import json

import numpy as np
import pytest
from harness_support import language_model, write_tasks

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra eval")

from lcjax import checkpoints
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, LmEval, Method, ReplugSplit, RunSection, run
from lcjax.evaluation.lm_eval import HarnessModel
from lcjax.evaluation.lm_eval.harness import Suite
from lcjax.rope import Yarn

pytestmark = pytest.mark.slow  # importing and indexing the harness alone takes ten seconds

NAMES = ["tiny_choice", "tiny_choice_bare", "tiny_last_word", "tiny_texts", "tiny_writing"]
LENGTH = 96


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def lm():
    return language_model()


def evaluated(model, tasks, names=NAMES, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options
    )
    return found


@pytest.fixture(scope="module")
def ours(lm, tasks):
    return evaluated(HarnessModel(lm, max_length=LENGTH, batch_size=3), tasks)


@pytest.fixture(scope="module")
def transformers(lm, tmp_path_factory):
    """The harness's own model, of the same weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the harness's model of transformers needs it")
    from lm_eval.models.huggingface import HFLM

    folder = str(tmp_path_factory.mktemp("model"))
    checkpoints.save_hf(folder, lm.params, lm.config.replace(scan_layers=False), lm.tokenizer)
    options = {"dtype": "float32", "max_length": LENGTH, "batch_size": 2}
    return HFLM(pretrained=folder, device="cpu", **options)


@pytest.fixture(scope="module")
def theirs(transformers, tasks):
    return evaluated(transformers, tasks)


def answers(found, name):
    return [sample["resps"] for sample in found["samples"][name]]


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_the_harness_with_transformers(ours, theirs, name):
    mine, wanted = answers(ours, name), answers(theirs, name)
    assert len(mine) == len(wanted) > 0
    for one, two in zip(mine, wanted, strict=True):
        if name == "tiny_writing":
            assert one == two
        elif name == "tiny_texts":
            np.testing.assert_allclose(one, two, rtol=1e-4)
        else:
            np.testing.assert_allclose(
                [pair[0] for row in one for pair in row],
                [float(pair[0]) for row in two for pair in row],
                atol=1e-3,
            )
            assert [p[1] for row in one for p in row] == [p[1] for row in two for p in row]
    for key, value in theirs["results"][name].items():
        if "," in key and isinstance(value, float):
            assert ours["results"][name][key] == pytest.approx(value, rel=1e-4)


def test_the_default_length_is_the_one_that_the_harness_reads_from_an_export(lm, tmp_path):
    pytest.importorskip("accelerate", reason="the harness's model of transformers needs it")
    from lm_eval.models.huggingface import HFLM

    for factor in (1, 2):
        model = lm.with_method(rope=Yarn(factor=2.0) if factor == 2 else None)
        model.save(folder := tmp_path / str(factor))
        theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32")
        assert HarnessModel(model).max_length == theirs.max_length == factor * lm.config.max_length


def test_cached_requests_are_not_computed_again(lm, tasks, ours, tmp_path):
    model = HarnessModel(lm, max_length=LENGTH, batch_size=3)
    options = {"names": ["tiny_choice", "tiny_writing"], "use_cache": str(tmp_path / "answers")}
    evaluated(model, tasks, **options)
    model._model = None  # nobody to ask
    again = evaluated(model, tasks, **options)
    for name in options["names"]:
        assert answers(again, name) == answers(ours, name)


def config(include_path, folder, methods=(Method("base"),), **settings):
    return EvalConfig(
        methods=methods,
        tasks=(LmEval(include_path=include_path, **settings),),
        lengths=(LENGTH,),
        batch_size=3,
        run=RunSection(str(folder), "resume"),
    )


def test_a_run_of_eval_py_gives_the_numbers_of_the_harness(lm, tasks, ours, tmp_path):
    names = ("tiny_group", "tiny_last_word:acc", "tiny_texts", "tiny_writing")
    report = run(config(tasks, tmp_path, tasks=names), load=lambda section: lm)
    (cell,) = report.cells
    wanted = ours["results"]
    for name, keys in (
        ("tiny_last_word", ("perplexity,none", "acc,none")),
        ("tiny_texts", ("word_perplexity,none", "bits_per_byte,none")),
        ("tiny_writing", ("exact_match,none",)),
    ):
        for key in keys:
            found = cell[f"{name}:{key.removesuffix(',none')}"]
            assert found == pytest.approx(wanted[name][key], rel=1e-5)
    both = [wanted[name]["acc,none"] for name in ("tiny_choice", "tiny_choice_bare")]
    assert cell["tiny_group:acc"] == pytest.approx(np.mean(both))
    counted = [
        cell[k] for k in ("tiny_group:acc", "tiny_last_word:acc", "tiny_writing:exact_match")
    ]
    assert cell["value"] == pytest.approx(np.mean(counted))
    assert "tiny_texts (word_perplexity)" in report.text
    lines = (tmp_path / "records" / "lm_eval.jsonl").read_text().splitlines()
    assert len(lines) == 8 * 4 + 3
    again = run(config(tasks, tmp_path, tasks=names), load=lambda section: lm)
    assert again.cells[0]["value"] == cell["value"]


def test_a_tag_shows_its_selected_metric(tasks):
    suite = Suite(["tiny_tag"], metrics={"tiny_tag": "acc_norm"}, include_path=tasks)
    shown = {(d.task, d.fields["metric"]) for d in suite.documents()}
    assert shown == {("tiny_choice", "acc_norm"), ("tiny_choice_bare", "acc_norm")}


def test_chat_examples_are_turns_in_the_models_format(lm, tasks, tmp_path):
    settings = {"tasks": ("tiny_choice",), "template": "chat", "system": "Be kind."}
    run(config(tasks, tmp_path, **settings), load=lambda section: lm)
    lines = (tmp_path / "records" / "lm_eval.jsonl").read_text().splitlines()
    (prompt,) = [row["prompt"] for row in map(json.loads, lines) if "prompt" in row]
    assert prompt.startswith("<s>system\nBe kind.</s><s>user\nQuestion")
    assert prompt.count("<s>assistant") == 2 and prompt.endswith("</s><s>assistant")


def test_chat_gives_the_answers_of_the_harness_with_transformers(lm, tasks, transformers):
    model = HarnessModel(lm, max_length=LENGTH, batch_size=3)
    options = {"names": ["tiny_choice"], "apply_chat_template": True}
    mine, wanted = (
        evaluated(one, tasks, **options)["samples"]["tiny_choice"] for one in (model, transformers)
    )
    first = mine[0]["arguments"][0][0]
    assert first.startswith("<s>user\nQuestion")
    assert model.tok_encode(first).count(model.prefix_token_id) == first.count("<s>")
    for one, two in zip(mine, wanted, strict=True):
        assert one["arguments"] == two["arguments"]
        sums = [
            [float(pair[0]) for row in sample["resps"] for pair in row] for sample in (one, two)
        ]
        np.testing.assert_allclose(*sums, atol=1e-3)


def test_methods_that_read_beside_the_decoder_answer_all_but_whole_texts(lm, tasks, tmp_path):
    methods = (Method("alone"), Method("replug", replug=ReplugSplit(decoder=40, chunk=24)))
    names = ("tiny_choice", "tiny_writing")
    report = run(
        config(tasks, tmp_path, tasks=names, methods=methods, max_examples=2),
        load=lambda section: lm,
    )
    assert [cell["windows"] for cell in report.cells] == [4, 4]
    with pytest.raises(InputError, match="of which the decoder of this method reads only"):
        run(
            config(tasks, tmp_path / "b", tasks=("tiny_texts:bits_per_byte",), methods=methods[1:]),
            load=lambda section: lm,
        )


def test_names_that_are_unknown_or_count_down_raise_input_error_at_once(tasks, tmp_path, lm):
    with pytest.raises(InputError, match="did you mean tiny_choice"):
        Suite(["tiny_chioce"], include_path=tasks)
    with pytest.raises(InputError, match="tiny_choice has no metric acc_nrm; known: acc, acc_norm"):
        Suite(["tiny_tag"], metrics={"tiny_tag": "acc_nrm"}, include_path=tasks)
    with pytest.raises(InputError, match="name them, .*tiny_texts:word_perplexity"):
        run(config(tasks, tmp_path, tasks=("tiny_texts",)), load=lambda section: lm)
