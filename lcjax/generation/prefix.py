"""What prompts begin with, read before they are asked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lcjax.attention import Pattern
from lcjax.errors import InputError
from lcjax.models.cache import Cache


class Prefix(NamedTuple):
    """The beginning of every prompt of a batch, read with the rotation that all of them have."""

    cache: Cache  # full, of one row without padding
    ids: np.ndarray  # int32, of its first tokens

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def check(
        self, pattern: Pattern, prompts: Sequence[Sequence[int]], *, context: Any, exact: bool
    ) -> None:
        """Refuses what cannot go on from here; `exact` says that rotations follow the length."""
        if not goes_on(pattern):
            raise InputError(
                f"prefix: what {type(pattern).__name__} lets a token see depends on all that is"
                " read with it; leave prefix out"
            )
        if context is not None or exact:
            name = "exact=True" if context is None else "context"
            raise InputError(f"prefix was read without {name}; leave one of the two out")
        for number, prompt in enumerate(prompts):
            ids = np.asarray(prompt)
            if len(ids) <= self.tokens or not np.array_equal(ids[: self.tokens], self.ids):
                raise InputError(
                    f"prompts[{number}] must begin with the {self.tokens} tokens of prefix and go"
                    " on; leave prefix out"
                )


def goes_on(pattern: Pattern) -> bool:
    """Whether a token sees by its place alone, whatever it is read with, and all keys are kept."""
    return pattern.is_position_based and pattern.cache_window() is None
