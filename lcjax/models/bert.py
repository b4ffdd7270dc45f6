"""BERT (Devlin et al. 2019, arXiv 1810.04805): the encoder of dense retrievers.

It differs from `lcjax.models.decoder` in the order of operations: a layer is
norm(x + attention(x)), then norm(x + mlp(x)), and positions and token types have learned
embeddings. Projections, MLP and norms are those of `lcjax.models.layers`, so sharding rules and
low-rank adapters apply.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lcjax.errors import INT32_MAX, InputError, check_integer, check_one_of
from lcjax.models.layers import Linear, Norm, Projections, look_up
from lcjax.models.lora import LoRA
from lcjax.models.memory import TensorRow
from lcjax.models.mlp import MLP
from lcjax.models.model_config import MAX_LAYERS, ModelConfig
from lcjax.parallel.sharding import attention_layout, keep_tokens
from pallas_kernels import flash

MODEL_TYPES = ("bert", "dpr")  # `model_type` of config.json
# `hidden_act` of config.json, and the activation of `lcjax.models.mlp.MLP`.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
# Field, key of config.json, and transformers' default for a missing key.
_SIZES = (
    ("vocab_size", "vocab_size", 30_522),
    ("width", "hidden_size", 768),
    ("mlp_width", "intermediate_size", 3_072),
    ("num_layers", "num_hidden_layers", 12),
    ("num_heads", "num_attention_heads", 12),
    ("max_length", "max_position_embeddings", 512),
    ("num_token_types", "type_vocab_size", 2),
)

# What the layers of a decoder have only if its config says so
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Configuration of a BERT."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    max_length: int  # rows of the table of positions
    num_token_types: int = 2
    norm_epsilon: float = 1e-12
    activation: str = "gelu"
    pooler: bool = False  # whether there is a dense layer with tanh over [CLS]
    dtype: str = "float32"  # of activations; softmax and norms stay float32
    param_dtype: str = "float32"
    lora: LoRA | None = None

    # Fields that `lcjax.models.layers` reads; the same for every BERT. Those that are not stated
    # have the default of `ModelConfig` (`__getattr__`).
    norm: ClassVar[str] = "layer"
    gated_mlp: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = True
    out_bias: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise AttributeError(f"BertConfig has no field {name!r}")

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def replace(self, **changes: Any) -> "BertConfig":
        return dataclasses.replace(self, **changes)

    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "config.json") -> "BertConfig":
        """Reads the `config.json` of a BERT or DPR checkpoint.

        Args:
          hf: the contents of the file.
          where: its name, for messages.

        Raises:
          InputError: another architecture, or an unsupported value.
        """
        kind = hf.get("model_type")
        if kind not in MODEL_TYPES:
            raise InputError(
                f"{where}: model_type={kind!r:.40} is not a BERT; encoders are read with"
                " model_type bert or dpr, static embeddings with model2vec"
            )
        sizes = {field: hf.get(key, default) for field, key, default in _SIZES}
        for field, key, _ in _SIZES:
            most = MAX_LAYERS if field == "num_layers" else INT32_MAX
            check_integer(f"{where}: {key}", sizes[field], 1, most=most)
        if sizes["width"] % sizes["num_heads"]:
            raise InputError(
                f"{where}: num_attention_heads={sizes['num_heads']} must divide"
                f" hidden_size={sizes['width']}"
            )
        activation = hf.get("hidden_act", "gelu")
        check_one_of(f"{where}: hidden_act", activation, _ACTIVATIONS)
        for key, allowed in (
            ("position_embedding_type", (None, "absolute")),
            ("is_decoder", (None, False)),
            ("add_cross_attention", (None, False)),
            ("projection_dim", (None, 0)),
            ("per_layer_config", (None, {})),
        ):
            if hf.get(key) not in allowed:
                raise InputError(
                    f"{where}: {key}={hf[key]!r:.40} must be {allowed[1]!r}: other BERTs are not"
                    " supported"
                )
        epsilon = float(hf.get("layer_norm_eps", 1e-12))
        return cls(**sizes, norm_epsilon=epsilon, activation=_ACTIVATIONS[activation])

    def hf_sizes(self) -> dict[str, int]:
        """Returns the sizes under their keys of `config.json`."""
        return {key: getattr(self, field) for field, key, _ in _SIZES}

    def hf_axes(self) -> dict[str, int]:
        """Returns the sizes of the axis letters in `hf_rows`."""
        return {
            "V": self.vocab_size,
            "P": self.max_length,
            "Y": self.num_token_types,
            "D": self.width,
            "F": self.mlp_width,
            "N": self.num_heads,
            "H": self.head_dim,
            "O": self.width,  # of the pooler
        }

    def hf_rows(self, *, older_names: bool) -> list[TensorRow]:
        """Returns the tensor names of Hugging Face checkpoints (see `lcjax.checkpoints.hf_names`).

        Args:
          older_names: whether the parameters of norms have the aliases gamma and beta, as in
            checkpoints converted from TensorFlow. They are read, and never written.
        """
        rows = [
            ("embeddings.word_embeddings.weight", "V,D", "embed/embedding", "VD"),
            ("embeddings.position_embeddings.weight", "P,D", "position/embedding", "PD"),
            ("embeddings.token_type_embeddings.weight", "Y,D", "token_type/embedding", "YD"),
            *_norm("embeddings.LayerNorm", "embed_norm"),
        ]
        layer = []
        for name in ("query", "key", "value"):
            hf, path = f"attention.self.{name}", f"attention/{name}"
            layer += [
                (f"{hf}.weight", "NH,D", f"{path}/kernel", "DNH"),
                (f"{hf}.bias", "NH", f"{path}/bias", "NH"),
            ]
        layer += [
            ("attention.output.dense.weight", "D,NH", "attention/out/kernel", "NHD"),
            ("attention.output.dense.bias", "D", "attention/out/bias", "D"),
            *_norm("attention.output.LayerNorm", "attention_norm"),
            ("intermediate.dense.weight", "F,D", "mlp/up/kernel", "DF"),
            ("intermediate.dense.bias", "F", "mlp/up/bias", "F"),
            ("output.dense.weight", "D,F", "mlp/down/kernel", "FD"),
            ("output.dense.bias", "D", "mlp/down/bias", "D"),
            *_norm("output.LayerNorm", "mlp_norm"),
        ]
        for names, axes, path, ours in layer:
            names = "|".join(f"encoder.layer.{{}}.{name}" for name in names.split("|"))
            rows.append((names, axes, f"layers/{path}", ours))
        if self.pooler:
            rows += [
                ("pooler.dense.weight", "O,D", "pooler/kernel", "DO"),
                ("pooler.dense.bias", "O", "pooler/bias", "O"),
            ]
        if not older_names:
            rows = [(names.split("|")[0], *rest) for names, *rest in rows]
        return rows


def _norm(hf: str, path: str) -> list[TensorRow]:
    return [
        (f"{hf}.weight|{hf}.gamma", "D", f"{path}/scale", "D"),
        (f"{hf}.bias|{hf}.beta", "D", f"{path}/bias", "D"),
    ]


class Block(nn.Module):
    """A layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    config: BertConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None
    ) -> tuple[Float[Array, "B T D"], None]:
        c, mesh = self.config, None if self.is_initializing() else self.mesh
        x = keep_tokens(x, mesh)
        projections = Projections(c, mesh, name="attention")
        q, k, v = projections.project(x)
        if self.is_initializing():
            y = q  # no parameter depends on attention
        else:
            with jax.named_scope("attend"):
                y, _ = flash(q, k, v, k_lengths=lengths, layout=attention_layout(mesh))
        x = Norm(c, name="attention_norm")(x + projections.combine(y))
        x = Norm(c, name="mlp_norm")(x + MLP(c, mesh, name="mlp")(x))
        return keep_tokens(x, mesh), None


class Bert(nn.Module):
    """A bidirectional encoder that returns hidden states.

    `hidden = model.apply({"params": params}, tokens, lengths=lengths)`
    """

    config: BertConfig
    mesh: jax.sharding.Mesh | None = None  # its devices share rows and heads

    def setup(self):
        c = self.config
        dtype, normal = jnp.dtype(c.param_dtype), nn.initializers.normal(0.02)

        def table(rows):
            return nn.Embed(rows, c.width, param_dtype=dtype, embedding_init=normal)

        self.embed = table(c.vocab_size)
        self.position = table(c.max_length)
        self.token_type = table(c.num_token_types)
        self.embed_norm = Norm(c)
        self.layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.num_layers,
        )(c, self.mesh)
        if c.pooler:
            self.pooler = Linear((c.width,), (c.width,), c, bias=True)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the hidden states of the last layer.

        Args:
          tokens: token ids; T is at most `config.max_length`.
          token_types: token type of each token; None: 0.
          lengths: number of visible tokens of each row, from the first one on; None: all. Later
            tokens are invisible but see the visible ones, as the [MASK] tokens of ColBERT do.

        Raises:
          InputError: T exceeds `config.max_length`.
        """
        c, dtype = self.config, self.config.compute_dtype()
        if tokens.shape[1] > c.max_length:
            raise InputError(
                f"{tokens.shape[1]} tokens are more than the {c.max_length} positions of this BERT;"
                " give it shorter texts"
            )
        mesh = None if self.is_initializing() else self.mesh
        # float32, so that the sum of three embeddings is rounded only once, after the norm.
        x = look_up(self.embed.embedding, tokens, jnp.dtype(jnp.float32), mesh)
        x = x + self.position.embedding[: tokens.shape[1]].astype(jnp.float32)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        x = x + self.token_type.embedding[types].astype(jnp.float32)
        x, _ = self.layers(self.embed_norm(x).astype(dtype), lengths)
        if self.is_initializing() and c.pooler:
            self.pooled(x)
        return x

    def pooled(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Returns tanh(dense(x)) of the first token, the input of classifiers."""
        return jnp.tanh(self.pooler(hidden[:, 0]))
