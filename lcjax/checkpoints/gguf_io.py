"""GGUF files (llama.cpp): weights, config and tokenizer from one file.

Tensors are de-quantised by the `gguf` package, rows at a time. llama.cpp stores the query and key
projections of the `llama` architecture with the two halves of each head interleaved (rows
0, H/2, 1, H/2+1, ...); `rows` puts them back into Hugging Face's half-split order.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lcjax.checkpoints import gguf_rope
from lcjax.checkpoints.gguf_reader import Tensor, read_index
from lcjax.checkpoints.hf_config import config_from_hf
from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import InputError, whole_number
from lcjax.models.config import ModelConfig

# kinds that are stored as they are
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_CHUNK = 2**20  # weights that are de-quantised at a time
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "phi2": "phi"}

# (GGUF name, Hugging Face names); several when llama.cpp stores them as one fused tensor.
_SEQUENTIAL = {
    "attn_norm": ("input_layernorm",),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn_gate": ("mlp.gate_proj",),
    "ffn_up": ("mlp.up_proj",),
    "ffn_down": ("mlp.down_proj",),
}
_PARALLEL = {
    "attn_norm": ("input_layernorm",),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.dense",),
    "ffn_up": ("mlp.fc1",),
    "ffn_down": ("mlp.fc2",),
}


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows of a stored tensor that make up one Hugging Face tensor."""

    tensor: Tensor
    start: int
    heads: int  # heads whose rows are interleaved; 0: rows are in order


class GGUFFile:
    """A GGUF file as a source of Hugging Face tensors."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self.metadata, self.stored = read_index(Path(path))
        self.architecture = self.get("general.architecture")
        if self.architecture not in _FAMILIES:
            raise InputError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_FAMILIES)}"
            )
        if (parts := self.get("split.count", 0)) > 1:
            raise InputError(
                f"{path}: one of {parts} parts of a model; merge them into one file "
                "(llama-gguf-split --merge FIRST OUT)"
            )
        self.hf_config = self._hf_config()
        self._parts: dict[str, _Part] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, tensor in self.stored.items():
            self._add(name, tensor)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.architecture)
        return self.metadata.get(key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            key = key.replace("{arch}", self.architecture)
            raise InputError(f"{self.path}: the metadata key {key!r} is missing; convert it again")
        return value

    def same(self, key: str, default: Any = None) -> Any:
        """A number that a file may also give layer by layer, where all have to agree."""
        value = self.need(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        key = key.replace("{arch}", self.architecture)
        for one in values:
            whole_number(f"{self.path}: {key}", one, 1)
        if len(values) != 1:
            raise InputError(
                f"{self.path}: {key} differs between layers ({sorted(values)}): such models are "
                "not supported; use one whose layers are alike"
            )
        return values.pop()

    def vector(self, name: str) -> np.ndarray:
        """A stored tensor of one axis."""
        return dequantize(self.stored[name], 0, self.stored[name].shape[0])

    def config(self) -> ModelConfig:
        return config_from_hf(self.hf_config, self.path)

    def _hf_config(self) -> dict[str, Any]:
        """The metadata in the words of a Hugging Face config."""
        kind = _FAMILIES[self.architecture]
        if kind == "llama" and self.get("{arch}.attention.sliding_window"):
            kind = "mistral"  # llama.cpp has one architecture for both
        heads = self.same("{arch}.attention.head_count")
        width = self.same("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length", width // heads)
        embedding = self.stored.get("token_embd.weight")
        if embedding is None:
            raise InputError(f"{self.path}: the tensor token_embd.weight is missing")
        hf = {
            "model_type": kind,
            "vocab_size": embedding.shape[0],
            "hidden_size": width,
            "intermediate_size": self.same("{arch}.feed_forward_length"),
            "num_hidden_layers": self.need("{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.same("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.need("{arch}.context_length"),
            "tie_word_embeddings": "output.weight" not in self.stored,
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self.stored,
            "sliding_window": self.get("{arch}.attention.sliding_window"),
            "dtype": self._dtype(),
        }
        if kind == "phi":
            hf["layer_norm_eps"] = _short(self.need("{arch}.attention.layer_norm_epsilon"))
        else:
            hf["rms_norm_eps"] = _short(self.need("{arch}.attention.layer_norm_rms_epsilon"))
        rotated = self.get("{arch}.rope.dimension_count", head_dim)
        if kind == "phi":
            hf["partial_rotary_factor"] = rotated / head_dim
        elif rotated != head_dim:
            raise InputError(
                f"{self.path}: {self.architecture}.rope.dimension_count={rotated} must equal the "
                f"head size {head_dim} for this architecture"
            )
        return hf | gguf_rope.to_hf(self, rotated)

    def _dtype(self) -> str:
        kinds = {_dtype_of(t) for t in self.stored.values() if len(t.shape) > 1}
        return kinds.pop() if len(kinds) == 1 else "float32"

    def _add(self, name: str, tensor: Tensor) -> None:
        shape = tensor.shape
        names, suffix = self._hf_names(name)
        head_dim = self.hf_config["head_dim"]
        heads = [self.hf_config["num_attention_heads"]]
        heads += [self.hf_config["num_key_value_heads"]] * 2
        start = 0
        for i, hf_name in enumerate(names):
            rows = heads[i] * head_dim if len(names) > 1 else shape[0]
            rotated = self.architecture == "llama" and re.search(r"\.[qk]_proj", hf_name)
            interleaved = heads["k_proj" in hf_name] if rotated else 0
            full = hf_name + suffix
            self._parts[full] = _Part(tensor, start, interleaved)
            self.tensors[full] = TensorInfo((rows, *shape[1:]), _dtype_of(tensor))
            start += rows

    def _hf_names(self, name: str) -> tuple[tuple[str, ...], str]:
        stem, _, suffix = name.rpartition(".")
        phi = self.architecture == "phi2"
        top = {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.final_layernorm" if phi else "model.norm",
            "output": "lm_head",
        }
        if stem in top:
            return (top[stem],), f".{suffix}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        inner = (_PARALLEL if phi else _SEQUENTIAL).get(match[2]) if match else None
        if inner is None:
            return (name,), ""
        return tuple(f"model.layers.{match[1]}.{x}" for x in inner), f".{suffix}"

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor, de-quantised, in Hugging Face's order."""
        part = self._parts[name]
        if not part.heads:
            return dequantize(part.tensor, part.start + start, part.start + stop)
        size = self.tensors[name].shape[0] // part.heads
        first, last = start // size * size, -(-stop // size) * size  # whole heads
        block = dequantize(part.tensor, part.start + first, part.start + last)
        block = block.reshape(-1, size // 2, 2, *block.shape[1:]).swapaxes(1, 2)
        return block.reshape(last - first, *block.shape[3:])[start - first : stop - first]


def _short(value: float) -> float:
    """The shortest decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _dtype_of(tensor: Tensor) -> str:
    return np.dtype(_PLAIN.get(tensor.kind, np.float32)).name


def dequantize(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Rows of the tensor as floats; vectors are one row."""
    if len(tensor.shape) == 1:
        return _floats(tensor, 0, 1).reshape(-1)[start:stop]
    return _floats(tensor, start, stop)


def _floats(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    data = tensor.data[start:stop]
    if tensor.kind in _PLAIN:
        return data.view(_PLAIN[tensor.kind])
    import gguf

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
