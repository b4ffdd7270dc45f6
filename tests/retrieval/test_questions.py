"""Questions that are made from a datastore by patterns."""

import json

import pytest

from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation.command import main as evaluate
from lcjax.retrieval import BuildConfig, Chunking, Datastore, QuestionKind, QuestionsConfig, build
from lcjax.retrieval.__main__ import main
from lcjax.retrieval.questions import write_questions

KIND = dict(
    name="keepers",
    pattern=r"(?P<answer>\w+ \w+) keeps\s+the (?P<place>\w+)\.",
    question="Who keeps the {place} in {stem}?",
)
TEXTS = {
    "a.md": (
        "Ada Brun keeps\nthe mill.",
        "Carl Dahl keeps the lock.",
        "Ed Flor keeps the inn.",
    ),
    "b.md": ("Gus Hal keeps the mill.", "Ida Jung keeps the farm.", "Kai Lund keeps the farm."),
    "c.md": ("Max Nord keeps the gate.", "Max Nord keeps the gate.", "The gate keeps the gate."),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "text").mkdir()
    for name, lines in TEXTS.items():
        (folder / "text" / name).write_text("\n\n".join(lines))
    data, chunking = TextConfig(path=f"{folder / 'text'}"), Chunking("sentences", 6)
    build(BuildConfig(data, chunking, out=f"{folder / 'store'}", workers=1))
    return folder / "store"


def read(folder, kind="keepers"):
    return {
        name: [json.loads(line) for line in (folder / kind / "own" / f"{name}.jsonl").open()]
        for name in ("test", "train")
    }


def questions(store, out, **options):
    defaults = dict(kinds=(QuestionKind(**KIND),), count=4, demonstrations=1)
    write_questions(QuestionsConfig(f"{store}", out=f"{out}", **(defaults | options)))
    return read(out)


def test_a_match_is_a_question_with_its_answer_and_all_passages_that_have_it(store, tmp_path):
    rows = questions(store, tmp_path)
    answers = {row["question"]: row["answer"] for part in rows.values() for row in part}
    assert answers == {
        "Who keeps the mill in a?": ["Ada Brun"],
        "Who keeps the lock in a?": ["Carl Dahl"],
        "Who keeps the inn in a?": ["Ed Flor"],
        "Who keeps the mill in b?": ["Gus Hal"],
        "Who keeps the gate in c?": ["Max Nord"],
    }, "not the farm with two keepers, nor the gate, which stands in its own question"
    assert [len(rows[name]) for name in ("test", "train")] == [4, 1]
    passages = {p.id: p for p in Datastore(store).passages(range(len(Datastore(store))))}
    for row in (*rows["test"], *rows["train"]):
        texts = [" ".join(passages[name].text.split()) for name in row["relevant"]]
        assert len(texts) == (2 if "gate" in row["question"] else 1)
        assert all(f"{row['answer'][0]} keeps the" in text for text in texts)
        first = passages[row["relevant"][0]]
        assert row["ctxs"] == [{"title": first.title, "text": first.text}]


def test_the_seed_chooses_and_deleted_passages_ask_nothing(store, tmp_path):
    first, again, other = (
        questions(store, tmp_path / name, count=3, demonstrations=0, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other and first["train"] == []
    (deleted,) = first["test"][0]["relevant"][-1:]
    copy = tmp_path / "store"
    copy.mkdir()
    for file in store.rglob("*"):
        target = copy / file.relative_to(store)
        target.mkdir() if file.is_dir() else target.write_bytes(file.read_bytes())
    Datastore(copy).delete([deleted])
    rows = questions(copy, tmp_path / "d", count=4, demonstrations=0)
    assert deleted not in [name for row in rows["test"] for name in row["relevant"]]


def test_the_command_writes_files_for_retrieval_evaluation(store, tmp_path, capsys):
    file = tmp_path / "questions.yaml"
    options = dict(store=f"{store}", kinds=[KIND], count=4, demonstrations=1, out=f"{tmp_path}")
    file.write_text(json.dumps(options))
    assert main(["questions", f"--config={file}"]) == main(["questions", f"--config={file}"]) == 0
    assert main(["questions", f"--config={file}", "--seed=9"]) == 2
    assert "exists with other content" in (captured := capsys.readouterr()).err
    assert f"{tmp_path}/keepers/own/test.jsonl" in captured.out
    words = [f"--path={tmp_path}/keepers/own/test.jsonl", f"--retrievers=[{{folder: {store}}}]"]
    assert evaluate(["retrieval", *words, "--k=[1,9]"]) == 0
    assert "1.0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (dict(pattern="(?P<answer>"), {}, "pattern of keepers is invalid"),
        (dict(pattern="a (b)"), {}, r"no group \(\?P<answer>"),
        (dict(question="Who keeps {it}?"), {}, r"\{title\}, \{stem\}, \{answer\}, \{place\}"),
        (dict(question="Who?"), {}, "must have some of"),
        (dict(question="Who keeps {"), {}, "the question of keepers"),
        (dict(question="Who keeps {place:d}?"), {}, "has a format or conversion; write {group}"),
        (dict(pattern="(?P<answer>a) (?P<title>b)"), {}, "has a group title, which is a field"),
        (dict(name="a/b"), {}, "kinds.name='a/b' must be a word"),
        ({}, dict(count=0), "count=0 must"),
        ({}, dict(kinds=()), "kinds must be one or more"),
        ({}, dict(count=6), "keepers has 5 questions with one answer .* are 7"),
    ],
)
def test_mistakes_are_one_line(store, tmp_path, kind, options, message):
    with pytest.raises(InputError, match=message):
        questions(store, tmp_path, **({"kinds": (QuestionKind(**(KIND | kind)),)} | options))
    assert not list(tmp_path.iterdir())
