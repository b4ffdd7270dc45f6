"""Reference arrays of CEPE's released code, and models with the same weights."""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lcjax.convert.cepe import config_from_hf
from lcjax.convert.weights import TensorInfo, read_params
from lcjax.models import Decoder

FOLDER = Path(__file__).parent.parent / "golden" / "cepe"
CASES = ("mha_nopad", "padded", "decode_cache", "init_zero", "distill")


class Stored:
    """Named tensors in memory, as `read_params` wants them."""

    def __init__(self, name: str):
        self.path, self._arrays = name, load_file(FOLDER / f"{name}.weights.safetensors")
        self.tensors = {k: TensorInfo(v.shape, str(v.dtype)) for k, v in self._arrays.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.io.npz") as data:
        return dict(data)


@functools.cache
def model(name: str) -> tuple[Decoder, dict]:
    """The decoder of a case and its parameters."""
    document = json.loads((FOLDER / f"{name}.json").read_text())
    hf = {"model_type": "llama", "encoder_config": document["encoder_config"]}
    config = config_from_hf(document["decoder_config"] | hf)
    return Decoder(config), read_params(Stored(name), config)


def context(name: str) -> tuple[np.ndarray, np.ndarray]:
    """chunks int32 [B, C, P] and their mask."""
    chunks = arrays(name)["encoder_input_ids"].astype(np.int32)
    mask = arrays(name).get("encoder_attention_mask", np.ones_like(chunks))
    return chunks, mask.astype(bool)
