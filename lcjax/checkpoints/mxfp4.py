"""Reads weights that a checkpoint stores in MXFP4, as those of the experts of gpt-oss.

A number has 4 bits, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, and 32 numbers share a scale,
a power of two (OCP Microscaling Formats v1.0, 2023, sec. 5.3 and 6). A matrix [E, I, O] is stored
as `NAME_blocks` uint8 [E, O, I / 32, 16], with two numbers in a byte, the first in its low bits,
and `NAME_scales` uint8 [E, O, I / 32], an exponent plus 127.
"""

import ml_dtypes
import numpy as np

from lcjax.checkpoints.weights import TensorInfo, WeightSource
from lcjax.errors import InputError

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # numbers of a scale
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], ml_dtypes.bfloat16)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The four numbers of every two bytes, as uint64
_QUADS = _NUMBERS[np.arange(2**16)[:, None] >> np.arange(0, 16, 4) & 15].view(np.uint64)[:, 0]
# Scales with which all numbers but 0 are normal: exponents of bfloat16 from 1 to 254
_FIRST, _LAST = 2, 252


class Mxfp4Source:
    """A source whose MXFP4 tensors are bfloat16 ones, which hold the same numbers.

    Gate and up-projection, whose outputs take turns in one tensor, are two tensors, under the names
    of `hf_names.alternating`: so each number is decoded once.
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
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == _GROUP // 2 and blocks.dtype == "U8"
        if not fits or scales != TensorInfo(blocks.shape[:-1], "U8"):
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
