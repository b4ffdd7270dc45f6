"""Key-value retrieval: what the object holds, where the asked pair is, and what counts."""

import json
import re

import pytest
from benchmark_support import TOKENIZER, plan, scored
from evaluation_support import only_the_run

from lcjax.evaluation.tasks.needles import KvRetrieval


def held(unit):
    """The pairs of the object in a prompt."""
    text = TOKENIZER.decode(unit.tokens)
    return json.loads(re.search(r"\{.*?\n\}", text, re.DOTALL).group())


@pytest.mark.parametrize("length", [600, 2000, 2047])
@pytest.mark.parametrize("template", ["none", "chat"])
def test_prompts_have_full_length_and_the_queried_pair_at_its_depth(length, template):
    units = plan(KvRetrieval(depths=5, template=template), length)
    for unit, depth in zip(units, (0, 0.25, 0.5, 0.75, 1)):
        pairs = held(unit)
        assert length - 90 < unit.fields["size"] <= length
        assert len(pairs) == unit.fields["pairs"] and unit.fields["depth"] == depth
        assert list(pairs).index(unit.fields["key"]) == round(depth * (len(pairs) - 1))
        assert [pairs[unit.fields["key"]]] == unit.fields["references"]
        text = TOKENIZER.decode(unit.tokens)
        assert text.endswith("The value of this key is") and text.count(unit.fields["key"]) == 2
        assert (unit.tokens == 0).sum() == 1
    keys = [key for unit in units for key in held(unit)]
    assert len(set(keys)) == len(keys)


def test_the_same_seed_gives_the_same_object_and_trials_leave_each_other_alone():
    one, two = plan(KvRetrieval(trials=1), 1000), plan(KvRetrieval(trials=2), 1000)
    assert [u.digest for u in one] == [u.digest for u in two][::2]
    assert len({unit.digest for unit in two}) == 20


def test_a_word_that_is_the_value_counts_and_a_part_of_it_does_not(tmp_path):
    task = KvRetrieval(depths=3)
    units = plan(task, 1000)
    values = [unit.fields["references"][0] for unit in units]
    records = scored(task, units, [f' "{values[0]}".', f"x{values[1]}", values[2][:-1]])
    assert [record["correct"] for record in records] == [1, 0, 0]
    assert [record["scores"]["substring"] for record in records] == [1, 1, 0]
    assert task.summarise(records)["value"] == pytest.approx(1 / 3)
    cells = [{"method": "m", "length": 4000, "trained": 4000, **task.summarise(records)}]
    with only_the_run():
        assert len(task.figures(cells, [{**r, "trained": 4000} for r in records], tmp_path)) == 2
