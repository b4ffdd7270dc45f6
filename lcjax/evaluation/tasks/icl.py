"""In-context learning: eleven classification sets, options ranked by their likelihood, four scores.

CEPE (arXiv 2402.16617, section 5): k demonstrations drawn for every text, balanced over classes,
and the option with the highest score:

    acc         sum of log p(o_i | prompt)        acc_calib       acc - sum of log p(o_i | BOS)
    acc_norm    that / tokens of the option       acc_calib_norm  that / tokens of the option

where the end of a document replaces BOS if the tokenizer has none (`bare_prefix` of a record).
Each set shows the score that CEPE's table uses for it, which was chosen by Llama-2 with two
demonstrations. Options are tokenised after a blank, as inside a text. If a prompt does not fit the
decoder of a model with a memory, its first demonstrations move to the context. CEPE's tables 3 and
8 fix what reads which demonstrations: every decoder reads `shots: 2`, and a memory reads
`context_shots: 18` or 38 more, each as one chunk. Models whose decoder reads all of them have 20 or
40. The decoder's demonstrations are those of the same task without `context_shots`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from lcjax.checkpoints.tokenizer import encode_mid_text
from lcjax.errors import InputError, NonNegativeInt, OneOf, PositiveInt
from lcjax.evaluation.corpus import TokenizedCorpus, prefix_token
from lcjax.evaluation.prompt import Prompt, Segment
from lcjax.evaluation.prompt_task import Example
from lcjax.evaluation.split import continuations
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Limits, Record, Records, Task, Unit, pad_batch
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.benchmark import DataSet, FileBenchmark, by_name
from lcjax.evaluation.tasks.local_files import Wording

SCORES = ("acc", "acc_norm", "acc_calib", "acc_calib_norm")
ORDERS = ("shuffled", "first")
SOURCE = (
    "a folder a data set with train.jsonl and test.jsonl (validation.jsonl for sst2, sst5 and"
    " clinic150), rows with text and label"
)


@dataclasses.dataclass(frozen=True)
class IclSet(DataSet):
    """A classification set: its texts, its classes by number, and the score shown."""

    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()  # empty: rows hold names
    main_score: str = "acc"
    test: str = "test"


# `read` sets the number of new tokens to the length of the longest option.
_SETS = tuple(
    IclSet(name, "icl", 0, {}, **{**settings, "classes": tuple(settings.get("classes", ()))})
    for name, settings in local_files.library_prompts("icl").items()
)
_TEXTS = {data.name: data.texts for data in _SETS}


@Task.register_subclass("icl")
@dataclasses.dataclass(frozen=True)
class Icl(FileBenchmark):
    """Rows are `text` and `label`, a name or, where classes are known, their number.

    Underscores of names become blanks. Texts stay as they are, as in CEPE's prompts: those of sst2
    end in a blank. The options are the classes of train.jsonl, in order of their number or else of
    the alphabet.
    """

    generates: ClassVar[bool] = True
    ranks_options: ClassVar[bool] = True
    datasets: ClassVar[dict[str, DataSet]] = by_name(_SETS)
    title: ClassVar[str] = "In-context learning"
    source: ClassVar[str] = SOURCE

    max_examples: int | None = 250
    shots: NonNegativeInt = 2
    # Further demonstrations, for the context of models with a memory
    context_shots: NonNegativeInt = 0
    # Which texts are used: drawn with the seed, or the first ones (CEPE; in sorted files these
    # have one class)
    order: Annotated[str, OneOf(ORDERS)] = "shuffled"
    seed: NonNegativeInt = 42
    # Number of runs, with `seed`, `seed` + 1, ..., whose mean counts (CEPE: 3)
    seeds: PositiveInt = 1
    # YAML file with an instruction and an example for each data set; null: this library's own
    wording: str | None = None

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        self.read_wording(key)
        for data in self.selection():
            local_files.find(self.path, (f"{data.name}/train.jsonl",), key, SOURCE)

    def cluster(self, record: Record) -> object:
        """Returns the question of a record; records of other seeds share it."""
        return record["dataset"], record["line"]

    def read_wording(self, key: str) -> Wording:
        names = {f"{data}.instruction": "" for data in _TEXTS}
        names |= {f"{data}.example": "text label" for data in _TEXTS}
        needed = [f"{data.name}.{text}" for data in self.selection() for text in data.texts]
        wording = local_files.read_wording(self.wording, _TEXTS, names, key, needed=needed)
        for name in (name for name in wording.texts if name.endswith(".example")):
            question, label, _ = wording.texts[name].partition(" {label}")
            if not label or "{text}" not in question:
                raise InputError(
                    f"{key}.wording={self.wording}: {name} must have {{text}}, and after it a blank"
                    " and {label}, as options are ranked after a blank"
                )
        return wording

    def files(self, name: str) -> tuple[str, ...]:
        return (f"{name}/{self.datasets[name].test}.jsonl",)

    def examples_of(
        self, data: IclSet, corpus: TokenizedCorpus, length: int, limits: Limits
    ) -> Iterator[Example]:
        for seed in range(self.seed, self.seed + self.seeds):
            one = dataclasses.replace(self, seed=seed, seeds=1)
            for example in super(Icl, one).examples_of(data, corpus, length, limits):
                yield dataclasses.replace(example, fields={**example.fields, "seed": seed})

    def read(self, data: IclSet, path: Path, corpus: TokenizedCorpus) -> Iterator[Example]:
        files, wording = (path.with_name("train.jsonl"), path), self.read_wording(self.label)
        instruction, example = (f"{data.name}.{text}" for text in ("instruction", "example"))
        train, rows = corpus.once((Icl, path), lambda: [_rows(file, data) for file in files])
        if not train:
            raise InputError(
                f"{files[0]} contains no valid row; use the official file of {data.name}"
            )
        labels = {label for _, _, label in train}
        unknown = sorted(labels - set(data.classes))
        if data.classes and 0 < len(unknown) < len(labels):
            raise InputError(
                f"{files[0]}: label={unknown[0]!r} is none of the classes of {data.name},"
                f" {', '.join(data.classes)}; use these names or their numbers"
            )
        options = [name for name in data.classes if name in labels] or sorted(labels)
        by_class = [[row for row in train if row[2] == option] for option in options]
        longest = max(len(encode_mid_text(corpus.tokenizer, f" {name}")) for name in options)
        if self.order == "shuffled":
            rng = np.random.default_rng(self.seed)
            rows = [rows[index] for index in rng.permutation(len(rows))]
        for line, text, label in rows:
            if label not in labels:
                local_files.warn_skipped(
                    path, line, f"has label={label!r}, which train.jsonl lacks"
                )
                continue
            rng = np.random.default_rng([self.seed, line])
            demos = self._demonstrations(by_class, rng)
            texts = [wording.fill(example, text=t, label=name) for _, t, name in demos]
            parts = [Segment("instruction", wording.fill(instruction))]
            parts += [Segment("context", demo) for demo in texts[self.shots :]]
            parts += [Segment("demo", demo) for demo in texts[: self.shots]]
            question = wording.texts[example].partition(" {label}")[0]
            parts.append(Segment("question", question.replace("{text}", text)))
            fields = {"line": line, "options": options, **wording.fields}
            fields |= {"shots": self.shots, "context_shots": self.context_shots}
            yield Example(parts, [label], fields, longest)

    def _demonstrations(self, by_class: Sequence[list], rng: np.random.Generator) -> list:
        """Draws rounds of one row per class, each in random order, up to the number of shots."""
        count = self.shots + self.context_shots
        num_rounds = math.ceil(count / len(by_class))
        orders = [rng.permutation(len(rows)) for rows in by_class]
        demos: list = []
        for number in range(num_rounds):
            rows = [rows[order[number % len(rows)]] for rows, order in zip(by_class, orders)]
            demos += [rows[index] for index in rng.permutation(len(rows))]
        return demos[:count]

    def check_model(self, model, units: Sequence[Unit]) -> None:
        prefix_token(model.tokenizer)

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        return self.scorer(model, batch)(units)

    def scorer(self, model, batch: int) -> Callable[[Sequence[Unit]], list[Record]]:
        """Scores the options after BOS alone once per data set."""
        bos = prefix_token(model.tokenizer)
        prefix = "eos" if model.tokenizer.bos_id is None else "bos"

        @functools.cache
        def encode(names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
            return option_ids(model.tokenizer, names)

        @functools.cache
        def bare_losses(options: tuple[tuple[int, ...], ...]) -> np.ndarray:
            return option_losses(model, [Prompt(np.array([bos], np.int32), ())], [options])[0]

        def score(units: Sequence[Unit]) -> list[Record]:
            rows = pad_batch(units, batch)
            options = [encode(tuple(unit.fields["options"])) for unit in rows]
            losses = option_losses(model, [unit.prompt for unit in rows], options)
            return [
                {**self._option_record(*entry, bare_losses(entry[-1])), "bare_prefix": prefix}
                for entry in zip(units, losses, options)
            ]

        return score

    def _option_record(
        self, unit: Unit, losses: np.ndarray, options: Sequence[Sequence[int]], bare: np.ndarray
    ) -> Record:
        """Returns the record of a unit: the option with the best value of each score."""
        sizes = list(map(len, options))
        names = unit.fields["options"]
        gains = bare - losses
        by_score = (-losses, -losses / sizes, gains, gains / np.asarray(sizes))
        picks = {name: likeliest(names, values) for name, values in zip(SCORES, by_score)}
        right = unit.fields["references"][0]
        scores = {name: float(pick == right) for name, pick in picks.items()}
        main_score = self.datasets[unit.fields["dataset"]].main_score
        return {
            "answer": picks[main_score],
            "scores": {"score": scores[main_score], **scores},
            "correct": scores[main_score],
            "shown": main_score,
            "option_nll": losses.tolist(),
            "option_nll_bare": bare.tolist(),
            "read": len(unit.tokens) + sum(sizes),
        }

    def summarise(self, records: Records) -> Record:
        """Adds the mean over sets of each score, and its standard deviation over seeds."""
        summary = {**super().summarise(records), **self.further_means(records, SCORES)}
        by_seed = [
            self.scores_by_set(group)
            for group in group_by(records, lambda r: r.get("seed")).values()
        ]
        if len(by_seed) > 1:
            names = self.scores_by_set(records)
            summary |= {f"{n}:deviation": float(np.std([x[n] for x in by_seed])) for n in names}
        return summary


def option_losses(model, prompts: Sequence[Prompt], options) -> list[np.ndarray]:
    """Returns -log p of each option after its prompt, summed over its tokens, float64 [options]."""
    return [
        np.asarray([np.sum(option.nll, dtype=np.float64) for option in row])
        for row in continuations(model, prompts, options)
    ]


def likeliest(names: Sequence[str], values: np.ndarray) -> str:
    """Returns the name with the highest value; "" if a value is NaN, so that no option is right."""
    return "" if np.isnan(values).any() else names[int(np.argmax(values))]


def option_ids(tokenizer, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of options, each after a blank."""
    return tuple(tuple(encode_mid_text(tokenizer, f" {name}")) for name in names)


def _rows(path: Path, data: IclSet) -> list[tuple[int, str, str]]:
    """Reads line, text and name of the class of every row."""

    def parse(number: int, row: dict) -> tuple[int, str, str]:
        text, label = row["text"], row["label"]
        if isinstance(label, int) and 0 <= label < len(data.classes):
            label = data.classes[label]
        if not isinstance(text, str) or not isinstance(label, str) or not label.strip("_ \n"):
            known = f"0 to {len(data.classes) - 1} or a name" if data.classes else "a name"
            raise ValueError(f"text must be a string, and label={label!r} must be {known}")
        return number, text, label.replace("_", " ").strip()

    return list(local_files.rows(path, ("text", "label"), parse))
