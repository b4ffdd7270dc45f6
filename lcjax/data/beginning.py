"""Documents whose beginning is context: a conversation's question, or the text itself.

As SharedLLM is tuned on instructions ("Two are better than one: context window extension with
multi-grained self-injection", sec. 4.1 and its released code): of a question of q tokens the first
max(q // P - 1, 1) chunks of P are read as context, the decoder has the rest and the answer, which
alone is learned. A text without a question is cut in the same way and learned behind its context.
Chunks are whole: nothing of a document is padding, and what is left over is the decoder's.
"""

import numpy as np

from lcjax.data.chunks import Chunks, decoders, learned, split


def asked(learned: np.ndarray) -> int:
    """Tokens of the question of a document, by which of its places [n] have a learned target.

    All n of a text, of which every token is learned.
    """
    return len(learned) if learned[0] else int(np.argmax(learned)) + 1


def context_chunks(config: Chunks, question: int, tokens: int) -> int:
    """How many chunks of a document of so many `tokens`, its `question` among them, are context.

    More than the rule says where the decoder could not hold the rest. A token of the question, or
    two of a text, stay with the decoder: so questions of up to a chunk have no context (the
    released code would put the answer there).
    """
    text = question == tokens
    wanted = max(question // config.length - 1, 1)
    wanted = min(wanted, config.most or config.count) if text else wanted
    needed = -(-(tokens - config.decoder) // config.length)
    most = (question - 1 - int(text)) // config.length
    return max(min(max(wanted, needed), most, config.count), 0)


def fitted(pair: np.ndarray, config: Chunks, length: int, *, drop: bool) -> np.ndarray | None:
    """A document [n, 2] of at most `length` tokens, of which a row has room for every one.

    A question that is too long loses its middle, a text its end; answers that the decoder cannot
    hold lose their end. `drop`: None for texts and answers that are too long.
    """
    learned = pair[:, 1] >= 0
    question = asked(learned)
    over, text = len(pair) - length, question == len(pair)
    if over > 0 and text:
        return None if drop else pair[:length]
    if over > 0:
        keep = max(question - over, 1)
        ends = keep // 2, question - (keep - keep // 2)
        pair, question = np.concatenate([pair[: ends[0]], pair[ends[1] :]]), keep
    room = config.decoder + config.length * context_chunks(config, question, len(pair))
    if len(pair) > room:
        return None if drop else pair[:room]
    return pair


class CutBeginning:
    """A row of one document -> the decoder's part of all its fields, `chunks` and `chunk_mask`.

    Documents are `fitted`; their chunks are the last ones of a row, those before are padding.
    """

    def __init__(self, config: Chunks):
        self._config = config

    def __call__(self, row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        config, tokens = self._config, int((row["segments"] > 0).sum())
        question = asked(row["weights"][:tokens] > 0) if tokens else 0
        start = config.length * context_chunks(config, question, tokens)
        chunks, mask, _ = split(row["tokens"][:start], config.count, config.length, 0)
        context = {"chunks": chunks, "chunk_mask": mask, **learned(row, start, config)}
        return decoders(row, start, tokens, config.decoder) | context
