"""Scores of the benchmarks: pure functions of strings, each equal to the official scorer.

qa.qa_f1("The Eiffel Tower, in Paris.", "eiffel tower")      # 0.667
qa.best(qa.qa_f1, prediction, ["one", "another"])            # over references

Where an official scorer has a quirk, the function's name or a keyword selects the variant.
"""
