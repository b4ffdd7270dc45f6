"""Reference arrays of CEPE's released code, and models with the same weights."""

import functools

import numpy as np
from memory_support import Golden

from lcjax.checkpoints import config_from_hf
from lcjax.checkpoints.weights import read_params
from lcjax.models import Decoder

GOLDEN = Golden("cepe")
CASES = ("mha_nopad", "padded", "decode_cache", "init_zero", "distill")
arrays = functools.cache(GOLDEN.arrays)


@functools.cache
def model(name: str) -> tuple[Decoder, dict]:
    """The decoder of a case and its parameters."""
    document = GOLDEN.document(name)
    hf = {"model_type": "llama", "encoder_config": document["encoder_config"]}
    config = config_from_hf(document["decoder_config"] | hf)
    return Decoder(config), read_params(GOLDEN.weights(name), config)


def context(name: str) -> tuple[np.ndarray, np.ndarray]:
    """chunks int32 [B, C, P] and their mask."""
    chunks = arrays(name)["encoder_input_ids"].astype(np.int32)
    mask = arrays(name).get("encoder_attention_mask", np.ones_like(chunks))
    return chunks, mask.astype(bool)
