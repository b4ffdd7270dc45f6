"""Maps Hugging Face's tensor names to paths in the parameter tree, with one table.

A row is `(tensor, axes, path, our axes, condition)`. Letters are the library's array axes, and a
comma separates the axes of the stored tensor: with `"NH,D" -> "DNH"`, a matrix [N*H, D] is viewed
as [N, H, D] and transposed to [D, N, H]. Nothing between two commas is an axis of size 1. Names
with `{}` occur once per layer and are stacked on a leading axis L under `layers/`. Besides the
usual letters, P counts pairs of rotary channels, M is the hidden width of CLEX's learned
frequencies and O the width of the dense layer before masked logits. Rows and letters of a memory
are in its own module (`Memory.hf_rows`), and those of an attention pattern in the pattern
(`Pattern.parameters`, `Pattern.sizes`). Of a mixer, G counts heads of keys with C channels, U
heads of values with Y channels, and W the taps of its convolution.

Z is the width of a layer's part of a second embedding, and X that of all layers together.
E counts experts, whose width is F; S is the width of a shared expert. A name with `*` stands for
one tensor per expert, with the expert's number for `*`; the row describes their concatenation along
the leading axis. A name that ends with `[0::2]` or `[1::2]` stands for every second entry of a
tensor's last axis, one that ends with `[:n]` or `[n:]` for the first or second half of this axis,
and one that ends with `[:, :n]` or `[:, n:]` for a half of the second axis.

`"a|b"` is one tensor that the released class holds under two names. A checkpoint may store it under
either name, or under both with equal values; both are written.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lcjax.checkpoints.families import FAMILIES, Family
from lcjax.checkpoints.nearest_family import family_of
from lcjax.models.memory import Memory, TensorRow
from lcjax.models.model_config import ModelConfig

# Weights and biases of the decoder. The last column is the condition on the config: one of its
# fields, or a flag of `_rows`. Rows whose path begins with `layers/` occur once per layer.
_ATTENTION, _MLP, _EXPERTS = "layers/attention", "layers/mlp", "layers/mlp/experts"
_SHARED = "layers/mlp/shared"
_FORMS = ("each", "alternating", "halves", "rows")  # `Family.expert_arrays`
_MIXER = "layers/mixer"
_DECODER = (
    ("model.embed_tokens.weight", "V,D", "embed/embedding", "VD", ""),
    (
        "model.embed_tokens_per_layer.weight",
        "V,X",
        "layer_embed/embedding",
        "VX",
        "layer_embedding",
    ),
    (
        *("model.per_layer_model_projection.weight", "X,D"),
        *("layer_embed/projection/kernel", "DX", "layer_embedding"),
    ),
    (
        *("model.per_layer_projection_norm.weight", "Z"),
        *("layer_embed/norm/scale", "Z", "layer_embedding"),
    ),
    ("input_layernorm.weight", "D", f"{_ATTENTION}_norm/scale", "D", "before"),
    ("input_layernorm.bias", "D", f"{_ATTENTION}_norm/bias", "D", "norm_biases"),
    ("self_attn.q_proj.weight", "NH,D", f"{_ATTENTION}/query/kernel", "DNH", "ungated"),
    ("self_attn.query.weight", "NH,D", f"{_ATTENTION}/query/kernel", "DNH", "attention_gate"),
    ("self_attn.gate.weight", "NH,D", f"{_ATTENTION}/output_gate/kernel", "DNH", "attention_gate"),
    ("self_attn.k_proj.weight", "KH,D", f"{_ATTENTION}/key/kernel", "DKH", "keys"),
    ("self_attn.v_proj.weight", "KH,D", f"{_ATTENTION}/value/kernel", "DKH", "values"),
    ("self_attn.o_proj.weight", "D,NH", f"{_ATTENTION}/out/kernel", "NHD", ""),
    ("self_attn.q_proj.bias", "NH", f"{_ATTENTION}/query/bias", "NH", "ungated bias"),
    ("self_attn.query.bias", "NH", f"{_ATTENTION}/query/bias", "NH", "gated bias"),
    ("self_attn.gate.bias", "NH", f"{_ATTENTION}/output_gate/bias", "NH", "gated bias"),
    ("self_attn.k_proj.bias", "KH", f"{_ATTENTION}/key/bias", "KH", "key bias"),
    ("self_attn.v_proj.bias", "KH", f"{_ATTENTION}/value/bias", "KH", "value bias"),
    ("self_attn.o_proj.bias", "D", f"{_ATTENTION}/out/bias", "D", "out_bias"),
    ("self_attn.q_norm.weight", "H", f"{_ATTENTION}/query_norm/scale", "H", "head norms"),
    ("self_attn.k_norm.weight", "H", f"{_ATTENTION}/key_norm/scale", "H", "norms of keys"),
    ("self_attn.q_norm.weight", "NH", f"{_ATTENTION}/query_norm/scale", "NH", "norms over heads"),
    ("self_attn.k_norm.weight", "KH", f"{_ATTENTION}/key_norm/scale", "KH", "norms over heads"),
    ("self_attn.q_norm.weight", "N,H", f"{_ATTENTION}/query_norm/scale", "NH", "norms by head"),
    ("self_attn.k_norm.weight", "K,H", f"{_ATTENTION}/key_norm/scale", "KH", "norms by head"),
    ("linear_attn.q_proj.weight", "GC,D", f"{_MIXER}/query/kernel", "DGC", "mixer"),
    ("linear_attn.k_proj.weight", "GC,D", f"{_MIXER}/key/kernel", "DGC", "mixer"),
    ("linear_attn.v_proj.weight", "UY,D", f"{_MIXER}/value/kernel", "DUY", "mixer"),
    ("linear_attn.g_proj.weight", "UY,D", f"{_MIXER}/output_gate/kernel", "DUY", "mixer"),
    ("linear_attn.b_proj.weight", "U,D", f"{_MIXER}/beta/kernel", "DU", "mixer"),
    ("linear_attn.a_proj.weight", "U,D", f"{_MIXER}/decay/kernel", "DU", "mixer"),
    ("linear_attn.q_conv1d.weight", "GC,,W", f"{_MIXER}/query_taps", "WGC", "mixer"),
    ("linear_attn.k_conv1d.weight", "GC,,W", f"{_MIXER}/key_taps", "WGC", "mixer"),
    ("linear_attn.v_conv1d.weight", "UY,,W", f"{_MIXER}/value_taps", "WUY", "mixer"),
    ("linear_attn.A_log", "U", f"{_MIXER}/decay_rate", "U", "mixer"),
    ("linear_attn.dt_bias", "U", f"{_MIXER}/decay_bias", "U", "mixer"),
    ("linear_attn.norm.weight", "Y", f"{_MIXER}/norm/scale", "Y", "mixer"),
    ("linear_attn.out_proj.weight", "D,UY", f"{_MIXER}/out/kernel", "UYD", "mixer"),
    ("post_attention_layernorm.weight", "D", f"{_ATTENTION}_after_norm/scale", "D", "after"),
    ("post_attention_layernorm.weight", "D", f"{_MLP}_norm/scale", "D", "only before"),
    ("pre_feedforward_layernorm.weight", "D", f"{_MLP}_norm/scale", "D", "before and after"),
    ("post_feedforward_layernorm.weight", "D", f"{_MLP}_after_norm/scale", "D", "after"),
    ("mlp.gate_proj.weight", "F,D", f"{_MLP}/gate/kernel", "DF", "gate"),
    ("mlp.up_proj.weight", "F,D", f"{_MLP}/up/kernel", "DF", "one_mlp"),
    ("mlp.down_proj.weight", "D,F", f"{_MLP}/down/kernel", "FD", "one_mlp"),
    ("mlp.gate_proj.bias", "F", f"{_MLP}/gate/bias", "F", "gate_bias"),
    ("mlp.up_proj.bias", "F", f"{_MLP}/up/bias", "F", "mlp_bias"),
    ("mlp.down_proj.bias", "D", f"{_MLP}/down/bias", "D", "mlp_bias"),
    ("self_attn.sinks", "N", f"{_ATTENTION}/sinks", "N", "attention_sinks"),
    ("mlp.gate.weight", "E,D", f"{_MLP}/router/kernel", "DE", "experts"),
    ("mlp.gate.bias", "E", f"{_MLP}/router/bias", "E", "expert_bias"),
    ("mlp.experts.*.gate_proj.weight", "EF,D", f"{_EXPERTS}/gate/kernel", "EDF", "each"),
    ("mlp.experts.*.up_proj.weight", "EF,D", f"{_EXPERTS}/up/kernel", "EDF", "each"),
    ("mlp.experts.*.down_proj.weight", "ED,F", f"{_EXPERTS}/down/kernel", "EFD", "each"),
    ("mlp.experts.gate_up_proj[0::2]", "E,D,F", f"{_EXPERTS}/gate/kernel", "EDF", "alternating"),
    ("mlp.experts.gate_up_proj[1::2]", "E,D,F", f"{_EXPERTS}/up/kernel", "EDF", "alternating"),
    ("mlp.experts.gate_up_proj[:n]", "E,D,F", f"{_EXPERTS}/gate/kernel", "EDF", "halves"),
    ("mlp.experts.gate_up_proj[n:]", "E,D,F", f"{_EXPERTS}/up/kernel", "EDF", "halves"),
    ("mlp.experts.gate_up_proj[:, :n]", "E,F,D", f"{_EXPERTS}/gate/kernel", "EDF", "rows"),
    ("mlp.experts.gate_up_proj[:, n:]", "E,F,D", f"{_EXPERTS}/up/kernel", "EDF", "rows"),
    ("mlp.experts.gate_up_proj_bias[0::2]", "E,F", f"{_EXPERTS}/gate/bias", "EF", "expert_bias"),
    ("mlp.experts.gate_up_proj_bias[1::2]", "E,F", f"{_EXPERTS}/up/bias", "EF", "expert_bias"),
    ("mlp.experts.down_proj", "E,F,D", f"{_EXPERTS}/down/kernel", "EFD", "together"),
    ("mlp.experts.down_proj", "E,D,F", f"{_EXPERTS}/down/kernel", "EFD", "rows"),
    ("mlp.experts.down_proj_bias", "E,D", f"{_EXPERTS}/down/bias", "ED", "expert_bias"),
    ("mlp.shared_expert.gate_proj.weight", "S,D", f"{_SHARED}/gate/kernel", "DS", "shared"),
    ("mlp.shared_expert.up_proj.weight", "S,D", f"{_SHARED}/up/kernel", "DS", "shared"),
    ("mlp.shared_expert.down_proj.weight", "D,S", f"{_SHARED}/down/kernel", "SD", "shared"),
    ("router.scale", "D", f"{_MLP}/router_norm/scale", "D", "branch_norms"),
    ("router.per_expert_scale", "E", f"{_MLP}/expert_scale", "E", "expert_scale"),
    ("pre_feedforward_layernorm_2.weight", "D", f"{_EXPERTS}_norm/scale", "D", "branch_norms"),
    (
        *("post_feedforward_layernorm_2.weight", "D"),
        *(f"{_EXPERTS}_after_norm/scale", "D", "branch_norms"),
    ),
    (
        *("post_feedforward_layernorm_1.weight", "D"),
        *(f"{_SHARED}_after_norm/scale", "D", "branch_norms"),
    ),
    ("mlp.shared_expert_gate.weight", "1,D", f"{_SHARED}_gate/kernel", "D1", "shared_gate"),
    ("per_layer_input_gate.weight", "Z,D", "layers/embedding_gate/kernel", "DZ", "layer_embedding"),
    ("per_layer_projection.weight", "D,Z", "layers/embedding_out/kernel", "ZD", "layer_embedding"),
    (
        *("post_per_layer_input_norm.weight", "D"),
        *("layers/embedding_norm/scale", "D", "layer_embedding"),
    ),
    ("layer_scalar", "1", "layers/output_scale", "1", "layer_scale"),
    ("model.norm.weight", "D", "final_norm/scale", "D", ""),
    ("model.norm.bias", "D", "final_norm/bias", "D", "norm_biases"),
    ("lm_head.weight", "V,D", "head/kernel", "DV", "untied"),
    ("lm_head.bias", "V", "head/bias", "V", "head_bias"),
)


class Fused(NamedTuple):
    """A matrix that some classes store in place of several."""

    parts: tuple[str, ...]  # the modules whose rows it holds, in order
    # The letter of an axis, each of whose entries has its rows of all parts, one part after the
    # other; "": all rows of a part are together
    groups: str = ""
    # Whether transformers, which reads the parts and joins them, saves equal parts of the whole
    saved_in_equal_parts: bool = False


FUSED = {
    "self_attn.qkv_proj": Fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "mlp.gate_up_proj": Fused(("mlp.gate_proj", "mlp.up_proj")),
    "self_attn.q_proj": Fused(("self_attn.query", "self_attn.gate"), "N"),
    "linear_attn.in_proj_qkvz": Fused(tuple(f"linear_attn.{x}_proj" for x in "qkvg"), "G"),
    "linear_attn.in_proj_ba": Fused(("linear_attn.b_proj", "linear_attn.a_proj"), "G"),
    "linear_attn.in_proj_qkv": Fused(tuple(f"linear_attn.{x}_proj" for x in "qkv")),
    "linear_attn.conv1d": Fused(
        tuple(f"linear_attn.{x}_conv1d" for x in "qkv"), saved_in_equal_parts=True
    ),
}
# Leaves whose channels are rotated.
ROTATED = tuple(f"{_ATTENTION}/{name}/" for name in ("query", "key", "query_norm", "key_norm"))
# Rows that the classes of transformers 5 hold as one array [E, ...] of all experts, under these
# names in all families: (name, part, number of parts) of the array's second axis.
# `save_pretrained` writes one tensor for each expert, `torch.save` of a `state_dict` these arrays.
STATE_DICT = {
    f"{_MLP}/router/kernel": ("mlp.gate.weight", 0, 1),
    f"{_EXPERTS}/gate/kernel": ("mlp.experts.gate_up_proj", 0, 2),
    f"{_EXPERTS}/up/kernel": ("mlp.experts.gate_up_proj", 1, 2),
    f"{_EXPERTS}/down/kernel": ("mlp.experts.down_proj", 0, 1),
}

# Learned arrays of published CLEX checkpoints; transformers ignores them.
_CLEX = (
    ("model.clex_layer.proj_func.ode_up_proj", "P,M", "rope/up", "PM", ""),
    ("model.clex_layer.proj_func.ode_down_proj", "M,P", "rope/down", "MP", ""),
    ("model.clex_layer.inv_freq", "P", "rope/inv_freq", "P", ""),
)

# The head with which CEPE's encoder was trained (released class LlamaForMLM).
_MASKED = (
    ("lm_dense.weight", "O,D", "mlm/dense/kernel", "DO", ""),
    ("lm_dense.bias", "O", "mlm/dense/bias", "O", ""),
    ("lm_layer_norm.weight", "D", "mlm/norm/scale", "D", ""),
    # The released class sets `self.lm_head.bias = self.lm_bias`, and computes with `lm_head.bias`.
    # torch saves both names, safetensors may drop one. Written alone, `lm_head.bias` would load,
    # but transformers 5 then initialises `lm_bias` anew and saves the two with different values.
    ("lm_head.bias|lm_bias", "V", "mlm/bias", "V", ""),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of the tree and the stored tensors that it consists of."""

    path: str  # "layers/attention/query/kernel"
    names: tuple[str, ...]  # one for each of `layers`, or a single one
    stacked: bool  # whether the leaf has a leading axis of layers
    view: tuple[int, ...]  # shape of the stored tensor with its axes split
    tensor_shape: tuple[int, ...]  # shape of the stored tensor
    order: tuple[int, ...]  # axes of the view in the leaf's order
    aliases: tuple[tuple[str, ...], ...]  # for each of `names`, other names of the same tensor
    layers: tuple[int, ...] = ()  # for each of `names`, the number of its layer, if stacked
    # Rotary channels of each head that the stored tensor has in pairs of neighbours; 0: none
    interleaved: int = 0
    groups: int = 1  # of rows of its fused tensor (`Fused.groups`)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer of the leaf, or of a leaf that is not stacked."""
        return tuple(self.view[axis] for axis in self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return (len(self.names), *self.layer_shape) if self.stacked else self.layer_shape

    def spellings(self, layer: int | None) -> tuple[str, ...]:
        """Returns the names under which the tensor of a layer is written; None: not stacked."""
        at = 0 if layer is None else self.layers.index(layer)
        return self.names[at], *self.aliases[at]

    def by_layer(self) -> list["Entry"]:
        """Returns the leaves of separate layers, each with a path of its own."""
        if not self.stacked:
            return [self]
        return [
            dataclasses.replace(
                self,
                path=self.path.replace("layers/", f"layers_{layer}/", 1),
                names=(name,),
                stacked=False,
                aliases=(others,),
                layers=(),
            )
            for layer, name, others in zip(self.layers, self.names, self.aliases, strict=True)
        ]

    def dtype(self, param_dtype: str) -> str:
        """Returns `param_dtype`, but float32 for learned frequencies and rates of decay.

        Half precision would rotate far positions wrongly, and forget at other rates.
        """
        is_exact = self.path.startswith("rope/") or "/decay_" in self.path
        return "float32" if is_exact else param_dtype

    @property
    def num_experts(self) -> int:
        """Number of tensors that one of `names` with `*` stands for."""
        return self.view[0]

    def to_tensor(self, layer: np.ndarray) -> np.ndarray:
        """Converts one layer of the leaf to the stored tensor."""
        view = layer.transpose(np.argsort(self.order))
        if self.interleaved:
            axis = min(1, view.ndim - 1)  # that of the channels, after the heads if there are any
            view = view.take(np.argsort(halves(view.shape[axis], self.interleaved)), axis)
        return view.reshape(self.tensor_shape)


def halves(head_dim: int, rotary_dim: int) -> np.ndarray:
    """Returns the order that turns rotary pairs (2i, 2i + 1) of a head into pairs (i, i + R/2).

    Channels after the R = `rotary_dim` rotated ones stay where they are.
    """
    rotated = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)
    return np.concatenate([rotated, np.arange(rotary_dim, head_dim)])


def checkpoint_order(config: ModelConfig) -> np.ndarray | None:
    """Returns `halves` of the checkpoint from which a config was read; None: no reordering.

    The family that the config states decides, which stays when patterns and ropes are replaced.
    """
    family = FAMILIES.get(config.family)
    if family is None or not family.interleaved:
        return None
    return halves(config.head_dim, config.rotary_dim)


def expert_names(name: str, count: int) -> list[str]:
    """Returns the names of stored tensors: with `*`, one for each of `count` experts."""
    return [name.replace("*", str(i)) for i in range(count)] if "*" in name else [name]


_PART = re.compile(r"(.+)\[(.+)\]")


def part_of(name: str) -> tuple[str, str] | None:
    """Returns the stored tensor, and which entries of an axis `name` has (`part_index`).

    None for the name of a whole tensor.
    """
    match = _PART.fullmatch(name)
    return match and (match[1], match[2])


def part_axis(part: str, rank: int) -> int:
    """Returns the axis, of `rank`, half of which a name with `part` in brackets has."""
    return 1 if part.startswith(":, ") else rank - 1


def part_index(part: str, shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of the part of a tensor of this shape that a name has in brackets."""
    axis = part_axis(part, len(shape))
    half = shape[axis] // 2
    entries = {
        "0::2": slice(0, None, 2),
        "1::2": slice(1, None, 2),
        ":n": slice(half),
        "n:": slice(half, None),
    }[part.removeprefix(":, ")]
    return (*(slice(None),) * axis, entries)


def parts_of(name: str) -> list[str]:
    """Returns the tensors whose rows a fused tensor holds; empty for other tensors."""
    for module, fused in FUSED.items():
        if f".{module}." in name:
            return [name.replace(module, part) for part in fused.parts]
    return []


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Returns the fused matrices (`FUSED`) that the family of `config` stores."""
    return FAMILIES[family_of(config).name].fused


def fused_name(name: str, modules: Iterable[str]) -> str | None:
    """Returns the tensor of one of the fused `modules` that holds a tensor's rows; None: none."""
    for module in modules:
        for part in FUSED[module].parts:
            if f".{part}." in name:
                return name.replace(part, module)
    return None


def fuses_adapters(config: ModelConfig) -> bool:
    """Returns whether a matrix that gets an adapter (`config.lora`) is stored fused with others."""
    modules, targets = fused_modules(config), config.lora.targets
    adapted = (e.names[0] for e in entries(config) if e.path.split("/")[-2] in targets)
    return any(fused_name(name, modules) for name in adapted)


def entries(config: ModelConfig) -> tuple[Entry, ...]:
    """Returns the leaves of a decoder's tree in the order in which the model uses them.

    A leaf that only some layers have, or whose shape differs between layers, is stacked over the
    layers where it is the same.
    """
    family = FAMILIES[family_of(config).name]
    rows: dict[tuple[int, TensorRow, tuple[tuple[str, int], ...], int], list[int]] = {}
    for number, kind in enumerate(config.kinds):
        layer = config.of_kind(kind)
        layers = [i for i, other in enumerate(config.kind_by_layer) if other == number]
        sizes = _sizes(layer) | layer.pattern.sizes
        for place, row in _rows(layer, family):
            used = tuple((letter, sizes[letter]) for letter in row[3])
            key = place, row, used, _num_groups(row[0], family, sizes)
            rows.setdefault(key, []).extend(layers)
    table = tuple(
        dataclasses.replace(_entry(row, dict(sizes), sorted(layers)), groups=groups)
        for (_, row, sizes, groups), layers in sorted(rows.items())
    )
    if family.interleaved:
        table = tuple(
            dataclasses.replace(entry, interleaved=config.rotary_dim)
            if entry.path.startswith(ROTATED)
            else entry
            for entry in table
        )
    if config.memory is None:
        return table
    after = max(i for i, entry in enumerate(table) if entry.stacked) + 1
    memory = _memory_entries(config, [row for _, row, *_ in sorted(rows)])
    return (*table[:after], *memory, *table[after:], *_encoder_entries(config.memory))


def _num_groups(name: str, family: Family, sizes: Mapping[str, int]) -> int:
    """Returns the number of groups of rows of the fused tensor that holds a tensor."""
    for module in family.fused:
        fused = FUSED[module]
        if fused.groups and any(f".{part}." in name for part in fused.parts):
            return sizes[fused.groups]
    return 1


def entries_of(
    rows: Iterable[TensorRow], sizes: Mapping[str, int], layers: Sequence[int]
) -> tuple[Entry, ...]:
    """Returns the leaves that `rows` describe; of any architecture.

    Args:
      rows: as in this file.
      sizes: those of the letters.
      layers: the numbers of the layers that have the leaves.
    """
    return tuple(_entry(row, sizes, layers) for row in rows)


def _memory_entries(config: ModelConfig, decoder_rows: list[TensorRow]) -> list[Entry]:
    """Returns a memory's leaves, those of layers stacked over the readers."""
    rows = config.memory.hf_rows(config, decoder_rows)
    sizes = _sizes(config) | config.memory.hf_axes(config)
    reads = config.memory.reader_layers(config.num_layers)
    return list(entries_of(rows, sizes, [i for i, layer_reads in enumerate(reads) if layer_reads]))


def _encoder_entries(memory: Memory) -> list[Entry]:
    """Returns the leaves of the encoder inside a memory, without its masked-language-model head."""
    if (config := memory.encoder_config) is None:
        return []
    config = config.replace(mlm_head=False)
    rows = (row for _, row in _rows(config, FAMILIES[family_of(config).name]))
    rows = [
        (name.replace("model.", "encoder."), axes, f"encoder/{path}", ours)
        for name, axes, path, ours in rows
    ]
    return list(entries_of(rows, _sizes(config), range(config.num_layers)))


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {
        "V": config.vocab_size,
        "D": config.width,
        "F": config.expert_width,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "O": config.width,
        "1": 1,
    }
    if config.layer_embedding is not None:
        sizes |= {"Z": config.layer_embedding, "X": config.num_layers * config.layer_embedding}
    if config.experts is not None:
        sizes |= {"E": config.experts.count, "S": config.experts.shared_width}
    if config.mixer is not None:
        sizes |= {"G": config.mixer.key_heads, "C": config.mixer.key_dim}
        sizes |= {"U": config.mixer.value_heads, "Y": config.mixer.value_dim}
        sizes["W"] = config.mixer.taps
    if config.rope.learned:
        sizes |= {"P": config.rotary_dim // 2, "M": config.rotary_dim * config.rope.param_factor}
    return sizes


def _rows(config: ModelConfig, family: Family) -> Iterator[tuple[int, TensorRow]]:
    """Yields the rows of the tables whose condition holds, with full names and their place.

    Args:
      config: of all layers, or of one kind of them.
      family: that of the model.
    """
    parallel, place = config.block == "parallel", config.norm_place
    flags = {
        "": True,
        "norm_biases": config.norm == "layer" and config.norm_bias,
        "before": place != "after",
        "after": place != "before",
        "only before": place == "before" and not parallel,
        "before and after": place == "both",
        "head norms": config.qk_norm in ("head", "rotated"),
        "norms over heads": config.qk_norm == "all",
        "norms by head": config.qk_norm == "each",
        "ungated": not config.attention_gate,
        "ungated bias": config.qkv_bias and not config.attention_gate,
        "gated bias": config.qkv_bias and config.attention_gate,
        "keys": config.keys_of is None,
        "key bias": config.qkv_bias and config.keys_of is None,
        "norms of keys": config.qk_norm in ("head", "rotated") and config.keys_of is None,
        "values": config.keys_of is None and not config.values_from_keys,
        "value bias": config.qkv_bias and config.keys_of is None and not config.values_from_keys,
        "untied": not config.tie_embeddings,
        "one_mlp": config.experts is None,
        "expert_bias": config.experts is not None and config.experts.bias,
        **{form: config.experts is not None and family.expert_arrays == form for form in _FORMS},
        "together": config.experts is not None and family.expert_arrays in _FORMS[1:3],
        "branch_norms": config.experts is not None and config.experts.branch_norms,
        "expert_scale": config.experts is not None and config.experts.expert_scale,
        "shared": config.experts is not None and config.experts.shared_width is not None,
        "shared_gate": config.experts is not None and config.experts.shared_gate,
        "gate": config.experts is None and config.gated_mlp,
        "gate_bias": config.gated_mlp and config.mlp_bias,
    }
    tables = (
        *_DECODER,
        *(_CLEX if config.rope.learned else ()),
        *(_MASKED if config.mlm_head else ()),
    )
    modules = family.modules if config.mixer is None else family.modules | family.mixer_modules
    for place, (name, axes, path, ours, condition) in enumerate(tables):
        if not (flags[condition] if condition in flags else getattr(config, condition)):
            continue
        if config.mixer is not None and path.startswith(f"{_ATTENTION}/"):
            continue
        module, _, leaf = name.rpartition(".")
        if module in modules:
            name = f"{modules[module]}.{leaf}"
        if path.startswith("layers/"):
            name = f"model.layers.{{}}.{name}"
        yield place, (name, axes, path, ours)
        if path == f"{_ATTENTION}/out/kernel":
            for part, one in config.pattern.parameters.items():
                name, path = f"model.layers.{{}}.{one.tensor}", f"{_ATTENTION}/pattern/{part}"
                yield place, (name, one.tensor_axes, path, one.axes)


def _entry(row: TensorRow, sizes: Mapping[str, int], layers: Sequence[int]) -> Entry:
    name, axes, path, ours = row
    letters = axes.replace(",", "")
    stacked = "{}" in name
    spellings = [name.replace("{}", str(i)).split("|") for i in (layers if stacked else [0])]
    return Entry(
        path=path,
        names=tuple(first for first, *_ in spellings),
        stacked=stacked,
        view=tuple(sizes[letter] for letter in letters),
        tensor_shape=tuple(math.prod(sizes[x] for x in group) for group in axes.split(",")),
        order=tuple(letters.index(letter) for letter in ours),
        aliases=tuple(tuple(others) for _, *others in spellings),
        layers=tuple(layers) if stacked else (),
    )
