"""Reference arrays of SharedLLM's code, repaired, and models with the same weights."""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lcjax.convert.shared_llm import config_from_hf
from lcjax.convert.weights import TensorInfo, read_params, spread_layers
from lcjax.models import Decoder

FOLDER = Path(__file__).parent.parent / "golden" / "sharedllm"
CASES = ("paper_lm_n3", "paper_query_n4_gqa")


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
    """The model of a case, with chunks of 64 tokens, and its parameters."""
    hf = json.loads((FOLDER / f"{name}.json").read_text())["config"] | {"model_type": "llama"}
    own = {
        "chunk": 64,
        "ratios": [16, 8, 4],  # two tokens of every node
        "noise": None,
        "policy": {"type": "query" if hf["do_retrieval"] else "right"},
        "placement": "bottom",
        "positions": "paper",
    }
    config = config_from_hf(hf | {"lcjax_shared_llm": own})
    return Decoder(config), spread_layers(read_params(Stored(name), config), config)


def tokens(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The text int32 [B, T], and chunks int32 [B, C, P]."""
    return tuple(arrays(name)[key].astype(np.int32) for key in ("input_ids", "encoder_input_ids"))
