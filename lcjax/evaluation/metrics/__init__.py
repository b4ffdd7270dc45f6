"""Scores of the benchmarks: pure functions of strings, each equal to the official scorer.

metrics.qa_f1("The Eiffel Tower, in Paris.", "eiffel tower")      # 0.667
metrics.best(metrics.qa_f1, prediction, ["one", "another"])       # over references

Where an official scorer has a quirk, the function's name or a keyword selects the variant.
"""

from lcjax.evaluation.metrics import infinitebench, longbench
from lcjax.evaluation.metrics.answers import (
    best,
    exact_match,
    first_line,
    letter_match,
    letter_match_cepe,
    normalise,
    normalise_zh,
    qa_f1,
    qa_f1_characters,
    qa_f1_verdict,
    qa_f1_zh,
    string_match_all,
    string_match_part,
    substring_match,
    value_match,
    word_recall,
    words_zh,
)
from lcjax.evaluation.metrics.rouge import (
    rouge1_f,
    rouge_l,
    rouge_l_sets,
    rouge_l_sets_zh,
    rouge_lsum,
    rouge_mean,
    rouge_n,
)

__all__ = [
    "best", "exact_match", "first_line", "infinitebench", "letter_match", "letter_match_cepe",
    "longbench", "normalise", "normalise_zh", "qa_f1", "qa_f1_characters", "qa_f1_verdict",
    "qa_f1_zh", "rouge1_f", "rouge_l", "rouge_l_sets", "rouge_l_sets_zh", "rouge_lsum",
    "rouge_mean", "rouge_n", "string_match_all", "string_match_part", "substring_match",
    "value_match", "word_recall", "words_zh",
]  # fmt: skip
