"""LongBench (arXiv 2308.14508): 21 data sets, and LongBench-E, from the official JSONL files.

Prompts are the official ones if `dataset2prompt.json` is in the folder or in its config/, and this
library's own otherwise. Records name the source. As in the official script the middle of a prompt
over the budget is cut, few-shot and code prompts have no chat template, generation is greedy, and
only the first line of few-shot answers counts.

Differs from the official script in one place: samsum's generation ends at its length instead of the
first newline, which changes no first line unless the model begins with a newline.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from lcjax.errors import InputError, OneOf
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa, rouge
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.task import Limits, Record, Records, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, Score, TextCutBenchmark, best_of, by_name

SOURCE = (
    "LongBench's data.zip (Hugging Face: THUDM/LongBench), one <task>.jsonl a data set;"
    " dataset2prompt.json of its code belongs beside them"
)
_FIELDS = ("input", "context", "answers", "all_classes")
_PARAGRAPH = {"retrieval": r"Paragraph \d", "retrieval_zh": r"段落\d"}  # of a right answer
BANDS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}  # words
_COMMENTS = ("`", "#", "//")  # marks of lines that are no code


def classification(
    prediction: str, reference: str, classes: Sequence[str], *, parity: bool = True
) -> float:
    """Returns 1 / n if the right class is among the n classes in the prediction, else 0.

    Classes whose name is part of the right class's name do not count. With `parity`, they are
    removed from the list while it is iterated, as in the official scorer, so the class after each
    of them is skipped.
    """
    matches = [name for name in classes if name in prediction]
    if not parity:
        matches = [name for name in matches if name == reference or name not in reference]
    index = 0
    while index < len(matches):
        if matches[index] in reference and matches[index] != reference:
            matches.remove(matches[index])  # the first of that name
        index += 1
    return 1 / len(matches) if reference in matches else 0.0


def count(prediction: str, reference: str) -> float:
    """Returns the share of numbers in the prediction that equal the reference as text."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, word: str = "Paragraph ") -> float:
    """Returns the share of numbers in the prediction that equal the right paragraph's number."""
    return count(prediction, re.findall(word + r"(\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str) -> float:
    """Returns `retrieval` for Chinese."""
    return retrieval(prediction, reference, "段落")


def code_line(prediction: str) -> str:
    """Returns the first line without a comment or Markdown mark, or an empty string."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _COMMENTS)), "")


def code_indel(prediction: str, reference: str) -> float:
    """Returns the similarity of the first line of code: 2 LCS / (n + m), in whole percent.

    It equals fuzzywuzzy with python-Levenshtein installed.
    """
    line = code_line(prediction)
    size = len(line) + len(reference)
    return _percent(line, reference, 2 * rouge.lcs_length(line, reference) / size if size else 1.0)


def code_difflib(prediction: str, reference: str) -> float:
    """Returns the similarity of the first line of code by difflib; never above `code_indel`.

    It equals fuzzywuzzy without python-Levenshtein.
    """
    line = code_line(prediction)
    ratio = difflib.SequenceMatcher(None, line, reference).ratio()
    return _percent(line, reference, ratio)


def _percent(line: str, reference: str, ratio: float) -> float:
    if line == reference:
        return 1.0
    return round(100 * ratio) / 100 if line and reference else 0.0


def _classes(*, parity: bool) -> Score:
    score = functools.partial(classification, parity=parity)
    return lambda answer, fields: qa.best(
        lambda text, right: score(text, right, fields["all_classes"]), answer, fields["references"]
    )


_F1 = {"qa_f1": best_of(qa.qa_f1)}
_F1_ZH = {"qa_f1_zh": best_of(qa.qa_f1_zh)}
_ROUGE = {"rouge_l_sets": best_of(rouge.rouge_l_sets)}
_ROUGE_ZH = {"rouge_l_sets_zh": best_of(rouge.rouge_l_sets_zh)}
_CLASS = {
    "classification": _classes(parity=True),
    "classification_whole": _classes(parity=False),
}
_INDEL, _DIFFLIB = best_of(code_indel), best_of(code_difflib)
_CODE = {"code_difflib": _DIFFLIB, "code_indel": _INDEL}
_RETRIEVAL = {"retrieval": best_of(retrieval)}
_RETRIEVAL_ZH = {"retrieval_zh": best_of(retrieval_zh)}
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
    DataSet("passage_count", "synthetic", 32, {"count": best_of(count)}),
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
    """LongBench's data sets; `length` is the window, which official prompts do not fill.

    Papers aggregate differently: LCEG prints the flat mean of `tasks=[en]`, LongBench's README
    `aggregate=category_macro`, and SharedLLM the categories of `tasks=[en_without_synthetic]`.
    """

    scoring_settings: ClassVar[tuple[str, ...]] = ("aggregate", "code_metric", "first_lines")
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

    # Tokens of a window that prompts leave free. null: the official budgets, which are 3,500 tokens
    # of 4,096, 15,500 of 16,384 and 31,500 of 32,768; LCEG has 0
    reserve: int | None = None
    # A YAML file with your own prompts; null: the official ones in the folder, else this library's
    wording: str | None = None
    e: bool = False  # LongBench-E: 13 of the data sets, with lengths spread evenly
    # difflib: fuzzywuzzy alone, as in the official requirements; indel: with python-Levenshtein
    code_metric: Annotated[str, OneOf(("difflib", "indel"))] = "difflib"
    # few-shot tasks; lceg: also English QA and synthetic tasks
    first_lines: Annotated[str, OneOf(("official", "lceg"))] = "official"

    @property
    def label(self) -> str:
        return self.name or ("longbench_e" if self.e else "longbench")

    def selection(self) -> list[DataSet]:
        return [data for data in super().selection() if not self.e or data.name in _E]

    def files(self, name: str) -> tuple[str, ...]:
        file = f"{name}_e.jsonl" if self.e else f"{name}.jsonl"
        return file, f"data/{file}"

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        if not self.selection():
            raise InputError(f"{key}.tasks={list(self.tasks)} has no part in LongBench-E")
        for data in self.selection():
            template(data.name, self.path, self.wording, key)
        if any(data.scores in (_F1_ZH, _ROUGE_ZH) for data in self.selection()):
            qa.words_zh("")  # raises before a model is loaded if jieba is missing

    def cut_length(self, length: int) -> int:
        # model2maxlen.json: 1,000 tokens for each 1,024 of the window, less 500.
        return length * 1000 // 1024 - 500 if self.reserve is None else length - self.reserve

    def wording_texts(self) -> Record:
        names = [data.name for data in self.selection()]
        return {name: template(name, self.path, self.wording, self.label).text for name in names}

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        return examples(path, *template(data.name, self.path, self.wording), data)

    def scoring(self, data: DataSet) -> DataSet:
        wide = data.group in ("single_doc_qa", "multi_doc_qa", "synthetic")
        if self.first_lines == "lceg" and wide and data.name not in _CHINESE:
            data = dataclasses.replace(data, first_line=True)
        return data.with_main_score(f"code_{self.code_metric}") if data.group == "code" else data

    def summarise(self, records: Records) -> Record:
        """Adds the mean over data sets in each band of words, for LongBench-E."""
        summary = super().summarise(records)
        for band, group in by_band(records).items() if self.e else ():
            band, by_set = band.replace("-", "_").rstrip("+"), self.scores_by_set(group)
            summary[f"words_{band}"] = float(np.mean(list(by_set.values()))) if by_set else None
            summary |= {f"{name}_{band}": score for name, score in by_set.items()}
        return summary


def by_band(records: Records) -> dict[str, list[Record]]:
    """Groups records of LongBench-E by the number of words of their prompts, if known."""
    counted = [record for record in records if record.get("words") is not None]
    return {
        band: [record for record in counted if low <= record["words"] < high]
        for band, (low, high) in BANDS.items()
    }


def template(
    name: str, folder: str, wording: str | None, key: str = "tasks"
) -> local_files.ChosenTemplate:
    """Returns the prompt of a data set, and its source; official ones are in or near the folder."""
    paths = ("dataset2prompt.json", "config/dataset2prompt.json")
    paths += tuple(f"{parent}{path}" for parent in ("../", "LongBench/") for path in paths)

    def official() -> tuple[dict[str, str], str]:
        templates, file = local_files.json_templates(folder, paths)
        return templates, f"official ({file})"

    return local_files.choose_template(wording, "longbench", name, official, key)


def examples(path: Path, template: str, source: str, data: DataSet) -> Iterator[Example]:
    """Yields the examples of a file in LongBench's format."""

    def parse(number: int, row: dict) -> Example:
        _check_row(row, data)
        fields = {"line": number, "id": row.get("_id")}
        fields |= local_files.template_fields(template, source)
        if "classification" in data.scores:
            fields["all_classes"] = row["all_classes"]
        if "length" in row:
            fields["words"] = row["length"]
        values = {key: row[key] for key in ("context", "input")}
        return Example(local_files.fill_template(template, values), row["answers"], fields)

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
