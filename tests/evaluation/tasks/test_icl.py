"""In-context learning: demonstrations, and four scores against the toy model's losses."""

import dataclasses
import json
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan
from evaluation_support import BigramModel, ByteTokenizer, fake, losses_behind, only_the_run

from lcjax.errors import InputError
from lcjax.evaluation import ContextSplit, EvalConfig, RunSection, run
from lcjax.evaluation.split import SplitModel
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.icl import SCORES, Icl


def write(folder: Path, name="sst2", labels=(0, 1), test="validation", count=6) -> str:
    (folder / name).mkdir(parents=True)
    for split, size in (("train", 8), (test, count)):
        rows = [
            {"text": f"{split} words {i}", "label": labels[i % len(labels)]} for i in range(size)
        ]
        (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def loss(prompt, option):
    return sum(losses_behind(prompt, option))


def test_four_scores_are_those_of_the_formulas(tmp_path):
    task = Icl(path=write(tmp_path), tasks=("sst2",), shots=1)
    units, model = plan(task), BigramModel()
    records = [task.score(model, [unit], 3)[0] for unit in units]
    options = [TOKENIZER.encode(" negative"), TOKENIZER.encode(" positive")]
    sizes = np.asarray(list(map(len, options)))
    for unit, record in zip(units, records):
        assert unit.fields["options"] == ["negative", "positive"]
        assert unit.fields["size"] == len(unit.tokens) + len(" positive")
        given = np.asarray([loss(unit.tokens.tolist(), option) for option in options])
        bare = np.asarray([loss([0], option) for option in options])
        right = unit.fields["options"].index(unit.fields["references"][0])
        scores = (-given, -given / sizes, bare - given, (bare - given) / sizes)
        expected = {n: float(np.argmax(v) == right) for n, v in zip(SCORES, scores)}
        assert {name: record["scores"][name] for name in SCORES} == expected
        assert record["option_nll"] == pytest.approx(given.tolist())
        assert record["shown"] == "acc_calib" and record["correct"] == expected["acc_calib"]
    cell = task.summarise([{**u.fields, **r} for u, r in zip(units, records)])
    value = pytest.approx(cell["value"])
    assert cell["sst2:acc_calib"] == value and cell["sst2"] == value
    assert cell["all:acc"] == pytest.approx(np.mean([r["scores"]["acc"] for r in records]))


def test_texts_stand_in_prompts_as_they_are(tmp_path):
    """CEPE formats the text of a row, such as sst2's with a blank at its end, without a change."""
    (tmp_path / "sst2").mkdir()
    for split, text in (("train", "hide new  secretions "), ("validation", " two\nlines ")):
        rows = [{"text": text, "label": label} for label in (0, 1)]
        file = tmp_path / "sst2" / f"{split}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
    task = Icl(path=str(tmp_path), tasks=("sst2",), shots=1, wording="lcjax:wording/cepe_icl")
    for unit in plan(task):
        text = TOKENIZER.decode(unit.tokens).removeprefix("\0")
        demo, _, question = text.partition("\n\n")
        text, _, name = demo.rpartition(" ")
        assert text == "Sentence: hide new  secretions \nSentiment:"
        assert name in ("negative", "positive")
        assert question == "Sentence:  two\nlines \nSentiment:"


def test_without_bos_the_end_of_a_document_calibrates(tmp_path):
    ending = ByteTokenizer(bos_id=None, add_bos=False, eos_ids=(11,))
    task = Icl(path=write(tmp_path), tasks=("sst2",), shots=1)
    for tokenizer, first, name in (
        (ending, 11, "eos"), (ByteTokenizer(add_bos=False), 0, "bos"), (TOKENIZER, 0, "bos"),
    ):  # fmt: skip
        unit = plan(task, tokenizer=tokenizer)[0]
        (record,) = task.score(BigramModel(tokenizer), [unit], 1)
        options = [tokenizer.encode(f" {option}") for option in unit.fields["options"]]
        bare = [loss([first], option) for option in options]
        assert record["bare_prefix"] == name
        assert record["option_nll_bare"] == pytest.approx(bare)
        best = int(np.argmax(np.subtract(bare, record["option_nll"])))
        assert record["answer"] == unit.fields["options"][best]
    neither = BigramModel(dataclasses.replace(ending, eos_ids=()))
    with pytest.raises(InputError, match="neither BOS nor an end"):
        task.check_model(neither, [unit])


def test_a_batch_is_one_call_and_bos_alone_is_scored_once(tmp_path):
    task = Icl(path=write(tmp_path, count=5), tasks=("sst2",), shots=1)
    units, model = plan(task), BigramModel()
    score = task.scorer(model, 2)
    records = [record for i in range(0, 5, 2) for record in score(units[i : i + 2])]
    assert model.log == [("continuations", n) for n in (2, 1, 2, 2)]
    for unit, record in zip(units, records, strict=True):
        (alone,) = task.score(model, [unit], 1)
        assert alone == record
        assert record["read"] == len(unit.tokens) + len(" negative") + len(" positive")


def test_a_run_resumes_after_scored_examples(tmp_path):
    config = EvalConfig(
        tasks=(Icl(path=write(tmp_path / "sets", count=2), tasks=("sst2",), shots=1),),
        lengths=(200, 300), run=RunSection(str(tmp_path / "out")),
    )  # fmt: skip
    with only_the_run():
        report = run(config, load=fake())
        file = tmp_path / "out" / "records" / "icl.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
        log = []
        again = run(config, load=fake(log=log))
    assert [c["value"] for c in again.cells] == [c["value"] for c in report.cells]
    assert [n for _, n in log] == [1, 1], "of the length that is not finished, and BOS"


def test_what_a_decoder_has_no_room_for_of_the_demonstrations_is_read_beside_it(tmp_path):
    class Beside(BigramModel):
        def encode_contexts(self, passages, chunk):
            return [b"".join(bytes(i - 1 for i in piece) for piece in own) for own in passages]

        def continuations(self, prompts, options, context):
            asked.extend((TOKENIZER.decode(p), c.decode()) for p, c in zip(prompts, context))
            return super().continuations(prompts, options)

    asked, task = [], Icl(path=write(tmp_path, count=1), tasks=("sst2",), shots=4)
    (unit,) = plan(task)
    model = Beside()
    memory = types.SimpleNamespace(is_prefix=False, by_chunk=False)
    model.config = types.SimpleNamespace(max_length=32, memory=memory)
    task.score(SplitModel(model, ContextSplit(decoder=64, chunk=32), 64, 32), [unit], 1)
    (read, beside), bare = asked
    assert beside + read == TOKENIZER.decode(unit.tokens) and bare == ("", "")
    assert len(read) + len(" negative") + 1 == 64 and read.endswith("Sentiment:")


@pytest.mark.parametrize("further", [18, 38])
def test_two_demonstrations_stay_with_the_decoder_and_others_are_chunks_of_the_context(
    tmp_path, further
):
    class Beside(BigramModel):
        def encode_contexts(self, passages, chunk):
            return [[TOKENIZER.decode(piece) for piece in row] for row in passages]

        def continuations(self, prompts, options, context):
            asked.extend((TOKENIZER.decode(p), c) for p, c in zip(prompts, context))
            return super().continuations(prompts, options)

    asked, path = [], write(tmp_path, count=1)
    (unit,) = plan(Icl(path=path, tasks=("sst2",), shots=2, context_shots=further))
    assert (unit.fields["shots"], unit.fields["context_shots"]) == (2, further)
    model = Beside()
    memory = types.SimpleNamespace(is_prefix=False, by_chunk=False)
    model.config = types.SimpleNamespace(max_length=32, memory=memory)
    Icl(path=path).score(SplitModel(model, ContextSplit(), 4000, 32), [unit], 1)
    (read, beside), _ = asked
    (alone,) = plan(Icl(path=path, tasks=("sst2",), shots=2))
    assert read == TOKENIZER.decode(alone.tokens), "that of the task with two demonstrations"
    assert len(beside) == further
    assert all(piece.startswith("Text: ") and piece.endswith("ive\n\n") for piece in beside)
    assert "".join(beside) + read == TOKENIZER.decode(unit.tokens)


def test_demonstrations_are_balanced_and_drawn_for_every_text(tmp_path):
    labels = ("card_lost", "top_up", "exchange rate")
    path = write(tmp_path, "banking77", labels, "test")
    units = plan(Icl(path=path, tasks=("banking77",), shots=6))
    texts = [TOKENIZER.decode(unit.tokens) for unit in units]
    names = sorted(label.replace("_", " ") for label in labels)
    for unit, text in zip(units, texts):
        assert unit.fields["options"] == names
        shown = [
            line.partition(": ")[2] for line in text.split("\n") if line.startswith("Intent: ")
        ]
        assert Counter(shown) == dict.fromkeys(names, 2)
        assert sorted(shown[:3]) == names and text.endswith("\nIntent:")
    assert len({text.rpartition("Text:")[0] for text in texts}) > 1
    again = plan(Icl(path=path, tasks=("banking77",), shots=6))
    assert [u.digest for u in units] == [u.digest for u in again]


def test_the_mean_over_seeds_has_the_texts_and_demonstrations_of_each_seed_alone(tmp_path):
    path = write(tmp_path, count=20)
    options = {"path": path, "tasks": ("sst2",), "shots": 3, "max_examples": 5, "order": "first"}
    units = plan(Icl(**options, seeds=3))
    expected = [unit for seed in (42, 43, 44) for unit in plan(Icl(**options, seed=seed))]
    assert [unit.tokens.tolist() for unit in units] == [u.tokens.tolist() for u in expected]
    assert [unit.fields["seed"] for unit in units] == [42] * 5 + [43] * 5 + [44] * 5
    assert len({unit.digest for unit in units}) > 5, "other demonstrations for each seed"
    rng, task = np.random.default_rng(0), Icl(**options, seeds=3)
    records = [
        {**unit.fields, "method": "m", "answer": "a", "truncated": 0, "correct": correct,
         "scores": dict.fromkeys(SCORES, correct)}
        for unit, correct in zip(units, rng.integers(0, 2, 15).astype(float))
    ]  # fmt: skip
    means = [np.mean([r["correct"] for r in records[i : i + 5]]) for i in (0, 5, 10)]
    cell = task.summarise(records)
    assert cell["value"] == pytest.approx(np.mean(means))
    assert cell["sst2:deviation"] == pytest.approx(np.std(means))


def test_examples_are_the_first_texts_or_shuffled_ones(tmp_path):
    path = write(tmp_path, count=40)
    first = plan(Icl(path=path, tasks=("sst2",), max_examples=5, order="first"))
    drawn = plan(Icl(path=path, tasks=("sst2",), max_examples=5))
    assert [unit.fields["line"] for unit in first] == [1, 2, 3, 4, 5]
    assert [unit.fields["line"] for unit in drawn] != [1, 2, 3, 4, 5] and len(drawn) == 5


@pytest.mark.filterwarnings("ignore:.*text must be a string.*")
def test_labels_that_fit_not_are_named(tmp_path):
    path = write(tmp_path)
    file = tmp_path / "sst2" / "validation.jsonl"
    bad = [{"text": "a", "label": 7}, {"text": "b", "label": "neutral"}]
    bad += [{"text": None, "label": 1}, {"text": "d", "label": "_"}]
    file.write_text(file.read_text() + "\n" + "\n".join(map(json.dumps, bad)))
    task = Icl(path=path, tasks=("sst2",))
    with pytest.warns(UserWarning) as warned:
        units = plan(task)
    texts = " ".join(str(warning.message) for warning in warned)
    assert all(f"validation.jsonl:{line} " in texts for line in (7, 8, 9, 10)) and len(units) == 6
    train = tmp_path / "sst2" / "train.jsonl"
    before = train.read_text()
    train.write_text("\n".join(map(json.dumps, bad[:1])))
    with pytest.raises(InputError, match=r"train\.jsonl contains no valid row"):
        plan(task)
    train.write_text(before)
    limits = Limits((1000,))
    with pytest.raises(InputError, match="shuffled, first"):
        Icl(path=path, tasks=("sst2",), order="last").check(limits, "tasks.0")
    with pytest.raises(InputError, match=r"mr.test\.jsonl is missing"):
        Icl(path=path, tasks=("mr",)).check(limits, "tasks.0")
    with pytest.raises(InputError, match="too short"):
        plan(Icl(path=path, tasks=("sst2",), shots=8), 60)


def test_train_labels_beside_the_known_classes_raise_input_error(tmp_path):
    task = Icl(path=write(tmp_path, labels=("negative", "positively")), tasks=("sst2",))
    with pytest.raises(InputError, match="label='positively' is none of the classes of sst2"):
        plan(task)


def test_without_losses_no_class_is_right(tmp_path):
    class Broken(BigramModel):
        def continuations(self, *args, **kwargs):
            rows = super().continuations(*args, **kwargs)
            return [[option._replace(nll=option.nll * np.nan) for option in row] for row in rows]

    task = Icl(path=write(tmp_path), tasks=("sst2",))
    records = task.score(Broken(), plan(task), 6)
    assert {record["correct"] for record in records} == {0.0}
    assert {record["answer"] for record in records} == {""}
