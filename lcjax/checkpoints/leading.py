"""Checkpoints of memories that stand before the text: a Llama folder with what they add.

Tensors have the names of the released code (Activation Beacon's `beacon_q_proj`, AutoCompressor's
`embed_summary`); how windows are read is noted in a field of our own. What reads the folder as a
Llama alone leaves both out and gets the decoder without a memory.
"""

import dataclasses
from typing import Any

from lcjax.checkpoints import hf_config, shared_llm
from lcjax.errors import InputError
from lcjax.memory import AutoCompressor, Beacon
from lcjax.models.config import ModelConfig

_OWN = "lcjax_memory"
_KINDS = {"beacon": Beacon, "auto_compressor": AutoCompressor}


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `lcjax.checkpoints.shared_llm.config_from_hf`, which reads all other checkpoints."""
    if (note := hf.get(_OWN)) is None:
        _refuse_released(hf, where)
        return shared_llm.config_from_hf(hf, where)
    try:
        fields = {key: tuple(x) if isinstance(x, list) else x for key, x in note.items()}
        memory = _KINDS[fields.pop("type")](**fields)
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{where}: {_OWN}={note!r} is not as this version writes it; it knows the types"
            f" {', '.join(_KINDS)}"
        ) from None
    return hf_config.config_from_hf(hf, where).replace(memory=memory)


def _refuse_released(hf: dict[str, Any], where: str) -> None:
    """A folder of the authors' code, whose memory would be left out without a word."""
    for name, kind in (("summary_length", "auto_compressor"), ("beacon_", "beacon")):
        found = [key for key, value in hf.items() if key.startswith(name) and value]
        if found:
            raise InputError(
                f"{where}: {found[0]}={hf[found[0]]!r} is of a released checkpoint with a memory of"
                " its own, which is not opened here; load the Llama that it began with, with"
                f" model.memory.type={kind}, and train that"
            )


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """As `lcjax.checkpoints.shared_llm.config_to_hf`, with a note of a memory that leads."""
    memory = config.memory
    if memory is None or not memory.is_prefix:
        return shared_llm.config_to_hf(config, dtype=dtype)
    note = {"type": memory.get_choice_name(type(memory))} | dataclasses.asdict(memory)
    note = {key: list(x) if isinstance(x, tuple) else x for key, x in note.items()}
    return hf_config.config_to_hf(config.replace(memory=None), dtype=dtype) | {_OWN: note}
