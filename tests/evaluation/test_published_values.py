"""Numbers in configs/reproduce, each compared with what its paper prints (tests/golden/published).

    python tests/evaluation/test_published_values.py

writes the table of coverage into docs/reproduce.md.
"""

import dataclasses
import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from lcjax.evaluation import reproduce

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/reproduce.md"
PAPERS = {
    "lceg": "LCEG", "cepe": "CEPE", "sharedllm": "SharedLLM", "e2llm": "E2-LLM",
    "lost_in_the_middle": "Lost in the Middle",
}  # fmt: skip
GOLDEN = ROOT / "tests/golden/published"
PRINTED = {
    f"{paper}/{table}": items
    for paper in PAPERS
    for table, items in json.loads((GOLDEN / f"{paper}.json").read_text()).items()
}
NUMBERS = {"lceg": 1249, "cepe": 726, "sharedllm": 217, "e2llm": 363, "lost_in_the_middle": 21}


class Key(NamedTuple):
    """A cell in `published` of a file of configs/reproduce."""

    task: str  # of a mean over tasks, all of them
    field: str
    length: int | None  # published length; None: any
    method: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the numbers of a paper's table are in configs/reproduce.

    `names` holds parts of the `Key` of numbers whose task, row or column has this name, where they
    differ from these names.
    """

    file: str
    names: dict[str, dict[str, str | int]] = dataclasses.field(default_factory=dict)


# LCEG's names of RULER's tasks, and of LongBench's data sets in tables 4 and 11.
RULER_TASKS = {
    "NIAH_S1": "niah_single_1", "NIAH_S2": "niah_single_2", "NIAH_S3": "niah_single_3",
    "NIAH_M1": "niah_multikey_1", "NIAH_M2": "niah_multikey_2", "NIAH_M3": "niah_multikey_3",
    "NIAH_MV": "niah_multivalue", "NIAH_MQ": "niah_multiquery", "VT": "vt", "CWE": "cwe",
    "FWE": "fwe", "QA_1": "qa_1", "QA_2": "qa_2",
}  # fmt: skip
LCEG_DATA_SETS = {
    name: {"field": field}
    for names, field in {
        "NQA": "narrativeqa", "QAP QAPR": "qasper", "MQA MFQA": "multifieldqa_en",
        "HQA HPQA": "hotpotqa", "WQA WMQA": "2wikimqa", "MSQ": "musique", "GR": "gov_report",
        "QSM QMSM": "qmsum", "MWS MNWS": "multi_news", "TRE TREC": "trec", "TQA TRVQA": "triviaqa",
        "SMS SMSM": "samsum", "PSC": "passage_count", "PSR": "passage_retrieval_en", "LCC": "lcc",
        "REP REPO": "repobench-p",
    }.items()
    for name in names.split()
} | {"Average": {"field": "value", "length": 32768}}  # fmt: skip


def by(part: str, **names: str) -> dict[str, dict[str, str]]:
    """Names whose keys have another `part`."""
    return {name: {part: value} for name, value in names.items()}


# CEPE's names of domains and of ablations.
DOMAINS = {
    "arxiv": "domain:arxiv", "book": "domain:book", "c4": "domain:c4", "cc": "domain:common_crawl",
    "github": "domain:github", "stackex": "domain:stackexchange", "wiki": "domain:wikipedia",
}  # fmt: skip
ABLATIONS = by("method", **{
    "CEPE": "full", "w/ RetDoc": "retdoc", "w/ RP Only": "cat_only", "w/ AB Only": "filter_only",
    "w/ Frozen Encoder": "frozen_encoder", "w/ Random Encoder": "random_encoder",
    "w/ No Warmup": "no_warmup", "w/ No Copy Init": "no_warmup",  # table 13's name of this row
})  # fmt: skip
LONGBENCH_MEAN = {"task": "mean of longbench_en, longbench_zh", "field": "flat"}
# Tables that have another file than that of their name, or other names for tasks, rows or columns.
PLACES = {
    # LCEG
    "lceg/table4": Place("lceg/table4", LCEG_DATA_SETS | {"base": {"length": 4096}}),
    "lceg/table11": Place("lceg/table4", LCEG_DATA_SETS),
    **{
        f"lceg/table{12 + i}": Place("lceg/table3", {
            name: {"field": task, "length": 4096 << i} for name, task in RULER_TASKS.items()
        })
        for i in range(5)
    },
    # CEPE
    "cepe/table2": Place("cepe/table2", {
        f"{n}:{d}": {"field": f} for n in (2048, 4096, 7168, 14848) for d, f in DOMAINS.items()
    }),
    "cepe/table3": Place("cepe/table3", {
        f"{method}_{count}": {"task": f"icl_{count}", "method": method}
        for method, count in (("llama2", 2), ("llama2", 40), ("cepe", 20), ("cepe", 40))
    }),
    "cepe/table4": Place("cepe/table4", {
        "LLAMA-2-CHAT|2K": {"method": "llama2_chat", "length": 2048},
        "LLAMA-2-CHAT|4K": {"method": "llama2_chat", "length": 4096},
        "LLAMA-2-32K INSTRUCT|32K": {"method": "llama2_32k_instruct", "length": 32768},
        "+ CEPED|2K + 2K": {"method": "ceped", "length": 4096},
        "ceped": {"length": 32768},
        "|2K + All": {"method": "ceped, all tokens", "length": 32768},
    }),
    "cepe/table5": Place("cepe/table5", by(
        "task", code_parrot="mean of code_parrot, arxiv, book, pg19, proof_pile"
    )),
    "cepe/table7": Place("cepe/table7", {
        f"{data}_{count}": {"task": "many" if count > 20 else "few"}
        for data in ("nq", "triviaqa", "popqa")
        for count in (1, 5, 10, 15, 20, 30, 60)
    }),
    "cepe/table12": Place("cepe/table5", ABLATIONS),
    "cepe/table13": Place("cepe/table5_retrieval", {
        **ABLATIONS,
        **{d: {"task": "rag_lm", "field": f} for d, f in DOMAINS.items()},
        "avg": {"task": "rag_lm"},
        # The heading says 2,048 tokens and k = 0; the numbers are those of k = 8 in table 2.
        "2048": {"length": 4096},
    }),
    "cepe/table14": Place("cepe/table14", {
        f"{tokens}{field}": {"length": length, "field": field, "task": task}
        for tokens, length, task in (
            ("4K:", 4096, "zeroscrolls"), ("16K:", 16384, "zeroscrolls"),
            ("", 32768, "zeroscrolls"), ("All:", 265216, "all_tokens"),
        )
        for field in (
            "narrative_qa", "qasper", "quality", "gov_report", "summ_screen_fd", "qmsum"
        )
    }),
    # SharedLLM
    "sharedllm/table1": Place("sharedllm/table1", by("method", **{
        "StreamingLLM": "streaming", "AutoCompressor": "auto_compressor",
        "LongAlpaca-16K": "longalpaca_16k", "LongChat-32K": "longchat_32k",
        "Activation Beacon": "beacon",
    })),
    "sharedllm/table2": Place("sharedllm/table2", by("method", **{
        "LLaMA-2-7B (4K)": "llama2", "LLaMA-2-32K": "llama2_32k", "YaRN-2-128K": "yarn_128k"
    })),
    "sharedllm/table3": Place("sharedllm/table3", by("method", **{
        "LM-Infinite": "lm_infinite", "StreamingLLM": "streaming", "InfLLM": "inf_llm"
    })),
    "sharedllm/table4": Place("sharedllm/table4", by("method", **{
        "Llama-2-7B-Chat": "llama2_chat", "LongAlpaca": "longalpaca_16k",
        "YaRN-128K": "yarn_128k", "Beacon": "beacon",
    })),
    "sharedllm/table9": Place("sharedllm/table9", by("method", shared="shared_llm") | by(
        "field", md="category:multi_doc_qa", summ="category:summarization"
    )),
    # E2-LLM
    "e2llm/table1_and_2": Place("e2llm/table1_and_2", by("method", **{
        "Llama2-7B-chat-4k": "chat", "LongChat-v1.5-7B-32k": "longchat_32k",
        "Vicuna-v1.5-7B-16k": "vicuna_16k", "E2-LLM-Llama2-7B-16k": "e2_16k",
        "E2-LLM-Llama2-7B-32k": "e2_32k", "Llama2-13B-chat-4k": "chat_13b",
        "Vicuna-v1.5-13B-16k": "vicuna_13b_16k", "PI-Llama2-13B-16k": "pi_13b_16k",
        "E2-LLM-Llama2-13B-16k": "e2_13b_16k", "E2-LLM-Llama2-13B-32k": "e2_13b_32k",
    }) | {
        f"{table}:{column}": {"task": f"longbench_{field[:2]}", "field": field[3:]}
        for table, fields in {
            "t1": "en:narrativeqa en:qasper en:multifieldqa_en zh:multifieldqa_zh en:hotpotqa"
                  " en:2wikimqa en:musique zh:dureader en:gov_report en:qmsum",
            "t2": "en:multi_news zh:vcsum en:trec en:triviaqa en:samsum zh:lsht en:lcc"
                  " en:repobench-p en:value zh:value",
        }.items()
        for column, field in enumerate(fields.split())
    } | {"t2:10": LONGBENCH_MEAN}),
    "e2llm/table3": Place("e2llm/table3", by("method", **{
        "Vicuna-v1.5-16k (PI)": "vicuna_16k", "LongChat-v1.5-32k (PI)": "longchat_32k",
        "13b_base": "base_13b", "13b_Vicuna-v1.5-16k (PI)": "vicuna_13b_16k",
        "13b_e2_16k": "e2_13b_16k", "13b_e2_32k": "e2_13b_32k", "13b_e2_64k": "e2_13b_64k",
    })),
    "e2llm/table4": Place("e2llm/table4", {
        "en": {"task": "longbench_en", "field": "value"},
        "zh": {"task": "longbench_zh", "field": "value"},
        "all": LONGBENCH_MEAN,
    }),
    "e2llm/table5": Place("e2llm/table5", {"longbench_all": LONGBENCH_MEAN}),
    "e2llm/table7": Place("e2llm/table7", by("method", **{
        "Llama2-7B (4K)0": "base", "E 2 -LLM-32K0": "e2_32k", "E 2 -LLM-64K0": "e2_64k",
        "Llama2-13B (4K)0": "base_13b", "E 2 -LLM-32K1": "e2_13b_32k",
        "E 2 -LLM-64K1": "e2_13b_64k",
    }) | {
        str(column): {"length": 4096, "field": field}
        for column, field in enumerate((
            "piqa:acc", "wsc:acc", "hellaswag:acc_norm", "social_iqa:acc", "winogrande:acc",
            "race:acc", "race_middle:acc", "nq_open:exact_match,remove_whitespace", "value",
        ))
    }),
    # Lost in the Middle
    "lost_in_the_middle/figure5": Place(
        "lost_in_the_middle/figure5", by("method", **{"LongChat-13B-16K": "longchat"})
    ),
}  # fmt: skip

# Files that repeat numbers of others, with parts of names of methods that the others do not have.
REPEATS = {
    "lceg/bf16_positions": (("lceg/table1", "lceg/table2", "lceg/table3"), "_bf16"),
    "lceg/figure3": (("lceg/table2",), ""),
    "lceg/table10": (("lceg/table2",), ""),
}


def key_of(table: str, item: dict) -> Key:
    """The cell that holds a printed number."""
    length, _, field = item["column"].rpartition(":")
    if item["column"].isdigit():
        length, field = item["column"], "value" if item["field"] == "main" else item["field"]
    key = {"task": item["task"], "method": item["row"], "length": None, "field": item["column"]}
    if length.isdigit():
        key |= {"length": int(length), "field": field}
    names = PLACES.get(table, Place(table)).names
    for name in (item["task"], item["row"], item["column"]):
        key |= names.get(name, {})
    return Key(**key)


@functools.cache
def cells(file: str) -> dict[Key, list[float]]:
    """The published values of a file at the scale `paper`."""
    values = defaultdict(list)
    for table in reproduce.config_at(file, "paper").published:
        task = table.task
        if table.mean_over:
            task = f"mean of {', '.join((task, *table.mean_over))}"
        for row in (*table.rows, *table.others):
            for column, value in zip(table.columns, row.values, strict=True):
                if value is not None:
                    length = column.published_length
                    values[Key(task, column.field, length, row.method)].append(value)
    return values


def at(key: Key, values: dict[Key, list[float]]) -> list[float]:
    """The values of a cell; one whose length is open must have one length."""
    keys = [key] if key.length else [k for k in values if k._replace(length=None) == key]
    assert len(keys) <= 1, f"{key} has several lengths: name one in PLACES"
    return [value for k in keys for value in values.get(k, ())]


def compare(table: str, items: list[dict], values: dict[Key, list[float]]) -> tuple[list, list]:
    """Printed numbers of a table that a file lacks, and those that it has with another value."""
    missing, different = [], []
    for item in items:
        ours = at(key_of(table, item), values)
        if not ours:
            missing.append(item)
        elif item["value"] not in ours:  # `unknown` finds values that no table prints
            different.append(item | {"ours": ours})
    return missing, different


def file_of(table: str) -> str:
    return PLACES.get(table, Place(table)).file


def unknown(file: str) -> list[tuple[Key, float]]:
    """Values of a file that neither its tables of the paper nor the files that it repeats have."""
    printed = defaultdict(set)
    for table, items in PRINTED.items():
        if file_of(table) == file:
            for item in items:
                printed[key_of(table, item)].add(item["value"])
    others, suffix = REPEATS.get(file, ((), ""))
    lines = []
    for key, values in cells(file).items():
        same = printed[key] | printed[key._replace(length=None)]
        plain = key._replace(method=key.method.removesuffix(suffix) if suffix else key.method)
        same = same.union(*(cells(other).get(plain, ()) for other in others))
        lines += [(key, value) for value in values if value not in same]
    return lines


def coverage() -> str:
    """The table of docs/reproduce.md: printed numbers, and how many of them the files have."""
    rows, total = [["table", "file", "numbers", "in the file"]], [0, 0]
    for table, items in PRINTED.items():
        absent = sum(map(len, compare(table, items, cells(file_of(table)))))
        counts = [len(items), len(items) - absent]
        total = [a + b for a, b in zip(total, counts)]
        paper, _, name = table.partition("/")
        name = re.sub(r"(table|figure)(\d+)", r"\1 \2", name).replace("_", " ")
        rows.append([f"{PAPERS[paper]}, {name}", f"`{file_of(table)}`", *map(str, counts)])
    rows.append(["all", "", *(f"{count:,}" for count in total)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|---|---:|---:|", *lines[1:]])


def with_coverage(page: str) -> str:
    """The page with the table of coverage as it should be."""
    head = "| table | file | numbers |"
    pattern = re.compile(rf"^{re.escape(head)}.*?\n(?!\|)", re.DOTALL | re.MULTILINE)
    assert len(pattern.findall(page)) == 1
    return pattern.sub(lambda _: coverage() + "\n", page)


@pytest.mark.parametrize("table", PRINTED)
def test_every_number_that_a_paper_prints_is_in_its_file(table):
    assert compare(table, PRINTED[table], cells(file_of(table))) == ([], [])


def test_no_printed_number_is_lost():
    counts = dict.fromkeys(PAPERS, 0)
    for table, items in PRINTED.items():
        counts[table.partition("/")[0]] += len(items)
        keys = [(item["task"], item["field"], item["row"], item["column"]) for item in items]
        assert len(set(keys)) == len(keys), table
    assert counts == NUMBERS and sum(counts.values()) == 2576
    assert PLACES.keys() <= PRINTED.keys()
    assert {*REPEATS, *(place.file for place in PLACES.values())} <= set(reproduce.names())


@pytest.mark.parametrize("file", reproduce.names())
def test_a_file_has_no_number_that_its_paper_does_not_print(file):
    assert unknown(file) == []


def test_a_lost_a_changed_and_an_additional_number_are_noticed(monkeypatch):
    table = "cepe/table6"
    items, values = PRINTED[table], dict(cells(table))
    assert compare(table, items, values) == ([], []) and unknown(table) == []
    lost, changed = key_of(table, items[0]), key_of(table, items[1])
    del values[lost]
    values[changed] = [values[changed][0] + 0.001]
    missing, different = compare(table, items, values)
    assert missing == [items[0]] and [d["row"] for d in different] == [items[1]["row"]]
    extra = Key("arxiv", "value", 8192, "stride_7")
    monkeypatch.setitem(cells(table), extra, [1.0])
    assert unknown(table) == [(extra, 1.0)]


def test_the_table_of_coverage_in_the_docs_is_current():
    page = PAGE.read_text()
    assert page == with_coverage(page), "python tests/evaluation/test_published_values.py"


if __name__ == "__main__":
    PAGE.write_text(with_coverage(PAGE.read_text()))
