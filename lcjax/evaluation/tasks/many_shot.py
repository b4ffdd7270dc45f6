"""Many-shot classification of questions: accuracy over the number of demonstrations.

TREC's 50 classes of questions (Li and Roth, COLING 2002) with 1 to 1,000 demonstrations, as in LCEG
(arXiv 2409.12181, figure 2): LongBench's prompt and score, 64 new tokens, the first line. With
`options` all classes are also ranked by their likelihood after the prompt. Examples are read from
LCEG's files in LongBench's format, or drawn from TREC's own two files; then classes have this
library's names. The prompt is that of LongBench's `trec`.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from lcjax.errors import InputError, NonNegativeInt
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.prompt import Segment
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.statistics import at_longest
from lcjax.evaluation.task import Limits, Metric, Record, Records, Task, Unit, pad_batch
from lcjax.evaluation.tasks import local_files, longbench
from lcjax.evaluation.tasks.benchmark import DataSet, TextCutBenchmark, by_name
from lcjax.evaluation.tasks.icl import likeliest, option_ids, option_losses
from lcjax.evaluation.tasks.longbench import LongBench
from lcjax.storage import check_regular

SHOTS = (1, 5, 10, 25, 50, 75, 100, 200, 300, 400, 500, 625, 750, 875, 1000)
OPTION_SCORES = ("options", "options_norm")
TRAIN, TEST = "train_5500.label", "TREC_10.label"
SOURCE = (
    f"TREC's {TRAIN} and {TEST} (cogcomp.seas.upenn.edu/Data/QA/QC), or LCEG's trec_<k>shots.jsonl"
)
_SCORES = LongBench.datasets["trec"].scores
_SETS = tuple(
    DataSet(f"trec_{shots}shots", "trec", 64, _SCORES, chat=False, first_line=True)
    for shots in SHOTS
)
# No name is part of another, so that an answer never contains two.
CLASSES: dict[str, str] = local_files.library_prompts("trec_classes")  # by TREC's own names


@Task.register_subclass("many_shot")
@dataclasses.dataclass(frozen=True)
class ManyShot(TextCutBenchmark):
    """One data set for each number of demonstrations; those that do not fit a length are left out.

    Demonstrations are drawn anew for every question, with `balanced` one of each class in turn.
    """

    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    title: ClassVar[str] = "Many-shot"
    metric: ClassVar[Metric] = Metric(
        "accuracy", "Many-shot TREC, mean over numbers of demonstrations", False, 4
    )
    source: ClassVar[str] = SOURCE

    max_examples: int | None = 200  # questions; of TREC's own file drawn with `seed`
    budget_rule: str = "total"
    balanced: bool = False
    options: bool = False  # also rank the classes: by sum of log p, and by that over their tokens
    wording: str | None = None  # a YAML file with your own prompt; null: as LongBench's task trec
    seed: NonNegativeInt = 0

    @property
    def ranks_options(self) -> bool:
        return self.options

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        self._template(key)
        for data in self.selection():
            path = local_files.find(self.path, self.files(data.name), key, SOURCE)
            if path.name == TEST:
                local_files.find(self.path, (TRAIN,), key, SOURCE)

    def wording_texts(self) -> Record:
        return {"trec": self._template().text}

    def files(self, name: str) -> tuple[str, ...]:
        return f"{name}.jsonl", TEST

    def read(self, data: DataSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        if path.name != TEST:
            return longbench.examples(path, *self._template(), data)
        files = corpus.once(
            (ManyShot, path), lambda: (_label_file(path), _label_file(path.with_name(TRAIN)))
        )
        return self._draw(SHOTS[list(self.datasets).index(data.name)], *files)

    def cluster(self, record: Record) -> object:
        """Returns the question of a record; records of other numbers of demonstrations share it."""
        return record["line"] if "shots" in record else super().cluster(record)

    def _template(self, key: str = "tasks") -> local_files.ChosenTemplate:
        return longbench.template("trec", self.path, self.wording, key)

    def _draw(self, count: int, questions: Sequence, train: Sequence) -> Iterator[Example]:
        order = np.random.default_rng(self.seed).permutation(len(questions))
        template, source = self._template()
        opening, _, closing = template.partition("{context}")
        closing = closing.removeprefix("\n")  # every demonstration ends with a newline
        for index in order[: self.max_examples]:
            line, question, answer = questions[index]
            rng = np.random.default_rng([self.seed, count, line])
            demos = [
                Segment("demo", f"Question: {text}\nType: {name}\n")
                for _, text, name in self._demonstrations(train, count, rng)
            ]
            text = closing.replace("{input}", f"Question: {question}\nType:")
            segments = [Segment("instruction", opening), *demos, Segment("question", text)]
            fields = {"line": line, "all_classes": list(CLASSES.values()), "shots": count}
            fields |= local_files.template_fields(template, source)
            yield Example(segments, [answer], fields)

    def _demonstrations(self, train: Sequence, count: int, rng: np.random.Generator) -> list:
        order = rng.permutation(len(train))
        if self.balanced:
            counts: dict[str, int] = collections.Counter()
            rounds = []  # number of earlier rows of the same class
            for _, _, name in (train[index] for index in order):
                rounds.append(counts[name])
                counts[name] += 1
            order = order[np.argsort(rounds, kind="stable")]
        return [train[index] for index in order[:count]]

    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        units = super().plan(corpus, length, limits)
        cut = {
            unit.fields["dataset"]
            for unit in units
            if unit.fields["truncated"] or unit.fields.get("cut_tokens")
        }
        whole = [unit for unit in units if unit.fields["dataset"] not in cut]
        if not whole:
            raise InputError(
                f"lengths: {length} is too short for {self.label} with {self.selection()[0].name};"
                " use longer ones, or fewer demonstrations in tasks"
            )
        return [dataclasses.replace(unit, index=index) for index, unit in enumerate(whole)]

    def prompts(self, unit: Unit) -> list[np.ndarray]:
        return [unit.tokens] * (2 if self.options else 1)

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        records = super().score(model, units, batch)
        if not self.options:
            return records
        rows = pad_batch(units, batch)
        options = [option_ids(model.tokenizer, unit.fields["all_classes"]) for unit in rows]
        losses = option_losses(model, [unit.prompt for unit in rows], options)
        return [
            self._with_options(unit, record, loss, list(map(len, ids)))
            for unit, record, loss, ids in zip(units, records, losses, options)
        ]

    def _with_options(
        self, unit: Unit, record: Record, losses: np.ndarray, sizes: Sequence[int]
    ) -> Record:
        """Adds the loss of each class after the prompt, and whether the likeliest is right."""
        record = {**record, "option_nll": losses.tolist(), "option_tokens": sizes}
        scores = {**record["scores"], **_option_scores({**unit.fields, **record})}
        read = unit.fields["size"] + len(unit.tokens) + sum(sizes)
        return {**record, "scores": scores, "read": read}

    def score_answer(self, answer: str, unit: Unit, tokenizer) -> dict[str, float]:
        return {**super().score_answer(answer, unit, tokenizer), **_option_scores(unit.fields)}

    def summarise(self, records: Records) -> Record:
        names = OPTION_SCORES if self.options else ()
        return {**super().summarise(records), **self.further_means(records, names)}

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        """Draws the number by length, and at the longest length by number of demonstrations."""
        files, cells = super().figures(cells, records, folder), at_longest(cells)
        counts = zip(self.datasets, SHOTS)
        shots = {name: n for name, n in counts if any(name in cell for cell in cells)}
        panels = {f"Many-shot TREC at {cells[0]['length']:,} tokens": shots}
        if self.options:
            panels["The likeliest class"] = {
                f"{name}:{OPTION_SCORES[0]}": count for name, count in shots.items()
            }
        path = folder / f"{self.label}_by_shots.png"
        return [*files, plots.over_counts(cells, panels, ("demonstrations", "accuracy"), path)]


def _option_scores(fields: Record) -> dict[str, float]:
    """Returns whether the likeliest class is right, if `fields` has the losses of the classes."""
    if "option_nll" not in fields:
        return {}
    losses, names = np.asarray(fields["option_nll"], np.float64), fields["all_classes"]
    by_score = (-losses, -losses / np.asarray(fields["option_tokens"]))
    return {
        score: float(likeliest(names, values) in fields["references"])
        for score, values in zip(OPTION_SCORES, by_score, strict=True)
    }


def _label_file(path: Path) -> list[tuple[int, str, str]]:
    """Reads number, question and class of every line `CLASS:fine question` of TREC's file."""
    check_regular(path)
    rows = []
    for number, line in enumerate(path.read_text(encoding="latin-1").splitlines(), 1):
        code, _, question = line.partition(" ")
        if code in CLASSES and question.strip():
            rows.append((number, question.strip(), CLASSES[code]))
        elif line.strip():
            local_files.warn_skipped(path, number, f"begins with {code!r}, none of TREC's classes")
    if not rows:
        raise InputError(f"{path} has no line such as 'NUM:date When ...'; it is not TREC's file")
    return rows
