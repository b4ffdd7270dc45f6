"""What people read of a run: tables, figures, summary.json and report.html, from records alone."""

from lcjax.evaluation.report.report import Report, cell_of, made_here, write

__all__ = ["Report", "cell_of", "made_here", "write"]
