"""The `model.memory` section of a config: which memory a checkpoint gets."""

from dataclasses import dataclass
from typing import Literal

import draccus

from lcjax.errors import InputError


@dataclass(frozen=True)
class MemorySection(draccus.ChoiceRegistry):
    """A memory for a decoder that has none; a checkpoint that has one brings its own."""


@MemorySection.register_subclass("cepe")
@dataclass(frozen=True)
class CepeSection(MemorySection):
    """CEPE (arXiv 2402.16617): an encoder of chunks, and cross-attention in the last layers."""

    # A checkpoint of the encoder (a run of masked language modelling, hyen/LLaMA-MLM-Large), or the
    # name of a preset, with random weights.
    encoder: str = "cepe-encoder"
    layers: int | None = None  # layers that read the context, from the last one down; null: all
    # Of the output projection: zeros leave the decoder as it was (the paper); copy begins with
    # self-attention's, as the released configs of the warm-up do.
    out: Literal["zeros", "copy"] = "zeros"

    def __post_init__(self):
        if self.layers is not None and self.layers < 1:
            raise InputError(
                f"model.memory.layers={self.layers} must be at least 1; null: all; without"
                " any, leave model.memory out"
            )
