"""LongBench from miniature files in the official format: wording, cuts, templates, scores."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import pytest
from benchmark_support import TOKENIZER, Scripted, plan, scored
from evaluation_support import config_in, only_the_run, records

from lcjax.config import parse
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, Method, results, run
from lcjax.evaluation.export import export
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.local_files import PROMPTS_VERSION, library_prompts
from lcjax.evaluation.tasks.longbench import LongBench, code_difflib, code_indel

CLASSES = ["Food", "Other entity", "Entity", "Food other"]
ANSWERS = {
    "trec": "Food other", "lsht": "Food", "passage_count": "12", "code": "return x[0]",
    "passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "段落3",
}  # fmt: skip


def row(name, index=0, context="some text. ", **fields):
    group = LongBench.datasets[name].group
    answer = ANSWERS.get(name, ANSWERS.get(group, f"the blue house {index}"))
    return {
        "input": f"What is asked {index}?", "context": context * 20, "answers": [answer],
        "length": 3000 * (index + 1), "dataset": name, "language": "en", "_id": f"{name}{index}",
        "all_classes": CLASSES if name in ("trec", "lsht") else None, **fields,
    }  # fmt: skip


def write(folder: Path, names, count=2, suffix="", **fields) -> str:
    folder.mkdir(exist_ok=True)
    for name in names:
        lines = [json.dumps(row(name, index, **fields)) for index in range(count)]
        (folder / f"{name}{suffix}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


class _Jieba:
    @staticmethod
    def cut(text, cut_all):
        return iter(text.split())


@pytest.fixture
def jieba(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", _Jieba)


def test_right_answers_to_all_tasks_give_1_and_each_group_its_mean(tmp_path, jieba):
    task = LongBench(path=write(tmp_path, LongBench.datasets))
    units = plan(task)
    assert len(units) == 2 * 21
    answers = [unit.fields["references"][0] for unit in units]
    for index, unit in enumerate(units):
        if task.datasets[unit.fields["dataset"]].first_line:
            answers[index] = f"\n{answers[index]}\nand more"
    found = scored(task, units, answers)
    cell = task.summarise(found)
    means = cell["value"], cell["flat"], cell["category_macro"]
    assert means == pytest.approx((1, 1, 1))
    assert {name: cell[name] for name in task.datasets} == pytest.approx(
        dict.fromkeys(task.datasets, 1)
    )
    assert cell["windows"] == 42 and cell["empty"] == 0
    low, high = task.interval(found)
    assert low <= cell["value"] + 1e-9 and high >= cell["value"] - 1e-9


def test_a_few_shot_answer_counts_up_to_its_first_line_and_another_one_as_a_whole(tmp_path):
    task = LongBench(path=write(tmp_path, ("triviaqa", "hotpotqa"), 1), tasks=("en",))
    with pytest.raises(InputError, match=r"narrativeqa\.jsonl is missing.*THUDM/LongBench"):
        task.check(Limits((4000,)), "tasks.0")
    task = LongBench(path=task.path, tasks=("triviaqa", "hotpotqa"))
    hotpot, trivia = scored(task, plan(task), lambda _: "\nblue house 0\nred red")
    assert trivia["scores"]["qa_f1"] == 1.0
    assert hotpot["scores"]["qa_f1"] == pytest.approx(0.75)
    lceg = LongBench(path=task.path, tasks=task.tasks, first_lines="lceg")
    assert lceg.rescore({**hotpot, "window": 0}, TOKENIZER)["correct"] == 1.0


def test_settings_select_the_mean_over_data_sets_or_categories(tmp_path):
    names = ("hotpotqa", "musique", "lcc")
    path = write(tmp_path, names)

    def answer(text):
        return "return x[0]" if "line" in text else "nothing"

    flat = LongBench(path=path, tasks=names)
    found = scored(flat, plan(flat), answer)
    macro = LongBench(path=path, tasks=names, aggregate="category_macro")
    assert flat.summarise(found)["value"] == pytest.approx(1 / 3)
    assert macro.summarise(found)["value"] == pytest.approx(0.5)
    cell = macro.summarise(found)
    assert cell["aggregate"] == "category_macro(hotpotqa,musique,lcc)"
    assert (cell["category:code"], cell["category:multi_doc_qa"]) == (1, 0)
    assert "mean of 3" in flat.metric.title and "category" in macro.metric.title


def test_code_is_scored_by_the_backend_that_is_named(tmp_path):
    path = write(tmp_path, ("lcc",), 1)
    answer = "return y[10]"
    for name, score in (("indel", code_indel), ("difflib", code_difflib)):
        task = LongBench(path=path, tasks=("lcc",), code_metric=name)
        (record,) = scored(task, plan(task), lambda _: answer)
        assert record["correct"] == score(answer, "return x[0]")
        assert {"code_indel", "code_difflib"} <= set(record["scores"])


def test_code_is_scored_by_difflib_by_default(tmp_path):
    """The official requirements have fuzzywuzzy without python-Levenshtein."""
    path = write(tmp_path, ("lcc",), 1, answers=["bcdabc"])
    task = LongBench(path=path, tasks=("lcc",))
    (record,) = scored(task, plan(task), lambda _: "abcabcd")
    # difflib takes the block "abc" at the start, after whose match nothing is left: 2 * 3 / 13. The
    # longest common subsequence is "bcabc": 2 * 5 / 13.
    assert record["correct"] == record["scores"]["code_difflib"] == 0.46
    assert record["scores"]["code_indel"] == 0.77


def test_classes_are_also_judged_without_the_scorers_slip(tmp_path):
    fields = {"all_classes": ["Foo", "Food", "Food other"]}
    task = LongBench(path=write(tmp_path, ("trec",), 1, **fields), tasks=("trec",))
    (record,) = scored(task, plan(task), ["Food other"])
    assert record["scores"]["classification"] == record["correct"] == 0.5
    assert record["scores"]["classification_whole"] == 1.0


def test_official_wording_is_read_from_the_folder_and_recorded(tmp_path, monkeypatch):
    path = write(tmp_path, ("trec", "hotpotqa"), 1)
    task = LongBench(path=path, tasks=("trec", "hotpotqa"))
    assert {unit.fields["wording"] for unit in plan(task)} == {"lcjax-2"}
    (tmp_path / "config").mkdir()
    prompts = {"trec": "Types.\n{context}\n{input}", "hotpotqa": "Read {context}\nQ: {input}\nA: "}
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    hotpot, trec = plan(task)
    assert hotpot.fields["wording"] == "official (dataset2prompt.json)"
    text = "some text. " * 20
    assert TOKENIZER.decode(hotpot.tokens) == f"Read {text}\nQ: What is asked 0?\nA: "
    assert TOKENIZER.decode(trec.tokens) == f"Types.\n{text}\nWhat is asked 0?"
    ((start, stop),) = hotpot.prompt.movable
    assert TOKENIZER.decode(hotpot.tokens[start:stop]).strip() == text.strip()


def official_cut(text: str, limit: int) -> list[int]:
    ids = [0, *TOKENIZER.encode(text)]
    if len(ids) > limit:
        half = limit // 2
        text = "".join(
            TOKENIZER.decode(part, skip_special=True) for part in (ids[:half], ids[-half:])
        )
    return [0, *TOKENIZER.encode(text)]


@pytest.mark.parametrize("length", [700, 901, 1200, 5000])
def test_a_prompt_over_the_budget_loses_its_middle_as_in_the_official_script(tmp_path, length):
    path = write(tmp_path, ("hotpotqa",), 1, context="abcd efgh ")
    (tmp_path / "dataset2prompt.json").write_text(
        json.dumps({"hotpotqa": "Read this:\n{context}\nQuestion: {input}\nAnswer:"})
    )
    task = LongBench(path=path, tasks=("hotpotqa",), reserve=600)
    (unit,) = plan(task, length)
    whole = f"Read this:\n{'abcd efgh ' * 20}\nQuestion: What is asked 0?\nAnswer:"
    assert unit.tokens.tolist() == official_cut(whole, length - 600)
    assert len(unit.tokens) <= max(length - 600, 1)
    assert (unit.fields["cut_tokens"] > 0) == (len(whole) + 1 > length - 600)
    if length > 700:
        ((start, stop),) = unit.prompt.movable
        assert "Question" not in TOKENIZER.decode(unit.tokens[start:stop])


@pytest.mark.parametrize(
    ("length", "expected"),
    [(4096, 3500), (8192, 7500), (16_384, 15_500), (32_768, 31_500), (700, 183)],
)
def test_prompts_have_the_official_budgets_by_default(tmp_path, length, expected):
    """Those of model2maxlen.json, and for other windows the same rule."""
    path = write(tmp_path, ("hotpotqa",), 1, context="abcd efgh " * 200)
    (unit,) = plan(LongBench(path=path, tasks=("hotpotqa",)), length)
    assert len(unit.tokens) == expected // 2 * 2  # two halves
    (unit,) = plan(LongBench(path=path, tasks=("hotpotqa",), reserve=0), length)
    assert len(unit.tokens) == length


def test_a_chat_template_goes_around_all_but_few_shot_and_code_and_is_not_counted(tmp_path):
    names = ("hotpotqa", "trec", "lcc")
    task = LongBench(path=write(tmp_path, names, 1), tasks=names, template="chat", reserve=900)
    hotpot, trec, lcc = plan(task, 1000)
    assert TOKENIZER.decode(hotpot.tokens).endswith("Answer:[end][assistant]")
    assert hotpot.prompt.tokens("instruction", "context_doc", "question", "bos") <= 100
    for unit in (trec, lcc):
        assert "[user]" not in TOKENIZER.decode(unit.tokens) and len(unit.tokens) <= 100
    assert "answer_prefix" in hotpot.fields["budget"] and "new" not in hotpot.fields["budget"]
    whole = LongBench(path=task.path, tasks=names, template="chat", budget_rule="total")
    for unit in plan(whole, 420):
        assert unit.fields["size"] <= 420
        # lcc's prompt holds no input.
        assert ("What is asked 0?" in TOKENIZER.decode(unit.tokens)) != (unit.index == 2)


def test_a_broken_line_is_named_and_skipped(tmp_path):
    path = Path(write(tmp_path, ("hotpotqa",), 2)) / "hotpotqa.jsonl"
    lines = path.read_text().splitlines()
    bad = ["{not json", json.dumps({"input": "x"}), json.dumps({**row("hotpotqa"), "answers": "a"})]
    path.write_text("\n".join([lines[0], *bad, "", lines[1]]))
    task = LongBench(path=str(tmp_path), tasks=("hotpotqa",))
    with pytest.warns(UserWarning) as warned:
        units = plan(task)
    assert [unit.fields["line"] for unit in units] == [1, 6]
    texts = [str(warning.message) for warning in warned]
    assert [f"hotpotqa.jsonl:{n}" in text for n, text in zip((2, 3, 4), texts)] == [True] * 3
    assert "context" in texts[1] and "answers" in texts[2]
    path.write_text("\n")
    with pytest.raises(InputError, match="use the official file"):
        plan(task)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("trec", {"all_classes": None}, "all_classes=None"),
        ("lsht", {"all_classes": "Food"}, "all_classes='Food'"),
        ("trec", {"all_classes": ["Food", 3]}, "all_classes="),
        ("passage_retrieval_en", {"answers": ["3"]}, "name no paragraph"),
        ("passage_retrieval_zh", {"answers": ["段落3", "Paragraph 3"]}, "name no paragraph"),
        ("hotpotqa", {"answers": []}, "no list of texts"),
        ("hotpotqa", {"context": "half \ud83d"}, "a lone surrogate"),
        ("qasper", {"length": "many"}, "length='many', no number"),
    ],
)
def test_a_row_that_the_scores_cannot_read_is_left_out_by_name(
    tmp_path, jieba, name, fields, words
):
    suffix = "_e" if "length" in fields else ""
    path = Path(write(tmp_path, (name,), 2, suffix=suffix)) / f"{name}{suffix}.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ({**row(name), **fields}, row(name, 1))))
    task = LongBench(path=str(tmp_path), tasks=(name,), e=bool(suffix))
    with pytest.warns(UserWarning, match=rf"{name}{suffix}\.jsonl:1 .*{words}"):
        units = plan(task)
    assert [unit.fields["line"] for unit in units] == [2]
    assert task.summarise(scored(task, units, lambda _: "something"))["windows"] == 1


def test_a_number_with_more_digits_than_python_reads_is_a_broken_line(tmp_path):
    path = Path(write(tmp_path, ("hotpotqa",), 1)) / "hotpotqa.jsonl"
    path.write_text(path.read_text() + '{"length": ' + "1" * 5000 + "}")
    with pytest.warns(UserWarning, match=r"hotpotqa\.jsonl:2 is no JSON"):
        assert len(plan(LongBench(path=str(tmp_path), tasks=("hotpotqa",)))) == 1


def test_the_even_lengths_version_has_its_own_files_and_bands(tmp_path):
    path = write(tmp_path, ("qasper", "lcc"), 3, suffix="_e")
    task = LongBench(path=path, tasks=("qasper", "lcc"), e=True)
    assert len(LongBench(e=True).selection()) == 13
    found = scored(task, plan(task), lambda text: "the blue house 0" if "paper" in text else "")
    cell = task.summarise(found)
    assert task.label == "longbench_e"
    assert cell["qasper_0_4k"] == 1 and cell["words_0_4k"] == 0.5
    assert cell["qasper_8k"] == cell["qasper_4_8k"] == pytest.approx(2 / 3)
    with pytest.raises(InputError, match="LongBench-E"):
        LongBench(path=path, tasks=("narrativeqa",), e=True).check(Limits((4000,)), "tasks.0")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tasks": ("hotpot",)}, "tasks='hotpot' must be one of"),
        ({"path": "nowhere"}, "is no folder.*data.zip"),
        ({"aggregate": "mean"}, "flat, category_macro"),
        ({"code_metric": "bleu"}, "difflib, indel"),
        ({"first_lines": "all"}, "official, lceg"),
        ({"wording": "best"}, r"tasks\.0\.wording=best: best does not exist"),
        ({"budget_rule": "none"}, "official, total"),
        ({"max_examples": 0}, "max_examples"),
        ({"reserve": 4000}, "leaves no room"),
        ({"reserve": -1}, "tasks.0.reserve"),
        ({"tasks": ("multifieldqa_zh",)}, "pip install 'jieba>="),
    ],
)
def test_settings_that_cannot_work_raise_input_error(tmp_path, monkeypatch, fields, words):
    monkeypatch.setitem(sys.modules, "jieba", None)
    path = write(tmp_path, ("hotpotqa", "multifieldqa_zh"), 1)
    task = LongBench(**{"path": path, "tasks": ("hotpotqa",), **fields})
    with pytest.raises(InputError, match=words):
        task.check(Limits((4000,)), "tasks.0")


def test_only_chinese_scores_need_jieba(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    names = ("lsht", "passage_retrieval_zh")
    task = LongBench(path=write(tmp_path, names), tasks=names)
    task.check(Limits((4000,)), "tasks.0")
    found = scored(task, plan(task), ["Food", "Food", "段落3", "段落3"])
    assert task.summarise(found)["value"] == 1


def test_a_command_line_runs_it_and_writes_records_and_tables(tmp_path):
    path = write(tmp_path / "longbench", ("hotpotqa", "trec"))
    config = config_in(tmp_path)
    arguments = ["--tasks", f"[{{type: longbench, path: {path}, tasks: [trec, hotpotqa]}}]"]
    arguments += ["--lengths", "[900]", "--run.folder", config.run.folder]
    config = parse(EvalConfig, arguments)
    with only_the_run():
        report = run(config, load=lambda _: Scripted(lambda text: "Food other"))
    (cell,) = report.cells
    assert (cell["trec"], cell["hotpotqa"], cell["value"]) == (1, 0, 0.5)
    found = records(config, "longbench")
    assert len(found) == 4 and found[0]["dataset"] == "hotpotqa"
    assert found[0]["answer"] == "Food other" and found[0]["references"] == ["the blue house 0"]
    assert "LongBench, mean of 2" in report.text and "category:few_shot" in report.text
    (entry,) = report.summary["tasks"]
    assert entry["aggregates"]["base"]["flat"] == 50  # in percent, as papers print it


def exported(folder: Path, task: LongBench) -> list[Path]:
    """Files of a run whose first answer is right."""
    model = Scripted(lambda text: "Food other" if "asked 0" in text else "none")
    config = dataclasses.replace(
        config_in(folder), tasks=(task,), lengths=(900,), methods=(Method("base"),)
    )
    with only_the_run():
        run(config, load=lambda _: model)
    return export(results.read(config.run.folder), ["longbench"], folder / "out")


def test_predictions_go_back_to_the_official_scorer_with_its_numbers(tmp_path):
    task = LongBench(path=write(tmp_path / "data", ("trec",)), tasks=("trec",))
    predictions, result = exported(tmp_path, task)
    assert result.parent == tmp_path / "out" / "longbench" / "longbench" / "900" / "pred" / "base"
    rows = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [row["pred"] for row in rows] == ["Food other", "none"]
    assert rows[0]["all_classes"] == CLASSES and rows[0]["length"] == 3000
    assert json.loads(result.read_text()) == {"trec": 50.0}


def test_of_the_even_lengths_version_they_go_back_with_scores_by_words(tmp_path):
    task = LongBench(path=write(tmp_path / "data", ("trec",), suffix="_e"), tasks=("trec",), e=True)
    _, result = exported(tmp_path, task)
    assert result.parent.parent.name == "pred_e"
    # 3,000 and 6,000 words.
    assert json.loads(result.read_text()) == {"trec": {"0-4k": 100.0, "4-8k": 0.0, "8k+": None}}


def test_the_librarys_own_prompts_are_those_of_their_version():
    # Records name this version (`wording`): other prompts need another PROMPTS_VERSION.
    names = ("longbench", "infinitebench", "zeroscrolls", "ruler", "ruler_haystack", "trec_classes")
    names += ("passkey", "niah", "icl", "kv_retrieval", "open_qa")
    text = json.dumps([library_prompts(name) for name in names])
    assert PROMPTS_VERSION == "lcjax-2"
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "392145807d1a63e3"
    text = json.dumps([library_prompts("multi_document_qa")])  # added under the same version
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "24d1fb3c86e21b5d"
