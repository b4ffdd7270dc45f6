"""Activation Beacon: windows of a text are condensed to keys and values of beacon tokens.

Zhang et al. 2024, "Soaring from 4K to 400K: extending LLM's context with activation beacon" (arXiv
2401.03462, first version). A window of P tokens is followed by P / r beacons, one for every r of
its tokens, all with one learned embedding. Beacons have separate projections of queries, keys,
values and outputs in every layer; norms and MLPs are those of the decoder, which is not changed.
After m beacons of earlier windows,

    token j has position m + j and sees these m, and the tokens of the window up to itself;
    beacon i has position m + (i + 1) r and sees these m, the first (i + 1) r tokens, and itself

("step-expansion"). Of a window, each layer stores only the values and unrotated keys of beacons.
For later windows they have positions m, m + 1, ..., so r times as much text fits before the last
window.

Published as namespace-Pt/activation-beacon-llama2-7b-chat; the tensors and fields of config.json
that are read are those of its classes (FlagOpen/FlagEmbedding at 0ad0dee, Long_LLM/
activation_beacon/src/activation_beacon_llama). The models of the newer code place beacons among the
tokens and are not read.
"""

import dataclasses
import warnings
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention import AttentionMetadata, Causal
from lcjax.attention.base import rotate_queries
from lcjax.attention.cache import Arrays
from lcjax.errors import InputError, Range, check_integer
from lcjax.memory.prefix import (
    PrefixMemory,
    WindowReader,
    WindowSize,
    check_released,
    check_token,
    collect_range,
    init_embeddings,
    is_released,
)
from lcjax.models.layers import (
    Attention,
    LayerInputs,
    LayerOutput,
    Projections,
    collect_key_values,
)
from lcjax.models.memory import (
    EncodedContext,
    Memory,
    MemorySection,
    ReadConfig,
    TensorRow,
    add_to_readers,
)
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import attention_layout

# Defaults of the released config class, which are also all that is computed here; a window is
# condensed as a whole if its stride is its length.
_RELEASED_DEFAULTS = {
    "beacon_stride": [1024],
    "beacon_attn": "step-expansion",
    "beacon_attend_previous": True,
    "beacon_ratio": [8],
    "beacon_param": ["q", "k", "v", "o"],
    "retrieval_method": None,
}

Ratio = Annotated[int, Range(0, hint="0 keeps all tokens")]
TrainedRatio = Annotated[int, Range(1, hint="1 has a beacon for every token")]


@Memory.register_subclass("beacon")
@dataclasses.dataclass(frozen=True)
class Beacon(PrefixMemory):
    """Options of Activation Beacon."""

    # Tokens of a window per beacon. 0: no beacons; the keys and values of all tokens are stored.
    ratio: Ratio = 32
    # In training the ratio is drawn from these for each window of a row; empty: `ratio`.
    ratios: tuple[TrainedRatio, ...] = ()

    @property
    def num_embeddings(self) -> int:
        return 1

    @property
    def attention_module(self) -> type[Attention]:
        return BeaconAttention

    def num_slots(self, tokens: int) -> int:
        return -(-tokens // self.ratio) if self.ratio else tokens

    def max_slots(self, tokens: int) -> int:
        # Without a random key, as in validation, the ratio is `ratio` even if `ratios` is set.
        if not self.ratios:
            return self.num_slots(tokens)
        return -(-tokens // min(self.ratio, *self.ratios))

    def tokens_read(self, tokens: int) -> int:
        return tokens + self.max_slots(tokens) if self.ratio else tokens

    def for_inference(self) -> "Beacon":
        """Returns a copy that condenses every window by `ratio`."""
        return dataclasses.replace(self, ratios=())

    def check(self, config: ModelConfig) -> None:
        if not isinstance(self.ratios, tuple):
            raise InputError(
                f"model.memory.ratios={self.ratios!r} must be a list of whole numbers, such as"
                " [2, 4, 8]; [] trains with model.memory.ratio alone"
            )
        super().check(config)
        if self.ratios and not self.ratio:
            raise InputError(
                "model.memory.ratio=0 keeps all tokens and has no beacons to train; leave"
                " model.memory.ratios empty, or set ratio to one of them"
            )
        self.check_chunk(self.chunk, "model.memory.chunk")
        if self.chunk + self.num_slots(self.chunk) > config.max_length:
            raise InputError(
                f"model.memory.chunk={self.chunk} and the {self.num_slots(self.chunk)} slots of the"
                f" window before it are more than the {config.max_length} tokens that the model"
                f" was trained to read; set it to {config.max_length // 2} or less, or raise"
                " model.memory.ratio"
            )

    def check_chunk(self, length: int, key: str) -> None:
        super().check_chunk(length, key)
        for ratio in (self.ratio, *self.ratios):
            if ratio and length % ratio:
                below, above = length // ratio * ratio, -(-length // ratio) * ratio
                near = ", ".join(str(size) for size in (below, above) if size)
                raise InputError(
                    f"{key}={length} must be a multiple of {ratio}, the tokens that a beacon stands"
                    f" for (model.memory.ratio, ratios); nearest: {near}"
                )

    def encode_window(
        self,
        reader: WindowReader,
        embedding: Float[Array, "1 D"],
        tokens: Int[Array, "B P"],
        mask: Bool[Array, "B P"],
        key: jax.Array | None,
    ) -> EncodedContext:
        (rows, size), x = tokens.shape, reader.embed(tokens)
        positions, length = jnp.cumsum(mask, axis=1) - 1, mask.sum(1, keepdims=True)
        if not self.ratio:
            output = reader(x, positions, mask, collect=collect_range(size, rows))
            return reader.slots(mask, output.key_values, output.hidden)
        count, ratio = self.max_slots(size), self._draw_ratio(key, rows)[:, None]
        # If r does not divide the window, its last beacon condenses fewer tokens.
        beacon_mask = jnp.arange(count) * ratio < length
        beacons = jnp.minimum(jnp.arange(1, count + 1) * ratio, length)
        embeddings = jnp.broadcast_to(embedding, (rows, count, x.shape[-1]))
        output = reader(
            jnp.concatenate([x, embeddings], 1),
            jnp.concatenate([positions, beacons], 1),
            jnp.concatenate([mask, beacon_mask], 1),
            collect=collect_range(count, rows, size),
            beacons=beacons,
        )
        return reader.slots(beacon_mask, output.key_values, output.hidden[:, :size])

    def _draw_ratio(self, key: jax.Array | None, rows: int) -> Int[Array, " B"]:
        """Returns the ratio of a window in each row."""
        if not self.ratios or key is None:
            return jnp.full((rows,), self.ratio, jnp.int32)
        return jax.random.choice(key, jnp.array(self.ratios, jnp.int32), (rows,))

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig | None:
        if not is_released(hf, "beacon_window"):
            return super().from_hf(hf, where, read_config)
        return read_config(hf, where).replace(memory=cls._released(hf, where))

    @classmethod
    def _released(cls, hf: dict[str, Any], where: str) -> "Beacon":
        """Returns the memory of a `config.json` of the released code."""
        hf = _RELEASED_DEFAULTS | hf
        known = {"beacon_window", "beacon_stride_mix", "beacon_ratio_mix", *_RELEASED_DEFAULTS}
        for key, value in hf.items():
            if key.startswith("beacon_") and key not in known:
                raise InputError(
                    f"{where}: {key}={value!r:.60} is a field of the newer code of Activation"
                    " Beacon, in which beacons stand among the tokens of a window; lcjax computes"
                    " the first version only (namespace-Pt/activation-beacon-llama2-7b-chat)"
                )
        window, ratios = hf["beacon_window"], hf["beacon_ratio"]
        computed = _RELEASED_DEFAULTS | {"beacon_stride": [window], "beacon_ratio": ratios}
        check_released(cls, hf, where, computed)
        if not isinstance(ratios, list) or not ratios:
            raise InputError(f"{where}: beacon_ratio={ratios!r:.60} must be a list of ratios")
        for ratio in ratios:
            check_integer(f"{where}: beacon_ratio", ratio, 0, "0 keeps all tokens")
        if len(ratios) == 1:
            return cls(window, ratios[0])
        ratio = cls.ratio if cls.ratio in ratios else max(ratios)
        warnings.warn(
            f"{where}: beacon_ratio={ratios} with beacon_ratio_mix={hf.get('beacon_ratio_mix')!r}"
            " chooses a ratio for each text or window; lcjax condenses every window by"
            f" {ratio}, and by another ratio if config.json has it alone in beacon_ratio",
            stacklevel=2,
        )
        return cls(window, ratio, tuple(ratio for ratio in ratios if ratio))

    def hf_rows(self, config: ModelConfig, decoder_rows: list[TensorRow]) -> list[TensorRow]:
        attention = [
            (
                name.replace("self_attn.", "self_attn.beacon_"),
                axes,
                path.replace("attention/", "attention/memory/"),
                param_axes,
            )
            for name, axes, path, param_axes in decoder_rows
            if "self_attn." in name
        ]
        return [*attention, ("model.beacon_embed_tokens.weight", "R,D", "encoder/embedding", "RD")]


class BeaconAttention(Attention):
    """Self-attention in which beacons have separate projections and no other token sees them."""

    def setup(self):
        super().setup()
        self.memory = Projections(self.config.replace(lora=None), self.mesh)

    def __call__(
        self, x: jax.Array, context: LayerInputs, cache: Arrays | None
    ) -> tuple[jax.Array, LayerOutput]:
        if self.is_initializing():
            self.memory.combine(self.memory.project(x)[0])
        if context.beacons is None:
            return super().__call__(x, context, cache)
        size = x.shape[1] - context.beacons.shape[1]
        q, k, v = self.project(x[:, :size])
        beacon_q, beacon_k, beacon_v = self.memory.project(x[:, size:])
        with jax.named_scope("attend"):
            q = jnp.concatenate([q, beacon_q], 1)
            index = context.index[:, :size]
            self_partial = _self_partial(beacon_q, beacon_k, beacon_v, context, size)
            metadata = AttentionMetadata(
                context.positions,
                context.positions[:, :size],
                rotation=context.rotation,
                # A beacon has the order index of the last token that it sees.
                q_index=jnp.concatenate([index, context.beacons - 1], 1),
                k_index=index,
                q_segments=context.segments,
                k_segments=context.segments[:, :size],
                layout=attention_layout(self.mesh),
                extra_partials=[*self.other_partials(q, context), self_partial],
            )
            y = Causal().attend(q, k, v, metadata)
        out = [self.combine(y[:, :size]), self.memory.combine(y[:, size:])]
        k, v = (jnp.concatenate(pair, 1) for pair in ((k, beacon_k), (v, beacon_v)))
        key_values = collect_key_values(k, v, context, Causal())
        return jnp.concatenate(out, 1), LayerOutput(key_values=key_values)


def _self_partial(
    q: jax.Array, k: jax.Array, v: jax.Array, context: LayerInputs, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the partial of each beacon to itself; it is empty for the `size` tokens before."""
    positions = context.positions[:, size:]
    q = rotate_queries(q, positions, context.rotation).astype(jnp.float32)
    k = context.rotation.rotate(k, positions).astype(jnp.float32)
    k, v = (jnp.repeat(part, q.shape[2] // part.shape[2], axis=2) for part in (k, v))
    lse = (q * k).sum(-1) * q.shape[-1] ** -0.5
    padding = [(0, 0), (size, 0), (0, 0)]
    return jnp.pad(v, [*padding, (0, 0)]), jnp.pad(lse, padding, constant_values=-jnp.inf)


@MemorySection.register_subclass("beacon")
@dataclasses.dataclass(frozen=True)
class BeaconSection(MemorySection):
    """Activation Beacon (arXiv 2401.03462): windows before the text are condensed by beacons."""

    chunk: WindowSize = 1024  # tokens of a window
    ratio: Ratio = 32  # tokens per beacon, except in training (128 for 400K)
    # In training each window draws its ratio from these; empty: ratio. 2 to 128 in the paper.
    ratios: tuple[TrainedRatio, ...] = (2, 4, 8, 16, 32, 64, 128)
    init_token: int = 2  # token whose embedding initialises the beacons': EOS, for Llama

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> Beacon:
        check_token(self.init_token, config)
        return Beacon(self.chunk, self.ratio, tuple(self.ratios))

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Adds the embedding of beacons, and copies of the decoder's projections for beacons."""

        def init_layer(layer):
            return {"attention": {"memory": layer["attention"]}}

        params = add_to_readers(params, config, init_layer, mesh)
        return init_embeddings(params, config, self.init_token, mesh)
