"""InfiniteBench and ZeroSCROLLS from miniature files in their official formats."""

import collections
import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan, scored

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.evaluation.report import differences
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.infinitebench import GENERATED, InfiniteBench
from lcjax.evaluation.tasks.zeroscrolls import _INDEX_FIELDS, ZeroScrolls
from lcjax.generation.language_model import LanguageModel

OPTIONS = ["get_a", "get_b", "get_c", "get_d"]
# An example's fields, a right answer and a wrong one, by task.
TASKS = {
    "passkey": ({"answer": ["71432"]}, "71432.", "071432"),
    "number_string": ({"answer": ["7000011432"]}, " 7000011432", "7"),
    "kv_retrieval": ({"answer": "ab-cd"}, '"ab-cd"', "ab"),
    "longbook_sum_eng": ({"answer": ["He leaves.\nShe stays."]}, "she stays\nhe leaves", "no"),
    "longbook_qa_eng": ({"answer": ["the red fox", "fox"]}, "fox", "hen"),
    "longbook_choice_eng": ({"answer": ["get_c"], "options": OPTIONS}, "C. get_c", "D"),
    "longdialogue_qa_eng": ({"answer": ["ACE", "ACE ROTHSTEIN"]}, "Ace", "Nicky"),
    "longbook_qa_chn": ({"answer": ["胡一刀"]}, "胡一刀。", "没有"),
    "code_debug": ({"answer": "get_b", "options": OPTIONS}, "B. get_b", "B"),
    "code_run": ({"answer": 12, "input": "What does func_7(-3) return?"}, "it is 12.", "12 or so"),
    "math_calc": ({"answer": [1, 3, 4]}, "[1, 3, 4]", "2"),
    "math_find": ({"answer": 42, "input": "The second largest number of it is:"}, "42", "42.5"),
}


def write(folder: Path, names=TASKS, count=1):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        fields = {"context": "a line of text. " * 10, "input": "What?", "options": [], "answer": 0}
        rows = [{"id": i, **fields, **TASKS[name][0]} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def test_right_answers_to_all_tasks_count_and_wrong_ones_do_not(tmp_path):
    task = InfiniteBench(path=write(tmp_path))
    units = plan(task)
    names = [unit.fields["dataset"] for unit in units]
    assert sorted(names) == sorted(TASKS)
    right = scored(task, units, [TASKS[name][1] for name in names])
    wrong = scored(task, units, [TASKS[name][2] for name in names])
    assert [record["correct"] for record in right] == pytest.approx([1.0] * 12)
    assert [record["correct"] for record in wrong] == pytest.approx([0.0] * 12)
    assert task.summarise(right)["category:english"] == pytest.approx(1)
    debug = wrong[names.index("code_debug")]["scores"]
    assert (debug["code_debug"], debug["letter"]) == (0, 1)  # a bare letter is wrong officially


def test_prompts_of_the_chosen_family_are_read_without_running_the_file(tmp_path):
    path = write(tmp_path, ("code_run", "math_find", "longbook_choice_eng"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "prompt.py").write_text(
        "raise SystemExit\n"
        "gpt4_templates = {'code_run': 'Run {func}: {context}' + ' {func_call}'}\n"
        "yarn_mistral_templates = {'code_run': 'In {context} {func_call} is', 'math_find':"
        " '{prefix}|{context}|{input}', 'longbook_choice_eng': '{context} {question} {OPTION_D}:'}"
    )
    text = "a line of text. " * 10
    names = ("code_run", "math_find", "longbook_choice_eng")
    choice, run, find = plan(InfiniteBench(path=path, tasks=names))
    assert run.fields["wording"] == "official (prompt.py, yarn-mistral)"
    assert TOKENIZER.decode(run.tokens) == f"In {text} func_7(-3) is"
    prefix = "What is the second largest number in the following list?"
    assert TOKENIZER.decode(find.tokens) == f"{prefix}|{text}|The second largest number of it is:"
    assert TOKENIZER.decode(choice.tokens) == f"{text} What? get_d:"
    (other,) = plan(InfiniteBench(path=path, tasks=("code_run",), family="gpt4"))
    assert TOKENIZER.decode(other.tokens) == f"Run func_7: {text} func_7(-3)"
    assert "gpt4" in other.fields["wording"]
    own = InfiniteBench(path=write(tmp_path / "a" / "own"), tasks=("code_run",))
    assert plan(own)[0].fields["wording"] == "lcjax-2"


def test_the_input_alone_is_cut_in_the_middle_and_the_answer_comes_on_top(tmp_path):
    task = InfiniteBench(path=write(tmp_path), tasks=("longbook_sum_eng",))
    (unit,) = plan(task, 120)
    assert len(unit.tokens) <= 120 and unit.fields["max_new_tokens"] == 1200
    assert TOKENIZER.decode(unit.tokens).endswith("A summary of the book:")
    assert unit.fields["cut_tokens"] > 0
    short = InfiniteBench(path=task.path, tasks=task.tasks, max_new_tokens=7, budget_rule="total")
    (unit,) = plan(short, 120)
    assert unit.fields["size"] <= 120 and unit.fields["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("code_run", {"input": "What is it?"}, "func_1"),
        ("math_find", {"input": "Which one?"}, "The ... of"),
        ("code_debug", {"options": ["a"]}, "not four"),
        ("code_debug", {"answer": "other"}, "must be one of the options"),
        ("passkey", {"answer": []}, "empty answer"),
        ("passkey", {"context": 3}, "no text"),
        *((name, {"answer": answer}, "no text") for name in TASKS for answer in (None, 3.5)
          if name not in ("code_run", "math_calc", "math_find")),
        *((name, {"answer": ["12", None]}, "no number") for name in TASKS
          if name in ("code_run", "math_calc", "math_find")),
        ("longbook_qa_eng", {"answer": ["fox", 7]}, "no text"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_its_task_is_left_out_by_name(tmp_path, name, fields, words):
    path = Path(write(tmp_path, (name,), 2)) / f"{name}.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    path.write_text(json.dumps({**first, **fields}) + "\n" + json.dumps(second))
    with pytest.warns(UserWarning, match=rf"{name}\.jsonl:1 .*{words}"):
        units = plan(InfiniteBench(path=str(tmp_path), tasks=(name,)))
    assert [unit.fields["line"] for unit in units] == [2]
    assert scored(InfiniteBench(path=str(tmp_path)), units, [TASKS[name][1]])[0]["correct"] == 1


MADE_TASKS = tuple(GENERATED)


@functools.cache
def made(length=3000, count=14, seed=0, **fields):
    """Units of the generated tasks, by task."""
    task = InfiniteBench(tasks=MADE_TASKS, generated=True, max_examples=count, **fields)
    units = plan(task, length, seed=seed)
    by_set = {name: [u for u in units if u.fields["dataset"] == name] for name in MADE_TASKS}
    assert [len(own) for own in by_set.values()] == [count] * len(MADE_TASKS)
    return task, by_set


def context(unit):
    ((start, stop),) = unit.prompt.movable
    return TOKENIZER.decode(unit.tokens[start:stop]).strip()


def test_generated_tasks_need_no_files_and_hold_their_answers_uncut():
    task, by_set = made()
    for name, units in by_set.items():
        for unit in units:
            size, answer = len(unit.tokens), str(unit.fields["references"][0])
            assert 0.8 * 3000 < size <= 3000, name
            assert unit.fields["cut_tokens"] == unit.fields["truncated"] == 0
            assert answer in context(unit) or name == "math_find"
            assert unit.fields["source"] == "generated, lcjax-2" and unit.fields["units"] >= 10
        answers = [str(unit.fields["references"][0]) for unit in units]
        right = scored(task, units, answers)
        assert [record["correct"] for record in right] == [1.0] * len(units), name


def test_generated_questions_sweep_the_positions_of_answers():
    _, by_set = made()
    for name, digits in (("passkey", 5), ("number_string", 10)):
        places = []
        for unit in by_set[name]:
            lines = context(unit).split("\n")
            (place,) = [i for i, line in enumerate(lines) if unit.fields["references"][0] in line]
            places.append(place / (len(lines) - 1))
            assert len(lines) == unit.fields["units"] + 1 and len(set(lines)) == 2
            assert len(unit.fields["references"][0]) == digits
        assert places[0] == 0 and places == sorted(places) and places[-1] > 0.9
    for unit in by_set["number_string"]:
        runs = [len(list(same)) for _, same in itertools.groupby(unit.fields["references"][0])]
        assert len(runs) <= 5
    places = []
    for unit in by_set["kv_retrieval"]:
        pairs = json.loads(context(unit))
        (key,) = re.findall('Key: "(.*)"', TOKENIZER.decode(unit.tokens))
        assert [pairs[key]] == unit.fields["references"] and len(pairs) == unit.fields["units"]
        places.append(list(pairs).index(key))
    assert len(set(places)) == 14 and places == sorted(places)


def test_generated_ranks_are_those_of_distinct_numbers():
    _, by_set = made()
    asked = {
        "largest": lambda n: max(n), "second largest": lambda n: sorted(set(n))[-2],
        "third largest": lambda n: sorted(set(n))[-3], "smallest": lambda n: min(n),
        "second smallest": lambda n: sorted(set(n))[1],
        "third smallest": lambda n: sorted(set(n))[2], "median": lambda n: np.median(n),
    }  # fmt: skip
    bounds = collections.defaultdict(set)
    for index, unit in enumerate(by_set["math_find"]):
        text, numbers = TOKENIZER.decode(unit.tokens), json.loads(context(unit))
        name = list(asked)[index % 7]
        assert text.startswith(f"What is the {name} number in the following list?")
        assert unit.fields["references"] == [asked[name](numbers)]
        bounds[name] |= {min(numbers), max(numbers)}
        assert min(numbers) <= 19 and max(numbers) >= 79
    assert len(bounds["largest"]) > 2, "the bound is drawn anew"


def test_generated_tasks_follow_the_seed_and_keep_their_keys_at_other_lengths():
    short, other = made(2000, 3)[1], made(2000, 3, seed=1)[1]
    again = made.__wrapped__(2000, 3)[1]
    digests = [[u.digest for own in sets.values() for u in own] for sets in (short, again, other)]
    assert digests[0] == digests[1] and not set(digests[0]) & set(digests[2])
    long = made(4000, 3)[1]
    for name in ("passkey", "number_string"):
        keys = [[u.fields["references"] for u in units[name]] for units in (short, long)]
        assert keys[0] == keys[1]
    _, whole = made(3000, 2, budget_rule="total")
    assert all(u.fields["size"] <= 3000 for own in whole.values() for u in own)


def test_generated_tasks_have_the_official_size_where_it_fits(tmp_path):
    sizes = {name: (one.count, one.max_units(lambda _: True)) for name, one in GENERATED.items()}
    assert sizes == {
        "passkey": (590, 5220), "number_string": (590, 5220), "kv_retrieval": (500, 2500),
        "math_find": (350, 60_000),
    }  # fmt: skip
    for name in MADE_TASKS:
        task = InfiniteBench(tasks=(name,), generated=True)
        with pytest.raises(InputError, match=f"lengths: 100 is too short for {name} with 10 "):
            plan(task, 100)
        with pytest.raises(InputError, match="is no folder"):
            InfiniteBench(tasks=(name,)).check(Limits((1000,)), "tasks.0")
    mixed = InfiniteBench(path=write(tmp_path, ("code_run",)), tasks=("code_run", "passkey"),
                          generated=True, max_examples=2)  # fmt: skip
    found = [(u.fields["dataset"], u.fields.get("line")) for u in plan(mixed)]
    assert found == [("passkey", None), ("passkey", None), ("code_run", 1)]


def test_settings_of_infinitebench_that_cannot_work_raise_input_error(tmp_path):
    limits = Limits((1000,))
    with pytest.raises(InputError, match="yarn-mistral, gpt4, claude2"):
        InfiniteBench(path=str(tmp_path), family="kimi").check(limits, "tasks.0")
    with pytest.raises(InputError, match=r"passkey\.jsonl is missing.*xinrongzhang2022"):
        InfiniteBench(path=str(tmp_path)).check(limits, "tasks.0")


QUESTION, STORY = "Who sings?", "A bird sat there. " * 20
QUALITY = f"{QUESTION}\n\n (A) a dog\n (B) the bird\n (C) a cow\n (D) no one\n\n\n{STORY}"
SCROLLS = {
    "narrative_qa": (f"{QUESTION}\n\n{STORY}", ["the bird", "a bird"], "Bird", "a cow"),
    "qasper": (f"{QUESTION}\n\n{STORY}", ["yes"], "yes", "no, it did not"),
    "quality": (QUALITY, ["the bird"], "(B)", "the"),
    "gov_report": (STORY, ["A bird sat down."], "a bird sat down", "cow"),
    "summ_screen_fd": (STORY, ["Birds sing."], "birds sing", "cow"),
    "qmsum": (f"{QUESTION}\n\n{STORY}", ["The bird sings."], "the bird sings", "cow"),
}


def scrolls(folder: Path) -> str:
    for name, (text, answers, *_) in SCROLLS.items():
        (folder / name).mkdir(parents=True)
        rows = [{"id": "x", "pid": f"x_{i}", "input": text, "output": a}
                for i, a in enumerate(answers)]  # fmt: skip
        (folder / name / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def test_rows_of_scrolls_that_share_an_id_are_references_of_one_question(tmp_path):
    task = ZeroScrolls(path=scrolls(tmp_path))
    units = plan(task)
    names = [unit.fields["dataset"] for unit in units]
    assert names == list(ZeroScrolls.datasets) and units[0].fields["references"] == [
        "the bird",
        "a bird",
    ]
    assert units[names.index("quality")].fields["references"] == ["B"]
    right = scored(task, units, [SCROLLS[name][2] for name in names])
    assert [record["correct"] for record in right] == pytest.approx([1.0] * 6)
    wrong = scored(task, units, [SCROLLS[name][3] for name in names])
    assert [record["correct"] for record in wrong] == pytest.approx([0.0] * 6)
    assert {unit.shape[1:] for unit in units} == {(1024, ())}
    text = TOKENIZER.decode(units[names.index("quality")].tokens)
    assert "(D) no one" in text and text.index("sat there") < text.index("(A) a dog")
    assert {unit.fields["wording"] for unit in units} == {"lcjax-2"}


def test_the_flavour_sets_the_length_of_answers_and_their_stop(tmp_path):
    task = ZeroScrolls(path=scrolls(tmp_path), tasks=("qasper", "quality", "qmsum"))
    shapes = [[(1024, ())] * 3, [(50, ("\n",)), (50, ("\n",)), (1024, ())]]
    for flavour, expected in zip(("zeroscrolls", "cepe"), shapes):
        units = plan(dataclasses.replace(task, flavour=flavour))
        assert [unit.shape[1:] for unit in units] == expected
    units = plan(dataclasses.replace(task, max_new_tokens=7))
    assert [unit.shape[1:] for unit in units] == [(7, ())] * 3


def test_cepe_has_one_question_for_each_row_but_in_narrative_qa(tmp_path):
    def rows(*texts):
        return "\n".join(
            json.dumps({"id": id, "input": f"{QUESTION}\n\n{STORY}", "output": text})
            for id, text in texts
        )

    texts = rows(("q1", "BERT"), ("q1", "a recurrent network"), ("q2", "yes"))
    names = ("narrative_qa", "qasper")
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(texts)
    task = ZeroScrolls(path=str(tmp_path), tasks=names)
    merged = [["BERT", "a recurrent network"], ["yes"]]
    assert [unit.fields["references"] for unit in plan(task)] == merged * 2
    task = dataclasses.replace(task, flavour="cepe")
    units = plan(task)
    rowwise = [["BERT"], ["a recurrent network"], ["yes"]]
    assert [unit.fields["references"] for unit in units] == merged + rowwise
    records = scored(task, units, lambda _: "BERT")
    assert task.summarise(records)["narrative_qa"] == pytest.approx(1 / 2)
    assert task.summarise(records)["qasper"] == pytest.approx(1 / 3)
    assert len({task.cluster(record) for record in records}) == 4  # rows of q1 are dependent
    one = dataclasses.replace(task, tasks=("qasper",), max_examples=2)
    assert [unit.fields["references"] for unit in plan(one)] == rowwise[:2]


def test_cepe_scores_yes_and_no_as_a_whole_and_summaries_by_rouge_l(tmp_path):
    task = ZeroScrolls(path=scrolls(tmp_path), tasks=("qasper", "qmsum"), flavour="cepe")
    plain = ZeroScrolls(path=task.path, tasks=task.tasks)
    answers = ["yes, it did", "bird the sings"]
    for shown, names in ((task, ("f1_verdict", "rouge_l")), (plain, ("f1", "rouge_mean"))):
        for record, name in zip(scored(shown, plan(shown), answers), names):
            assert record["correct"] == record["scores"][name]
    assert scored(task, plan(task), answers)[0]["correct"] == 0


def summary_task(folder: Path, references: list[list[str]], **settings) -> ZeroScrolls:
    """A task of one report for each list of references."""
    rows = [
        {"id": str(i), "input": STORY, "output": text}
        for i, texts in enumerate(references)
        for text in texts
    ]
    (folder / "gov_report").mkdir()
    (folder / "gov_report" / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ZeroScrolls(path=str(folder), tasks=("gov_report",), **settings)


def test_the_number_of_summaries_is_the_geometric_mean_of_three_means_without_stems(tmp_path):
    # Of the second report each ROUGE has another best reference: "x y z" shares three words with
    # "z y x" but no pair, and one pair with "x y a b c".
    task = summary_task(tmp_path, [["a b c"], ["z y x", "x y a b c"], ["cost"]])
    records = scored(task, plan(task, 2000), ["A b c.", "x y z", "costs"])
    rouges = [(1, 1, 1), (1, 1 / 3, 1 / 2), (0, 0, 0)]
    for record, expected in zip(records, rouges, strict=True):
        assert [record["scores"][name] for name in ("r1", "r2", "rl")] == pytest.approx(expected)
        assert record["correct"] == pytest.approx(np.prod(expected) ** (1 / 3))
    summary = task.summarise(records)
    official = (2 / 3 * 4 / 9 * 1 / 2) ** (1 / 3)
    assert summary["value"] == summary["gov_report"] == pytest.approx(official)
    # CEPE: the mean of ROUGE-L with stems.
    assert [record["scores"]["rouge_l"] for record in records] == pytest.approx([1, 1 / 2, 1])
    cepe = dataclasses.replace(task, flavour="cepe")
    rescored = [cepe.rescore(record, TOKENIZER) for record in records]
    assert cepe.summarise(rescored)["value"] == pytest.approx(5 / 6)
    assert cepe.values(rescored) == pytest.approx([1, 1 / 2, 1])
    nothing = scored(task, plan(task, 2000), ["no", "no", "no"])
    assert task.summarise(nothing)["value"] == 0 and task.values(nothing) == [0, 0, 0]


def test_intervals_and_differences_of_summaries_are_those_of_the_geometric_mean(tmp_path):
    rng = np.random.default_rng(0)
    task = ZeroScrolls(path=str(tmp_path))

    def made(level):
        rouges = np.clip(rng.normal(level, 0.1, (60, 3)), 0.01, 1)
        fields = {"protocol": "", "answer": "a", "truncated": 0}
        return rouges, [
            {
                **fields, "window": i, "digest": str(i), "id": str(i), "dataset": "qmsum",
                "scores": dict(zip(("r1", "r2", "rl"), row)), "correct": np.prod(row) ** (1 / 3),
            }
            for i, row in enumerate(rouges.tolist())
        ]  # fmt: skip

    (low_rouges, low), (high_rouges, high) = made([0.4, 0.2, 0.3]), made([0.5, 0.2, 0.3])

    def number(rouges, rows=slice(None)):
        return np.prod(rouges[rows].mean(0)) ** (1 / 3)

    numbers = number(low_rouges), number(high_rouges)
    assert [task.summarise(r)["qmsum"] for r in (low, high)] == pytest.approx(numbers)
    assert np.mean(task.values(low)) == pytest.approx(numbers[0])
    gap = differences.of_records(task, low, high)
    assert gap.mean == pytest.approx(numbers[1] - numbers[0])
    # Against the number of every resample, computed anew.
    samples = rng.integers(60, size=(4000, 60))
    whole = np.array([[number(low_rouges, s), number(high_rouges, s)] for s in samples])
    for found, drawn in (
        (task.interval(low), whole[:, 0]), ((gap.low, gap.high), whole[:, 1] - whole[:, 0])
    ):  # fmt: skip
        expected = np.quantile(drawn, [0.025, 0.975])
        assert found == pytest.approx(expected, abs=0.05 * np.ptp(expected))


@pytest.mark.slow
def test_answers_to_reports_are_drawn_from_the_nucleus_and_their_mean_counts(tmp_path):
    task = ZeroScrolls(
        path=scrolls(tmp_path), tasks=("qasper", "gov_report"), draws=3, max_new_tokens=12
    )
    greedy, *drawn = plan(task, 1000)
    assert len(greedy.shape) == 3 and [unit.fields["draw"] for unit in drawn] == [0, 1, 2]
    assert len({unit.digest for unit in drawn}) == 1
    samplings = [unit.shape[3] for unit in drawn]
    assert [(s.temperature, s.top_p, s.min_new_tokens, s.seed) for s in samplings] == [
        (1.0, 0.95, 10, seed) for seed in (0, 1, 2)
    ]
    model = LanguageModel.load(ModelSection(preset="tiny"))
    answers = [task.score(model, [unit], 1)[0]["answer"] for unit in drawn]
    assert len(set(answers)) == 3
    # Neither the size of a batch nor the other texts in it change a draw.
    assert answers == [task.score(model, [unit, unit], 3)[1]["answer"] for unit in drawn]
    records = scored(task, drawn, ["a bird sat down", "cow", "cow"])
    assert task.summarise(records)["gov_report"] == pytest.approx(1 / 3)


def official(folder: Path, **fields) -> str:
    head, tail = "Read the story.\n\nStory:\n", "\n\nQuestion:\nWho sings?\n\nAnswer:\n"
    row = {
        "id": "x", "pid": "x_0", "input": head + STORY + tail, "output": "the bird",
        "document_start_index": len(head), "document_end_index": len(head + STORY),
        "query_start_index": len(head + STORY) + 2, "query_end_index": len(head + STORY + tail),
        "truncation_seperator": "... [The rest is omitted]\n\n", **fields,
    }  # fmt: skip
    (folder / "narrative_qa").mkdir(parents=True, exist_ok=True)
    (folder / "narrative_qa" / "validation.jsonl").write_text(json.dumps(row))
    return str(folder)


def test_an_official_prompt_keeps_the_head_of_its_text_and_marks_the_truncation(tmp_path):
    task = ZeroScrolls(path=official(tmp_path), tasks=("narrative_qa",), max_new_tokens=50)
    (whole,) = plan(task, 1000)
    assert whole.fields["wording"] == "official (its input)"
    row = json.loads((tmp_path / "narrative_qa" / "validation.jsonl").read_text())
    assert TOKENIZER.decode(whole.tokens) == row["input"]
    (cut,) = plan(task, 300)
    text = TOKENIZER.decode(cut.tokens)
    assert cut.fields["size"] == 300 and cut.fields["truncated"] > 0
    assert text.startswith("Read the story.\n\nStory:\nA bird sat there.")
    assert text.endswith("... [The rest is omitted]\n\nQuestion:\nWho sings?\n\nAnswer:\n")
    # One token too long, BOS counted: the line stands as soon as anything is cut.
    (edge,) = plan(task, whole.fields["size"] - 1)
    assert edge.fields["truncated"] > 0 and "omitted" in TOKENIZER.decode(edge.tokens)
    (tail,) = plan(dataclasses.replace(task, keep="tail"), 300)
    text = TOKENIZER.decode(tail.tokens)
    assert "omitted" not in text and text.endswith(
        "sat there. \n\nQuestion:\nWho sings?\n\nAnswer:\n"
    )


@pytest.mark.parametrize("fields", [{"document_start_index": None}, {"document_end_index": 2}])
def test_places_that_are_none_are_named(tmp_path, fields):
    task = ZeroScrolls(path=official(tmp_path, **fields), tasks=("narrative_qa",))
    with (
        pytest.warns(UserWarning, match=r"validation\.jsonl:1 has indices"),
        pytest.raises(InputError, match="contains no valid row"),
    ):
        plan(task)


def test_a_row_whose_id_or_separator_is_no_text_is_left_out_by_line(tmp_path):
    path = Path(official(tmp_path)) / "narrative_qa" / "validation.jsonl"
    row = json.loads(path.read_text())
    bad = ({**row, "id": ["x"]}, {**row, "truncation_seperator": 7})
    path.write_text("\n".join(map(json.dumps, (*bad, row))))
    task = ZeroScrolls(path=str(tmp_path), tasks=("narrative_qa",), max_new_tokens=50)
    with pytest.warns(UserWarning) as warned:
        (unit,) = plan(task, 300)
    assert unit.fields["line"] == 3
    words = ("jsonl:1 has id=['x'], no text", "jsonl:2 has truncation_seperator=7, no text")
    assert all(word in str(w.message) for word, w in zip(words, warned, strict=True))


def test_a_split_without_references_raises_input_error_with_the_line(tmp_path):
    task = ZeroScrolls(path=official(tmp_path, output=None), tasks=("narrative_qa",))
    with (
        pytest.warns(UserWarning, match="no text"),
        pytest.raises(InputError, match="contains no valid row"),
    ):
        plan(task)


@pytest.mark.filterwarnings("ignore:.*has an empty input")
def test_a_row_with_an_empty_input_is_skipped(tmp_path):
    path = Path(scrolls(tmp_path)) / "qmsum" / "validation.jsonl"
    indices = dict.fromkeys(_INDEX_FIELDS, 0)
    row = {"id": "empty", "input": "", "output": "x", "truncation_seperator": "..."} | indices
    task = ZeroScrolls(path=str(tmp_path), tasks=("qmsum",))
    expected = [unit.digest for unit in plan(task)]
    path.write_text(path.read_text().rstrip("\n") + "\n" + json.dumps(row) + "\n")
    assert [unit.digest for unit in plan(task)] == expected
