"""Scores against what the official scorers gave, and what must hold for any two strings."""

import functools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.errors import InputError
from lcjax.evaluation.metrics import infinitebench, qa, rouge
from lcjax.evaluation.metrics.rouge import lcs_length, lcs_pairs, stem_word
from lcjax.evaluation.tasks import longbench

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())["cases"]


def over(metric):
    return lambda case: qa.best(metric, case["pred"], case["ref"])


def once(metric):
    return lambda case: metric(case["pred"], case["ref"])


SCORERS = {
    ("longbench", "qa_f1"): over(qa.qa_f1),
    ("longbench", "code_sim(indel backend, rapidfuzz)"): once(longbench.code_indel),
    ("longbench", "code_sim(difflib backend)"): once(longbench.code_difflib),
    ("longbench", "classification"): lambda case: longbench.classification(
        case["pred"], case["ref"], case["all_classes"]
    ),
    ("longbench", "count"): once(longbench.count),
    ("longbench", "retrieval"): once(longbench.retrieval),
    ("cepe", "substring_em"): over(qa.substring_match),
    ("cepe", "em"): over(qa.exact_match),
    ("cepe", "f1"): over(qa.qa_f1_verdict),
    ("infinitebench", "qa_f1"): over(qa.qa_f1),
    ("infinitebench", "math_find"): once(infinitebench.math_find),
    ("infinitebench", "longbook_choice_eng"): once(infinitebench.choice),
    ("infinitebench", "passkey"): once(infinitebench.digits),
    ("infinitebench", "kv_retrieval"): once(infinitebench.kv_retrieval),
    ("infinitebench", "code_debug"): once(infinitebench.code_debug),
    ("infinitebench", "code_run"): once(infinitebench.code_run),
    ("infinitebench", "longdialogue_qa_eng"): once(infinitebench.dialogue),
    ("ruler", "string_match_all"): once(qa.string_match_all),
    ("ruler", "string_match_part"): once(qa.string_match_part),
    ("rouge-score 0.1.2", "rougeL"): lambda case: rouge.rouge_l(
        case["pred"], case["ref"], stem=case["stemmer"]
    ),
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['metric']}-{case['pred'][:12]!r}")
def test_scores_are_those_of_the_official_scorers(case):
    score = SCORERS[case["flavour"], case["metric"]]
    if "raises" in case:
        with pytest.raises(ValueError):
            score(case)
    else:
        assert score(case) == pytest.approx(case["value"], abs=1e-6)


def test_a_verdict_must_be_the_whole_answer():
    for verdict in ("yes", "no", "noanswer"):
        assert qa.qa_f1_verdict(f"{verdict} because", verdict) == 0
        assert qa.qa_f1_verdict(verdict, f"{verdict} because") == 0
        assert qa.qa_f1_verdict(f"The {verdict}.", verdict) == 1
    assert qa.qa_f1_verdict("maybe because", "maybe") == pytest.approx(2 / 3)


# Computed with the PyPI package rouge 1.0.1, rouge-score 0.1.2 with its stemmer (ROUGE-1, ROUGE-2,
# ROUGE-L, ROUGE-Lsum) and NLTK's stemmer.
@pytest.mark.parametrize(
    ("prediction", "reference", "sets", "stems"),
    [
        ("the cat sat on the mat and the dog barked",
         "The cat sat on the mat. The dog barked at the cat. The cat ran.",
         0.555556, [0.72, 0.608696, 0.72, 0.72]),
        ("Costs are rising.\nThe committees agreed, it says.",
         "The report says costs rose.\nThe committee did not agree with rising costs.",
         0.315789, [0.571429, 0.105263, 0.380952, 0.571429]),
        ("a b c a b c", "a b c", 1.0, [0.666667, 0.571429, 0.666667, 0.666667]),
        (" ", "a b. ", 0.5, [0.0, 0.0, 0, 0]),
        ("", "x y", 0.0, [0.0, 0.0, 0, 0]),
    ],
)  # fmt: skip
def test_both_rouge_scores_equal_their_packages(prediction, reference, sets, stems):
    assert rouge.rouge_l_sets(prediction, reference) == pytest.approx(sets, abs=1e-6)
    found = [rouge.rouge_n(prediction, reference, size, stem=True) for size in (1, 2)]
    found.append(rouge.rouge_l(prediction, reference, stem=True))
    found.append(rouge.rouge_lsum(prediction, reference, stem=True))
    assert found == pytest.approx(stems, abs=1e-6)


def test_a_summary_that_never_ends_is_scored_without_recursion():
    assert rouge.rouge_l_sets("word " * 3000, "word") == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("caresses", "caress"), ("ties", "tie"), ("flies", "fli"), ("agreed", "agre"),
        ("died", "die"), ("spied", "spi"), ("hopping", "hop"), ("falling", "fall"),
        ("filing", "file"), ("enjoy", "enjoy"), ("happy", "happi"), ("sky", "sky"),
        ("relational", "relat"), ("radically", "radic"), ("archaeology", "archaeolog"),
        ("hopefully", "hope"), ("adoption", "adopt"), ("controlling", "control"),
        ("syzygy", "syzygi"), ("ion", "ion"), ("generalizations", "gener"), ("us", "us"),
    ],
)  # fmt: skip
def test_stems_are_nltks(word, expected):
    assert stem_word(word) == expected


TEXT = st.text(alphabet="ab c.\nTheyes012-", max_size=40)
ROUGES = [
    functools.partial(metric, stem=stem)
    for stem in (False, True)
    for metric in (
        functools.partial(rouge.rouge_n, size=1), functools.partial(rouge.rouge_n, size=2),
        rouge.rouge_l,
    )
]  # fmt: skip
BOUNDED = [
    qa.qa_f1, qa.qa_f1_verdict, qa.qa_f1_characters, qa.exact_match,
    qa.substring_match, rouge.rouge_l_sets, *ROUGES, longbench.count,
    longbench.code_indel, longbench.code_difflib, qa.letter_match,
]  # fmt: skip
SYMMETRIC = [
    qa.qa_f1, qa.qa_f1_verdict, qa.qa_f1_characters, qa.exact_match, *ROUGES,
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT)
def test_scores_lie_between_0_and_1_and_do_not_depend_on_the_side_where_they_should_not(one, two):
    for metric in BOUNDED:
        assert 0 <= metric(one, two) <= 1 + 1e-12
    for metric in SYMMETRIC:
        assert metric(one, two) == pytest.approx(metric(two, one))
    assert longbench.code_difflib(one, two) <= longbench.code_indel(one, two)
    assert qa.exact_match(one, two) <= qa.substring_match(one, two)
    assert qa.best(qa.qa_f1, one, [two, one]) >= qa.qa_f1(one, two)


def table_lcs(one, two):
    rows = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            rows[i + 1][j + 1] = rows[i][j] + 1 if a == b else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@settings(max_examples=60, deadline=None)
@given(st.text("abc", max_size=70), st.text("abc", max_size=70))
def test_common_subsequences_equal_dynamic_programming(one, two):
    pairs = lcs_pairs(one, two)
    assert lcs_length(one, two) == len(pairs) == table_lcs(one, two)
    assert all(one[i] == two[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in zip(pairs, pairs[1:]))


def test_the_class_behind_a_removed_one_is_passed_over():
    classes = ["Food", "Food other", "other"]
    # "Food" goes, so the walk misses "Food other", takes out "other" and leaves the right one.
    assert longbench.classification("Food other", "Food other", classes) == 1.0
    # "Foo" goes, and "Food" behind it stays although it is part of the right name.
    classes = ["Foo", "Food", "Food other"]
    assert longbench.classification("Food other", "Food other", classes) == 0.5
    assert longbench.classification("Food other", "Food other", classes, parity=False) == 1.0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: infinitebench.code_debug("B", ["f", "B"]), 0),
        (lambda: infinitebench.option_letter("B", ["f", "B"]), 1),
        (lambda: infinitebench.code_debug("B. f", ["f", "B"]), 1),
        (lambda: infinitebench.code_debug("The answer is:", ["f", "B"]), 0),
        (lambda: infinitebench.math_find("-3", [3], parity=False), 0),
        (lambda: infinitebench.math_find("42.5", [42], parity=False), 0),
        (lambda: infinitebench.math_find("42.0 is it", 42, parity=False), 1),
        (lambda: infinitebench.math_find("4.5", 4.5), 1),
        (lambda: infinitebench.math_find("none", 4), 0),
        (lambda: infinitebench.math_calc("[1, 3, 9]", [1, 3, 7, 2]), 0.5),
        (lambda: infinitebench.math_calc("1 3", [[1, 3]]), 1),
        (lambda: infinitebench.math_calc("01 3 " + "9" * 5000, [1, 3, 7, 2]), 0.5),
        (lambda: infinitebench.math_calc("0 00 5", [0, 0, 5]), 1),
        (lambda: infinitebench.choice("maybe C then", ["no", "C"]), 1),
        (lambda: infinitebench.choice("the answer is", ["no", "C"]), 0),
        (lambda: infinitebench.choice("nothing here", ["no", "C"]), 0),
        (lambda: infinitebench.code_run("", 1), 0),
        (lambda: infinitebench.code_run("it is x", 1), 0),
        (lambda: qa.letter_match("(a).", "A"), 1),
        (lambda: qa.letter_match("", "A"), 0),
        (lambda: qa.exact_match("the", "A"), 1),  # articles are deleted
        (lambda: qa.value_match("12 and 7", ["12", "7"]), 1),
        (lambda: qa.value_match("12", ["12", "7"]), 0),
        (lambda: qa.word_recall("a b", "a b a c"), 2 / 3),
        (lambda: qa.word_recall("a b a c", "a b a c", distinct=False), 3 / 4),
        (lambda: longbench.retrieval_zh("段落12", "段落12"), 1),
        (lambda: qa.qa_f1_characters("你好，世界", "世界。"), 2 / 3),
    ],
)
def test_a_quirk_is_kept_where_it_is_official_and_the_other_flavour_is_there(call, expected):
    assert call() == pytest.approx(expected)


def test_labels_of_choices_are_text_and_letter():
    options = ["one", "two", "three", "four"]
    assert infinitebench.labels("three", options) == ["three", "C"]
    assert infinitebench.labels(["two"], options) == infinitebench.labels(["two", "B"], options)
    with pytest.raises(ValueError, match="five"):
        infinitebench.labels(["five"], options)


class _Jieba:
    @staticmethod
    def cut(text, cut_all):
        assert not cut_all
        return iter(text.split("|"))


def test_chinese_is_split_by_jieba_or_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", _Jieba)
    assert qa.qa_f1_zh("上涨|，|价格", "价格|。|上涨|了") == pytest.approx(0.8)
    assert rouge.rouge_l_sets_zh("价格|上涨", "价格|没有|上涨") == pytest.approx(0.8, abs=1e-6)
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(InputError, match="pip install 'jieba>="):
        qa.qa_f1_zh("上涨", "上涨")
