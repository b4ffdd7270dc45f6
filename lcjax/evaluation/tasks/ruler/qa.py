"""RULER's questions over SQuAD and HotpotQA: the right paragraphs among others."""

import dataclasses
import json
import random
from pathlib import Path

from lcjax.errors import InputError
from lcjax.evaluation.tasks.ruler.search import Drawn, Maker
from lcjax.evaluation.tasks.ruler.wording import Wording

SOURCES = {
    "squad": "dev-v2.0.json of SQuAD 2.0 (https://rajpurkar.github.io/SQuAD-explorer)",
    "hotpotqa": "hotpot_dev_distractor_v1.json of HotpotQA (https://hotpotqa.github.io)",
}


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # documents that always stand there
    near: tuple[int, ...] = ()  # those that come next: of the same article


def read(path: str | None, name: str, key: str) -> tuple[list[Question], list[str]]:
    """Questions and distinct documents of the official file."""
    if path is None:
        raise InputError(f"{key}=null, which is needed here: name {SOURCES[name]}")
    if not Path(path).is_file():
        raise InputError(f"{key}={path} is no file; it is {SOURCES[name]}")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        questions, documents = (_squad if name == "squad" else _hotpotqa)(data)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{key}={path} is not {SOURCES[name]} ({error!r:.60})") from None
    if not questions:
        raise InputError(f"{key}={path} has no question with an answer; it is not {SOURCES[name]}")
    return questions, documents


def _squad(data) -> tuple[list[Question], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({p["context"] for paragraphs in articles for p in paragraphs})
    place = {document: index for index, document in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        own = [place[p["context"]] for p in paragraphs]
        for paragraph in paragraphs:
            gold = place[paragraph["context"]]
            near = tuple(index for index in own if index != gold)
            questions += [
                Question(q["question"], tuple(a["text"] for a in q["answers"]), (gold,), near)
                for q in paragraph["qas"]
                if not q.get("is_impossible") and q["answers"]
            ]
    return questions, documents


def _hotpotqa(data) -> tuple[list[Question], list[str]]:
    def texts(row) -> list[str]:
        return [f"{title}\n{''.join(lines)}" for title, lines in row["context"]]

    documents = sorted({text for row in data for text in texts(row)})
    place = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(row["question"], (row["answer"],), tuple(place[text] for text in texts(row)))
        for row in data
    ]
    return questions, documents


class Passages(Maker):
    """Units are documents; each is a segment of its own."""

    new_tokens = 32

    def __init__(self, wording: Wording, questions, documents: list[str], tokenizer, fixed: bool):
        super().__init__(wording, tokenizer, fixed)
        self.questions, self._documents = questions, documents
        self.least = self.least_of(0)
        self._known: dict[int, list[int]] = {}  # ids by document

    def step(self, length: int) -> int:
        return 10

    def least_of(self, index: int) -> int:
        return len(self.questions[index].gold)

    def draw(self, rng: random.Random, units: int, index: int) -> Drawn:
        question, pool = self.questions[index], len(self._documents)
        if units < pool:
            chosen = self._chosen(rng, question, max(units, len(question.gold)))
        else:
            chosen = [place % pool for place in range(units)]
        self.shuffle(rng, chosen)
        parts = self._wording.parts("qa", query=question.text)
        documents = (self._document(n, place) for n, place in enumerate(chosen, 1))
        segments = parts.around(*documents)
        gold = [chosen.index(place) + 1 for place in question.gold]
        return Drawn(segments, question.answers, {"query": question.text, "gold": gold})

    def _chosen(self, rng: random.Random, question: Question, units: int) -> list[int]:
        gold, near = list(question.gold), list(question.near)
        extra = units - len(gold)
        if extra <= len(near):
            return gold + rng.sample(near, extra)
        used = {*gold, *near}
        others = [index for index in range(len(self._documents)) if index not in used]
        return gold + near + rng.sample(others, min(extra - len(near), len(others)))

    def _document(self, number: int, place: int) -> list[int]:
        if place not in self._known:
            self._known[place] = self.ids("\n" + self._documents[place])
        return self.ids(f"\n\nDocument {number}:") + self._known[place]
