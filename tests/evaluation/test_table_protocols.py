"""Tables of CEPE, SharedLLM and E2-LLM: who reads and scores what, built again from the papers."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from evaluation_support import BigramModel, ByteTokenizer, NotingModel, token_loss

from lcjax.evaluation import reproduce
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.run import limits_of
from lcjax.evaluation.split import ContextSplit, SplitModel
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.perplexity import Perplexity
from lcjax.generation.sampling import Sampling

TOKENIZER = ByteTokenizer()


def config(table):
    return reproduce.config_at(table, "paper")


def task_of(table, label, **changes):
    (task,) = (task for task in config(table).tasks if task.label == label)
    return dataclasses.replace(task, **changes)


def plan(task, length):
    limits = Limits((length,))
    task.check(limits, "tasks.0")
    return task.plan(TokenizedCorpus((), TOKENIZER), length, limits)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def context_of(table, method, length):
    """(chunks, tokens of a chunk, tokens of the decoder) of a row of a table."""
    (row,) = (row for row in config(table).methods if row.name == method)
    split = row.context or ContextSplit()
    model = NotingModel()
    return *split.context(model, length), split.tokens(model, length)


@pytest.mark.parametrize(
    ("table", "method", "expected"),
    [
        ("cepe/table1", "cepe",
         [(8, 256, 2048), (16, 256, 4096), (112, 256, 4096), (496, 256, 4096)]),
        ("cepe/table4", "ceped", [(0, 256, 2048), (8, 256, 2048), (24, 256, 2048), (56, 256, 2048),
                                  (120, 256, 2048)]),
        ("sharedllm/table2", "shared_llm",
         [(2, 1024, 2048), (4, 1024, 4096), (28, 1024, 4096), (124, 1024, 4096)]),
        ("sharedllm/table1", "shared_llm",
         [(4, 512, 2048), (24, 512, 4096), (56, 512, 4096), (192, 512, 4096)]),
        ("sharedllm/table5", "beta_1", [(28, 1024, 4096)]),
        ("sharedllm/table11_to_14", "m_8", [(4, 1024, 4096)]),
        ("sharedllm/table3", "shared_llm", [(248, 512, 4096)]),
        ("sharedllm/figure3", "cepe",
         [(16, 256, 4096), (48, 256, 4096), (112, 256, 4096), (240, 256, 4096), (496, 256, 4096)]),
        ("cepe/table5", "random_encoder", [(8, 256, 2048), (16, 256, 4096), (112, 256, 4096)]),
        ("cepe/table14", "kl_1", [(8, 256, 2048), (56, 256, 2048), (120, 256, 2048)]),
        ("cepe/niah", "cepe_plain", [(8, 256, 2048), (24, 256, 2048), (32, 256, 2048),
                                     (48, 256, 2048), (72, 256, 2048), (120, 256, 2048)]),
    ],
)  # fmt: skip
def test_windows_are_divided_between_decoder_and_chunks_as_in_the_papers(table, method, expected):
    lengths = config(table).lengths
    assert [context_of(table, method, length) for length in lengths] == expected
    totals = [chunks * size + decoder for chunks, size, decoder in expected]
    assert totals == list(lengths)


def shortest(table, task):
    """Tokens of the shortest document that counts."""
    return getattr(task, "min_tokens", None) or max(config(table).lengths)


@pytest.mark.parametrize(
    ("table", "whole"),
    [("cepe/table5", "cepe/table1"), ("cepe/table6", "cepe/table1"),
     ("cepe/table5_retrieval", "cepe/table2"), ("cepe/table14", "cepe/table4"),
     ("sharedllm/table5", "sharedllm/table2"), ("e2llm/table4", "e2llm/table3"),
     ("e2llm/table5", "e2llm/table3"), ("e2llm/figure4", "e2llm/table3")],
)  # fmt: skip
def test_ablations_are_scored_as_the_tables_that_they_belong_to(table, whole):
    ablations, main = config(table), config(whole)
    of_main = {task.label: task for task in main.tasks}
    shared = [task for task in ablations.tasks if task.label in of_main]
    assert shared
    for task in shared:
        other = of_main[task.label]
        assert shortest(table, task) == shortest(whole, other)
        if hasattr(task, "min_tokens"):
            task = dataclasses.replace(task, min_tokens=other.min_tokens)
        assert task == other
    assert {*ablations.lengths} <= {*main.lengths}
    for name in ("stride", "max_documents", "max_windows"):
        assert getattr(ablations, name) == getattr(main, name)


def windows_of_the_paper(table, sizes, length):
    """(document, start, size, first scored token) of all windows, as the specification words it."""
    if table.startswith("cepe"):  # the last 256 tokens of one window of each of ten documents
        usable = [i for i, size in enumerate(sizes) if size >= 131_072]
        return [(i, 0, length, length - 256) for i in usable[:10]]
    if table.startswith("sharedllm"):  # of 100 windows as they come, at 128K of ten documents
        least = 102_400 if table == "sharedllm/table1" else 131_072
        usable = [i for i, size in enumerate(sizes) if size >= least]
        if length == 131_072:
            return [(i, 0, length, length - 256) for i in usable[:10]]
        starts = [(i, start) for i in usable for start in range(0, sizes[i] - length + 1, 256)]
        return [(i, start, length, length - 256) for i, start in starts[:100]]
    # All tokens of the first window, then 256 new ones, to the end of 128 documents.
    windows = []
    for i in [i for i, size in enumerate(sizes) if size >= 65_536][:128]:
        windows.append((i, 0, length, 1))
        for start in range(256, sizes[i] - length + 256, 256):
            windows.append((i, start, min(length, sizes[i] - start), length - 256))
    return [windows[number * len(windows) // 128] for number in range(128)]


@functools.cache
def tokenized(sizes):
    """A corpus of documents of so many tokens; BOS is one of them."""
    text = "a" * max(sizes)
    documents = [(str(i), text[: size - 1]) for i, size in enumerate(sizes)]
    return TokenizedCorpus(documents, TOKENIZER)


@pytest.mark.slow_except("cepe/table1", "sharedllm/table1", "sharedllm/table2", "e2llm/table3")
@pytest.mark.parametrize(
    "table",
    ["cepe/table1", "cepe/table5", "cepe/table6", "sharedllm/table1", "sharedllm/table2",
     "sharedllm/table5", "e2llm/table3", "e2llm/table4", "e2llm/table5", "e2llm/figure4"],
)  # fmt: skip
def test_perplexity_scores_the_windows_of_the_paper(table):
    if table.startswith("e2llm"):
        sizes = [65_536 + 1_000 * (i % 3) for i in range(130)]
        sizes[1:1] = [4_000, 65_535]
    else:
        sizes = [131_072 + 1_000 * (i % 3) for i in range(12)]
        sizes[2:2] = [4_000, 131_071, 102_400, 40_000]
    corpus = tokenized(tuple(sizes))
    limits = limits_of(config(table), config(table).tasks[0])
    tasks = [task for task in config(table).tasks if isinstance(task, Perplexity)]
    assert len({dataclasses.replace(task, name=None, corpus=None) for task in tasks}) == 1
    for length in config(table).lengths:
        units = tasks[0].plan(corpus, length, limits)
        windows = [
            (int(u.fields["source"]), *(u.fields[name] for name in ("start", "size", "first")))
            for u in units
        ]
        assert windows == windows_of_the_paper(table, sizes, length)
        assert all(len(unit.tokens) == unit.fields["size"] for unit in units)


def test_cepes_table_2_scores_the_last_1792_of_2048_tokens_after_the_best_chunks(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {
            "domain": domain, "input_ids": rng.integers(1, 257, 2100).tolist(),
            "chunks": [
                {"ids": rng.integers(1, 257, 300).tolist(), "score": float(score)}
                for score in rng.permutation(50)
            ],
        }
        for domain in ("book", "book", "wikipedia")
    ]  # fmt: skip
    write(tmp_path / "rows.jsonl", rows)
    task = task_of("cepe/table2", "rag_lm", path=str(tmp_path / "rows.jsonl"))
    lengths = config("cepe/table2").lengths
    assert [(length - 2048) / 256 for length in lengths] == [0, 8, 20, 50]
    for length, count in ((2048, 0), (4096, 8)):
        units, losses = plan(task, length), {"book": [], "wikipedia": []}
        for unit, row in zip(units, rows, strict=True):
            best = sorted(row["chunks"], key=lambda chunk: -chunk["score"])[:count]
            tokens = [t for chunk in best for t in chunk["ids"][:256]] + row["input_ids"][:2048]
            assert unit.tokens.tolist() == tokens
            scored = range(length - 1792, length)
            losses[row["domain"]].append(
                np.mean([token_loss(tokens[:place], tokens[place]) for place in scored])
            )
        records = [task.score(BigramModel(), [unit], 1)[0] for unit in units]
        cell = task.summarise([{**u.fields, **r} for u, r in zip(units, records)])
        expected = np.mean([math.exp(np.mean(values)) for values in losses.values()])
        assert cell["value"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow_except("icl_20-20")
@pytest.mark.parametrize(("label", "count"), [("icl_2", 2), ("icl_20", 20), ("icl_40", 40)])
def test_cepes_table_3_has_balanced_demonstrations_of_three_seeds(tmp_path, label, count):
    names = ("negative", "positive")
    train = [{"text": f"train {i}", "label": names[i % 2]} for i in range(50)]
    test = [{"text": f"test {i}", "label": names[i // 150]} for i in range(300)]
    write(tmp_path / "sst2" / "train.jsonl", train)
    write(tmp_path / "sst2" / "validation.jsonl", test)
    units = plan(task_of("cepe/table3", label, path=str(tmp_path), tasks=("sst2",)), 8192)
    assert [unit.fields["seed"] for unit in units] == [42] * 250 + [43] * 250 + [44] * 250
    labels = {row["text"]: row["label"] for row in train}
    seen = set()
    for index, unit in enumerate(units):
        text = TOKENIZER.decode(unit.tokens)
        *demos, question = text.split("\n\n")
        assert question == f"Sentence: test {index % 250}\nSentiment:"
        pairs = [demo.removeprefix("Sentence: ").split("\nSentiment: ") for demo in demos]
        assert len(pairs) == count and all(labels[text] == label for text, label in pairs)
        assert len({text for text, _ in pairs}) == count
        # Each round has a demonstration of either class; those of the decoder are the first round.
        decoder = pairs[-2:]
        assert sorted(label for _, label in decoder) == sorted(names)
        assert sum(label == "positive" for _, label in pairs) == count / 2
        assert len(unit.prompt.passages) == count - 2
        seen.add(tuple(text for text, _ in pairs))
    assert len(seen) > 500, "demonstrations are drawn for every text and seed"


def test_cepes_needle_is_kamradts_and_scored_as_fu_et_al_and_lceg_score_it():
    (task,), (other,) = (config(table).tasks for table in ("cepe/niah", "lceg/figure1"))
    assert task == dataclasses.replace(other, name="niah")
    assert (task.needle, task.depths, task.trials) == ("kamradt", 10, 1)


def test_cepes_table_4_keeps_the_end_of_texts_and_the_encoder_reads_the_rest(
    tmp_path,
):
    text = "".join(f"Sentence {i}. " for i in range(300)).strip()
    row = {"id": "q", "pid": "q_0", "output": "it"}
    write(tmp_path / "qasper.jsonl", [{**row, "input": f"What is it?\n\n{text}"}])
    write(tmp_path / "gov_report.jsonl", [{**row, "input": text}])
    names = ("qasper", "gov_report")
    task = task_of("cepe/table4", "zeroscrolls", path=str(tmp_path), tasks=names)
    assert (task.max_examples, task.flavour) == (500, "cepe")
    short, *drawn = plan(task, 3000)
    assert [unit.shape[3].seed for unit in drawn] == [0, 1, 2]
    assert {(u.shape[3].top_p, u.shape[3].temperature) for u in drawn} == {(0.95, 1.0)}
    assert (short.fields["max_new_tokens"], drawn[0].fields["max_new_tokens"]) == (50, 1024)
    instruction = (
        "You are given a scientific article and a question. Answer the question as concisely as you"
        " can, using a single phrase or sentence if possible. If the question cannot be answered"
        ' based on the information in the article, write "unanswerable". If the question is a'
        ' yes/no question, answer "yes", "no", or "unanswerable".'
    )
    head, tail = "Article:\n", f"\n\n{instruction}\n\nQuestion:\nWhat is it?\n\nAnswer:\n"
    room = 3000 - 50 - 1 - len(head) - len(tail)  # BOS counts
    assert TOKENIZER.decode(short.tokens) == head + text[-room:] + tail
    # The decoder's 2,048 tokens hold the answer; the beginning of the text goes to the encoder.
    noting = NotingModel()
    model = SplitModel(noting, ContextSplit(decoder=2048, chunk=256), 2048, 256)
    model = model.with_movable([short.prompt.movable], [()])
    model.generate([short.tokens.tolist()], Sampling(max_new_tokens=50))
    ((prompt,), ((chunks,), _), _), moved = noting.given[0], 3000 - 2048
    assert len(prompt) == 2048 - 50
    assert TOKENIZER.decode(prompt) == head + text[-room:][moved:] + tail
    assert "".join(map(TOKENIZER.decode, chunks)) == text[-room:][:moved]
    assert [len(chunk) for chunk in chunks] == [moved % 256, 256, 256, 256]


def test_cepes_table_7_has_two_demonstrations_and_ten_passages_in_the_decoder(tmp_path):
    def row(name, count):
        passages = [
            {"title": f"T{i}", "text": f"{name} {i}.", "score": 99 - i} for i in range(count)
        ]
        return {"question": f"who is {name}?", "answer": [f"{name}!", "else"], "ctxs": passages}

    write(tmp_path / "nq-open" / "test.jsonl", [row("Q1", 60), row("Q2", 60)])
    write(
        tmp_path / "nq-open" / "train.jsonl", [row(f"D{i}", 60) for i in range(9)] + [row("Q1", 60)]
    )
    published = {table.task: table.fields for table in config("cepe/table7").published}
    for label, name, count in (("few", "nq_10", 10), ("few", "nq_15", 15), ("many", "nq_60", 60)):
        task = task_of("cepe/table7", label, path=str(tmp_path), tasks=(name,))
        assert name in task_of("cepe/table7", label).tasks
        for index, unit in enumerate(plan(task, 16_896)):
            *before, question = TOKENIZER.decode(unit.tokens).split("\n\n")
            assert unit.fields["max_new_tokens"] == 25
            assert question == f"Question: who is Q{index + 1}?\nAnswer:"
            assert before[4:] == [
                f"Document (Title: T{i}): Q{index + 1} {i}." for i in range(count)
            ]
            for document, answered in (before[:2], before[2:4]):
                demo = document.removeprefix("Document (Title: T0): ").removesuffix(" 0.")
                assert (
                    demo.startswith("D")
                    and answered == f"Question: who is {demo}?\nAnswer: {demo}!"
                )
            noting = NotingModel()
            model = SplitModel(noting, ContextSplit(decoder=4096, chunk=256), 4096, 256)
            model = model.with_movable([unit.prompt.movable], [unit.prompt.passages])
            model.generate([unit.tokens.tolist()], Sampling(max_new_tokens=25))
            ((prompt,), ((chunks,), _), _) = noting.given[0]
            rest = [f"Document (Title: T{i}): Q{index + 1} {i}.\n\n" for i in range(10, count)]
            assert list(map(TOKENIZER.decode, chunks)) == rest
            in_decoder = "\n\n".join([*before[:14], question])
            assert TOKENIZER.decode(prompt) == in_decoder
    names = ("nq", "triviaqa", "popqa")
    assert published == {
        label: tuple(f"{name}_{count}" for name in names for count in counts)
        for label, counts in (("few", (1, 5, 10, 15, 20)), ("many", (30, 60)))
    }


def test_sharedllms_longbench_has_five_categories_of_fourteen_sets_and_31500_tokens():
    (task,) = config("sharedllm/table4").tasks
    lengths = config("sharedllm/table4").lengths
    sets = task.selection()
    assert [task.cut_length(length) for length in lengths] == [3_500, 15_500, 31_500]
    assert task.template == "none" and len(sets) == 14
    groups = {}
    for data in sets:
        groups.setdefault(data.group, []).append(data.name)
    assert [len(names) for names in groups.values()] == [3, 3, 3, 3, 2]
    rng = np.random.default_rng(0)
    records = [
        {"dataset": data.name, "correct": float(correct), "answer": "a", "truncated": 0}
        for data in sets
        for correct in rng.random(rng.integers(1, 5))
    ]
    means = {
        group: np.mean(
            [np.mean([r["correct"] for r in records if r["dataset"] == name]) for name in names]
        )
        for group, names in groups.items()
    }
    cell = task.summarise(records)
    published = config("sharedllm/table4").published
    assert [table.lengths for table in published] == [(length,) for length in lengths]
    for table in published:
        assert [cell[field] for field in table.fields] == pytest.approx(list(means.values()))
    assert cell["value"] == pytest.approx(np.mean(list(means.values())))
    ablations = config("sharedllm/table5_longbench").tasks[0]
    assert [data.name for data in ablations.selection()] == groups["multi_doc_qa"]
    assert [*map(ablations.cut_length, config("sharedllm/table5_longbench").lengths)] == [31_500]


def test_sharedllms_passkeys_are_ten_a_length_and_compare_tokens():
    (task,) = config("sharedllm/table10").tasks
    units = plan(task, 4096)
    assert [round(unit.fields["depth"], 3) for unit in units] == [
        round(i / 9, 3) for i in range(10)
    ]
    assert {len(unit.tokens) + task.max_new_tokens for unit in units} == {4096}
    scores = task.score_answer(
        " 12345", dataclasses.replace(units[0], fields={"key": "12346"}), TOKENIZER
    )
    assert not scores[task.main_score] and task.main_score == "token_ids"


def test_sharedllms_infinitebench_cuts_the_middle_of_prompts_to_131072_tokens(tmp_path):
    context = "".join(f"[{i}]" for i in range(40_000))
    row = {"id": 0, "context": context, "input": "What?", "options": list("abcd"), "answer": ["c"]}
    write(tmp_path / "longbook_choice_eng.jsonl", [row])
    (tmp_path / "src").mkdir()
    templates = {"longbook_choice_eng": "{context}\n{question}\n{OPTION_D}:"}
    (tmp_path / "src" / "prompt.py").write_text(f"yarn_mistral_templates = {templates!r}")
    (task,) = config("sharedllm/table3").tasks
    names = ("longbook_choice_eng",)
    (unit,) = plan(dataclasses.replace(task, path=str(tmp_path), tasks=names), 131_072)
    text, whole = TOKENIZER.decode(unit.tokens), f"{context}\nWhat?\nd:"
    assert len(unit.tokens) == 131_072 < len(whole)
    head = next(i for i, (a, b) in enumerate(zip(text, whole)) if a != b)
    assert abs(head - len(text) / 2) <= 1 and whole.endswith(text[head:])
    assert {data.name for data in task.selection()} == {"math_find", "longbook_choice_eng"}


def test_e2llms_table_7_asks_seven_tasks_without_examples_at_the_scale_of_short_texts():
    pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
    (task,) = config("e2llm/table7").tasks
    assert task.num_fewshot == 0 and len(task.tasks) == 7
    methods = {method.name: method for method in config("e2llm/table7").methods}
    assert methods.pop("base").rope is methods.pop("base_13b").rope is None
    assert {name: method.rope.factor for name, method in methods.items()} == {
        "e2_llm": None, "e2_32k": 8, "e2_64k": 16, "e2_13b_32k": 8, "e2_13b_64k": 16
    }  # fmt: skip


@pytest.mark.parametrize(
    "table", ["e2llm/table1_and_2", "e2llm/table4", "e2llm/table5", "e2llm/figure4"]
)
def test_e2llms_longbench_is_a_plain_mean_over_fourteen_and_four_sets(table):
    english, chinese, *texts = config(table).tasks
    assert [len(task.selection()) for task in (english, chinese)] == [14, 4]
    groups = {data.group for data in (*english.selection(), *chinese.selection())}
    assert "synthetic" not in groups and {english.aggregate, chinese.aggregate} == {"flat"}
    if texts:
        assert (texts[0].protocol, config(table).stride) == ("slide_press", 256)
        for method in config(table).methods:  # 32K of Llama-2's 4K, and 8K without g
            assert method.rope.factor == (2 if method.name == "without_g" else 8)
