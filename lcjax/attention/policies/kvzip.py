"""KVzip: a model repeats a text, and keeps the keys that it reads most while it does."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lcjax.attention.budgets import AcrossLayers, HeadBudget
from lcjax.attention.candidates import Seen, attention_by_head, by_blocks, on_each_device
from lcjax.attention.eviction import CachePolicy, Reading
from lcjax.errors import NonNegativeInt, PositiveInt


@CachePolicy.register_subclass("kvzip")
@dataclass(frozen=True)
class KVzip(CachePolicy):
    """Keeps what a model reads of a text while it repeats it (Kim et al. 2025, arXiv 2505.23416).

    After a prompt, with all of its keys, the model reads a request to repeat it, and the prompt
    again, part by part. The score of a key is the largest attention weight that it receives from
    these tokens, in a softmax over the first `sinks` tokens, the part, and the tokens of the
    repetition. They never enter the cache. The sinks always stay. So the choice does not depend on
    a question, and one cut serves many. By default the best keys of all layers and heads stay; in
    the layerwise form those of each layer (`heads: {type: adaptive, floor: 0}`). As in kvpress; in
    the authors' code the first `prefix` tokens always stay, which `sinks` of as many gives.

    A prompt is in the cache whole until it is cut, and reading it again costs about as much as
    reading it. Tokens after a prompt stay.
    """

    scores_attention: ClassVar[bool] = True

    examples = (
        {"ratio": 0.5, "repeat_size": 16},
        {"tokens": 32, "heads": None, "normalized": True},
    )
    slot_state: ClassVar[tuple[str, ...]] = ("received",)  # inf: a token was not repeated yet
    reads_again: ClassVar[bool] = True

    heads: HeadBudget | None = AcrossLayers()
    sinks: NonNegativeInt = 4
    repeat_size: PositiveInt = 2048  # tokens of the text that are repeated at once
    # First tokens of a text, such as those of a chat template, that are not repeated. They go
    # before all others, but for the sinks.
    prefix: NonNegativeInt = 0
    # What the model is asked before it repeats the first part, and the later ones
    first_request: str = "\n\nRepeat the previous context exactly."
    next_request: str = "\n\nRepeat the part of the previous context exactly, starting with"
    overlap: NonNegativeInt = 8  # tokens before a part, which end the request for it
    suffix: str = ""  # after a request: the tokens of a chat template before an answer
    # Whether weights are multiplied by |W_o v| / |x|, the norms of the value after the output
    # projection and of the layer's input x where it is read (KVzip+ of kvpress)
    normalized: bool = False

    @property
    def reads_output(self) -> bool:
        return self.normalized

    def readings(self, text, start, encode):
        first, later, suffix = map(encode, (self.first_request, self.next_request, self.suffix))
        begin = max(self.prefix - start, 0)
        readings = []
        for place in range(begin, len(text), self.repeat_size):
            part = [*text[place : place + self.repeat_size]]
            before = text[max(place - self.overlap, begin) : place]
            request = [*later, *before] if place > begin else first
            span = start + place, start + place + len(part)
            readings.append(Reading([*request, *suffix, *part], *span))
        return readings

    def observe(self, seen: Seen):
        slots = seen.slots
        received = jnp.where(seen.is_new, jnp.inf, slots.state["received"][..., 0])
        if "span" in slots.state:
            received = self._received(seen, received)
        return {"received": received[..., None]}

    def _received(self, seen: Seen, received: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
        """Returns `received` with the weights of the part that the new tokens repeat."""
        slots, new = seen.slots, seen.index.shape[1]
        start, stop = (slots.state["span"][:, :, i] for i in range(2))  # [B, 1, 1]
        in_part = (slots.index >= start) & (slots.index < stop)
        is_prefix = jnp.isinf(received) & slots.is_token & (slots.index < start)
        received = jnp.where(is_prefix, 0, received)
        # The part is short beside the text, so weights are those of gathered keys.
        is_read = in_part | seen.is_new | (slots.is_token & (slots.index < self.sinks))
        places = self._places(is_read, min(is_read.shape[-1], self.sinks + self.repeat_size + new))

        def gather(x, fill):
            index = places if x.ndim == 3 else places[..., None]
            take = functools.partial(jnp.take_along_axis, axis=2, mode="fill", fill_value=fill)
            return on_each_device(take, slots.layout, x, index)

        read = slots._replace(
            keys=gather(slots.keys, 0),
            values=gather(slots.values, 0),
            index=gather(slots.index, -1),
        )
        largest = self._largest(seen, read)
        is_scored = gather(in_part, False)
        places = jnp.where(is_scored, places, received.shape[-1])
        return jnp.put_along_axis(received, places, largest, axis=2, inplace=False, mode="drop")

    def _places(self, is_read: Bool[Array, "B K S"], most: int):
        """Returns the first `most` slots that are read, in order; S where there are fewer."""
        slots = is_read.shape[-1]
        places = jnp.where(is_read, jnp.arange(slots, dtype=jnp.int32), slots)
        return jnp.sort(places, axis=-1)[..., :most]

    def _largest(self, seen: Seen, read) -> Float[Array, "B K P"]:
        """Returns the largest weight of each key over queries and the heads of its group."""
        by_head, by_query = [], []
        if self.normalized:
            by_head = [_output_norms(read.values, seen.output_kernel)[:, :, :, None]]
            by_query = [1 / jnp.maximum(seen.input_norms, 1e-30)]

        def reduce(weights, *factors):
            for x in factors:
                weights = weights * x
            return weights.max((1, 2))

        def step(largest, queries, index, *scale):
            shape = *read.index.shape[:2], 1, queries.shape[2], 1
            scale = [jnp.broadcast_to(x[:, None, None, :, None], shape) for x in scale]
            weights = attention_by_head(read, queries, index, reduce, *by_head, *scale)
            return jnp.maximum(largest, weights)

        initial = jnp.zeros(read.index.shape, jnp.float32)
        return by_blocks(step, initial, seen.queries, seen.index, *by_query)

    def score(self, slots):
        received = slots.state["received"][..., 0]
        return jnp.where(slots.index < self.sinks, jnp.inf, received)


def _output_norms(
    values: Float[Array, "B K P H"], kernel: Float[Array, "N H D"]
) -> Float[Array, "B K G P"]:
    """Returns the 2-norms of values after the output projection of each query head.

    They come from the products [H, H] of the rows of the projection, without results of width D.
    """
    precision, kv_heads = jax.lax.Precision.HIGHEST, values.shape[1]
    kernel = kernel.astype(jnp.float32)
    gram = jnp.einsum("NHD,NID->NHI", kernel, kernel, precision=precision)
    gram = gram.reshape(kv_heads, -1, *gram.shape[1:])
    values = values.astype(jnp.float32)
    turned = jnp.einsum("BKPH,KGHI->BKGPI", values, gram, precision=precision)
    squares = (turned * values[:, :, None]).sum(-1)
    return jnp.sqrt(jnp.maximum(squares, 0))
