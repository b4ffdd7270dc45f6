"""Landmark attention (Mohtashami & Jaggi 2023, arXiv 2305.16300)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from lcjax.attention.base import Pass, Pattern, Places, rotate_qk
from lcjax.attention.landmark.retrieval import retrieve
from lcjax.errors import InputError, one_of, whole_number, whole_numbers
from lcjax.rope.rotation import Rotation
from pallas_kernels import causal, landmark_attention

SELECT = ("per_token_and_head", "per_head_and_chunk")
LOSSES = ("predict", "skip", "drop")


@Pattern.register_subclass("landmark")
@dataclass(frozen=True)
class Landmark(Pattern):
    """A softmax over blocks, by their landmark tokens, and a softmax inside each block.

    Every `block`-th token is a landmark (`lcjax.attention.landmark.tokens` inserts them). A token
    sees the ordinary tokens of its own block, and those of an older block with the weight that the
    block's landmark gets (sec. 3.1). Tokens of one call, as in training, see all older blocks of
    the call.
    Earlier tokens come from the cache: the `top_k` blocks with the best landmarks, moved to
    positions at which no distance exceeds the trained length (sec. 3.2 and 3.2.1). So a long text
    must be read in calls of `chunk` tokens.
    """

    examples = (
        {"block": 8, "top_k": 12, "train_length": 160},  # every block is selected
        {"block": 5, "top_k": None},
    )

    block: int = 64  # tokens, the landmark included (the paper 51; epfml's LLaMA and LCEG 64)
    top_k: int | None = 5  # blocks that a query reads from the cache; null: all, where they stand
    select: str = "per_token_and_head"  # or per_head_and_chunk: one choice for what is read at once
    train_length: int = 512  # the trained length in tokens, landmarks included
    token: int | None = None  # id of the landmark token
    loss: str = "predict"  # what is learned around it: predict, skip or drop (see tokens.py)

    def __post_init__(self):
        whole_number("pattern.block", self.block, 2)
        whole_numbers("pattern", self, 0, "token")
        one_of("pattern.select", self.select, SELECT)
        one_of("pattern.loss", self.loss, LOSSES)
        if self.top_k is None:
            return
        whole_number("pattern.top_k", self.top_k, 1)
        whole_number("pattern.train_length", self.train_length, self.block)
        if self.chunk < 1:
            raise InputError(
                f"pattern.top_k={self.top_k} blocks of {self.block} leave no room in "
                f"pattern.train_length={self.train_length}, which must hold top_k + 2 blocks; at "
                f"most {max(self.train_length // self.block - 2, 0)}"
            )

    @property
    def chunk(self) -> int | None:
        """The most tokens that one call may read: the trained length less the retrieved blocks.

        None without retrieval.
        """
        if self.top_k is None:
            return None
        return (self.train_length // self.block - self.top_k - 1) * self.block

    def passes(self, places: Places) -> list[Pass]:
        """The keys that one call multiplies with the queries; `attend` weighs them by blocks."""
        return [Pass(places.q_positions, places.k_positions, causal())]

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        rotation: Rotation,
        places: Places,
        *,
        keys_rotated: bool = False,
        implementation: str | None = None,
    ) -> Float[Array, "B T N Hv"]:
        rotated_q, k = rotate_qk(q, k, places, rotation, keys_rotated=keys_rotated)
        if self.top_k is not None and k.shape[1] != q.shape[1]:
            implementation = places.partitionable(implementation)
            return retrieve(self, q, rotated_q, k, v, rotation, places, implementation)
        out, _ = landmark_attention(
            rotated_q,
            k,
            v,
            self.block,
            q_index=places.q_index,
            k_index=places.k_index,
            q_segments=places.q_segments,
            k_segments=places.k_segments,
            layout=places.layout,
            implementation=implementation,
        )
        return out
