"""Benchmarks of long-context methods: perplexity under named protocols, answers, and reports.

For example:

    result = run(EvalConfig(model=..., methods=..., lengths=(4096, 8192)))
    result.cells                              # one dict per task, method and length
"""

from lcjax.evaluation.eval_config import EvalConfig, Method, RunSection
from lcjax.evaluation.report import Report
from lcjax.evaluation.run import run
from lcjax.evaluation.split import ContextSplit, ReplugSplit
from lcjax.evaluation.task import Task
from lcjax.evaluation.tasks import (
    Icl,
    InfiniteBench,
    KvRetrieval,
    LmEval,
    LongBench,
    ManyShot,
    MultiDocumentQa,
    Niah,
    OpenQa,
    Passkey,
    Perplexity,
    RagLm,
    Ruler,
    ZeroScrolls,
)

__all__ = [
    "ContextSplit", "EvalConfig", "Icl", "InfiniteBench", "KvRetrieval", "LmEval", "LongBench",
    "ManyShot", "Method", "MultiDocumentQa", "Niah", "OpenQa", "Passkey", "Perplexity", "RagLm",
    "ReplugSplit", "Report", "Ruler", "RunSection", "Task", "ZeroScrolls", "run",
]  # fmt: skip
