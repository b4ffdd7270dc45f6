"""Scores of the benchmarks, each a pure function of strings and exact to the official scorer.

metrics.qa_f1("The Eiffel Tower, in Paris.", "eiffel tower")      # 0.667
metrics.best(metrics.qa_f1, prediction, ["one", "another"])       # over references

Where an official scorer has a quirk, the name or a keyword says which flavour is computed.
"""

from lcjax.evaluation.metrics import infinitebench, longbench
from lcjax.evaluation.metrics.answers import (
    exact_match,
    letter_match,
    letter_match_cepe,
    qa_f1,
    qa_f1_characters,
    qa_f1_verdict,
    qa_f1_zh,
    substring_match,
)
from lcjax.evaluation.metrics.retrieval import (
    rouge1_f,
    string_match_all,
    string_match_part,
    value_match,
    word_recall,
)
from lcjax.evaluation.metrics.rouge import rouge_l, rouge_lsum, rouge_mean, rouge_n
from lcjax.evaluation.metrics.rouge_sets import rouge_l_sets, rouge_l_sets_zh
from lcjax.evaluation.metrics.text import best, first_line, normalise, normalise_zh, words_zh

__all__ = [
    "best", "exact_match", "first_line", "infinitebench", "letter_match", "letter_match_cepe",
    "longbench", "normalise", "normalise_zh", "qa_f1", "qa_f1_characters", "qa_f1_verdict",
    "qa_f1_zh", "rouge1_f", "rouge_l", "rouge_l_sets", "rouge_l_sets_zh", "rouge_lsum",
    "rouge_mean", "rouge_n", "string_match_all", "string_match_part", "substring_match",
    "value_match", "word_recall", "words_zh",
]  # fmt: skip
