"""LongBench (arXiv 2308.14508): 21 data sets, and LongBench-E, from the official JSONL files.

Prompts are the official ones if `dataset2prompt.json` is in the folder or in its config/, and this
library's own otherwise; with `wording: lm_eval` they are those of an installed lm-eval. Records
name the source. As in the official script the middle of a prompt over the budget is cut, few-shot
and code prompts have no chat template, generation is greedy, and only the first line of few-shot
answers counts.

Differs from the official script in one place: samsum's generation ends at its length instead of the
first newline, which changes no first line unless the model begins with a newline.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from lcjax.errors import InputError, one_of
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.generation import Example
from lcjax.evaluation.metrics import longbench as scores
from lcjax.evaluation.task import Limits, Record, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, Score, TextCutBenchmark, best_of, by_name

# This library's own prompts, for folders without the official ones (`wording` of a record). They
# ask for the same and end alike: code in a newline, numbers in a blank.
_QA = (
    "Here is {kind}. Below it stands a question about it; reply with the shortest text that answers"
    " it.\n\n{{context}}\n\nReply to the question with the shortest text that answers it, and"
    " nothing else.{more}\n\nQuestion: {{input}}\nAnswer:"
)
_PASSAGES = _QA.format(kind="a number of passages", more="")
_SUMMARY = (
    "Here {kind}. Your task is a summary of one page.\n\n{{context}}\n\nWrite the summary of one"
    " page.\n\nSummary:"
)
_CODE = "Here is the beginning of a program. Continue it.\n{context}%sThe line that comes next:\n"

WORDING = {
    "narrativeqa": _QA.format(kind="a story, told as a novel or a script", more=""),
    "qasper": _QA.format(
        kind="a paper",
        more=(
            ' Reply "yes" or "no" where that is what is asked, and "unanswerable" where the paper'
            " does not say."
        ),
    ),
    "multifieldqa_en": _QA.format(kind="a text", more=""),
    "multifieldqa_zh": (
        "下面是一篇文章，之后有一个问题。\n\n{context}\n\n请用尽量短的中文回答问题，不要写别的内容。"
        "\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "下面是几篇文章，之后有一个问题。\n\n{context}\n\n请根据文章回答问题。\n\n问题：{input}\n回答："
    ),
    "gov_report": _SUMMARY.format(kind="is a report of a government agency"),
    "qmsum": (
        "Here is what was said in a meeting. A request about it follows.\n\n{context}\n\nFulfil the"
        " request in one sentence or a few.\n\nRequest: {input}\nAnswer:"
    ),
    "multi_news": _SUMMARY.format(kind="are articles about one piece of news"),
    "vcsum": "下面是一次会议的记录，请为它写一段摘要。\n\n{context}\n\n摘要：",
    "trec": "Say of what type each question is, as in these examples.\n\n{context}\n{input}",
    "triviaqa": (
        "Each passage is followed by a question, and that by the shortest answer.\n\n{context}\n\n"
        "{input}"
    ),
    "samsum": "Each dialogue is followed by a summary in few words.\n\n{context}\n\n{input}",
    "lsht": "请像下面的例子一样，写出每条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Here are paragraphs, of which some stand there more than once. How many different ones are"
        " there?\n\n{context}\n\nReply with that number only.\n\nNumber of different paragraphs: "
    ),
    "passage_retrieval_en": (
        "Here are 30 numbered paragraphs, and after them a summary of one of them.\n\n{context}\n\n"
        'Summary: {input}\n\nWhich paragraph is it of? Reply in the form "Paragraph 1".\n\n'
        "The summary is of "
    ),
    "passage_retrieval_zh": (
        "下面是若干编号的段落，之后是其中一段的摘要。\n\n{context}\n\n摘要：{input}\n\n"
        "请写出这段摘要所属的段落，格式为“段落1”。\n\n所属段落："
    ),
    "lcc": _CODE % "",
    "repobench-p": _CODE % "{input}",
}


SOURCE = (
    "LongBench's data.zip (Hugging Face: THUDM/LongBench), one <task>.jsonl a data set;"
    " dataset2prompt.json of its code belongs beside them"
)
_FIELDS = ("input", "context", "answers", "all_classes")
_PARAGRAPH = {"retrieval": r"Paragraph \d", "retrieval_zh": r"段落\d"}  # of a right answer
BANDS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}  # words


def _classes(*, parity: bool) -> Score:
    score = functools.partial(scores.classification, parity=parity)
    return lambda answer, facts: metrics.best(
        lambda text, right: score(text, right, facts["all_classes"]), answer, facts["references"]
    )


_F1 = {"qa_f1": best_of(metrics.qa_f1)}
_F1_ZH = {"qa_f1_zh": best_of(metrics.qa_f1_zh)}
_ROUGE = {"rouge_l_sets": best_of(metrics.rouge_l_sets)}
_ROUGE_ZH = {"rouge_l_sets_zh": best_of(metrics.rouge_l_sets_zh)}
_CLASS = {
    "classification": _classes(parity=True),
    "classification_whole": _classes(parity=False),
}
_INDEL, _DIFFLIB = best_of(scores.code_indel), best_of(scores.code_difflib)
_CODE = {"code_indel": _INDEL, "code_difflib": _DIFFLIB}
_RETRIEVAL = {"retrieval": best_of(scores.retrieval)}
_RETRIEVAL_ZH = {"retrieval_zh": best_of(scores.retrieval_zh)}
_SHOTS = {"chat": False, "first_line": True}

_SETS = (
    DataSet("narrativeqa", "single_doc_qa", 128, _F1),
    DataSet("qasper", "single_doc_qa", 128, _F1),
    DataSet("multifieldqa_en", "single_doc_qa", 64, _F1),
    DataSet("multifieldqa_zh", "single_doc_qa", 64, _F1_ZH),
    DataSet("hotpotqa", "multi_doc_qa", 32, _F1),
    DataSet("2wikimqa", "multi_doc_qa", 32, _F1),
    DataSet("musique", "multi_doc_qa", 32, _F1),
    DataSet("dureader", "multi_doc_qa", 128, _ROUGE_ZH),
    DataSet("gov_report", "summarization", 512, _ROUGE),
    DataSet("qmsum", "summarization", 512, _ROUGE),
    DataSet("multi_news", "summarization", 512, _ROUGE),
    DataSet("vcsum", "summarization", 512, _ROUGE_ZH),
    DataSet("trec", "few_shot", 64, _CLASS, **_SHOTS),
    DataSet("triviaqa", "few_shot", 32, _F1, **_SHOTS),
    DataSet("samsum", "few_shot", 128, _ROUGE, **_SHOTS),
    DataSet("lsht", "few_shot", 64, _CLASS, **_SHOTS),
    DataSet("passage_count", "synthetic", 32, {"count": best_of(scores.count)}),
    DataSet("passage_retrieval_en", "synthetic", 32, _RETRIEVAL),
    DataSet("passage_retrieval_zh", "synthetic", 32, _RETRIEVAL_ZH),
    DataSet("lcc", "code", 64, _CODE, chat=False),
    DataSet("repobench-p", "code", 64, _CODE, chat=False),
)
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_E = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec",
    "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip


@Task.register_subclass("longbench")
@dataclasses.dataclass(frozen=True)
class LongBench(TextCutBenchmark):
    """LongBench's data sets; `length` is the window, of which official prompts leave 500 tokens.

    Aggregations as papers print them: LCEG is `tasks=[en]` flat, LongBench's README
    `aggregate=category_macro`, SharedLLM the categories of `tasks=[en_without_synthetic]`.
    """

    judging: ClassVar[tuple[str, ...]] = ("aggregate", "code_metric", "first_lines")
    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    selections: ClassVar[dict[str, tuple[str, ...]]] = {
        "en": tuple(data.name for data in _SETS if data.name not in _CHINESE),
        "zh": _CHINESE,
        "en_without_synthetic": tuple(
            data.name for data in _SETS if data.name not in _CHINESE and data.group != "synthetic"
        ),
    }
    title: ClassVar[str] = "LongBench"
    source: ClassVar[str] = SOURCE

    reserve: int = 500  # 3,500 tokens of a window of 4,096 are the official budget; LCEG has none
    # Whose prompts. auto: the official ones in the folder, else an installed lm-eval's, else this
    # library's own; folder: not lm-eval's; lm_eval: these alone
    wording: str = "auto"
    e: bool = False  # LongBench-E: 13 of the data sets, with lengths spread evenly
    code_metric: str = "indel"  # indel: fuzzywuzzy with python-Levenshtein; difflib: without it
    first_lines: str = "official"  # few-shot tasks; lceg: also English QA and synthetic tasks

    @property
    def label(self) -> str:
        return self.name or ("longbench_e" if self.e else "longbench")

    def selection(self) -> list[DataSet]:
        return [data for data in super().selection() if not self.e or data.name in _E]

    def files(self, name: str) -> tuple[str, ...]:
        file = f"{name}_e.jsonl" if self.e else f"{name}.jsonl"
        return file, f"data/{file}"

    def check(self, limits: Limits, key: str) -> None:
        one_of(f"{key}.code_metric", self.code_metric, ("indel", "difflib"))
        one_of(f"{key}.first_lines", self.first_lines, ("official", "lceg"))
        super().check(limits, key)
        if not self.selection():
            raise InputError(f"{key}.tasks={list(self.tasks)} has no part in LongBench-E")
        for data in self.selection():
            template(data.name, self.path, self.wording, key)
        if any(data.scores in (_F1_ZH, _ROUGE_ZH) for data in self.selection()):
            metrics.words_zh("")  # raises before a model is loaded if jieba is missing

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        return examples(path, *template(data.name, self.path, self.wording), data)

    def scoring(self, data: DataSet) -> DataSet:
        wide = data.group in ("single_doc_qa", "multi_doc_qa", "synthetic")
        if self.first_lines == "lceg" and wide and data.name not in _CHINESE:
            data = dataclasses.replace(data, first_line=True)
        return data.with_shown(f"code_{self.code_metric}") if data.group == "code" else data

    def summarise(self, records: Sequence[Record]) -> Record:
        """Adds the mean over data sets in each band of words, for LongBench-E."""
        summary = super().summarise(records)
        for band, group in by_band(records).items() if self.e else ():
            band, by_set = band.replace("-", "_").rstrip("+"), self.scores_by_set(group)
            summary[f"words_{band}"] = float(np.mean(list(by_set.values()))) if by_set else None
            summary |= {f"{name}_{band}": score for name, score in by_set.items()}
        return summary


def by_band(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of LongBench-E by the number of words of their prompts, if the file has it."""
    counted = [record for record in records if record.get("words") is not None]
    return {
        band: [record for record in counted if low <= record["words"] < high]
        for band, (low, high) in BANDS.items()
    }


def template(name: str, folder: str, rule: str, key: str = "tasks") -> tuple[str, str]:
    """Returns the prompt of a data set, and its source; official ones are in or near the folder."""
    paths = ("dataset2prompt.json", "config/dataset2prompt.json")
    paths += tuple(f"{parent}{path}" for parent in ("../", "LongBench/") for path in paths)

    def official() -> tuple[dict[str, str], str] | None:
        templates = local_files.json_templates(folder, paths)
        return templates and (templates[0], f"official ({templates[1]})")

    lm_eval_task = ("longbench", name)
    return local_files.choose_template(rule, name, official, lm_eval_task, WORDING[name], key)


def examples(path: Path, template: str, source: str, data: DataSet) -> Iterator[Example]:
    """Yields the examples of a file in LongBench's format."""

    def parse(number: int, row: dict) -> Example:
        _check_row(row, data)
        facts = {"wording": source, "line": number, "id": row.get("_id")}
        facts |= local_files.template_facts(template, source)
        if "classification" in data.scores:
            facts["all_classes"] = row["all_classes"]
        if "length" in row:
            facts["words"] = row["length"]
        fields = {key: row[key] for key in ("context", "input")}
        return Example(local_files.fill_template(template, fields), row["answers"], facts)

    return local_files.rows(path, _FIELDS, parse)


def _check_row(row: dict, data: DataSet) -> None:
    """Raises ValueError for a row that the scores of its data set cannot use."""
    for name in ("input", "context"):
        if not isinstance(row[name], str):
            raise ValueError(f"has {name}={row[name]!r}, no text")
    answers = row["answers"]
    if not local_files.is_text_list(answers):
        raise ValueError(f"has answers={answers!r}, no list of texts")
    if "classification" in data.scores and not local_files.is_text_list(row["all_classes"]):
        raise ValueError(f"has all_classes={row['all_classes']!r}, no list of texts")
    for name in _PARAGRAPH.keys() & data.scores.keys():
        if not all(re.search(_PARAGRAPH[name], answer) for answer in answers):
            raise ValueError(f"has answers={answers!r}, which name no paragraph")
    if not isinstance(row.get("length"), int | None):
        raise ValueError(f"has length={row['length']!r}, no number of words")
