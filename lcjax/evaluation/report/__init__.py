"""Tables, figures, summary.json and report.html of a run, from its records alone."""

from lcjax.evaluation.report.report import Report, cell_of, current_environment, write

__all__ = ["Report", "cell_of", "current_environment", "write"]
