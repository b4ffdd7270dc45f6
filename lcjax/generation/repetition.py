"""Reads prompts again before a cache policy cuts them, such as KVzip's repetition of a text.

The tokens of a reading follow the prompt and see all of it, but enter no cache: layers get space
for them, and afterwards only the numbers that the policy keeps for the prompt's tokens stay.
"""

from collections.abc import Sequence

import numpy as np

from lcjax.attention.cache import Arrays
from lcjax.checkpoints.tokenizer import Tokenizer, encode_mid_text
from lcjax.generation.programs import InferenceJit
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models import decoder as decoder_lib
from lcjax.models.cache import Cache
from lcjax.parallel.sharding import keep_rows
from lcjax.rope import Rotation


def read_again(
    model: Decoder,
    params: dict,
    cache: Cache,
    rotation: Rotation,
    texts: Sequence[Sequence[int]],
    start: int,
    tokenizer: Tokenizer,
) -> Cache:
    """Reads what the cache policy wants to read again, and returns the cache with its numbers.

    Args:
      model: the decoder, whose cache policy `reads_again`.
      params: its parameters.
      cache: the cache with the texts.
      rotation: with which they were read.
      texts: token ids of each row since the last cut.
      start: order index of the first of them, the same in all rows.
      tokenizer: encodes the requests of the policy.
    """

    def encode(text: str) -> list[int]:
        return encode_mid_text(tokenizer, text, allow_special=True)

    policy = model.config.cache
    rows = [policy.readings([*map(int, text)], start, encode) for text in texts]
    for number in range(max(map(len, rows))):
        batch = [row[number] if number < len(row) else None for row in rows]
        width = _width(max(len(reading.ids) for reading in batch if reading is not None))
        tokens, segments = np.zeros((2, len(batch), width), np.int32)
        spans = np.zeros((len(batch), 1, 2, 1), np.int32)
        for row, reading in enumerate(batch):
            if reading is not None:
                tokens[row, : len(reading.ids)] = reading.ids
                segments[row, : len(reading.ids)] = 1
                spans[row, 0, :, 0] = reading.start, reading.stop
        state = _read(model, params, cache, tokens, segments, rotation, spans)
        layers = (old | new for old, new in zip(cache.layers, state, strict=True))
        cache = cache_lib.replace_layers(cache, tuple(layers))
    return cache


def _width(length: int) -> int:
    """Rounds a number of tokens up to one of few sizes, each of which compiles a program."""
    unit = 32 if length <= 256 else 256
    return -(-length // unit) * unit


def _read_without_keeping(model, params, cache, tokens, segments, rotation, spans) -> list[Arrays]:
    """Returns the policy's numbers for the slots of each layer, after the reading of `tokens`."""
    mesh, names = model.mesh, model.config.cache.slot_state
    spacious = cache_lib.with_extra_slots(cache, tokens.shape[1], {"span": spans}, mesh)
    positions = cache_lib.next_order(cache, segments, tokens.shape[1])
    output = decoder_lib.apply(
        model,
        params,
        keep_rows(tokens, mesh),
        positions=keep_rows(positions, mesh),
        segments=segments,
        rotation=rotation,
        cache=spacious,
    )
    numbers = [
        {name: new[name][:, :, : old[name].shape[2]] for name in names if name in old}
        for old, new in zip(cache.layers, output.cache.layers, strict=True)
    ]
    return cache_lib.keep_heads(numbers, mesh)


_read = InferenceJit(_read_without_keeping, static_argnums=0, tokens=3)
