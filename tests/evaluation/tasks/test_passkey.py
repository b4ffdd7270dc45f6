"""Passkey prompts, looked at token by token, and the rules that judge answers."""

import hashlib
import re

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan
from evaluation_support import BigramModel, BlankInFront, ByteTokenizer

from lcjax.errors import InputError
from lcjax.evaluation import Passkey
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.needles import KvRetrieval, Niah, key_scores
from lcjax.generation.sampling import GeneratedText


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, ByteTokenizer(bos_id=None, add_bos=False), BlankInFront()]
)
@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("length", [900, 1024, 1501, 4096])
def test_prompt_and_answer_fill_the_budget_exactly_with_one_bos(length, template, tokenizer):
    task = Passkey(template=template, depths=5, max_new_tokens=9)
    for unit in plan(task, length, tokenizer=tokenizer):
        assert len(unit.tokens) + 9 == unit.fields["size"] == length
        assert unit.tokens.min() >= 0
        if tokenizer.bos_id is not None:
            assert unit.tokens[0] == 0 and (unit.tokens == 0).sum() == 1


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_the_key_occurs_once_at_its_depth(repeat):
    task = Passkey(depths=11, repeat=repeat)
    starts = []
    for unit in plan(task, 3000):
        text = TOKENIZER.decode(unit.tokens)
        key = unit.fields["key"]
        assert re.fullmatch(r"[1-9]\d{4}", key)
        assert re.findall(r"\d+", text) == [key] * repeat
        lines = [line for line in text.split("\n") if key in line]
        assert len(lines) == 1 and lines[0].startswith("The secret number is")
        start = unit.fields["key_start"]
        assert TOKENIZER.decode(unit.tokens[start : start + 40]).startswith("\n" + lines[0][:30])
        assert text.endswith("\nThe secret number is")
        starts.append((unit.fields["depth"], start))
    first, last = starts[0][1], starts[-1][1]
    for depth, start in starts:
        # A sentence is the grid that keys can stand on.
        assert abs((start - first) - depth * (last - first)) <= 60
    assert starts == sorted(starts) and [depth for depth, _ in starts] == pytest.approx(
        np.linspace(0, 1, 11)
    )


def test_the_first_and_last_depth_touch_instruction_and_question():
    first, *_, last = plan(Passkey(depths=3), 2000)
    before, after = (TOKENIZER.decode(unit.tokens) for unit in (first, last))
    assert "asked for it.\n\n\nThe secret number is" in before
    assert "is the secret number.\n\n\nWhat is the secret number?" in after


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_keys():
    def digest(seed):
        units = plan(Passkey(trials=2), 1200, seed=seed)
        return hashlib.sha256(b"".join(unit.tokens.tobytes() for unit in units)).hexdigest()

    assert digest(0) == digest(0) != digest(1)
    keys = [unit.fields["key"] for unit in plan(Passkey(trials=2), 1200)]
    assert len(set(keys)) == len(keys) == 20
    # Other depths or trials leave a cell as it is.
    fewer = [unit.fields["key"] for unit in plan(Passkey(trials=1), 1200)]
    assert fewer == keys[::2]


@pytest.mark.parametrize(
    ("task", "length"), [(Passkey(), 300), (Niah(needle="kamradt"), 100), (KvRetrieval(), 300)]
)
def test_a_length_without_room_raises_input_error_and_the_least_one_works(task, length):
    texts = [("a", "One sentence is short. " * 80)]  # of the haystack
    with pytest.raises(InputError, match="at least") as error:
        plan(task, length, texts=texts)
    least = int(re.search(r"at least (\d+)", str(error.value)).group(1))
    assert len(plan(task, least, texts=texts)) == 10
    if not isinstance(task, KvRetrieval):  # which may name a length of a few tokens more
        with pytest.raises(InputError):
            plan(task, least - 1, texts=texts)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (" 71432.", (True, True, True)),
        ("71432x", (True, True, True)),
        (" 071432", (True, False, False)),
        (" 714320", (False, False, True)),
        (" the key 71432", (True, True, False)),
        (" 5 71432", (False, False, False)),
        ("", (False, False, False)),
    ],
)
def test_answers_are_judged_by_each_published_rule(answer, verdict):
    assert tuple(key_scores(answer, "71432", TOKENIZER).values()) == verdict


def test_of_tokens_those_count_that_the_model_picked():
    for text, right in ((" 71432. It", True), ("71432", False), (" 7143", False)):
        ids = TOKENIZER.encode(text)
        assert key_scores(text, "71432", TOKENIZER, ids)["token_ids"] is right
    task, (unit, *_) = Passkey(match="token_ids"), plan(Passkey(), 1200)
    key = unit.fields["key"]  # decoding may lose the blank before it
    answer = GeneratedText(key, tuple(TOKENIZER.encode(" " + key)), "length")
    record = {**unit.fields, "window": 0, **task._record(answer, unit, TOKENIZER)}
    assert record["correct"] == 1.0 and type(record["answer"]) is str
    assert (record["ids"], record["finish"]) == (list(answer.ids), "length")
    assert task.rescore({**record, "correct": 0.0}, TOKENIZER)["correct"] == 1.0
    wrong = {**record, "ids": TOKENIZER.encode("x" + answer)}
    assert task.rescore(wrong, TOKENIZER)["correct"] == 0.0


def test_accuracy_and_the_effective_window_come_from_the_records():
    model, task = BigramModel(trained=1000), Passkey(depths=10)
    cells, records = [], []
    for length in (900, 2000, 20_000):
        units = plan(task, length)
        found = [
            {"method": "fake", "length": length, **unit.fields, **score}
            for start in range(0, 10, 4)
            for unit, score in zip(
                units[start : start + 4], task.score(model, units[start : start + 4], 4)
            )
        ]
        records += found
        cells.append({"method": "fake", "length": length, **task.summarise(found)})
    assert [cell["windows"] for cell in cells] == [10, 10, 10]
    # The fake sees the last 1,000 tokens: all keys, about half of them, the last one or two.
    assert cells[0]["value"] == 1.0
    assert 0.2 <= cells[1]["value"] < 0.9
    assert 0 < cells[2]["value"] < 0.2
    assert task.aggregates(cells, records) == {"fake": {"k_max_20": 2000, "k_max_90": 900}}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Passkey, {"match": "rouge"}), (Passkey, {"template": "llama"}), (Passkey, {"depths": 0}),
        (Niah, {"needle": "hay"}), (Niah, {"measure": "judge"}), (Niah, {"depths": 0}),
        (Niah, {"template": "x"}), (KvRetrieval, {"depths": 0}),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_raise_input_error(kind, field):
    with pytest.raises(InputError, match=next(iter(field))):
        kind(**field).check(Limits((1000,)), "tasks.1")
