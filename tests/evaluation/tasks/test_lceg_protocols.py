"""LCEG's tables: the tasks of configs/reproduce/lceg, each built again by hand from the study."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan, scored
from evaluation_support import ByteTokenizer, documents, score, texts, token_loss

from lcjax import config as config_lib
from lcjax.attention import Causal, Chunked, LMInfinite, SelfExtend
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import eval_config, reproduce, study
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.longbench import LongBench
from lcjax.evaluation.tasks.ruler.ruler import TASKS as RULER_TASKS
from lcjax.evaluation.tasks.ruler.ruler import Ruler
from lcjax.rope import NTK, DynamicNTK

TABLES = [name for name in reproduce.names() if name.startswith("lceg/")]
BOOKS = texts((37, 24, 12, 51, 20, 33, 45, 28, 19, 40, 60, 22))
ESSAYS = [("a", "One. Two is longer. Three, at last, is the longest of them. " * 40)]


@functools.cache
def config(name):
    return reproduce.config_at(name, "paper")


def tasks(kind):
    return [
        (name, task)
        for name in TABLES
        for task in config(name).tasks
        if task.get_choice_name(type(task)) == kind
    ]


def task_of(name, label):
    return next(task for task in config(name).tasks if task.label == label)


@pytest.mark.parametrize(("name", "task"), tasks("perplexity"), ids=str)
def test_perplexity_is_that_of_the_released_loop_over_the_first_documents(name, task):
    length, stride, count = 16, 4, 2 if name == "lceg/table9" else 10
    assert config(name).stride == 256 and task.first_documents == count
    stream = [token for document in documents(True, BOOKS)[:count] for token in document]
    means = []
    for start in list(range(0, len(stream) - length, stride))[:-1]:
        window = stream[start : start + length]
        means.append(np.mean([token_loss(window[:i], window[i]) for i in range(1, length)]))
    task = dataclasses.replace(task, corpus="")
    records = score(task, Limits((length,), stride=stride), length, corpus_texts=BOOKS)
    assert len(records) == len(means) == math.ceil((len(stream) - length) / stride) - 1
    assert task.summarise(records)["value"] == pytest.approx(2.71828 ** np.mean(means), rel=1e-12)


def test_the_token_files_of_the_study_are_scored_like_their_texts(tmp_path):
    file, tokenizer = tmp_path / "test.bin", ByteTokenizer()
    np.concatenate(documents(True, BOOKS)).astype(np.uint16).tofile(file)  # each begins with BOS
    task, limits = dataclasses.replace(task_of("lceg/table2", "pg19"), corpus=""), Limits((16,), 4)

    def scored_windows(corpus_texts):
        records = score(task, limits, 16, corpus_texts=corpus_texts)
        return [{**record, "source": None} for record in records]

    data = TextConfig(path=str(file))
    assert scored_windows(eval_config.texts(data, tokenizer)) == scored_windows(BOOKS) != []
    small = dataclasses.replace(tokenizer, vocab_size=100)
    with pytest.raises(
        InputError, match=r"test.bin.* has the token \d+, and the tokenizer only 100"
    ):
        score(task, limits, 16, small, corpus_texts=eval_config.texts(data, small))


def test_the_reference_of_figure_3_forgets_at_every_4096_tokens():
    methods = {method.name: method for method in config("lceg/figure3").methods}
    assert methods["base_4k"].pattern == Chunked(4096) and methods["base_4k"].path is None
    task = task_of("lceg/figure3", "pg19")
    assert task._rules.by_position and config("lceg/figure3").lengths == (32768,)


@pytest.mark.parametrize("name", ["lceg/table2", "lceg/table3", "lceg/table4", "lceg/figure1"])
def test_all_ten_methods_and_the_base_are_rows_with_the_settings_of_the_study(name):
    methods = {method.name: method for method in config(name).methods}
    assert len(methods) == 11 and methods["base"] == dataclasses.replace(
        methods["base"], rope=None, pattern=None, path=None
    )
    assert methods["ntk_frozen"].rope == DynamicNTK(factor=2)
    assert methods["lm_infinite"].pattern == LMInfinite(window=4096, sinks=10)
    assert methods["self_extend"].pattern == SelfExtend(window=1024, group=64)


def test_the_alphas_of_ntk_are_those_of_table_8():
    printed = {"ntk_frozen": [1, 3, 7, 15, 31], "ntk_32k": [29] * 4 + [61], "ntk_64k": [57] * 5}
    for name in ("lceg/table2", "lceg/figure3"):
        methods = {method.name: method for method in config(name).methods}
        for row, alphas in printed.items():
            rope = methods[row].rope.resolve(length=4096)
            computed = [rope.alpha(length) for length in (4096, 8192, 16_384, 32_768, 65_536)]
            assert computed == pytest.approx(alphas)


def test_the_seven_rows_of_phi_2_are_those_of_both_of_its_tables():
    names = ["base", "ntk_frozen", "self_extend", "pi_32k", "clex_32k", "ntk_32k", "ntk_64k"]
    for name in ("lceg/table5", "lceg/table6"):
        assert [method.name for method in config(name).methods] == names
        assert config(name).methods == config("lceg/table5").methods
    methods = {method.name: method for method in config("lceg/table5").methods}
    # One value for both base models (appendix 9.2).
    pattern, llama = methods["self_extend"].pattern, config("lceg/table2").methods
    assert pattern in [method.pattern for method in llama]
    longest = (2048 - pattern.window) * pattern.group + pattern.window
    assert longest >= 65_536, "Self-Extend must reach the longest length"
    clex = [
        config_lib.read_yaml(f"lcjax:clex_{model}_32k")["model"]["rope"]["max_factor"]
        for model in ("7b", "phi2")
    ]
    assert clex == [32, 32] and max(config("lceg/table5").lengths) == 32 * 2048


def test_the_grid_of_table_9_has_the_alphas_of_its_rule():
    rules = {"frozen": 2, "ntk_32k": 4, "ntk_64k": 8}
    expected = {
        f"{name}_{s * r - (s - 1)}"
        for name, s in rules.items()
        for r in (1, 2, 4, 8, 16, 32)
        if (name, r) != ("ntk_64k", 32)
    }
    methods = {method.name: method for method in config("lceg/table9").methods}
    assert set(methods) == expected
    for name, method in methods.items():
        assert method.rope == NTK(alpha=float(name.rsplit("_", 1)[1]))
        source = {"frozen": None, "ntk_32k": "Leooyii/NTK_32k_Slimpajama_1B"}
        assert method.path == source.get(name.rsplit("_", 1)[0], "Leooyii/NTK_64k_Slimpajama_1B")


def write_longbench(folder, words):
    rows = {"input": "Who came?", "context": "word " * words, "answers": ["Ann"]}
    for data in LongBench.datasets.values():
        row = rows | {"all_classes": ["Ann", "Bob"]}
        if data.group == "synthetic":
            row["answers"] = ["Paragraph 3" if "retrieval" in data.name else "3"]
        (folder / f"{data.name}.jsonl").write_text(json.dumps(row) + "\n")
    prompts = {name: f"{name}:\n{{context}}\nAsk {{input}}\nAnswer:" for name in LongBench.datasets}
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))


@pytest.mark.parametrize("name", ["lceg/table1", "lceg/table4"])
@pytest.mark.parametrize("words", [30, 300])
def test_longbench_keeps_both_ends_of_a_prompt_and_averages_sixteen_sets(tmp_path, name, words):
    write_longbench(tmp_path, words)
    task = dataclasses.replace(task_of(name, "longbench"), path=str(tmp_path), lengths=())
    units, length = plan(task, 800), 800
    new_tokens = {
        "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32,
        "musique": 32, "gov_report": 512, "qmsum": 512, "multi_news": 512, "trec": 64,
        "triviaqa": 32, "samsum": 128, "passage_count": 32, "passage_retrieval_en": 32, "lcc": 64,
        "repobench-p": 64,
    }  # fmt: skip
    assert {u.fields["dataset"]: u.fields["max_new_tokens"] for u in units} == new_tokens
    for unit in units:
        text = f"{unit.fields['dataset']}:\n{'word ' * words}\nAsk Who came?\nAnswer:"
        ids = [0, *TOKENIZER.encode(text)]
        if len(ids) > length:  # the tokens of the answer come on top, and nothing is reserved
            halves = ids[: length // 2], ids[-(length // 2) :]
            ids = [0, *TOKENIZER.encode("".join(map(TOKENIZER.decode, halves)))]
        assert unit.tokens.tolist() == ids
    answers = {"passage_count": "3", "passage_retrieval_en": "Paragraph 3"}
    right = set(list(new_tokens)[::2])

    def answer(unit):
        name = unit.fields["dataset"]
        return f"{answers.get(name, 'Ann')}\nmore" if name in right else "zzz"

    records = scored(task, units, [answer(unit) for unit in units])
    by_set = {record["dataset"]: record["correct"] for record in records}
    assert task.summarise(records)["value"] == pytest.approx(sum(by_set.values()) / 16)
    # Only the first line counts in questions and synthetic tasks, too.
    for name in right:
        first_line = not name.startswith(("gov_report", "multi_news", "qmsum"))
        assert (by_set[name] == pytest.approx(1, abs=1e-6)) == first_line, name


@pytest.mark.parametrize(("name", "task"), tasks("ruler"), ids=str)
def test_ruler_is_the_plain_mean_of_tasks_of_500_questions(name, task):
    assert task.samples == 500 and task.template == "none" and isinstance(task, Ruler)
    # Phi-2 has no QA-2 (appendix 9.1.2).
    left_out = {"qa_2"} if name == "lceg/table6" else set()
    assert set(task.task_names) == {*RULER_TASKS} - left_out
    assert len(task.task_names) == 13 - len(left_out)
    rng = np.random.default_rng(0)
    records, means = [], []
    for index, part in enumerate(task.task_names):
        scores = rng.integers(0, 2, 3 + index)
        means.append(np.mean(scores))
        records += [{"task": part, "correct": s, "answer": "x", "truncated": 0} for s in scores]
    assert task.summarise(records)["value"] == pytest.approx(np.mean(means))


def test_the_lengths_and_depths_of_figure_1_are_those_of_the_grid():
    figure, overview = config("lceg/figure1"), task_of("lceg/table1", "needle")
    grid = np.round(np.linspace(1000, 128000, 40)).astype(int).tolist()
    assert list(figure.lengths) == grid
    assert list(overview.lengths) == [length for length in grid if length <= 65_536]
    for task in (figure.tasks[0], overview):
        assert (task.depths, task.trials, task.max_new_tokens) == (10, 1, 50)
        assert (task.needle, task.measure) == ("kamradt", "word_recall_lceg")


@pytest.mark.parametrize("name", ["lceg/table1", "lceg/figure1"])
def test_the_needle_position_equals_the_released_script(name):
    task = dataclasses.replace(task_of(name, "needle"), lengths=())
    units = plan(task, 1500, texts=ESSAYS)
    assert [unit.fields["depth"] for unit in units] == pytest.approx(np.linspace(0, 1, 10))
    for unit in units:
        needle = " " + unit.fields["needle"]
        (span,) = [span for span in unit.prompt.spans if span.kind == "context_doc"]
        context = TOKENIZER.decode(unit.tokens[span.start : span.stop])
        room = len(context) - len(needle)
        hay = (ESSAYS[0][1] + "\n\n")[:room]
        cut = int(room * unit.fields["depth"])
        if unit.fields["depth"] < 1:
            while cut and hay[cut - 1] != ".":
                cut -= 1
        assert context == hay[:cut] + needle + hay[cut:]
    for answer, words in (
        # The 11 words of the expected answer, of which "a" stands twice.
        ("to have a sandwich in Dolores Park on a sunny day.", 10),
        ("to have a sandwich in Dolores Park on a sunny day. The nicest thing is a sandwich", 10),
        ("in Dolores Park.", 2),  # "park." is another word
        ("to visit the park, a museum or the nicest San Francisco thing", 2),  # no words of its own
    ):
        scores = task.score_answer(answer, units[0], TOKENIZER)
        assert scores["word_recall_lceg"] == pytest.approx(words / 11)
        assert scores["word_recall"] == pytest.approx(words / 10)
    cells = [{"value": 0.5, "length": 8}, {"value": 0.25, "length": 16}]
    assert task.overall(cells) == 0.375


@pytest.mark.parametrize("name", ["lceg/table1", "lceg/figure2"])
def test_demonstrations_are_drawn_for_every_question_and_the_first_line_counts(tmp_path, name):
    train = [f"NUM:date When was thing {i} made ?" for i in range(700)]
    train += [f"LOC:city Where is thing {i} ?" for i in range(700)]
    questions = ["NUM:date When was it ?", "LOC:city Where was it ?"]
    (tmp_path / "train_5500.label").write_text("\n".join(train))
    (tmp_path / "TREC_10.label").write_text("\n".join(questions))
    task = dataclasses.replace(task_of(name, "many_shot"), path=str(tmp_path))
    units = plan(task, 100_000)
    shots = [1, 5, 10, 25, 50, 75, 100, 200, 300, 400, 500, 625, 750, 875, 1000]
    assert [unit.fields["shots"] for unit in units] == [n for n in shots for _ in questions]
    names = {"NUM:date": "Date", "LOC:city": "City"}
    known = {f"Question: {q}\nType: {names[c]}" for c, q in (t.split(" ", 1) for t in train)}
    previous = None
    for unit in units:
        text = TOKENIZER.decode(unit.tokens)
        demos = ["Question: " + part.rstrip() for part in text.split("Question: ")[1:-1]]
        assert len(demos) == len(set(demos)) == unit.fields["shots"] and set(demos) <= known
        assert text.endswith("was it ?\nType:") and unit.fields["max_new_tokens"] == 64
        assert demos != previous  # those of the other question
        previous = demos
    records = scored(task, units, lambda text: " Date\nCity")
    by_shots = {n: [] for n in shots}
    for unit, record in zip(units, records, strict=True):
        by_shots[unit.fields["shots"]].append(unit.fields["references"] == ["Date"])
        assert record["correct"] == by_shots[unit.fields["shots"]][-1]
    assert task.summarise(records)["value"] == np.mean([np.mean(v) for v in by_shots.values()])


def test_published_means_are_those_of_the_published_tasks():
    """Of RULER's tasks (tables 12 to 16) those of table 3, of LongBench's sets those of table 4."""
    for name, count in (("lceg/table3", 13), ("lceg/table4", 16)):
        means, *by_task = config(name).published
        means = {row.method: dict(zip(means.lengths, row.values)) for row in means.rows}
        rows = [(row, table) for table in by_task for row in table.rows]
        for row, table in rows:
            assert len(set(table.fields)) == len(row.values) == count
            method, (length,) = row.method, table.lengths
            # In table 12 the columns of YaRN and CLEX are the other way round than in table 3.
            other = {"yarn_32k": "clex_32k", "clex_32k": "yarn_32k"}
            if (name, length) == ("lceg/table3", 4096):
                method = other.get(method, method)
            assert sum(row.values) / count == pytest.approx(means[method].pop(length), abs=0.0051)
        assert not [
            value for mean in means.values() for value in mean.values() if value is not None
        ]


def test_rows_with_rounded_positions_have_the_published_values_of_their_method():
    table = config("lceg/bf16_positions")
    names = [method.name for method in table.methods]
    for published in table.published:
        rows = {row.method: row.values for row in published.rows}
        for name in rows:
            if f"{name}_bf16" in names:
                assert rows[f"{name}_bf16"] == rows[name]
    assert all(method.pattern in (None, Causal()) for method in table.methods)


@pytest.mark.parametrize(
    ("name", "scale", "steps", "length", "rows"),
    [
        ("lceg/table2", "smollm2", 2, 16_384, 1),
        ("lceg/table3", "smollm2", 2, 16_384, 1),
        ("lceg/figure3", "smollm2", 2, 16_384, 1),
        ("lceg/table1", "smollm2_32k", 200, 32_768, 8),
        ("lceg/table2", "smollm2_32k", 200, 32_768, 8),
        ("lceg/table3", "smollm2_32k", 200, 32_768, 8),
    ],
)
def test_every_trained_row_of_a_small_scale_has_as_many_tokens_and_one_protocol(
    name, scale, steps, length, rows
):
    config = reproduce.config_at(name, scale)
    trainings = study.trainings(config)
    assert set(trainings) == {
        *("pi_32k", "yarn_32k", "clex_32k", "ntk_32k", "ntk_64k", "longlora_32k", "landmark"),
    }
    shapes = {(t.train.steps, t.train.batch_size * t.data.length) for t in trainings.values()}
    assert shapes == {(steps, rows * length)}
    rates = {(t.train.lr, t.train.schedule, t.train.lora, t.data.path) for t in trainings.values()}
    assert len(rates) == 1
    ropes = {label: training.model.rope for label, training in trainings.items()}
    factor = length / 8192
    assert ropes["pi_32k"].factor == ropes["yarn_32k"].factor == ropes["longlora_32k"].factor
    assert ropes["pi_32k"].factor == factor and ropes["clex_32k"].max_factor == 2 * factor
    # alpha = f C' / C - (f - 1) with f = C' / (2 C), as the study has it.
    for name, target in (("ntk_32k", length), ("ntk_64k", 2 * length)):
        assert (ropes[name].factor, ropes[name].min_length) == (target / (2 * 8192), target)
    assert max(max(task.lengths or config.lengths) for task in config.tasks) == length
