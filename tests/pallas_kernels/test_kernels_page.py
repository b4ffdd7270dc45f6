"""The examples of docs/kernels.md run as they stand there, one after the other."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.mark.slow
def test_every_example_runs_and_gives_finite_outputs(capsys):
    names, examples = {}, re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) > 5
    for example in examples:
        names.pop("out", None)
        exec(compile(example, str(PAGE), "exec"), names)
        assert "out" not in names or np.isfinite(names["out"]).all(), example
    assert "> xla" in capsys.readouterr().out
