"""Budgets for the pattern `vertical_slash`, searched with the queries of a model on a text.

python -m lcjax.generation.head_budgets --model.path=smollm2-135m-instruct --text_file=book.txt \\
    --out=heads.json
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Sequence

from lcjax import config as config_lib
from lcjax.attention import Causal
from lcjax.attention.base import rotate_qk
from lcjax.attention.vertical_slash import CANDIDATES, SparseHead, attention_mass, best_budgets
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError, PositiveInt, check_fields
from lcjax.files import read_input, write_whole
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import check_token_ids
from lcjax.generation.watched import watch


def head_budgets(
    lm: LanguageModel,
    text: Sequence[int],
    candidates: Sequence[SparseHead] = CANDIDATES,
    start: int = 2500,
) -> list[dict[str, list]]:
    """Searches budgets of all heads of a model: `search_head_budgets` in each layer.

    Args:
      lm: the model, with full attention.
      text: token ids of a prompt, more than `start`.
      candidates: as in `search_head_budgets`.
      start: as in `search_head_budgets`.

    Returns:
      For each layer {head: [kind, vertical, slash, share of the attention that is kept]}.
    """
    config = lm.config
    ids = check_token_ids("text", text, config.vocab_size)
    plain = all(type(pattern) is Causal for pattern in config.patterns)
    if not plain or config.memory is not None or config.mixers or config.attention_soft_cap:
        raise InputError(
            "head budgets are searched in layers that all have full attention; give a model under"
            " pattern causal, without memory, mixers and attention_soft_cap"
        )
    if len(ids) <= start:
        raise InputError(
            f"text has {len(ids)} tokens, and the first {start} do not count; give a longer one, or"
            " a smaller start"
        )

    def record(layer, q, k, pattern, metadata):
        rotated = (x[0] for x in rotate_qk(q, k, metadata))
        return attention_mass(*rotated, tuple(candidates), start)

    by_layer = watch(lm, ids, record)
    return [best_budgets(shares, candidates) for shares in by_layer]


@dataclasses.dataclass(frozen=True)
class HeadBudgetSearch:
    """A search of `head_budgets`, and the file in which its result is written."""

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    text_file: str | None = None
    tokens: PositiveInt = 8192  # first tokens of the text
    start: PositiveInt = 2500  # first of these whose attention does not count
    out: str = "head_budgets.json"  # for model.pattern.file

    def __post_init__(self):
        check_fields("", self)


def search(config: HeadBudgetSearch) -> None:
    """Writes the budgets that keep most of each head's attention to a text."""
    text = read_input("text_file", config.text_file)
    lm = LanguageModel.load(config.model)
    ids = lm.encode(text)[: config.tokens]
    budgets = head_budgets(lm, ids, start=config.start)
    write_whole(config.out, json.dumps(budgets) + "\n")
    kept = [entry[-1] for layer in budgets for entry in layer.values()]
    pairs = ((entry[1], entry[2]) for layer in budgets for entry in layer.values())
    mean, least = 100 * sum(kept) / len(kept), 100 * min(kept)
    print(f"{len(ids):,} tokens; attention kept, mean {mean:.1f} %, least {least:.1f} %")
    for (columns, diagonals), count in sorted(collections.Counter(pairs).items()):
        print(f"{count:6} heads  {columns:5} columns  {diagonals:5} diagonals")
    print(f"Written: {config.out}\nRead it with --model.pattern.type=vertical_slash", end=" ")
    print(f"--model.pattern.file={config.out}")


if __name__ == "__main__":
    sys.exit(config_lib.main(HeadBudgetSearch, search))
