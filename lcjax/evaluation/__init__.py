"""Benchmarks of long-context methods: perplexity by protocol, generated answers, their reports.

result = run(EvalConfig(model=..., methods=..., lengths=(4096, 8192)))
result.cells                              # one dict per task, method and length
"""

from lcjax.evaluation.config import EvalConfig, Method, RunSection
from lcjax.evaluation.icl import Icl
from lcjax.evaluation.infinitebench import InfiniteBench
from lcjax.evaluation.kv_retrieval import KvRetrieval
from lcjax.evaluation.longbench import LongBench
from lcjax.evaluation.many_shot import ManyShot
from lcjax.evaluation.niah import Niah
from lcjax.evaluation.open_qa import OpenQa
from lcjax.evaluation.passkey import Passkey
from lcjax.evaluation.perplexity import Perplexity
from lcjax.evaluation.rag_lm import RagLm
from lcjax.evaluation.report import Report
from lcjax.evaluation.ruler import Ruler
from lcjax.evaluation.run import run
from lcjax.evaluation.split import ContextSplit, ReplugSplit
from lcjax.evaluation.task import Task
from lcjax.evaluation.zeroscrolls import ZeroScrolls

__all__ = [
    "ContextSplit", "EvalConfig", "Icl", "InfiniteBench", "KvRetrieval", "LongBench", "ManyShot",
    "Method", "Niah", "OpenQa", "Passkey", "Perplexity", "RagLm", "ReplugSplit", "Report", "Ruler",
    "RunSection", "Task", "ZeroScrolls", "run",
]  # fmt: skip
