"""RULER: sizes of the prompts, what stands in them, scores."""

import collections
import dataclasses
import hashlib
import json
import random
import re

import numpy as np
import pytest
from benchmark_support import ESSAYS, plan, plan_at
from benchmark_support import TOKENIZER as BYTES
from evaluation_support import ByteTokenizer

from lcjax.errors import InputError
from lcjax.evaluation.statistics import bootstrap
from lcjax.evaluation.task import Limits, Unit
from lcjax.evaluation.tasks.ruler import Ruler
from lcjax.evaluation.tasks.ruler import ruler as task_lib
from lcjax.evaluation.tasks.ruler.generators import DEPTHS, median_maximum
from lcjax.evaluation.tasks.ruler.ruler import TASKS, clean_answer
from lcjax.evaluation.tasks.ruler.texts import Essays, read_templates

# `tokens_to_generate` of upstream's `scripts/data/synthetic/constants.py`.
NEW_TOKENS = dict.fromkeys(TASKS, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Made-up words, essays, and questions in the official formats."""
    folder, rng = tmp_path_factory.mktemp("ruler"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(900)]
    (folder / "words.txt").write_text("\n".join(words))
    paragraph = [" ".join(rng.choices(words, k=20)).capitalize() + "." for _ in range(40)]
    squad = [
        {
            "title": f"t{i}",
            "paragraphs": [
                {
                    "context": f"In {i} town {j} the mayor was {words[10 * i + j]}.",
                    "qas": [
                        {
                            "question": f"Who was mayor of {i} town {j}?",
                            "is_impossible": j == 1,
                            "answers": [{"text": words[10 * i + j]}] * (j != 1),
                        }
                    ],
                }
                for j in range(4)
            ],
        }
        for i in range(30)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": squad}))
    hotpot = [
        {
            "question": f"Which is {i}?",
            "answer": words[i],
            "context": [[f"{i} {j}", [f"It is {words[i + j]}. ", "So."]] for j in range(10)],
        }
        for i in range(12)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    own = {"words": f"{folder}/words.txt", "squad": f"{folder}/squad.json"}
    return own | {"hotpotqa": f"{folder}/hotpot.json"}, [("essay", " ".join(paragraph))]


@pytest.mark.parametrize(("shuffles", "template"), [("random", "none"), ("fixed", "chat")])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_budget_with_one_bos_and_hold_their_answers(
    files, task, shuffles, template
):
    own, texts = files
    length = 9000
    found = Ruler(tasks=(task,), samples=3, shuffles=shuffles, template=template, **own)
    for unit in plan(found, length, texts=texts):
        assert unit.fields["size"] == len(unit.tokens) + unit.fields["max_new_tokens"] <= length
        assert unit.fields["max_new_tokens"] == NEW_TOKENS[task]
        assert unit.tokens[0] == 0 and (unit.tokens == 0).sum() == 1
        prompt = BYTES.decode(unit.tokens)
        for answer in unit.fields["references"]:
            assert answer in prompt
        assert unit.fields["wording"] == "lcjax-2" and unit.fields["task"] == task
        if not task.startswith("qa"):  # these may not have as many documents
            # 500 words at a time are many bytes.
            assert unit.fields["size"] > (0.3 if task in ESSAYS else 0.7) * length


def test_the_kinds_of_needles_have_their_keys_values_and_distractors(files):
    own, texts = files
    for task, needles, answers in (
        ("niah_single_1", 1, 1), ("niah_single_3", 1, 1), ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4), ("niah_multiquery", 4, 4),
    ):  # fmt: skip
        for unit in plan(Ruler(tasks=(task,), samples=4, **own), 8000, texts=texts):
            found = re.findall(r"One of the secret lucky \w+ for (\S+) is: (\S+)\.", _context(unit))
            assert len(found) == needles and len(unit.fields["references"]) == answers
            wanted = dict.fromkeys(unit.fields["query"].replace("and ", "").split(", "))
            assert [v for k in wanted for key, v in found if key == k] == unit.fields[
                "references"
            ] or set(unit.fields["references"]) == {v for k, v in found if k in wanted}
    (unit,) = plan(Ruler(tasks=("niah_multikey_2",), samples=1, **own), 8000)
    lines = _context(unit).strip().split("\n")
    assert len(lines) == unit.fields["units"] + 1 > 50
    assert all(line.startswith("One of the secret lucky numbers for") for line in lines)


def _context(unit):
    (span,) = [s for s in unit.prompt.spans if s.kind == "context_doc"]
    return BYTES.decode(unit.tokens[span.start : span.stop])


def test_prompts_for_one_answer_use_the_singular(files):
    own, texts = files
    (one,) = plan(Ruler(tasks=("niah_single_2",), samples=1, **own), 4000, texts=texts)
    (many,) = plan(Ruler(tasks=("niah_multivalue",), samples=1, **own), 4000, texts=texts)
    one, many = (BYTES.decode(unit.tokens) for unit in (one, many))
    assert one.startswith("A secret lucky number is written") and one.endswith("above is")
    assert many.startswith("Some secret lucky numbers are written") and many.endswith("above are")


def test_needles_stand_at_forty_depths_alike(files):
    own, texts = files
    units = plan(Ruler(tasks=("niah_multikey_1",), samples=300, **own), 2000, texts=texts)
    counts = collections.Counter(depth for unit in units for depth in unit.fields["depths"])
    assert set(counts) == set(DEPTHS) and len(DEPTHS) == 40
    expected = 4 * 300 / 40
    chi = sum((counts[depth] - expected) ** 2 / expected for depth in DEPTHS)
    assert chi < 62.4, "chi-square of 39 degrees of freedom, one in a hundred"


def test_sentences_keep_the_quotes_and_brackets_that_close_them():
    text = (
        'He said "Go." (It rained.) \u201cNo!\u201d She left (at 3.) then. "So?\') 4 came. and so'
    )
    essays = Essays([text], BYTES)
    assert essays.sentences == [
        'He said "Go."', "(It rained.)", "\u201cNo!\u201d", "She left (at 3.) then.", '"So?\')',
        "4 came. and so",
    ]  # fmt: skip
    ids = [token for sentence in essays.first(len(text.split())) for token in sentence]
    assert BYTES.decode(ids) == " " + text


def test_records_name_the_word_list_and_the_rule_for_sentences(files):
    own, texts = files
    names = ("niah_single_1", "niah_single_2", "niah_multikey_3", "cwe")
    units = plan(Ruler(tasks=names, samples=1, **own), 8000, texts=texts)
    found = [(unit.fields.get("wordlist"), unit.fields.get("splitter")) for unit in units]
    assert found == [
        ("words.txt", None),
        ("words.txt", "lcjax-1"),
        (None, None),
        ("words.txt", None),
    ]


def test_words_essays_and_questions_are_read_once_for_all_lengths(files, monkeypatch):
    own, texts = files
    read = []
    for name in ("read_words", "read_questions", "Essays"):
        used = getattr(task_lib, name)
        noted = lambda *a, used=used, name=name: read.append(name) or used(*a)  # noqa: E731
        monkeypatch.setattr(task_lib, name, noted)
    task = Ruler(tasks=("niah_single_2", "qa_1"), samples=1, **own)
    assert all(plan_at(task, (3000, 4000, 5000), texts))
    assert sorted(read) == ["Essays", "read_questions", "read_words"]


def test_variables_stand_in_the_order_of_their_chain_behind_a_solved_example(files):
    for unit in plan(Ruler(tasks=("vt",), samples=3), 8000):
        prompt = BYTES.decode(unit.tokens)
        example, asked = prompt.split("\n\nFollow", 1)
        names = unit.fields["references"]
        rest = [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:])]
        places = [asked.index(line) for line in (f"VAR {names[0]} = ", *rest)]
        assert places == sorted(places) and len(set(names)) == 5
        solved = example.rsplit(": ", 1)[1].split()
        assert all(f"VAR {name} = " in example for name in solved) and len(solved) == 5
        assert prompt.endswith("they are:")


def test_common_words_stand_thirty_times_and_others_three_times(files):
    own, _ = files
    for length, often, seldom in ((12_000, 30, 3), (4000, 6, 1)):
        (unit,) = plan(Ruler(tasks=("cwe",), samples=1, **own), length)
        counts = collections.Counter(re.findall(r"\d+\. (\S+)", _context(unit)))
        common = {word for word, count in counts.items() if count == often}
        assert common == set(unit.fields["references"]) and len(common) == 10
        assert {counts[word] for word in counts.keys() - common} == {seldom}
        assert len(counts) == unit.fields["units"]


def test_frequent_words_follow_the_zeta_law(files):
    (unit,) = plan(Ruler(tasks=("fwe",), samples=1), 12_000)
    counts = collections.Counter(_context(unit).split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *unit.fields["references"]]
    share = [counts[word] / unit.fields["units"] for word in ranked]
    assert share == pytest.approx([0.608, 0.152, 0.0675, 0.038], abs=0.002)


def test_gold_documents_stand_at_upstreams_places_where_shuffles_are_fixed(files):
    own, _ = files
    places = {}
    for shuffles in ("fixed", "random"):
        units = plan(Ruler(tasks=("qa_1",), samples=12, shuffles=shuffles, **own), 3000)
        full = max(unit.fields["units"] for unit in units)
        places[shuffles] = {
            unit.fields["gold"][0] for unit in units if unit.fields["units"] == full
        }
    assert len(places["fixed"]) == 1 < len(places["random"])
    order = list(range(20))
    random.Random(42).shuffle(order)
    assert order.index(0) + 1 == 19
    (unit, *_) = plan(Ruler(tasks=("qa_1",), samples=1, **own), 3000)
    assert sum(s.kind == "context_doc" for s in unit.prompt.spans) == unit.fields["units"]


def test_the_number_of_units_is_the_median_over_random_questions():
    def units(limits, least=1, most=None):
        seeds = range(len(limits))
        return median_maximum(lambda seed, n: n <= limits[seed], seeds, least, most, 25)

    assert units([47, 46, 46, 46, 47]) == 46
    assert units([3000, 46, 46]) == units([5, 46, 3000]) == 46
    assert units([46, 3000, 3000], most=1234) == 1234
    assert units([46, 2, 2], least=4) == 4
    rng = random.Random(0)
    for _ in range(100):
        limits = [rng.randint(1, 10 ** rng.randint(1, 4)) for _ in range(7)]
        assert units(limits) == sorted(limits)[3]


@pytest.mark.parametrize("task", TASKS)
def test_tiny_lengths_end_with_the_least_that_works(files, task):
    own, texts = files
    with pytest.raises(
        InputError, match=rf"lengths: 30 is too short for {task}.*at least"
    ) as error:
        plan(Ruler(tasks=(task,), samples=2, **own), 30, texts=texts)
    least = int(re.search(r"at least (\d+)", str(error.value)).group(1))
    assert plan(Ruler(tasks=(task,), samples=1, **own), least + 200, texts=texts)


def test_the_same_seed_gives_the_same_bytes_in_every_process(files):
    own, texts = files
    tasks = ("niah_multikey_2", "niah_multiquery", "vt", "cwe", "fwe", "qa_2")
    task = Ruler(tasks=tasks, samples=2, **own)
    assert digest(plan(task, 7000, texts=texts)) == "cacee8d1ff9b"
    task = dataclasses.replace(task, tasks=("vt",))
    assert digest(plan(task, 7000)) != digest(plan(task, 7000, seed=1))


def digest(units):
    return hashlib.sha256(b"".join(unit.tokens.tobytes() for unit in units)).hexdigest()[:12]


def test_wording_comes_from_a_copy_of_ruler_without_running_it(tmp_path, files):
    own, _ = files
    folder = tmp_path / "scripts" / "data" / "synthetic"
    folder.mkdir(parents=True)
    families = ("niah", "variable_tracking", "common_words_extraction", "freq_words_extraction")
    tasks = {
        name: {"template": "Official are {context} Q {query}", "answer_prefix": " A"}
        for name in (*families, "qa")
    }
    (folder / "constants.py").write_text(f"raise SystemExit\nTASKS = {tasks!r}\n")
    niah = 'needle = "{type_needle_v} {key}: {value}."\nhaystack = f()\nhaystack = "Noise."\n'
    (folder / "niah.py").write_text(niah)
    task = Ruler(tasks=("niah_single_1",), samples=1, benchmark=str(tmp_path), **own)
    (unit,) = plan(task, 1500)
    assert BYTES.decode(unit.tokens).startswith("Official is\nNoise.\n")
    assert unit.fields["wording"] == "RULER"
    (folder / "niah.py").write_text("needle = 1 +")
    with pytest.raises(InputError, match="is no Python"):
        read_templates(str(tmp_path), "tasks.0.benchmark")


def judged(task, answer, references):
    unit = Unit(0, (), np.zeros(0, np.int32), {"task": task, "references": references})
    return Ruler().score_answer(answer, unit, BYTES)["string_match"]


def test_scores_are_upstreams():
    assert judged("niah_multivalue", "it is 12 and\x0034", ["12", "34", "56", "78"]) == 0.5
    assert judged("cwe", "1. Category", ["cat", "dog"]) == 0.5
    assert judged("qa_1", "In Paris.", ["paris", "France"]) == 1.0
    assert judged("qa_2", "", ["yes"]) == 0.0
    assert clean_answer(" a\tb\x07 \n") == "a\nb"


def test_the_picture_has_every_task_with_its_number(tmp_path):
    task = Ruler(tasks=("vt", "cwe", "fwe"))
    scores = {("vt", 8): [1.0, 0.5], ("cwe", 8): [0.25], ("fwe", 8): [0.0], ("cwe", 16): [0.125]}
    fixed = {"method": "m", "trained": 16}
    records = [
        {**fixed, "task": name, "length": length, "correct": value}
        for (name, length), values in reversed(scores.items())
        for value in values
    ]
    cells = [{**fixed, "length": length, "value": 0.5} for length in (8, 16)]
    files = task.figures(cells, records, tmp_path)
    assert [file.name for file in files] == ["ruler.png", "ruler_by_task.png"]
    text = files[1].with_suffix(".svg").read_text()
    said = re.findall(r">([^<>\s]+)</text>", text)
    assert [word for word in said if word in task.tasks] == ["vt", "cwe", "fwe"]
    assert [word for word in said if word in ("0.75", "0.25", "0.00", "0.12")] == [
        "0.75", "0.25", "0.12", "0.00",
    ]  # fmt: skip
    single = dataclasses.replace(task, tasks=("vt",))
    assert [file.name for file in single.figures(cells, records, tmp_path)] == ["ruler.png"]


def test_the_score_is_the_mean_of_the_tasks_with_groups_and_weighted_means():
    task = Ruler(tasks=("niah_single_1", "vt", "qa_1"), words=None)
    rows = [("niah_single_1", 1.0)] * 4 + [("vt", 0.5)] + [("qa_1", 0.0), ("qa_1", 1.0)]
    records = [
        {"window": i, "task": t, "correct": c, "scores": {"string_match": c}}
        | {"answer": "x", "truncated": 0}
        for i, (t, c) in enumerate(rows)
    ]
    found = task.summarise(records)
    assert found["value"] == pytest.approx(2 / 3) and found["retrieval"] == 1.0
    assert (found["tracing"], found["questions"], found["vt"]) == (0.5, 0.5, 0.5)
    shares = [1 / 4] * 4 + [1] + [1 / 2] * 2
    assert task.interval(records) == bootstrap([score for _, score in rows], weights=shares)
    values = (0.966, 0.963, 0.952, 0.932, 0.87, 0.812)  # the paper's row of GPT-4
    cells = [
        {"method": "m", "length": 4096 * 2**i, "value": value} for i, value in enumerate(values)
    ]
    assert task.aggregates(cells, records)["m"] == {
        "mean": 0.9158, "weighted_increasing": 0.8904, "weighted_decreasing": 0.9413,
        "effective_length": 65536,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"tasks": ("niah",)}, "tasks='niah' must be one of"),
        ({"tasks": ("vt", "vt")}, "twice"),
        ({"shuffles": "none"}, "shuffles='none'"),
        ({"samples": 0}, "samples=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"tasks": ("cwe",), "words": "absent.txt"}, "words=absent.txt is no file"),
        ({"tasks": ("qa_1",)}, "squad=null.*dev-v2.0.json"),
        ({"tasks": ("qa_2",), "hotpotqa": "absent.json"}, "hotpotqa=absent.json is no file"),
        ({"tasks": ("vt",), "benchmark": "absent"}, "benchmark=absent has no"),
    ],
)
def test_settings_that_cannot_work_raise_input_error(field, words):
    with pytest.raises(InputError, match=words) as error:
        Ruler(**field).check(Limits((4096,)), "tasks.0")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_the_official_one_raises_input_error(files, tmp_path):
    own, _ = files
    (tmp_path / "bad.json").write_text('{"data": [{}]}')
    task = dataclasses.replace(Ruler(**own), squad=str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match="bad.json is not dev-v2.0.json"):
        task.check(Limits((4096,)), "tasks.0")


def test_a_task_has_a_hundred_questions_unless_the_config_says_so():
    assert Ruler().samples == 100


def test_answers_have_another_length_if_the_config_says_so():
    units = plan(Ruler(tasks=("vt", "fwe"), samples=1, max_new_tokens=7), 2000)
    assert [unit.fields["max_new_tokens"] for unit in units] == [7, 7]


def test_a_chat_template_that_the_tokenizer_lacks_is_named_with_the_keys_that_help():
    class Plain(ByteTokenizer):
        def render_chat(self, messages, add_generation_prompt=True):
            raise InputError("this tokenizer has no chat_template")

    message = (
        r"^tasks: template=chat needs a chat template \(this tokenizer has no chat_template\); "
        r"set tasks\.N\.template=none, or a model\.tokenizer that has one$"
    )
    with pytest.raises(InputError, match=message):
        plan(Ruler(tasks=("vt",), samples=1, template="chat"), tokenizer=Plain())
    assert plan(Ruler(tasks=("vt",), samples=1), tokenizer=Plain())
