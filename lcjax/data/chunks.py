"""Long rows as chunks of context for an encoder, and the tokens behind them for the decoder.

CEPE (Yen et al. 2024, arXiv 2402.16617, sec. 3.1) reads consecutive tokens in two parts: the last
ones go to the decoder, which learns them; those before are cut into chunks of one length, which
the encoder reads side by side. Chunks are the raw tokens: nothing is put at their beginnings, BOS
and EOS stand where documents begin and end.
"""

from dataclasses import dataclass

import numpy as np

from lcjax.errors import InputError, whole_numbers

TEXTS = ("before", "same", "beginning")


@dataclass(frozen=True)
class Noise:
    """`data.chunks.noise`: context that is hidden in training (CEPE, sec. 3.2).

    A chunk is touched with probability `rate`. Of these a share `whole` is hidden altogether, of
    the others the last tokens: a number drawn from 1 ... P - `leave`, P the length of a chunk.
    """

    rate: float = 0.3
    whole: float = 0.1
    leave: int = 0  # tokens that are left of a suffix; the released code leaves 1

    def __post_init__(self):
        for name in ("rate", "whole"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"noise.{name}={getattr(self, name)} must lie in 0 ... 1, such as 0.3"
                )
        whole_numbers("noise", self, 0, "leave")


@dataclass(frozen=True)
class Chunks:
    """`data.chunks`: of a row of `data.length` tokens the first count x length are context."""

    count: int = 16  # chunks of a row
    length: int = 256  # tokens of a chunk
    # What the chunks hold: before, the tokens before those of the decoder; same, the decoder's own
    # tokens, which it then learns to copy (the warm-up of CEPE); beginning, the first whole chunks
    # of a document, those of a conversation's question (SharedLLM): see `lcjax.data.chunks`
    text: str = "before"
    noise: Noise | None = None  # hides some of the context in training, never in validation
    decoder: int | None = None  # of beginning: tokens of a row that the decoder has room for
    most: int | None = None  # of beginning: chunks of a text without a question; null: count
    # Whether what follows the tokens of chunks is learned as well: of memories whose chunks the
    # decoder reads one after the other (beacon, auto_compressor)
    learned: bool = False

    def __post_init__(self):
        whole_numbers("chunks", self, 1, "count", "length", "decoder", "most")
        if self.text not in TEXTS:
            raise InputError(f"chunks.text={self.text} is not one of {', '.join(TEXTS)}")
        if self.noise is not None and self.noise.leave >= self.length:
            raise InputError(
                f"chunks.noise.leave={self.noise.leave} leaves nothing to hide in chunks.length="
                f"{self.length}; set it to 0 or 1"
            )
        if self.learned and self.text == "same":
            raise InputError(
                "chunks.learned=true learns the tokens before the decoder's, and with"
                " chunks.text=same there are none; leave it out"
            )
        begins = self.text == "beginning"
        if begins and (self.decoder or 0) < 2 * self.length:
            raise InputError(
                f"chunks.decoder={self.decoder} must be at least {2 * self.length} with"
                f" chunks.text=beginning: up to two chunks of {self.length} tokens of a question"
                " and the answer are left to it"
            )
        for key in ("decoder", "most"):
            if not begins and getattr(self, key) is not None:
                raise InputError(
                    f"chunks.{key}={getattr(self, key)} is for chunks.text=beginning; leave it out"
                )

    @property
    def tokens(self) -> int:
        """Of all chunks of a row."""
        return self.count * self.length

    def decoder_length(self, length: int) -> int:
        """Tokens that the decoder reads of a row of `length`."""
        shape = f"data.chunks of {self.count} x {self.length} = {self.tokens} tokens"
        if self.text == "same":
            if length != self.tokens:
                raise InputError(
                    f"data.length={length} must equal {shape} with chunks.text=same, which hold"
                    f" the whole row; set it to {self.tokens}"
                )
            return length
        if self.text == "beginning":
            if length > self.tokens + self.decoder:
                raise InputError(
                    f"data.length={length} is more than {shape} and chunks.decoder={self.decoder}"
                    f" hold; set it to {self.tokens + self.decoder} or less"
                )
            return self.decoder
        if length < self.tokens + 2:
            raise InputError(
                f"data.length={length} leaves the decoder nothing to learn behind {shape}: a row"
                f" holds both; set it to, say, {2 * self.tokens}"
            )
        return length - self.tokens


def split(
    tokens: np.ndarray, chunks: int, chunk_length: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Consecutive `tokens` [n] as context and what follows it.

    The last `length` tokens are the decoder's, or all if there are fewer; the context is what
    stands right before them, as much as `chunks` of `chunk_length` hold. It ends where the last
    chunk ends: where text is missing, the first chunks are padding, and one begins with it.

    Returns:
      chunks: int32 [chunks, chunk_length]; 0 is padding.
      mask: bool, the same shape; true where there is text.
      rest: the decoder's tokens [min(n, length)].
    """
    start = max(len(tokens) - length, 0)
    context = tokens[max(start - chunks * chunk_length, 0) : start]
    missing = chunks * chunk_length - len(context)
    flat = np.concatenate([np.zeros(missing, np.int32), context]).astype(np.int32)
    mask = np.arange(len(flat)) >= missing
    shape = chunks, chunk_length
    return flat.reshape(shape), mask.reshape(shape), tokens[start:]


def learned(row: dict[str, np.ndarray], end: int, config: Chunks) -> dict[str, np.ndarray]:
    """What is learned of the context [K, Tc] that stands right before the place `end` of a row.

    `chunk_targets` int32 and `chunk_weights` float32, where `config` asks for them.
    """
    if not config.learned:
        return {}
    start, shape = max(end - config.tokens, 0), (config.count, config.length)
    missing = config.tokens - (end - start)
    return {
        f"chunk_{name}": np.pad(row[name][start:end], (missing, 0)).reshape(shape)
        for name in ("targets", "weights")
    }


class Cut:
    """A row of `length` tokens -> the decoder's part of all its fields, `chunks` and `chunk_mask`.

    Targets, attached before any cut, stay: the last place of a row has one in the next row.
    """

    def __init__(self, config: Chunks, length: int):
        self._config, self._same = config, config.text == "same"
        self._length = config.decoder_length(length)

    def __call__(self, row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        config, text = self._config, int((row["segments"] > 0).sum())
        behind = 0 if self._same else self._length
        chunks, mask, rest = split(row["tokens"][:text], config.count, config.length, behind)
        start = text - len(rest)
        context = {"chunks": chunks, "chunk_mask": mask, **learned(row, start, config)}
        if not self._same:
            row = decoders(row, start, text, self._length)
        return row | context


def decoders(
    row: dict[str, np.ndarray], start: int, end: int, length: int
) -> dict[str, np.ndarray]:
    """The places `start` ... `end` of a row alone, padded to the decoder's `length`."""
    missing = length - (end - start)
    row = {name: np.pad(value[start:end], (0, missing)) for name, value in row.items()}
    segments = row["segments"]
    segments = np.where(segments > 0, segments - segments[0] + 1, 0).astype(np.int32)
    return row | {"segments": segments, "positions": positions_in(segments)}


class Hide:
    """A row with `chunk_mask` false also where `Noise` hides its context; that is not learned."""

    def __init__(self, config: Noise):
        self._config = config

    def __call__(
        self, row: dict[str, np.ndarray], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        kept = self._kept(*row["chunk_mask"].shape, random)
        there = np.arange(row["chunk_mask"].shape[1]) < kept[:, None]
        row = row | {"chunk_mask": row["chunk_mask"] & there}
        if "chunk_weights" in row:
            row["chunk_weights"] = row["chunk_weights"] * there.astype(np.float32)
        return row

    def _kept(self, count: int, length: int, random: np.random.Generator) -> np.ndarray:
        """How many places of each chunk may be seen, int [count].

        One number per chunk decides between nothing, all and a part, as in the released code.
        """
        rate, whole = self._config.rate, self._config.whole
        drawn = random.random(count)
        hidden = random.integers(1, length - self._config.leave, count, endpoint=True)
        kept = np.where(drawn < rate, length - hidden, length)
        return np.where(drawn < rate * whole, 0, kept)


def positions_in(segments: np.ndarray) -> np.ndarray:
    """From 0 in every stretch of equal `segments`, int32; 0 on padding."""
    at = np.arange(len(segments), dtype=np.int32)
    begins = np.append(True, segments[1:] != segments[:-1])
    positions = at - np.maximum.accumulate(np.where(begins, at, 0))
    return np.where(segments > 0, positions, 0).astype(np.int32)


def asked(learned: np.ndarray) -> int:
    """Tokens of the question of a document, by which of its places [n] have a learned target.

    All n of a text, of which every token is learned.
    """
    return len(learned) if learned[0] else int(np.argmax(learned)) + 1


def num_context_chunks(config: Chunks, question: int, tokens: int) -> int:
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
    room = config.decoder + config.length * num_context_chunks(config, question, len(pair))
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
        start = config.length * num_context_chunks(config, question, tokens)
        chunks, mask, _ = split(row["tokens"][:start], config.count, config.length, 0)
        context = {"chunks": chunks, "chunk_mask": mask, **learned(row, start, config)}
        return decoders(row, start, tokens, config.decoder) | context
