"""ZeroSCROLLS (arXiv 2305.14196), six of its tasks, as CEPE's Table 4 has them.

Rows may be ZeroSCROLLS' own, whose `input` holds the official prompt and where its parts begin, or
those of SCROLLS, which have references for all of validation: a query, an empty line and the text.
The latter get this library's own wording, with the text first. Of a text that is too long the head
is kept, with the official line in place of the rest; CEPE keeps the tail. Generation is greedy.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from lcjax.errors import one_of
from lcjax.evaluation import metrics
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import OWN_WORDING, Example
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.task import Limits, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import AnswerBenchmark, DataSet, Score, best_of

SOURCE = (
    "ZeroSCROLLS (Hugging Face: tau/zero_scrolls) or SCROLLS (tau/scrolls), a folder a task with"
    " validation.jsonl in it"
)
_FIELDS = ("id", "input", "output")
_PLACES = ("document_start_index", "document_end_index", "query_start_index")
_SEPARATOR = "... [The rest of the text is left out]\n\n"
_ASK = (
    "{context}\n\nAnswer the question about this text in a few words.%s\n\nQuestion: {question}\n"
)
_SUMMARISE = "{context}\n\nThis was %s. Write a summary of it.\n\nSummary:\n"
WORDING = {
    "gov_report": _SUMMARISE % "a report of a government agency",
    "summ_screen_fd": _SUMMARISE % "the script of an episode",
    "qmsum": (
        "{context}\n\nThis was said in a meeting. Fulfil the request in a few sentences.\n\n"
        "Request: {question}\n\nAnswer:\n"
    ),
    "narrative_qa": _ASK % "" + "\nAnswer:",
    "qasper": _ASK % ' Write "unanswerable" where it does not say.' + "\nAnswer:",
    "quality": (
        "{context}\n\nWhich of the four answers to the question about this text is right? Give its"
        " letter.\n\nQuestion: {question}\n\n{options}\n\nAnswer:"
    ),
}


_best = functools.partial(best_of, strip=True)


def _rouge_n(size: int) -> Score:
    return _best(lambda answer, right: metrics.rouge_n(answer, right, size, stem=True))


_ROUGE_L = {"rouge_l": _best(functools.partial(metrics.rouge_l, stem=True))}
_SUMMARY = {"rouge_mean": _best(metrics.rouge_mean), **_ROUGE_L} | {
    "rouge_1": _rouge_n(1), "rouge_2": _rouge_n(2)
}  # fmt: skip
_QA = {
    "f1": _best(metrics.qa_f1), "f1_verdict": _best(metrics.qa_f1_verdict),
    "exact_match": _best(metrics.exact_match), **_ROUGE_L,
}  # fmt: skip
_LETTER = {"letter": _best(metrics.letter_match), "letter_cepe": _best(metrics.letter_match_cepe)}
# What CEPE's table shows instead of the first one.
_CEPE = {"rouge_mean": "rouge_l", "f1": "f1_verdict", "letter": "letter"}
_SETS = (
    DataSet("narrative_qa", "qa", 50, _QA, stop=("\n",)),
    DataSet("qasper", "qa", 50, _QA, stop=("\n",)),
    DataSet("quality", "qa", 50, _LETTER, stop=("\n",)),
    DataSet("gov_report", "summarization", 1024, _SUMMARY),
    DataSet("summ_screen_fd", "summarization", 1024, _SUMMARY),
    DataSet("qmsum", "summarization", 1024, _SUMMARY),
)


@Task.register_subclass("zeroscrolls")
@dataclasses.dataclass(frozen=True)
class ZeroScrolls(AnswerBenchmark):
    """Six tasks of ZeroSCROLLS; with `budget_rule=official` only the prompt counts.

    CEPE's numbers: SCROLLS validation, `flavour=cepe`, `keep=tail`, `max_examples=500`; its
    GovReport was drawn from the nucleus 0.95, three times, which is not done here.
    """

    judging: ClassVar[tuple[str, ...]] = ("aggregate", "flavour")
    known: ClassVar[dict[str, DataSet]] = {data.name: data for data in _SETS}
    title: ClassVar[str] = "ZeroSCROLLS"
    source: ClassVar[str] = SOURCE

    split: str = "validation"  # references of the official test split are private
    keep: str = "head"  # of a text that is too long: head (ZeroSCROLLS), tail (CEPE)
    flavour: str = "zeroscrolls"  # which scores tables show; cepe: F1 with its rule, ROUGE-L

    @property
    def cut(self) -> str:
        return {"head": "right", "tail": "left"}[self.keep]

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}/{self.split}.jsonl", f"{name}_{self.split}.jsonl", f"{name}.jsonl"

    def check(self, limits: Limits, key: str) -> None:
        for field, known in (("keep", ("head", "tail")), ("flavour", ("zeroscrolls", "cepe"))):
            one_of(f"{key}.{field}", getattr(self, field), known)
        super().check(limits, key)

    def read(self, data: DataSet, path: Path, corpus: Corpus) -> Iterator[Example]:
        """One example an id: rows that share one hold several references."""
        examples: dict[str, Example] = {}
        for number, row in local_files.rows(path, _FIELDS):
            try:
                example = _example(row, data.name, number)
            except ValueError as fault:
                local_files.skip(path, number, str(fault))
                continue
            before = examples.get(row["id"], example)
            references = dict.fromkeys([*before.references, *example.references])
            examples[row["id"]] = dataclasses.replace(before, references=list(references))
        yield from examples.values()

    def asked(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        """Where the text will be cut at its end, the official line says so."""
        example = super().asked(example, data, tokenizer, length)
        facts = dict(example.facts)
        separator = facts.pop("separator")
        if self.keep == "head":
            example = self.told(example, separator, tokenizer, length)
        return dataclasses.replace(example, facts=facts)

    def rules(self, data: DataSet) -> DataSet:
        shown = next(iter(data.scores))
        return data.showing(_CEPE[shown]) if self.flavour == "cepe" else data


def _example(row: dict, name: str, line: int) -> Example:
    """An example from a row of either form; ValueError says what does not fit."""
    separator = row.get("truncation_seperator") or _SEPARATOR
    for field, value in (*((f, row[f]) for f in _FIELDS), ("truncation_seperator", separator)):
        if not isinstance(value, str):
            raise ValueError(f"has {field}={value!r}, no text")
    facts = {"id": row["id"], "line": line, "wording": OWN_WORDING, "separator": separator}
    if any(field in row for field in _PLACES):
        text, places = row["input"], [row.get(field) for field in _PLACES]
        if not all(isinstance(p, int) for p in places) or not 0 <= places[0] <= places[1]:
            raise ValueError(f"has places {places}, which are no part of its input")
        start, stop = places[0], min(places[1], len(text))
        parts = {
            "instruction": text[:start],
            "context_doc": text[start:stop],
            "question": text[stop:],
        }
        segments = [Segment(kind, part) for kind, part in parts.items() if part]
        facts["wording"] = "official (its input)"
        return Example(segments, [row["output"]], facts)
    fields, answer = _scrolls(row, name)
    template = WORDING[name]
    facts["template_text"] = local_files.wording_hash(template)
    return Example(local_files.fill(template, fields), [answer], facts)


def _scrolls(row: dict, name: str) -> tuple[dict[str, str], str]:
    """Fields of a template, and the reference, from a row of SCROLLS."""
    text, answer = row["input"], row["output"].strip()
    if name in ("gov_report", "summ_screen_fd"):
        return {"context": text.strip()}, answer
    if name == "quality":
        return _quality(text, answer)
    question, found, document = text.partition("\n\n")
    if not found:
        raise ValueError("has no empty line between question and text")
    return {"context": document.strip(), "question": question.strip()}, answer


def _quality(text: str, answer: str) -> tuple[dict[str, str], str]:
    """A question, four options (A) to (D), the text; the reference becomes its letter."""
    form = r"(.*?)\s*\(A\)(.*?)\s*\(B\)(.*?)\s*\(C\)(.*?)\s*\(D\)(.*?)\n\n(.*)"
    found = re.fullmatch(form, text, re.DOTALL)
    if found is None:
        raise ValueError("has no options (A) to (D) between question and text")
    question, *options, document = (part.strip() for part in found.groups())
    if answer not in options:
        raise ValueError(f"has output={answer!r}, none of its options")
    listed = "\n".join(f"({letter}) {option}" for letter, option in zip("ABCD", options))
    fields = {"context": document, "question": question, "options": listed}
    return fields, "ABCD"[options.index(answer)]
