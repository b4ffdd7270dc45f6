"""The benchmarks; each is a type of `tasks`."""

from lcjax.evaluation.lm_eval import LmEval
from lcjax.evaluation.tasks.icl import Icl
from lcjax.evaluation.tasks.infinitebench import InfiniteBench
from lcjax.evaluation.tasks.longbench import LongBench
from lcjax.evaluation.tasks.many_shot import ManyShot
from lcjax.evaluation.tasks.needles import KvRetrieval, Niah, Passkey
from lcjax.evaluation.tasks.open_qa import MultiDocumentQa, OpenQa
from lcjax.evaluation.tasks.perplexity import Perplexity
from lcjax.evaluation.tasks.rag_lm import RagLm
from lcjax.evaluation.tasks.ruler import Ruler
from lcjax.evaluation.tasks.zeroscrolls import ZeroScrolls

__all__ = [
    "Icl", "InfiniteBench", "KvRetrieval", "LmEval", "LongBench", "ManyShot", "MultiDocumentQa",
    "Niah", "OpenQa", "Passkey", "Perplexity", "RagLm", "Ruler", "ZeroScrolls",
]  # fmt: skip
