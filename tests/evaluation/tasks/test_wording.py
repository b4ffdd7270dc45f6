"""Wording of prompts from files: one mechanism for all tasks, CEPE's prompts, and errors."""

import json
import re
from pathlib import Path

import pytest
import yaml
from benchmark_support import TOKENIZER, plan, scored

from lcjax.errors import InputError
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.icl import Icl
from lcjax.evaluation.tasks.infinitebench import InfiniteBench
from lcjax.evaluation.tasks.local_files import template_fields
from lcjax.evaluation.tasks.longbench import LongBench
from lcjax.evaluation.tasks.many_shot import ManyShot
from lcjax.evaluation.tasks.needles import KvRetrieval, Niah, Passkey
from lcjax.evaluation.tasks.open_qa import MultiDocumentQa, OpenQa
from lcjax.evaluation.tasks.zeroscrolls import ZeroScrolls

ESSAYS = [("a", "One sentence is short. Another one, which follows it, is rather longer! " * 30)]
STORY = "A bird sat there. It sang."
QUESTION = "Who sings?"
QUALITY = f"{QUESTION}\n\n (A) a dog\n (B) the bird\n (C) a cow\n (D) no one\n\n\n{STORY}"


@pytest.fixture
def data(tmp_path) -> str:
    """A folder with files of ICL, open QA, SCROLLS, LongBench and TREC."""

    def write(file: str, *rows: dict) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("\n".join(map(json.dumps, rows)))

    for file in ("sst2/train.jsonl", "sst2/validation.jsonl"):
        write(file, *({"text": f"a film {i}", "label": i % 2} for i in range(4)))
    passages = [{"title": "Birds", "text": "They sing."}, {"title": "", "text": "Some do not."}]
    row = {"question": QUESTION, "answer": ["birds"], "ctxs": passages}
    write("nq-open/test.jsonl", row)
    write("nq-open/train.jsonl", {**row, "question": "Who flies?"})
    gold = {"title": "Trees", "text": "Birds sing there.", "isgold": True}
    row = {"question": QUESTION, "answers": ["birds"], "ctxs": [*passages, gold]}
    write("nq-open-10_total_documents_gold_at_0.jsonl", row)
    scrolls = {
        "narrative_qa": (f"{QUESTION}\n\n{STORY}", "the bird"),
        "qasper": (f"{QUESTION}\n\n{STORY}", "yes"),
        "quality": (QUALITY, "the bird"),
        "gov_report": (STORY, "A bird sat down."),
        "summ_screen_fd": (STORY, "Birds sing."),
        "qmsum": (f"{QUESTION}\n\n{STORY}", "The bird sings."),
    }
    for name, (text, answer) in scrolls.items():
        write(
            f"{name}/validation.jsonl", {"id": "x", "pid": "x_0", "input": text, "output": answer}
        )
    longbench = {"input": QUESTION, "context": STORY, "answers": ["birds"], "all_classes": ["Food"]}
    for name in ("qasper", "trec", "trec_5shots"):
        write(f"{name}.jsonl", longbench)
    write(
        "code_run.jsonl",
        {"context": "x", "input": "What is func_1(2)?", "answer": 3, "options": []},
    )
    return str(tmp_path)


def write_texts(folder: str, texts: dict) -> str:
    file = Path(folder, "mine.yaml")
    file.write_text(yaml.safe_dump(texts, allow_unicode=True))
    return str(file)


TASKS = {
    "niah": lambda path, **wording: Niah(depths=2, **wording),
    "kamradt": lambda path, **wording: Niah(depths=2, needle="kamradt", **wording),
    "passkey": lambda path, **wording: Passkey(depths=2, **wording),
    "kv": lambda path, **wording: KvRetrieval(depths=2, **wording),
    "icl": lambda path, **wording: Icl(path=path, tasks=("sst2",), **wording),
    "open_qa": lambda path, **wording: OpenQa(path=path, tasks=("nq_5",), **wording),
    "multi_document_qa": lambda path, **wording: MultiDocumentQa(
        path=path, total_documents=(2,), **wording
    ),
    "zeroscrolls": lambda path, **wording: ZeroScrolls(path=path, **wording),
    "longbench": lambda path, **wording: LongBench(path=path, tasks=("qasper", "trec"), **wording),
    "many_shot": lambda path, **wording: ManyShot(path=path, tasks=("trec_5shots",), **wording),
    "infinitebench": lambda path, **wording: InfiniteBench(
        path=path, tasks=("code_run", "passkey"), generated=True, max_examples=2, **wording
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_first_record_shows_texts_that_a_file_may_hold_and_change(name, data):
    units = plan(TASKS[name](data), texts=ESSAYS)
    texts = units[0].fields["wording_texts"]
    assert [unit for unit in units[1:] if "wording_texts" in unit.fields] == []
    file = write_texts(data, texts)
    same = plan(TASKS[name](data, wording=file), texts=ESSAYS)
    assert [unit.digest for unit in same] == [unit.digest for unit in units]
    assert {unit.fields["wording"] for unit in same} == {file}
    assert {unit.fields["wording"] for unit in units} == {"lcjax-2"}

    def changed(value):
        if isinstance(value, dict):
            return {name: changed(text) for name, text in value.items()}
        return [*map(changed, value)] if isinstance(value, list) else f"@{value}"

    other = plan(TASKS[name](data, wording=write_texts(data, changed(texts))), texts=ESSAYS)
    assert all("@" in TOKENIZER.decode(unit.tokens) for unit in other)
    hashes = [{unit.fields["wording_hash"] for unit in group} for group in (units, same, other)]
    assert hashes[0] == hashes[1] and not hashes[0] & hashes[2]


def test_a_needle_of_the_user_has_keys_and_values_in_the_users_words(tmp_path):
    texts = {
        "instruction": "Read this.\n\n",
        "sentence": "Agent {key} carries {value} coins.",
        "question": "\n\nHow many coins?",
        "answer_prefix": "",
        "value": "{value} coins",
        "answer": "{value} coins.",
    }
    task = Niah(depths=3, wording=write_texts(str(tmp_path), texts))
    for unit in plan(task, 1000, texts=ESSAYS):
        text, (value,) = TOKENIZER.decode(unit.tokens), unit.fields["references"]
        assert re.search(rf" Agent \w+ \w+ carries {value}\.", text)
        assert "Read this.\n\n" in text[:20]
        assert text.endswith("\n\nHow many coins?") and len(unit.tokens) == 950
        (record,) = scored(task, [unit], [f"It is {value}."])
        assert record["correct"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"question": None}, "lacks question, which is needed here"),
        ({"needles": "x"}, "name of a text='needles' must be one of instruction, sentence"),
        ({"question": "Who is {name}?"}, r"question has the unknown placeholder {name}; it may"),
        ({"value": 7}, "value=7 must be a text"),
    ],
)
def test_texts_that_cannot_work_are_one_line(change, words, tmp_path):
    texts = {**plan(Niah(depths=1), texts=ESSAYS)[0].fields["wording_texts"], **change}
    texts = {name: text for name, text in texts.items() if text is not None}
    file = write_texts(str(tmp_path), texts)
    with pytest.raises(InputError, match=words) as error:
        Niah(wording=file).check(Limits((1000,)), "tasks.3")
    assert str(error.value).startswith(f"tasks.3.wording={file}")
    assert "\n" not in str(error.value)


def test_texts_of_data_sets_are_checked_by_their_name(data):
    def check(task):
        task.check(Limits((4000,)), "tasks.0")

    def icl(texts):
        return Icl(path=data, tasks=("sst2",), wording=write_texts(data, texts))

    with pytest.raises(InputError, match=r"lacks sst2\.instruction"):
        check(icl({"sst2": {"example": "{text} {label}"}}))
    with pytest.raises(InputError, match=r"sst2\.example lacks the placeholder {label}"):
        check(icl({"sst2": {"instruction": "", "example": "{text} good"}}))
    for example in ("{text}\n{label}", "Say {label}: {text}"):
        with pytest.raises(InputError, match=r"sst2\.example must have {text}, and after it a bl"):
            check(icl({"sst2": {"instruction": "", "example": example}}))
    file = write_texts(data, {"gov_report": "{context}\nSummary:"})
    tasks = ("gov_report",)
    check(ZeroScrolls(path=data, tasks=tasks, keep="tail", wording=file))  # nothing is left out
    with pytest.raises(InputError, match="lacks omitted"):
        check(ZeroScrolls(path=data, tasks=tasks, wording=file))
    with pytest.raises(InputError, match="lacks qmsum"):
        check(ZeroScrolls(path=data, tasks=("gov_report", "qmsum"), keep="tail", wording=file))
    file = write_texts(data, {"passkey": "{context}", "filler": "a"})
    with pytest.raises(InputError, match="name of a text='filler'"):
        check(InfiniteBench(tasks=("passkey",), generated=True, wording=file))
    with pytest.raises(InputError, match="filler='a' must be a list of texts"):
        check(Passkey(wording=write_texts(data, {"filler": "a"})))
    with pytest.raises(InputError, match=r"nowhere\.yaml does not exist"):
        check(LongBench(path=data, tasks=("qasper",), wording="nowhere.yaml"))
    with pytest.raises(InputError, match=r"tasks\.0\.wording=mine: mine does not exist"):
        check(LongBench(path=data, tasks=("qasper",), wording="mine"))


def test_rows_with_the_official_prompt_take_no_other(data):
    row = {"id": "x", "input": STORY, "output": "a", "document_start_index": 0,
           "document_end_index": 9, "query_start_index": 9}  # fmt: skip
    Path(data, "gov_report", "validation.jsonl").write_text(json.dumps(row))
    tasks = ("gov_report",)
    (unit,) = plan(ZeroScrolls(path=data, tasks=tasks))
    assert unit.fields["wording"] == "official (its input)"
    file = write_texts(data, {"gov_report": "{context}", "omitted": ""})
    with pytest.raises(InputError, match="take SCROLLS' rows, or leave wording out"):
        plan(ZeroScrolls(path=data, tasks=tasks, wording=file))


def test_cepes_prompts_are_those_of_its_code(data):
    def prompts(kind, name, **fields):
        task = kind(path=data, wording=f"lcjax:wording/cepe_{name}", **fields)
        return [TOKENIZER.decode(u.tokens).removeprefix("\0") for u in plan(task)]

    (text,) = prompts(Icl, "icl", tasks=("sst2",), max_examples=1, order="first", shots=2)
    example = r"Sentence: a film \d\nSentiment: (negative|positive)\n\n"
    assert re.fullmatch(f"({example}){{2}}Sentence: a film 0\nSentiment:", text)
    (text,) = prompts(OpenQa, "open_qa", tasks=("nq_5",), demonstrations=1)
    assert text == (
        "Document (Title: Birds): They sing.\n\nQuestion: Who flies?\nAnswer: birds\n\n"
        "Document (Title: Birds): They sing.\n\nDocument: Some do not.\n\n"
        f"Question: {QUESTION}\nAnswer:"
    )
    fields = {"keep": "tail", "flavour": "cepe"}
    texts = dict(zip(ZeroScrolls.datasets, prompts(ZeroScrolls, "zeroscrolls", **fields)))
    # header, what follows the text, what follows the instruction (spec of CEPE's test_qa.py)
    frames = {
        "narrative_qa": ("Story", "\n\n", f"\n\nQuestion:\n{QUESTION}\n\nAnswer:\n"),
        "qasper": ("Article", "\n\n", f"\n\nQuestion:\n{QUESTION}\n\nAnswer:\n"),
        "quality": (
            "Story", "\n\n", f"\n\nQuestion and Possible Answers:\n{QUESTION}\n\n(A) a dog\n"
            "(B) the bird\n(C) a cow\n(D) no one\n\nAnswer:",
        ),
        "gov_report": ("Report", "\n\n", "\nSummary:\n"),
        "summ_screen_fd": ("Episode Script", "\n\n", "\n\nSummary:\n"),
        "qmsum": ("Transcript", "\n\n", f"\n\nQuery:\n{QUESTION}\n\nAnswer:\n"),
    }  # fmt: skip
    for name, (header, gap, tail) in frames.items():
        assert texts[name].startswith(f"{header}:\n{STORY}{gap}"), name
        assert texts[name].endswith(tail), name
        instruction = texts[name].removeprefix(f"{header}:\n{STORY}{gap}").removesuffix(tail)
        assert re.match("(Instruction: )?You are ", instruction) and "\n" not in instruction


def test_records_name_a_wording_by_twelve_digits_of_its_sha_256_sum():
    fields = template_fields("abc", "mine.yaml")
    assert fields == {"wording": "mine.yaml", "wording_hash": "ba7816bf8f01"}
