"""Tasks of lm-evaluation-harness (extra `eval`), asked of every model of this library.

`task.LmEval` is a type of `tasks` in a config of eval.py. `adapter.HarnessModel` is a model for the
harness itself: lm_eval.simple_evaluate(model=HarnessModel(lm), tasks=["piqa"]).
"""

from lcjax.evaluation.lm_eval.task import LmEval

__all__ = ["LmEval"]
