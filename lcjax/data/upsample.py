"""Length up-sampling: drops short documents, so that long ones have a larger share of the tokens.

Fu et al. 2024 (arXiv 2402.10171, sec. 3): within a token budget per source of the corpus, nine of
ten documents below 4,096 tokens are dropped. The shares of the sources are preserved; the share of
long documents in each source grows. Lengths are estimated from characters, so that dropped
documents need not be tokenised. For documents in the same order, the selection equals that of the
authors' program.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from lcjax.errors import (
    Fraction,
    InputError,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    check_fields,
)

MODES = ("per_source", "code_arxiv_book", "global", "none")
_DRAWS = 1 << 20  # random numbers drawn at once when a position is restored


@dataclass(frozen=True)
class Share:
    """The share of a label in the tokens."""

    label: str
    share: float


# SlimPajama's own shares, as in the authors' program. The papers print LLaMA's mixture instead,
# 67 % of CommonCrawl (configs/data/slimpajama_upsampled.yaml).
SLIMPAJAMA = (
    Share("RedPajamaC4", 0.26609933),
    Share("RedPajamaCommonCrawl", 0.53374772),
    Share("RedPajamaStackExchange", 0.03169647),
    Share("RedPajamaWikipedia", 0.03402128),
    Share("RedPajamaGithub", 0.05004782),
    Share("RedPajamaArXiv", 0.04290379),
    Share("RedPajamaBook", 0.0414836),
)
# In mode code_arxiv_book the share of each is 0.6, before normalisation.
_LONG_LABELS = ("RedPajamaGithub", "RedPajamaArXiv", "RedPajamaBook")


@dataclass(frozen=True)
class Upsample:
    """Settings of the selection of documents in an epoch."""

    # per_source: a token budget for each label. code_arxiv_book: the same, with larger shares for
    # code, arXiv and books. global: no budgets by label. none: all documents, up to `tokens`
    mode: Annotated[str, OneOf(MODES)] = "per_source"
    # Tokens of an epoch, estimated from characters
    tokens: Annotated[int, Range(1, 2**63 - 1)] = 5_000_000_000
    ratio: Fraction = 0.1  # fraction of the short documents that is kept
    below: PositiveInt = 4096  # estimated tokens below which a document is short
    characters_per_token: PositiveFloat = 3.68  # Llama-2's on SlimPajama
    seed: Seed = 15213
    # Shares for per_source, [{label: a, share: 0.5}, ...]; empty: SlimPajama's
    shares: list[Share] = field(default_factory=list)
    normalise: bool = False  # divide the shares by their sum, which must be 1 otherwise

    def __post_init__(self):
        check_fields("upsample", self)
        if self.shares and self.mode != "per_source":
            raise InputError(f"upsample.mode={self.mode} does not use shares: set mode: per_source")
        self._check_shares()

    def _check_shares(self) -> None:
        labels = [share.label for share in self.shares]
        if len(set(labels)) < len(labels):
            raise InputError(f"upsample.shares name a label twice: {', '.join(labels)}")
        values = [share.share for share in self.shares]
        if not all(0 <= value < math.inf for value in values) or (values and not sum(values)):
            raise InputError(f"upsample.shares={values} must be 0 or more, and not all 0")
        if values and not self.normalise and abs(sum(values) - 1) > 1e-3:
            raise InputError(
                f"upsample.shares sum to {sum(values):.6g}, not to 1: correct them, or set"
                " upsample.normalise=true to divide them by it"
            )

    def budgets(self) -> dict[str, float] | None:
        """Returns the estimated tokens of each label in an epoch; None in modes without labels."""
        if self.mode in ("global", "none"):
            return None
        shares = {share.label: share.share for share in self.shares or SLIMPAJAMA}
        if self.mode == "code_arxiv_book":
            shares |= dict.fromkeys(_LONG_LABELS, 0.6)
        scale = sum(shares.values()) if self.normalise or self.mode == "code_arxiv_book" else 1
        return {label: self.tokens * (share / scale) for label, share in shares.items()}


class Selection:
    """Selects the documents of one epoch, in reading order."""

    def __init__(self, config: Upsample, epoch: int = 0):
        self._config, self._budgets = config, config.budgets()
        self._seed = (config.seed + epoch) % 2**32
        self._random = np.random.RandomState(self._seed)
        self._draws, self.used = 0, dict.fromkeys(self._budgets or [""], 0.0)

    @property
    def full(self) -> bool:
        """Whether the epoch has reached its number of tokens."""
        if self._budgets is None:
            return self.used[""] > self._config.tokens
        return all(self.used[label] >= budget for label, budget in self._budgets.items())

    def keep(self, characters: int, label: str, location: str) -> bool:
        """Returns whether the next document is selected, and counts its tokens if it is.

        Args:
          characters: number of characters of the document.
          label: label of the document.
          location: name or path of the document, for error messages.
        """
        length = characters / self._config.characters_per_token
        if self._budgets is None:
            label = ""
        elif label not in self._budgets:
            raise InputError(
                f"{location} has the label {label!r}, which upsample.shares lack; they have"
                f" {', '.join(self._budgets)}: add it (share 0 leaves its documents out), or name"
                " another label_field"
            )
        elif self._budgets[label] == 0 or self.used[label] > self._budgets[label]:
            return False  # draws no random number, as in the authors' program
        if self._config.mode != "none" and length < self._config.below:
            self._draws += 1
            if self._random.random_sample() > self._config.ratio:
                return False
        self.used[label] += length
        return True

    def get_state(self) -> dict:
        return {"used": dict(self.used), "draws": self._draws}

    def set_state(self, state: dict) -> None:
        self.used = {label: float(value) for label, value in state["used"].items()}
        self._random, self._draws = np.random.RandomState(self._seed), int(state["draws"])
        for i in range(0, self._draws, _DRAWS):
            self._random.random_sample(min(_DRAWS, self._draws - i))
