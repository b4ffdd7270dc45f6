"""Benchmarks of long-context methods: perplexity by protocol, generated answers, their reports.

result = run(EvalConfig(model=..., methods=..., lengths=(4096, 8192)))
result.cells                              # one dict per task, method and length
"""

from lcjax.evaluation.config import EvalConfig, Method, RunSection
from lcjax.evaluation.niah import Niah
from lcjax.evaluation.passkey import Passkey
from lcjax.evaluation.perplexity import Perplexity
from lcjax.evaluation.report import Report
from lcjax.evaluation.ruler import Ruler
from lcjax.evaluation.run import run
from lcjax.evaluation.split import ContextSplit, ReplugSplit
from lcjax.evaluation.task import Task

__all__ = [
    "ContextSplit", "EvalConfig", "Method", "Niah", "Passkey", "Perplexity", "ReplugSplit",
    "Report", "Ruler", "RunSection", "Task", "run",
]  # fmt: skip
