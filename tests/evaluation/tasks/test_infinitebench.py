"""InfiniteBench and ZeroSCROLLS from miniature files in their official formats."""

import json
from pathlib import Path

import pytest
from benchmark_support import TOKENIZER, plan, scored

from lcjax.errors import InputError
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.infinitebench import InfiniteBench
from lcjax.evaluation.tasks.zeroscrolls import ZeroScrolls

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
    names = [unit.facts["dataset"] for unit in units]
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
    assert run.facts["wording"] == "official (prompt.py, yarn-mistral)"
    assert TOKENIZER.decode(run.tokens) == f"In {text} func_7(-3) is"
    prefix = "What is the second largest number in the following list?"
    assert TOKENIZER.decode(find.tokens) == f"{prefix}|{text}|The second largest number of it is:"
    assert TOKENIZER.decode(choice.tokens) == f"{text} What? get_d:"
    (other,) = plan(InfiniteBench(path=path, tasks=("code_run",), family="gpt4"))
    assert TOKENIZER.decode(other.tokens) == f"Run func_7: {text} func_7(-3)"
    assert "gpt4" in other.facts["wording"]
    own = InfiniteBench(path=write(tmp_path / "a" / "own"), tasks=("code_run",))
    assert plan(own)[0].facts["wording"] == "lcjax-1"


def test_the_input_alone_is_cut_in_the_middle_and_the_answer_comes_on_top(tmp_path):
    task = InfiniteBench(path=write(tmp_path), tasks=("longbook_sum_eng",))
    (unit,) = plan(task, 120)
    assert len(unit.tokens) <= 120 and unit.facts["max_new_tokens"] == 1200
    assert TOKENIZER.decode(unit.tokens).endswith("A summary of the book:")
    assert unit.facts["cut_tokens"] > 0
    short = InfiniteBench(path=task.path, tasks=task.tasks, max_new_tokens=7, budget_rule="total")
    (unit,) = plan(short, 120)
    assert unit.facts["size"] <= 120 and unit.facts["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("code_run", {"input": "What is it?"}, "func_1"),
        ("math_find", {"input": "Which one?"}, "The ... of"),
        ("code_debug", {"options": ["a"]}, "not four"),
        ("code_debug", {"answer": "other"}, "none of the options"),
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
    assert [unit.facts["line"] for unit in units] == [2]
    assert scored(InfiniteBench(path=str(tmp_path)), units, [TASKS[name][1]])[0]["correct"] == 1


def test_settings_of_infinitebench_that_cannot_work_are_refused(tmp_path):
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
    names = [unit.facts["dataset"] for unit in units]
    assert names == list(ZeroScrolls.known) and units[0].facts["references"] == [
        "the bird",
        "a bird",
    ]
    assert units[names.index("quality")].facts["references"] == ["B"]
    right = scored(task, units, [SCROLLS[name][2] for name in names])
    assert [record["correct"] for record in right] == pytest.approx([1.0] * 6)
    wrong = scored(task, units, [SCROLLS[name][3] for name in names])
    assert [record["correct"] for record in wrong] == pytest.approx([0.0] * 6)
    assert {unit.shape[2] for unit in units} == {("\n",), ()}
    text = TOKENIZER.decode(units[names.index("quality")].tokens)
    assert "(D) no one" in text and text.index("sat there") < text.index("(A) a dog")
    assert {unit.facts["wording"] for unit in units} == {"lcjax-1"}


def test_cepe_scores_yes_and_no_as_a_whole_and_summaries_by_rouge_l(tmp_path):
    task = ZeroScrolls(path=scrolls(tmp_path), tasks=("qasper", "qmsum"), flavour="cepe")
    plain = ZeroScrolls(path=task.path, tasks=task.tasks)
    answers = ["yes, it did", "bird the sings"]
    for shown, names in ((task, ("f1_verdict", "rouge_l")), (plain, ("f1", "rouge_mean"))):
        for record, name in zip(scored(shown, plan(shown), answers), names):
            assert record["correct"] == record["scores"][name]
    assert scored(task, plan(task), answers)[0]["correct"] == 0


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


def test_an_official_prompt_keeps_the_head_of_its_text_and_says_that_the_rest_is_left_out(tmp_path):
    task = ZeroScrolls(path=official(tmp_path), tasks=("narrative_qa",))
    (whole,) = plan(task, 1000)
    assert whole.facts["wording"] == "official (its input)"
    row = json.loads((tmp_path / "narrative_qa" / "validation.jsonl").read_text())
    assert TOKENIZER.decode(whole.tokens) == row["input"]
    (cut,) = plan(task, 300)
    text = TOKENIZER.decode(cut.tokens)
    assert cut.facts["size"] == 300 and cut.facts["truncated"] > 0
    assert text.startswith("Read the story.\n\nStory:\nA bird sat there.")
    assert text.endswith("... [The rest is omitted]\n\nQuestion:\nWho sings?\n\nAnswer:\n")
    # One token too long, BOS counted: the line stands as soon as anything is cut.
    (edge,) = plan(task, whole.facts["size"] - 1)
    assert edge.facts["truncated"] > 0 and "omitted" in TOKENIZER.decode(edge.tokens)
    (tail,) = plan(ZeroScrolls(path=task.path, tasks=task.tasks, keep="tail"), 300)
    text = TOKENIZER.decode(tail.tokens)
    assert "omitted" not in text and text.endswith(
        "sat there. \n\nQuestion:\nWho sings?\n\nAnswer:\n"
    )
    (input_only,) = plan(ZeroScrolls(path=task.path, tasks=task.tasks, budget_rule="official"), 300)
    assert len(input_only.tokens) == 300


@pytest.mark.parametrize("fields", [{"document_start_index": None}, {"document_end_index": 2}])
def test_places_that_are_none_are_named(tmp_path, fields):
    task = ZeroScrolls(path=official(tmp_path, **fields), tasks=("narrative_qa",))
    with (
        pytest.warns(UserWarning, match=r"validation\.jsonl:1 has places"),
        pytest.raises(InputError, match="no line that fits"),
    ):
        plan(task)


def test_a_row_whose_id_or_separator_is_no_text_is_left_out_by_line(tmp_path):
    path = Path(official(tmp_path)) / "narrative_qa" / "validation.jsonl"
    row = json.loads(path.read_text())
    bad = ({**row, "id": ["x"]}, {**row, "truncation_seperator": 7})
    path.write_text("\n".join(map(json.dumps, (*bad, row))))
    task = ZeroScrolls(path=str(tmp_path), tasks=("narrative_qa",))
    with pytest.warns(UserWarning) as warned:
        (unit,) = plan(task, 300)
    assert unit.facts["line"] == 3
    words = ("jsonl:1 has id=['x'], no text", "jsonl:2 has truncation_seperator=7, no text")
    assert all(word in str(w.message) for word, w in zip(words, warned, strict=True))


def test_a_split_without_references_is_refused_by_line(tmp_path):
    task = ZeroScrolls(path=official(tmp_path, output=None), tasks=("narrative_qa",))
    with (
        pytest.warns(UserWarning, match="no text"),
        pytest.raises(InputError, match="no line that fits"),
    ):
        plan(task)
