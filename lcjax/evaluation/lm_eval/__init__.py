"""Tasks of lm-evaluation-harness (extra `eval`) for every model of this library.

`LmEval` is a type of `tasks` in a config of eval.py. `HarnessModel` runs a model in the harness's
own programs: lm_eval.simple_evaluate(model=HarnessModel(lm), tasks=["piqa"]).
"""

from typing import Any

from lcjax.evaluation.lm_eval.lm_eval_task import LmEval

__all__ = ["HarnessModel", "LmEval"]


def __getattr__(name: str) -> Any:
    if name != "HarnessModel":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from lcjax.evaluation.lm_eval.harness import check_installed

    check_installed()  # the base class is the harness's
    from lcjax.evaluation.lm_eval.adapter import HarnessModel

    return HarnessModel
