"""Memories that layers read by cross-attention, between self-attention and MLP."""

import dataclasses
import functools
import math
import re
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.errors import Interval, Range
from lcjax.models.layers import LayerInputs, Linear, Norm
from lcjax.models.memory import EncodedContext, Memory, TensorRow, VisibleKeys
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import LENGTH, attention_layout
from pallas_kernels import flash

ReaderLayers = Annotated[int, Range(1, hint="without any, leave model.memory out")]
# Initial output projection as a share of self-attention's.
OutputShare = Annotated[float, Interval(least=0, most=1, hint="0 for no output at first")]

RELEASED_CLASS = "LlamaForCausalContextLM"  # in CEPE's code, on which SharedLLM's is based


class CrossAttentionMemory(Memory):
    """A memory that reader layers read by cross-attention between self-attention and MLP.

    By default tokens attend to all slots, which have no order. A memory with an encoder has its
    config in the field `states`.
    """

    @property
    def encoder_config(self) -> ModelConfig | None:
        return getattr(self, "states", None)

    def encoder_config_for(self, config: ModelConfig) -> ModelConfig:
        """Returns `encoder_config` with the dtypes and the rematerialisation of a decoder."""
        changes = {name: getattr(config, name) for name in ("dtype", "param_dtype", "remat")}
        return self.encoder_config.replace(**changes)

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return CrossAttention(config, mesh, **options)

    def project_states(
        self, params: dict, config: ModelConfig, encoded: EncodedContext
    ) -> EncodedContext:
        """Returns `encoded` with its states projected to keys and values of every reader layer.

        This stores 2 K H numbers per token and layer instead of E per token, and saves the
        projections in every later step. The layers of `params` must not be stacked.
        """
        if encoded.states is None:
            return encoded
        states = encoded.states.astype(config.compute_dtype())
        precision = jax.lax.Precision.HIGHEST if states.dtype == jnp.float32 else None
        project = functools.partial(jnp.einsum, "BME,EKH->BKMH", states, precision=precision)
        layers = []
        for number, reads in enumerate(self.reader_layers(config.num_layers)):
            if reads:
                branch = params[f"layers_{number}"]["memory"]
                kernels = (branch[name]["kernel"].astype(states.dtype) for name in ("key", "value"))
                layers.append(tuple(map(project, kernels)))
        return dataclasses.replace(encoded, states=None, layers=tuple(layers))

    def weight_uses(self, path: str, length: int, context: tuple[int, int] | None) -> float:
        if path.startswith("encoder/head/"):
            return 0.0  # the encoder's states are read, not its logits
        if path.startswith("encoder/") or re.search(r"/memory/(key|value)/", path):
            return 0.0 if context is None else math.prod(context) / length
        return float(context is not None) if "/memory/" in path else 1.0

    def chunk_parts(self, chunk: int) -> tuple[int, ...]:
        """Returns the sizes of the parts of a chunk that are encoded independently."""
        return (chunk,)

    def attention_flops(
        self, config: ModelConfig, length: int, context: tuple[int, int], visible_keys: VisibleKeys
    ) -> tuple[float, float]:
        num_chunks, size = context
        inside, encoder = 0.0, self.encoder_config
        if encoder is not None:
            pairs = sum(part * visible_keys(encoder, part) for part in self.chunk_parts(size))
            inside = 4 * encoder.num_heads * encoder.head_dim * (pairs / size)
            inside *= encoder.num_layers * math.prod(context) / length
        across = 4 * config.num_heads * config.head_dim * num_chunks * self.num_slots(size)
        return inside, across * sum(self.reader_layers(config.num_layers))

    def hf_rows(self, config: ModelConfig, decoder_rows: list[TensorRow]) -> list[TensorRow]:
        """Returns the tensor names of CEPE's code (princeton-nlp/CEPE); E is the states' width."""
        name, path = "model.layers.{}.cross_attn.", "layers/memory/"
        return [
            (name + "layernorm.weight", "D", path + "norm/scale", "D"),
            (name + "q_proj.weight", "NH,D", path + "query/kernel", "DNH"),
            (name + "k_proj.weight", "KH,E", path + "key/kernel", "EKH"),
            (name + "v_proj.weight", "KH,E", path + "value/kernel", "EKH"),
            (name + "o_proj.weight", "D,NH", path + "out/kernel", "NHD"),
        ]

    def hf_axes(self, config: ModelConfig) -> dict[str, int]:
        return {"E": (self.encoder_config or config).width}


class CrossAttention(nn.Module):
    """Cross-attention to the context: returns [B, T, D], 0 for rows without a filled slot.

    By default every reader layer projects the context's states to its own keys and values.
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: LayerInputs) -> Float[Array, "B T D"]:
        c, mesh, encoded = self.config, self.mesh, context.memory
        with jax.named_scope("memory"):
            normed, shape = Norm(c, name="norm")(x), (c.num_heads, c.head_dim)
            q = Linear((c.width,), shape, c, self.query_bias, mesh, name="query")(normed)
            k, v = self.keys(encoded)
            if self.is_initializing():
                y = q  # no parameter depends on attention
            else:
                visible, layout = self.visible_slots(context), self._layout(x, encoded.mask)
                y, _ = flash(self.queries(q, encoded), k, v, **visible, layout=layout)
            return Linear(shape, (c.width,), c, mesh=mesh, name="out")(y)

    @property
    def query_bias(self) -> bool:
        """Whether the projection of queries has a bias."""
        return False

    def queries(
        self, q: Float[Array, "B T N H"], encoded: EncodedContext
    ) -> Float[Array, "B T N H"]:
        """Returns the projected queries, rotated or scaled as the keys require."""
        return q

    def keys(
        self, encoded: EncodedContext
    ) -> tuple[Float[Array, "B M K H"], Float[Array, "B M K H"]]:
        """Returns the keys and values of a context of M slots."""
        if encoded.layers is not None:
            return tuple(part.swapaxes(1, 2) for part in encoded.layers[0])
        c, states = self.config, encoded.states.astype(self.config.compute_dtype())
        inputs, sizes = states.shape[-1:], (c.num_kv_heads, c.head_dim)
        return tuple(
            Linear(inputs, sizes, c, mesh=self.mesh, name=name)(states) for name in ("key", "value")
        )

    def visible_slots(self, context: LayerInputs) -> dict[str, Any]:
        """Returns the arguments of `flash` for the visible slots: by default all filled ones."""
        mask, length = context.memory.mask, context.positions.shape[1]
        return {
            "q_segments": jnp.ones((len(mask), length), jnp.int32),
            "k_segments": mask.astype(jnp.int32),
        }

    def _layout(self, x: jax.Array, mask: jax.Array):
        """Returns the kernels' layout; length is sharded if the devices divide text and context."""
        if self.mesh is None:
            return None
        tokens = x.shape[1] if mask.shape[1] % self.mesh.shape[LENGTH] == 0 else None
        plan = self.config.context_strategy(self.mesh, x.shape[1])
        return attention_layout(self.mesh, plan.method, tokens, plan.group)


def init_reader(layer: dict, output_share: float, width: int) -> dict:
    """Returns a layer's initial weights of `CrossAttention` to states of `width` channels.

    The query projection is a copy of self-attention's. Key and value projections are the first E
    input rows of self-attention's, where E is the width of the states. The norm is a copy of the
    MLP's, which reads hidden states next. This is CEPE's released code; the paper does not say.

    Args:
      layer: parameters of the decoder's layer, or of all layers stacked.
      output_share: the output projection is self-attention's times this factor; with 0 the
        decoder's outputs do not change at first.
      width: E.
    """
    attention = layer["attention"]
    key, value = (attention[name]["kernel"][..., :width, :, :] for name in ("key", "value"))
    return {
        "norm": {"scale": layer["mlp_norm"]["scale"]},
        "query": {"kernel": attention["query"]["kernel"]},
        "key": {"kernel": key},
        "value": {"kernel": value},
        "out": init_output(attention, output_share),
    }


def init_output(attention: dict, share: float) -> dict:
    """Returns self-attention's output projection times `share`, in its dtype."""
    kernel = attention["out"]["kernel"]
    return {"kernel": kernel * jnp.asarray(share, kernel.dtype)}
