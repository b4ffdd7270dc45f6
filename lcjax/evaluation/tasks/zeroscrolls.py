"""Six tasks of ZeroSCROLLS (arXiv 2305.14196), those of CEPE's Table 4.

Rows are ZeroSCROLLS' own or those of SCROLLS. The `input` of ZeroSCROLLS is the official prompt,
with the indices of its parts. The `input` of SCROLLS, which has references for all of its
validation split, is a query, an empty line and the text. Its prompts have this library's own
wording, with the text first, or that of the file `wording`.

The end of a text that is too long is cut and replaced by the official line; CEPE cuts the
beginning. With it, CEPE's code cuts BOS and the heading of the text from the decoder's part, and
inserts an empty line (models with an encoder) or the official line before the instruction. Here
prompts are the same for all methods, so BOS and heading remain, and nothing is inserted.

Generation is greedy; CEPE samples three answers to each report of GovReport (`draws`).
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt, OneOf
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.metrics import qa, rouge
from lcjax.evaluation.prompt import document_segments
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Limits, Record, Records, Task
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import AnswerBenchmark, DataSet, best_of, by_name
from lcjax.evaluation.tasks.local_files import Wording
from lcjax.generation.sampling import Sampling

SOURCE = (
    "ZeroSCROLLS (Hugging Face: tau/zero_scrolls) or SCROLLS (tau/scrolls), a folder a task with"
    " validation.jsonl in it"
)
_FIELDS = ("id", "input", "output")
_INDEX_FIELDS = ("document_start_index", "document_end_index", "query_start_index")
_TEXTS = local_files.library_prompts("zeroscrolls")
_PLACEHOLDERS = {
    "gov_report": "context", "summ_screen_fd": "context", "qmsum": "context question",
    "narrative_qa": "context question", "qasper": "context question",
    "quality": "context question options", "omitted": "",
}  # fmt: skip


_best = functools.partial(best_of, strip=True)


# SCROLLS' three scores of summaries, without stems; CEPE's ROUGE-L has stems.
_ROUGES = {
    "r1": _best(functools.partial(rouge.rouge_n, size=1, stem=False)),
    "r2": _best(functools.partial(rouge.rouge_n, size=2, stem=False)),
    "rl": _best(functools.partial(rouge.rouge_l, stem=False)),
}


def _rouge_mean(answer: str, fields: Record) -> float:
    return _geometric_mean([score(answer, fields) for score in _ROUGES.values()])


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.prod(values) ** (1 / len(values)))


_ROUGE_L = {"rouge_l": _best(functools.partial(rouge.rouge_l, stem=True))}
_SUMMARY = {"rouge_mean": _rouge_mean, **_ROUGE_L, **_ROUGES}
_QA = {
    "f1": _best(qa.qa_f1), "f1_verdict": _best(qa.qa_f1_verdict),
    "exact_match": _best(qa.exact_match), **_ROUGE_L,
}  # fmt: skip
# CEPE's code deletes articles, so an empty answer or "the" is right for A.
_LETTER = {"letter": _best(qa.letter_match), "letter_cepe": _best(qa.exact_match)}
_NEW_TOKENS = 1024  # of ZeroSCROLLS' own run_hf_model.py, for every task
_NUCLEUS = Sampling(min_new_tokens=10, temperature=1.0, top_p=0.95)  # CEPE's GovReport
# The score that CEPE's table shows instead of the first one.
_CEPE = {"rouge_mean": "rouge_l", "f1": "f1_verdict", "letter": "letter"}
_SETS = (  # with CEPE's numbers of new tokens, and its stops
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
    """Six tasks of ZeroSCROLLS.

    CEPE's numbers: SCROLLS validation, `flavour=cepe`, `keep=tail`, `max_examples=500`, `draws=3`.
    """

    table_settings: ClassVar[tuple[str, ...]] = ("tasks", "flavour")
    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    title: ClassVar[str] = "ZeroSCROLLS"
    source: ClassVar[str] = SOURCE

    split: str = "validation"  # references of the official test split are private
    # Part kept of a text that is too long: head (ZeroSCROLLS), tail (CEPE)
    keep: Annotated[str, OneOf(("head", "tail"))] = "head"
    # Number of answers to each report of GovReport, whose mean counts; they are sampled from the
    # nucleus of 0.95 at temperature 1. 0: one greedy answer
    draws: NonNegativeInt = 0
    # Whose rules. zeroscrolls: 1,024 new tokens in every task, and no stop at a newline; cepe: for
    # questions 50 and a stop, one reference each but in NarrativeQA, F1 with its rule, and ROUGE-L
    flavour: Annotated[str, OneOf(("zeroscrolls", "cepe"))] = "zeroscrolls"
    # YAML file with a prompt for each task, and the line `omitted`, for rows of SCROLLS; null: this
    # library's own
    wording: str | None = None

    @property
    def cut(self) -> str:
        return {"head": "right", "tail": "left"}[self.keep]

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}/{self.split}.jsonl", f"{name}_{self.split}.jsonl", f"{name}.jsonl"

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        self.read_wording(key)

    def read_wording(self, key: str) -> Wording:
        needed = [data.name for data in self.selection()] + ["omitted"] * (self.keep == "head")
        return local_files.read_wording(self.wording, _TEXTS, _PLACEHOLDERS, key, needed=needed)

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        """Yields one example per id; rows with the same id hold several references.

        CEPE has one example per row, except in NarrativeQA, which is from the original release.
        """
        merges = self.flavour != "cepe" or data.name == "narrative_qa"
        examples: dict[object, Example] = {}
        parse = functools.partial(_example, data.name, self.read_wording(self.label))
        for example in local_files.rows(path, _FIELDS, parse):
            if self.wording is not None and example.fields["wording"] != self.wording:
                raise InputError(
                    f"{self.label}.wording={self.wording}: rows of {path} are ZeroSCROLLS' own,"
                    " whose input is the official prompt; take SCROLLS' rows, or leave wording out"
                )
            key = example.fields["id" if merges else "line"]
            first = examples.setdefault(key, example)
            references = dict.fromkeys([*first.references, *example.references])
            examples[key] = dataclasses.replace(
                first,
                references=list(references),
                cut_mark=first.cut_mark if self.keep == "head" else "",
            )
        yield from examples.values()

    def prepare(self, example: Example, data: DataSet, tokenizer, length: int) -> Example:
        if self.flavour == "zeroscrolls":
            data = dataclasses.replace(data, new_tokens=_NEW_TOKENS, stop=())
        return super().prepare(example, data, tokenizer, length)

    def examples_of(
        self, data: DataSet, corpus: TokenizedCorpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        """Yields each report of GovReport `draws` times, each time with another seed."""
        draws = self.draws if data.name == "gov_report" else 0
        for example in super().examples_of(data, corpus, length, limits):
            if not draws:
                yield example
            for draw in range(draws):
                least = min(_NUCLEUS.min_new_tokens, example.max_new_tokens)
                seed = limits.seed + draw
                sampling = dataclasses.replace(_NUCLEUS, min_new_tokens=least, seed=seed)
                fields = {**example.fields, "draw": draw, "document": example.fields["id"]}
                yield dataclasses.replace(example, fields=fields, sampling=sampling)

    def cluster(self, record: Record) -> object:
        """Returns the question of a record; several rows of CEPE's, or draws, may share it."""
        return record["dataset"], record["id"]

    def scoring(self, data: DataSet) -> DataSet:
        main_score = next(iter(data.scores))
        return data.with_main_score(_CEPE[main_score]) if self.flavour == "cepe" else data

    def scores_by_set(self, records: Records) -> dict[str, float]:
        """Returns each data set's mean score; for summaries, the geometric mean of three means."""
        means = {name: _geometric_mean(m) for name, m in self._rouge_means(records).items()}
        return super().scores_by_set(records) | means

    def values(self, records: Records) -> list[float | None]:
        """Returns the values of records; for summaries, to first order.

        The number of summaries is the geometric mean of three means (SCROLLS). With the means m of
        the scores x, a record contributes (m1 m2 m3)^(1/3) mean(x1/m1, x2/m2, x3/m3) to it.
        """
        values, means = super().values(records), self._rouge_means(records)
        for index, record in enumerate(records):
            if (mean := means.get(record["dataset"])) is not None:
                shares = np.mean(_rouges(record) / mean) if mean.all() else 0.0
                values[index] = _geometric_mean(mean) * float(shares)
        return values

    def _rouge_means(self, records: Records) -> dict[str, np.ndarray]:
        """Returns the three mean ROUGE scores of each data set whose number combines them."""
        return {
            name: np.mean([_rouges(record) for record in group], axis=0)
            for name, group in group_by(records, "dataset").items()
            if "rouge_mean" in self.datasets[name].scores and self.flavour == "zeroscrolls"
        }


def _rouges(record: Record) -> np.ndarray:
    return np.array([record["scores"][name] for name in _ROUGES])


def _example(name: str, wording: Wording, line: int, row: dict) -> Example:
    """Parses a row of either form; raises ValueError with what is wrong."""
    omitted = wording.texts.get("omitted", _TEXTS["omitted"])
    separator = row.get("truncation_seperator") or f"{omitted}\n\n"
    for field, value in (*((f, row[f]) for f in _FIELDS), ("truncation_seperator", separator)):
        if not isinstance(value, str):
            raise ValueError(f"has {field}={value!r}, no text")
    fields = {"id": row["id"], "line": line}
    if any(field in row for field in _INDEX_FIELDS):
        text, indices = row["input"], [row.get(field) for field in _INDEX_FIELDS]
        if not all(isinstance(i, int) for i in indices) or not 0 <= indices[0] <= indices[1]:
            raise ValueError(f"has indices {indices}, which are no part of its input")
        if not text.strip():
            raise ValueError("has an empty input")
        start, stop = indices[0], min(indices[1], len(text))
        segments = document_segments(text[:start], text[start:stop], text[stop:])
        fields["wording"] = "official (its input)"
        return Example(segments, [row["output"]], fields, cut_mark=separator)
    values, answer = _template_values(row, name)
    template = wording.texts[name]
    fields |= local_files.template_fields(template, wording.source)
    segments = local_files.fill_template(template, values)
    return Example(segments, [answer], fields, cut_mark=separator)


def _template_values(row: dict, name: str) -> tuple[dict[str, str], str]:
    """Returns the fields of a template, and the reference, of a row of SCROLLS."""
    text, answer = row["input"], row["output"].strip()
    if name in ("gov_report", "summ_screen_fd"):
        return {"context": text.strip()}, answer
    if name == "quality":
        return _quality_values(text, answer)
    question, separator, document = text.partition("\n\n")
    if not separator:
        raise ValueError("has no empty line between question and text")
    return {"context": document.strip(), "question": question.strip()}, answer


def _quality_values(text: str, answer: str) -> tuple[dict[str, str], str]:
    """Splits a question, four options (A) to (D) and a text; the reference becomes its letter."""
    form = r"(.*?)\s*\(A\)(.*?)\s*\(B\)(.*?)\s*\(C\)(.*?)\s*\(D\)(.*?)\n\n(.*)"
    match = re.fullmatch(form, text, re.DOTALL)
    if match is None:
        raise ValueError("has no options (A) to (D) between question and text")
    question, *options, document = (part.strip() for part in match.groups())
    if answer not in options:
        raise ValueError(f"has output={answer!r}, none of its options")
    listed = "\n".join(f"({letter}) {option}" for letter, option in zip("ABCD", options))
    values = {"context": document, "question": question, "options": listed}
    return values, "ABCD"[options.index(answer)]
