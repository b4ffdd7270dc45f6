"""Draws pictures of methods: attention masks, RoPE frequencies, and the attention of an answer.

    from lcjax import pictures
    pictures.mask_picture(lcjax.attention.SelfExtend(window=32, group=4), 128, "mask.png")
    pictures.rope_picture({"PI": Linear(factor=4.0), "YaRN": Yarn(factor=4.0)}, "rope.png")
    pictures.attention_picture(lm, "The key is 7. What is the key?", "attention.png")
    pictures.attention_recall(lm, ids).mass.mean()  # share of attention that a pattern keeps

The same from the command line:

    python -m lcjax.pictures mask | rope | positions | attention | recall --help
"""

from lcjax.pictures.answer import AnswerAttention, answer_attention
from lcjax.pictures.draw import (
    attention_picture,
    draw_attention,
    mask_picture,
    positions_picture,
    rope_picture,
    table_picture,
    trained_positions,
)
from lcjax.pictures.recall import Recall, attention_recall
from lcjax.pictures.weights import attention_weights, mask_of

__all__ = [
    "AnswerAttention", "Recall", "answer_attention", "attention_picture", "attention_recall",
    "attention_weights", "draw_attention", "mask_of", "mask_picture", "positions_picture",
    "rope_picture", "table_picture", "trained_positions",
]  # fmt: skip
