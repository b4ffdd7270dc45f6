"""Reads weights that a checkpoint stores in 4 or 8 bits, as floats with the same values.

MXFP4, for the experts of gpt-oss: a number has 4 bits, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a
sign, and 32 numbers share a scale, a power of two (OCP Microscaling Formats v1.0, 2023, sec. 5.3
and 6). A matrix [E, I, O] is stored as `NAME_blocks` uint8 [E, O, I / 32, 16], with two numbers in
a byte, the first in its low bits, and `NAME_scales` uint8 [E, O, I / 32], an exponent plus 127.

FP8 in blocks, as Qwen3 and DeepSeek-V3 are published (arXiv 2412.19437, sec. 3.3.2): `NAME` is
float8_e4m3 [O, I], and `NAME_scale_inv` has the factor of each block of 128 x 128 numbers.
"""

from typing import Any

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import DTYPES, TensorInfo, WeightSource
from lcjax.errors import InputError

# Methods of `quantization_config` that are read, whatever the family; a family may have others
METHODS = ("fp8",)
_SCALE = "_scale_inv"

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # numbers of a scale
_BYTES = ("U8", "uint8")  # in safetensors, and in torch's files
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], ml_dtypes.bfloat16)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The four numbers of every two bytes, as uint64
_QUADS = _NUMBERS[np.arange(2**16)[:, None] >> np.arange(0, 16, 4) & 15].view(np.uint64)[:, 0]
# Scales with which all numbers but 0 are normal: exponents of bfloat16 from 1 to 254
_FIRST, _LAST = 2, 252


def dequantised(source: WeightSource, settings: Any) -> WeightSource:
    """Returns a source of floats.

    Args:
      source: the stored tensors.
      settings: `quantization_config` of the checkpoint; None: it has none.

    Raises:
      InputError: the tensors are not as the settings say, or settings have a value that is not
        supported.
    """
    method = method_of(settings)
    if method == "mxfp4":
        return Mxfp4Source(source)
    return Fp8Source(source, settings) if method == "fp8" else source


def method_of(settings: Any) -> str | None:
    """Returns the method that a `quantization_config` states; None if there is none."""
    return settings.get("quant_method") if isinstance(settings, dict) else settings or None


class Fp8Source:
    """A source whose FP8 matrices are float32 ones, the products of numbers and scales."""

    def __init__(self, source: WeightSource, settings: Any):
        self.path, self._source = source.path, source
        settings = settings if isinstance(settings, dict) else {}
        block, scheme = settings.get("weight_block_size"), settings.get("activation_scheme")
        is_block = isinstance(block, list) and [type(size) for size in block] == [int, int]
        if not is_block or min(block) < 1 or scheme not in (None, "dynamic"):
            raise InputError(
                f"{self.path}: quantization_config with weight_block_size={block!r:.40} and"
                f" activation_scheme={scheme!r:.40} is not supported, only blocks such as"
                " [128, 128] with dynamic activations; use the unquantised checkpoint"
            )
        self._block = tuple(block)
        self.tensors = dict(source.tensors)
        scaled = [name for name in self.tensors if f"{name}{_SCALE}" in self.tensors]
        self._scaled = frozenset(scaled)
        for name in scaled:
            info, scale = self.tensors[name], self.tensors.pop(name + _SCALE)
            grid = tuple(-(-size // part) for size, part in zip(info.shape, self._block))
            fits = len(info.shape) == 2 and scale.shape == grid and scale.dtype in DTYPES
            if info.dtype != "F8_E4M3" or not fits:
                raise InputError(
                    f"{self.path}: {name} ({info.dtype} {list(info.shape)}) and {name}{_SCALE}"
                    f" ({scale.dtype} {list(scale.shape)}) are not as FP8 with weight_block_size="
                    f"{block} has them; download them again, or use the unquantised checkpoint"
                )
            self.tensors[name] = TensorInfo(info.shape, "float32")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        numbers = self._source.rows(name, start, stop)
        if name not in self._scaled:
            return numbers
        height, width = self._block
        first, last = start // height, -(-stop // height)
        scales = self._source.rows(name + _SCALE, first, last).astype(np.float32)
        scales = np.repeat(scales, height, axis=0)[start - first * height :][: stop - start]
        numbers = numbers.astype(np.float32)
        numbers *= np.repeat(scales, width, axis=1)[:, : numbers.shape[1]]
        return numbers


class Mxfp4Source:
    """A source whose MXFP4 tensors are bfloat16 ones, which hold the same numbers.

    Gate and up-projection, whose outputs take turns in one tensor, are two tensors, under the names
    of `hf_names.part_of`: so each number is decoded once.
    """

    def __init__(self, source: WeightSource):
        self.path, self._source = source.path, source
        self._packed: dict[str, tuple[str, slice]] = {}  # stored name, and outputs
        self.tensors = dict(source.tensors)
        names = [name for name in source.tensors if name.endswith(_BLOCKS)]
        for name in (name.removesuffix(_BLOCKS) for name in names):
            experts, inputs, outputs = self._shape(name)
            for part in (_BLOCKS, _SCALES):
                del self.tensors[name + part]
            parts = ["[0::2]", "[1::2]"] if name.endswith("gate_up_proj") else [""]
            for first, part in enumerate(parts):
                shape = experts, inputs, outputs // len(parts)
                self.tensors[name + part] = TensorInfo(shape, "bfloat16")
                self._packed[name + part] = name, slice(first, None, len(parts))

    def _shape(self, name: str) -> tuple[int, int, int]:
        blocks, scales = (self._source.tensors.get(name + part) for part in (_BLOCKS, _SCALES))
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == _GROUP // 2
        is_bytes = blocks.dtype in _BYTES and scales is not None and scales.dtype in _BYTES
        if not (fits and is_bytes and scales.shape == blocks.shape[:-1]):
            raise InputError(
                f"{self.path}: {name}{_BLOCKS} ({blocks.dtype} {list(blocks.shape)}) and"
                f" {name}{_SCALES} ({scales and f'{scales.dtype} {list(scales.shape)}'}) are not as"
                " MXFP4 has them; download them again"
            )
        experts, outputs, groups, _ = blocks.shape
        return experts, _GROUP * groups, outputs

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name not in self._packed:
            return self._source.rows(name, start, stop)
        stored, outputs = self._packed[name]
        out = np.empty((stop - start, *self.tensors[name].shape[1:]), ml_dtypes.bfloat16)
        for expert in range(start, stop):  # one at a time, as numbers are larger than their codes
            blocks, scales = (
                self._source.rows(stored + part, expert, expert + 1)[0, outputs]
                for part in (_BLOCKS, _SCALES)
            )
            out[expert - start] = decode(blocks, scales).T
        return out


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers, bfloat16 [O, I], of uint8 blocks [O, I / 32, 16] and scales [O, I / 32].

    Numbers beyond the range of bfloat16 are infinite, and all are NaN where a scale is (255).
    """
    shape = *scales.shape, _GROUP
    if scales.size and (scales.min() < _FIRST or scales.max() > _LAST):
        with np.errstate(over="ignore"):
            factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
            factors = np.where(scales == 255, np.nan, factors)
            numbers = _QUADS[_pairs_of_bytes(blocks)].view(ml_dtypes.bfloat16).reshape(shape)
            numbers = (numbers * factors[..., None]).astype(ml_dtypes.bfloat16)
    else:  # a scale is added to the exponents of all numbers but 0
        bits = _QUADS[_pairs_of_bytes(blocks)].view(np.uint16).reshape(shape)
        shift = (scales.astype(np.int16) - 127 << 7).view(np.uint16)[..., None]
        bits += shift * (bits & 0x7FFF != 0)
        numbers = bits.view(ml_dtypes.bfloat16)
    return numbers.reshape(scales.shape[0], -1)


def _pairs_of_bytes(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.uint16)
