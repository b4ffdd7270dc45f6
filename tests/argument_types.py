"""Calls functions of the Python API with arguments of other types."""

import contextlib
import inspect

import numpy as np

from lcjax.errors import InputError

OTHERS = (
    None, 3, -1, 1.5, "x", b"x", [1], ["x"], [None], {}, {"a": 1}, object(), np.zeros((2, 3)),
    np.zeros(0), len, True, (), float("nan"),
)  # fmt: skip


def check_other_types(function, *names, **arguments):
    """Asserts that `function` refuses an argument of another type with an InputError, or takes it.

    Args:
      function: the function.
      *names: the arguments to replace, one at a time; none: all.
      **arguments: valid arguments.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter.name for parameter in parameters if not parameter.kind]
    names = names or [p.name for p in parameters if "VAR_" not in p.kind.name]
    for name in names:
        for value in OTHERS:
            values = arguments | {name: value}
            args = [values.pop(key) for key in positional if key in values]
            print(f"{function.__qualname__}({name}={value!r})")  # pytest shows it after a failure
            with contextlib.suppress(InputError):
                function(*args, **values)
