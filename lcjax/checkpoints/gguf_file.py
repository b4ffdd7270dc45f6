"""Reads config and weights from a GGUF file (llama.cpp, versions 2 and 3).

Layout: magic, version, two counts, key/value metadata, tensor index, padding, tensor data. The
index is parsed here, because `gguf.GGUFReader` takes 3 seconds for the 49,000 tokens and merges of
SmolLM2 (this parser takes 0.1) and cannot distinguish a truncated file from a damaged one. The
`gguf` package de-quantises tensors, some rows at a time.

llama.cpp stores the query and key projections of some architectures with the two halves of each
head interleaved (rows 0, H/2, 1, H/2+1, ...), and Gemma's norms with 1 added; `GGUFFile.rows`
returns both in Hugging Face's form. The sources of `_ARCHITECTURES` are llama.cpp's converter
(`conversion/*.py` of 2026), and `src/models/*.cpp` for hyperparameters that a file omits.
"""

import dataclasses
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lcjax.checkpoints.families import FAMILIES, FULL, SLIDING
from lcjax.checkpoints.hf_config import decoder_from_hf
from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import INT32_MAX, InputError, check_integer, import_package
from lcjax.models.model_config import MAX_LAYERS, ModelConfig
from lcjax.rope import Yarn
from lcjax.storage import map_file, to_path

# struct formats of the scalar value types; 8 is a string, 9 an array
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9

# kinds that are not quantised
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_CHUNK = 2**20  # number of weights that are de-quantised at a time

# Modules by their GGUF names; llama.cpp stores the three projections of Phi-2 and 3 as one tensor.
_MODULES = {
    "token_embd": ("model.embed_tokens",),
    "output_norm": ("model.norm",),
    "output": ("lm_head",),
}
_LAYER_MODULES = {
    "attn_norm": ("input_layernorm",),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj",),
    "attn_q_norm": ("self_attn.q_norm",),
    "attn_k_norm": ("self_attn.k_norm",),
    "post_attention_norm": ("post_attention_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "post_ffw_norm": ("post_feedforward_layernorm",),
    "ffn_gate": ("mlp.gate_proj",),
    "ffn_up": ("mlp.up_proj",),
    "ffn_down": ("mlp.down_proj",),
    "ffn_gate_inp": ("mlp.gate",),  # the router of a mixture of experts
    "ffn_gate_exps": ("mlp.experts.*.gate_proj",),
    "ffn_up_exps": ("mlp.experts.*.up_proj",),
    "ffn_down_exps": ("mlp.experts.*.down_proj",),
}
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_ROPE_FACTORS = {"long_factor": "rope_factors_long", "short_factor": "rope_factors_short"}


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """How llama.cpp stores a family."""

    family: str  # model type of transformers
    interleaved: bool = False  # whether rows of queries and keys are interleaved
    norm_shift: float = 0.0  # number that was added to the weights of norms
    # Modules whose names differ from `_LAYER_MODULES`.
    modules: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Metadata key without the architecture, key of config.json, and the value if it is absent, or a
    # function that computes it from the head size.
    keys: tuple[tuple[str, str, Any], ...] = ()
    partial: bool = False  # whether a part of each head may be rotated
    # If the file has a window, every `period`-th layer has full attention; None: no layer has.
    period: int | None = None
    window_family: str | None = None  # model type of files with a window
    local_theta: float | None = None  # RoPE base of layers with a window; None: that of all layers
    # Number of layers of the model size that scales attention by width / heads, not the head size.
    wide_scale_layers: int | None = None
    expert_family: str | None = None  # model type of files with experts
    # Whether llama.cpp divides the weights of a token's experts by their sum; no key states it.
    norm_topk: bool = True


_GEMMA = {
    "norm_shift": 1.0,
    "modules": {"ffn_norm": ("pre_feedforward_layernorm",)},
}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_ARCHITECTURES = {
    "llama": _Architecture(
        "llama", interleaved=True, window_family="mistral", expert_family="mixtral"
    ),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", expert_family="qwen3_moe"),
    "olmoe": _Architecture("olmoe", expert_family="olmoe", norm_topk=False),
    "phi2": _Architecture("phi", partial=True),
    "phi3": _Architecture(
        "phi3", modules={"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}, partial=True
    ),
    "gemma2": _Architecture(
        "gemma2",
        **_GEMMA,
        keys=tuple(zip(_SOFT_CAPS, _SOFT_CAPS, (50.0, 30.0), strict=True)),
        period=2,
        wide_scale_layers=46,  # 27B
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        **_GEMMA,
        keys=((_SOFT_CAPS[1], _SOFT_CAPS[1], None),),
        period=6,
        local_theta=10_000.0,
        wide_scale_layers=62,  # 27B
    ),
    "olmo2": _Architecture("olmo2", period=4, window_family="olmo3"),
    "granite": _Architecture(
        "granite",
        interleaved=True,
        keys=(
            ("attention.scale", "attention_multiplier", lambda head_dim: head_dim**-0.5),
            ("embedding_scale", "embedding_multiplier", 1.0),
            ("residual_scale", "residual_multiplier", 1.0),
            ("logit_scale", "logits_scaling", 1.0),
        ),
    ),
    "smollm3": _Architecture("smollm3", interleaved=True),  # without a key for its NoPE layers
}

# The settings of every published Llama-3.1 to 3.3.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Keys `<arch>.rope.scaling.*` that llama.cpp reads, and values with which a key has no effect.
_SUPPORTED = {"type", "factor", "original_context_length", "finetuned"}
_NEUTRAL = {
    "attn_factor": (1.0,),  # multiplies cos and sin, whatever the type
    "alpha": (0.0,),
    "yarn_ext_factor": (0.0, -1.0),  # -1: not set
    "yarn_attn_factor": (1.0,),
    "yarn_log_multiplier": (0.0,),
}
_BETAS = {"yarn_beta_fast", "yarn_beta_slow"}  # of the ramp, which only yarn has
# Likewise, keys `<arch>.*` of experts, and values with which a key has no effect.
_EXPERTS = {"expert_count", "expert_used_count", "expert_feed_forward_length"}
_NEUTRAL_EXPERTS = {
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),  # 0: not set
    "expert_gating_func": (0, 1),  # 0: not set, 1: softmax
    "leading_dense_block_count": (0,),
}
_MAX_LENGTH = 2**26  # bytes of a string, entries of an array; no published file has more
_MAX_RANK = 4  # axes of a tensor in ggml


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Types of the metadata keys that are read here, by the ends of the keys.
_KINDS = {
    ("block_count", "context_length", "key_length", "sliding_window", "dimension_count"): "number",
    ("_epsilon", "freq_base", "scale_linear", "factor", "_beta_fast", "_beta_slow"): "number",
    ("split.count", "_token_id", "scaling.alpha", "log_multiplier", "freq_base_swa"): "number",
    ("_scale", "attention.scale", "_softcapping", "original_context_length"): "number",
    ("general.architecture", "scaling.type", "ggml.model", "ggml.pre", "chat_template"): "text",
    ("ggml.tokens", "ggml.merges"): "list of text",
    ("ggml.scores",): "list of numbers",
    ("ggml.token_type",): "list of token types, 0 to 6",
    ("add_bos_token", "add_space_prefix"): "flag",
}
_HOLDS = {
    "number": _is_number,
    "text": lambda v: isinstance(v, str),
    "list of text": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
    "list of numbers": lambda v: isinstance(v, list) and all(map(_is_number, v)),
    "list of token types, 0 to 6": lambda v: (
        isinstance(v, list) and all(type(x) is int and 0 <= x <= 6 for x in v)
    ),
    "flag": lambda v: isinstance(v, bool),
}


def _check_kinds(path: Path, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        kinds = [kind for ends, kind in _KINDS.items() if key.endswith(ends)]
        if kinds and not _HOLDS[kinds[0]](value):
            raise InputError(f"{path}: {key}={value!r:.60} must be a {kinds[0]}; convert it again")


class Tensor(NamedTuple):
    """One stored tensor; its data are the bytes of its rows."""

    name: str
    shape: tuple[int, ...]  # row-major: the last axis is contiguous and the quantised one
    kind: str  # "F32", "Q4_K", ...
    data: np.ndarray  # uint8 [rows, bytes of a row], a view of the file


class _Part(NamedTuple):
    """Rows of a stored tensor that make up one Hugging Face tensor."""

    tensor: Tensor
    start: int
    heads: int  # number of heads whose rows are interleaved; 0: rows are in order
    shift: float = 0.0  # number that was added to all weights


class GGUFFile:
    """A GGUF file as a source of Hugging Face tensors."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self.metadata, self.stored = read_index(to_path(path))
        _check_kinds(to_path(path), self.metadata)
        self.architecture = self.metadata.get("general.architecture")
        if str(self.architecture) not in _ARCHITECTURES:
            raise InputError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self._arch = _ARCHITECTURES[self.architecture]
        if (parts := self.get("split.count", 0)) > 1:
            raise InputError(
                f"{path}: one of {parts} parts of a model; merge them into one file "
                "(llama-gguf-split --merge FIRST OUT)"
            )
        self.hf_config = self._hf_config()
        self._parts: dict[str, _Part] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, tensor in self.stored.items():
            if name.removesuffix(".weight") not in _ROPE_FACTORS.values():
                self._add(name, tensor)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value; `{arch}` in the key stands for the architecture."""
        return self.metadata.get(self._key(key), default)

    def need(self, key: str) -> Any:
        """Returns a metadata value like `get`; raises an InputError if the key is missing."""
        if (value := self.get(key)) is None:
            raise InputError(
                f"{self.path}: the metadata key {self._key(key)!r} is missing; convert it again"
            )
        return value

    def _key(self, key: str) -> str:
        return key.replace("{arch}", str(self.architecture))

    def _count(self, key: str, default: Any = None, most: int = INT32_MAX) -> int:
        """Returns a positive whole number, which a file may repeat for every layer."""
        value = self.need(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        for number in values:
            check_integer(f"{self.path}: {self._key(key)}", number, 1, most=most)
        if len(values) != 1:
            raise InputError(
                f"{self.path}: {self._key(key)} differs between layers ({sorted(values)}): such "
                "models are not supported; use one whose layers are alike"
            )
        return values.pop()

    def config(self) -> ModelConfig:
        return decoder_from_hf(self.hf_config, self.path)

    def _hf_config(self) -> dict[str, Any]:
        """Converts the metadata to a Hugging Face config."""
        arch, kind = self._arch, self._arch.family
        window = self.get("{arch}.attention.sliding_window") or None  # 0: none
        if window is not None and arch.window_family is not None:
            kind = arch.window_family  # llama.cpp has one architecture for both
        if experts := self.get("{arch}.expert_count"):
            if arch.expert_family is None:
                raise _unreadable(self, f"{self._key('{arch}.expert_count')}={experts!r}")
            kind = arch.expert_family
        heads = self._count("{arch}.attention.head_count")
        width = self._count("{arch}.embedding_length")
        head_dim = self._count("{arch}.attention.key_length", width // heads)
        embedding = self.stored.get("token_embd.weight")
        if embedding is None:
            raise InputError(f"{self.path}: the tensor token_embd.weight is missing")
        hf = {
            "model_type": kind,
            "vocab_size": embedding.shape[0],
            "hidden_size": width,
            "intermediate_size": self._count("{arch}.feed_forward_length"),
            "num_hidden_layers": self._count("{arch}.block_count", most=MAX_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.need("{arch}.context_length"),
            "tie_word_embeddings": "output.weight" not in self.stored,
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self.stored,
            "sliding_window": window,
            "dtype": self._dtype(),
        }
        if kind == "phi":
            hf["layer_norm_eps"] = _short(self.need("{arch}.attention.layer_norm_epsilon"))
        else:
            hf["rms_norm_eps"] = _short(self.need("{arch}.attention.layer_norm_rms_epsilon"))
        if FAMILIES[kind].experts:
            hf |= self._experts(hf["intermediate_size"])
        for key, name, default in arch.keys:
            default = default(head_dim) if callable(default) else default
            value = self.get(f"{{arch}}.{key}")
            hf[name] = _short(value) if value else default
        if arch.wide_scale_layers is not None:
            wide = hf["num_hidden_layers"] == arch.wide_scale_layers
            hf["query_pre_attn_scalar"] = width // heads if wide else head_dim
        if arch.period is not None:
            hf |= self._windows(window, hf["num_hidden_layers"])
        rotated = self.get("{arch}.rope.dimension_count", head_dim)
        if arch.partial:
            hf["partial_rotary_factor"] = rotated / head_dim
        elif rotated != head_dim:
            raise InputError(
                f"{self.path}: {self.architecture}.rope.dimension_count={rotated} must equal the "
                f"head size {head_dim} for this architecture"
            )
        return hf | _rope_to_hf(self, rotated)

    def _windows(self, window: int | None, count: int) -> dict[str, Any]:
        """Returns the config keys for layers with a window, and for the base of their rotation."""
        key = "{arch}.attention.sliding_window_pattern"
        pattern = self.get(key) or self._arch.period
        if not isinstance(pattern, list):
            check_integer(f"{self.path}: {self._key(key)}", pattern, 1)
            pattern = [(i + 1) % pattern != 0 for i in range(count)]
        if len(pattern) != count or any(value not in (0, 1) for value in pattern):
            raise InputError(
                f"{self.path}: {self._key(key)}={pattern!r:.60} must be a period, or say for each"
                f" of the {count} layers whether it has a window; convert it again"
            )
        types = [SLIDING if has and window is not None else FULL for has in pattern]
        theta = self.get("{arch}.rope.freq_base_swa") or self._arch.local_theta
        theta = theta or self.get("{arch}.rope.freq_base", 10_000.0)
        return {"layer_types": types, "rope_local_base_freq": float(theta)}

    def _experts(self, mlp_width: int) -> dict[str, Any]:
        """Returns the config keys of the experts that replace each MLP."""
        if name := next(filter(_ONE_EXPERT.fullmatch, self.stored), None):
            raise InputError(
                f"{self.path}: {name} holds one expert, an old form of GGUF; convert the Hugging"
                " Face folder of this model again"
            )
        keys = {key.removeprefix(self._key("{arch}.")): v for key, v in self.metadata.items()}
        neutral = _NEUTRAL_EXPERTS | {"expert_weights_norm": (self._arch.norm_topk,)}
        values = {k: v for k, v in keys.items() if k.startswith("expert") or k in neutral}
        _check_values(self, "", values, _EXPERTS, neutral)
        top_k = self._count("{arch}.expert_used_count")
        width = self._count("{arch}.expert_feed_forward_length", mlp_width // top_k)
        return {
            "num_local_experts": self._count("{arch}.expert_count"),
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": width,  # of Qwen3-MoE; other families use intermediate_size
            "norm_topk_prob": self._arch.norm_topk,
        }

    def _dtype(self) -> str:
        """Returns the dtype of all matrices but routers, which are always float32."""
        kinds = {
            _dtype_of(tensor)
            for name, tensor in self.stored.items()
            if len(tensor.shape) > 1 and not name.endswith("ffn_gate_inp.weight")
        }
        return kinds.pop() if len(kinds) == 1 else "float32"

    def _add(self, name: str, tensor: Tensor) -> None:
        """Adds the Hugging Face tensors that a stored tensor holds."""
        names, hf, arch = self._hf_names(name), self.hf_config, self._arch
        heads = {"q": hf["num_attention_heads"], "k": hf["num_key_value_heads"]}
        heads["v"] = heads["k"]
        if "*" in names[0] and tensor.shape[0] == hf.get("num_local_experts"):
            # The table of names describes experts one after another, as their rows are stored.
            tensor = tensor._replace(shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))
        start = 0
        for hf_name in names:
            match = re.search(r"\.([qkv])_proj\.", hf_name)
            rows = tensor.shape[0] // len(names)
            if match and len(names) > 1:
                rows = heads[match[1]] * hf["head_dim"]
            interleaved = arch.interleaved and match and match[1] in "qk"
            shift = arch.norm_shift if "norm" in hf_name else 0.0
            part = _Part(tensor, start, heads[match[1]] if interleaved else 0, shift)
            self._parts[hf_name] = part
            self.tensors[hf_name] = TensorInfo((rows, *tensor.shape[1:]), _dtype_of(tensor))
            start += rows

    def _hf_names(self, name: str) -> list[str]:
        """Returns the Hugging Face tensors in a stored tensor; its own name if unknown."""
        stem, _, suffix = name.rpartition(".")
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
            table = _LAYER_MODULES | self._arch.modules
            prefix, modules = f"model.layers.{match[1]}.", table.get(match[2], ())
        else:
            prefix, modules = "", _MODULES.get(stem, ())
        renamed = FAMILIES[self.hf_config["model_type"]].modules
        modules = [renamed.get(module, module) for module in modules]
        return [f"{prefix}{module}.{suffix}" for module in modules] or [name]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows of a tensor, de-quantised, in Hugging Face's order."""
        part = self._parts[name]
        if not part.heads:
            block = dequantize(part.tensor, part.start + start, part.start + stop)
            if not part.shift:
                return block
            return (block.astype(np.float32) - part.shift).astype(block.dtype)
        size = self.tensors[name].shape[0] // part.heads
        first, last = start // size * size, -(-stop // size) * size  # whole heads
        block = dequantize(part.tensor, part.start + first, part.start + last)
        block = block.reshape(-1, size // 2, 2, *block.shape[1:]).swapaxes(1, 2)
        return block.reshape(last - first, *block.shape[3:])[start - first : stop - first]


def _short(value: float) -> float:
    """Returns the shortest decimal of a float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _dtype_of(tensor: Tensor) -> str:
    return np.dtype(_PLAIN.get(tensor.kind, np.float32)).name


def dequantize(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Returns entries [start:stop] of the first axis as floats."""
    if len(tensor.shape) == 1:  # stored as one row
        return dequantize(tensor._replace(shape=(1, *tensor.shape)), 0, 1)[0, start:stop]
    data = tensor.data[start:stop]
    if tensor.kind in _PLAIN:
        return data.view(_PLAIN[tensor.kind])
    gguf = import_package("gguf", tensor.name)
    kind = gguf.GGMLQuantizationType[tensor.kind]
    out = np.empty((len(data), tensor.shape[-1]), np.float32)
    # gguf works on 16 rows at a time; blocks are independent, so longer rows save its overhead.
    chunk = max(1, _CHUNK // tensor.shape[-1])
    try:
        for i in range(0, len(data), chunk):
            flat = np.ascontiguousarray(data[i : i + chunk]).reshape(1, -1)
            out[i : i + chunk] = gguf.dequantize(flat, kind).reshape(-1, tensor.shape[-1])
    except NotImplementedError as error:
        raise InputError(
            f"{tensor.name}: the quantisation {tensor.kind} cannot be read; use a file in F16, "
            "Q8_0 or Q4_K"
        ) from error
    return out


def _rope_to_hf(file: GGUFFile, rotary_dim: int) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a file."""
    theta = float(file.get("{arch}.rope.freq_base", 10_000.0))
    prefix = f"{file.architecture}.rope.scaling."
    scaling = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    kind = scaling.get("type") or "linear"
    factor = scaling.get("factor", file.get("{arch}.rope.scale_linear"))
    factor = 1.0 if kind == "none" else float(factor or 1.0)  # llama.cpp takes 0 for 1
    has_divisors = "rope_freqs.weight" in file.stored
    if f"{_ROPE_FACTORS['long_factor']}.weight" in file.stored:
        return {"rope_theta": theta} | _longrope(file, kind, factor, scaling, rotary_dim)
    if scaling.get("finetuned") is False and file.architecture == "granite":
        raise _unreadable(file, "rope.scaling.finetuned=False, a Granite without rotation,")
    if kind == "yarn" and "factor" in scaling and not has_divisors:
        form = _yarn(file, theta, factor, scaling).to_hf(rotary_dim)
        del form["rope_parameters"]  # Olmo3 reads sections for each type of layers there
        return form
    if kind not in ("linear", "none") or (has_divisors and factor != 1):
        beside = " beside rope_freqs.weight" if has_divisors else ""
        raise _unreadable(file, f"rope.scaling.type={kind!r} with factor={factor:g}{beside}")
    _check_values(file, "rope.scaling.", scaling, _SUPPORTED | _BETAS)
    if has_divisors:
        return {"rope_theta": theta, "rope_scaling": _llama3(file, theta, rotary_dim)}
    if factor == 1:
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}


def _longrope(
    file: GGUFFile, kind: str, factor: float, scaling: dict[str, Any], rotary_dim: int
) -> dict[str, Any]:
    """Returns Phi-3's LongRoPE: divisors are stored as tensors, and A as `attn_factor`.

    llama.cpp uses the long divisors for all texts if its context is longer than the original one.
    The result here has Hugging Face's meaning, which depends on the length of each text.
    """
    form: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in _ROPE_FACTORS.items():
        tensor = file.stored.get(f"{name}.weight")
        if tensor is None or tensor.shape != (rotary_dim // 2,):
            shape = None if tensor is None else list(tensor.shape)
            raise InputError(
                f"{file.path}: the tensor {name}.weight {shape} must be [{rotary_dim // 2}], beside"
                " that of the other lengths; convert it again"
            )
        form[key] = [_short(x) for x in dequantize(tensor, 0, rotary_dim // 2)]
    if kind not in ("linear", "none", "longrope") or factor != 1:
        raise _unreadable(
            file, f"rope.scaling.type={kind!r} with factor={factor:g} beside LongRoPE"
        )
    _check_values(file, "rope.scaling.", scaling, _SUPPORTED | {"attn_factor"})
    original = file.need("{arch}.rope.scaling.original_context_length")
    check_integer(f"{file.path}: rope.scaling.original_context_length", original, 2)
    scale = file.need("{arch}.context_length") / original
    formula = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    attention = scaling.get("attn_factor", 1.0)
    if not math.isclose(attention, formula, rel_tol=1e-6):
        form["attention_factor"] = _short(attention)
    return {"rope_scaling": form, "original_max_position_embeddings": original}


def _yarn(file: GGUFFile, theta: float, factor: float, scaling: dict[str, Any]) -> Yarn:
    """Returns llama.cpp's YaRN: A = attn_factor * (0.1 ln(factor) + 1), no sum for ext_factor 0.

    Some writers store A itself as `yarn_attn_factor`, which llama.cpp ignores in favour of the
    formula. So the key is accepted if it holds the value of the formula. The converter of 2025
    wrote the A of OLMo 3 as `attn_factor`.
    """
    original = file.need("{arch}.rope.scaling.original_context_length")
    share = scaling.get("yarn_ext_factor", -1.0)
    sharpened = 0.1 * math.log(max(factor, 1.0)) + 1 if share else 1.0
    supported = _SUPPORTED | _BETAS | {"attn_factor", "yarn_ext_factor"}
    if math.isclose(scaling.get("yarn_attn_factor", 0.0), sharpened, rel_tol=1e-4):
        supported |= {"yarn_attn_factor"}
    _check_values(file, "rope.scaling.", scaling, supported, _NEUTRAL | {"yarn_attn_factor": ()})
    betas = {key.removeprefix("yarn_"): float(scaling[key]) for key in _BETAS if key in scaling}
    attention = scaling.get("attn_factor", 1.0)
    if file.architecture == "olmo2" and math.isclose(attention, sharpened, rel_tol=1e-4):
        attention = 1.0
    return Yarn(
        theta=theta,
        factor=factor,
        original_length=original,
        extrapolation=1.0 if share < 0 else float(share),
        attention_factor=None if attention == 1 and share else attention * sharpened,
        **betas,
    )


def _check_values(
    file: GGUFFile,
    prefix: str,
    values: dict[str, Any],
    supported: set[str],
    neutral: Mapping[str, tuple] = _NEUTRAL,
) -> None:
    """Raises an InputError for keys that would change the result and are not supported."""
    others = {
        key: value
        for key, value in values.items()
        if key not in supported and value not in neutral.get(key, ())
    }
    if others:
        names = ", ".join(f"{prefix}{key}={value!r:.60}" for key, value in sorted(others.items()))
        raise _unreadable(file, names)


def _unreadable(file: GGUFFile, what: str) -> InputError:
    return InputError(
        f"{file.path}: {what} cannot be read from GGUF; load the Hugging Face folder of this model"
    )


def _llama3(file: GGUFFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Returns the Llama-3 settings that give the stored frequency divisors, and checks all of them.

    The file holds theta_j / f_j, not the settings. The slowest pair is divided by the full factor;
    the other settings are those of every published Llama-3.1 to 3.3.
    """
    tensor = file.stored["rope_freqs.weight"]
    stored = dequantize(tensor, 0, tensor.shape[0]).astype(np.float64)
    settings = {"rope_type": "llama3", "factor": float(stored.max())} | _LLAMA3
    if stored.shape != (rotary_dim // 2,) or not np.allclose(
        _llama3_divisors(settings, theta, rotary_dim), stored, rtol=1e-4
    ):
        raise InputError(
            f"{file.path}: rope_freqs.weight holds frequencies that are not those of Llama-3 for "
            f"factor {stored.max():g}; load the Hugging Face folder of this model"
        )
    return settings


def _llama3_divisors(settings: dict[str, Any], theta: float, dim: int) -> np.ndarray:
    """Returns theta_j / f_j: 1 for fast pairs, `factor` for slow ones, blended in between."""
    freq = theta ** (-np.arange(0, dim, 2) / dim)
    turns = settings["original_max_position_embeddings"] * freq / (2 * np.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - share) / settings["factor"] + share)


class _Cursor:
    def __init__(self, data: np.ndarray, position: int):
        self.data = data
        self.position = position

    def scalars(self, code: str, count: int = 1) -> tuple:
        form = f"<{count}{code}"
        values = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return values

    def string(self) -> str:
        (size,) = self.scalars("Q")
        if size > _MAX_LENGTH:
            raise ValueError(f"a string of {size:,} bytes")
        start, stop = self.position, self.position + size
        if stop > len(self.data):
            raise EOFError
        self.position = stop
        return bytes(self.data[start:stop]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (item,), (count,) = self.scalars("I"), self.scalars("Q")
            if count > _MAX_LENGTH:
                raise ValueError(f"an array of {count:,} entries")
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}")
        return self.scalars(_SCALARS[kind])[0]


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (metadata, tensors) of a file; the tensors are views of the mapped file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    size = path.stat().st_size
    data = np.frombuffer(map_file(path) if size else b"", np.uint8)
    if bytes(data[:4]) != b"GGUF":
        raise InputError(
            f"{path}: not a GGUF file (it does not start with GGUF); of a Hugging Face model give "
            "the folder, not one of its files"
        )
    try:
        return _parse(path, data)
    except (struct.error, EOFError) as error:
        raise InputError(
            f"{path}: truncated or damaged: the file of {size:,} bytes ends before its index says "
            "so; download it again"
        ) from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
        raise InputError(f"{path}: damaged GGUF index ({reason}); download it again") from error


def _parse(path: Path, data: np.ndarray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    cursor = _Cursor(data, 4)
    (version,) = cursor.scalars("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, readable are 2 and 3 in little-endian order")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.scalars("I"))
    index = []
    for _ in range(num_tensors):
        name = cursor.string()
        (rank,) = cursor.scalars("I")
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"{name} has {rank} axes")
        shape = cursor.scalars("Q", rank)[::-1]
        (kind,), (offset,) = cursor.scalars("I"), cursor.scalars("Q")
        index.append((name, shape, kind, offset))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors, expected = {}, 0
    layout = [(*item, *_layout(path, *item[:3])) for item in index]
    for name, _, _, offset, _, rows, row_bytes in layout:  # llama.cpp refuses gaps as well
        if offset != expected:
            raise ValueError(f"{name} begins at byte {offset:,}, not {expected:,}")
        expected = -(-(offset + rows * row_bytes) // alignment) * alignment
    for name, shape, _, offset, kind, rows, row_bytes in layout:
        begin, end = start + offset, start + offset + rows * row_bytes
        if end > len(data):
            raise EOFError
        tensors[name] = Tensor(name, shape, kind, data[begin:end].reshape(rows, row_bytes))
    return metadata, tensors


def _layout(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int, int]:
    """Returns the quantisation of a tensor, its number of rows, and the bytes of a row."""
    gguf = import_package("gguf", str(path))
    if kind not in set(gguf.GGMLQuantizationType):
        raise InputError(
            f"{path}: tensor {name} has quantisation type {kind}, which the installed package gguf "
            "does not know; upgrade gguf (pip install -U gguf), or use a file in F16, Q8_0 or Q4_K"
        )
    quantisation = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    if shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, no multiple of {block}")
    return quantisation.name, math.prod(shape[:-1]), shape[-1] // block * block_bytes
