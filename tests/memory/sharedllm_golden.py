"""Reference arrays of SharedLLM's code, repaired, and models with the same weights."""

import functools

import numpy as np
from memory_support import Golden

from lcjax.checkpoints import config_from_hf
from lcjax.checkpoints.weights import read_params
from lcjax.models import Decoder

GOLDEN = Golden("sharedllm")
CASES = ("paper_lm_n3", "paper_query_n4_gqa")
arrays = functools.cache(GOLDEN.arrays)


@functools.cache
def model(name: str) -> tuple[Decoder, dict]:
    """The model of a case, with chunks of 64 tokens, and its parameters."""
    hf = GOLDEN.document(name)["config"] | {"model_type": "llama"}
    own = {
        "chunk": 64,
        "ratios": [16, 8, 4],  # two tokens of every node
        "noise": None,
        "policy": {"type": "query" if hf["do_retrieval"] else "right"},
        "placement": "bottom",
        "positions": "paper",
    }
    config = config_from_hf(hf | {"lcjax_shared_llm": own})
    return Decoder(config), read_params(GOLDEN.weights(name), config)


def tokens(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The text int32 [B, T], and chunks int32 [B, C, P]."""
    return tuple(arrays(name)[key].astype(np.int32) for key in ("input_ids", "encoder_input_ids"))
