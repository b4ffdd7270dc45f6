"""Checkpoints of SharedLLM: a Llama folder with its lower model inside.

Names and fields are those of the released code (Clement25/SharedLLM), which is CEPE's with a
number of layers below 0, from the first one up. What it has no field for is noted beside them.
"""

from typing import Any

from lcjax.checkpoints import cepe, hf_config
from lcjax.errors import InputError
from lcjax.memory import QueryAware, Right, SharedLlm, Tree
from lcjax.memory.config import lower_config
from lcjax.memory.policies import policy_note, policy_of
from lcjax.models.config import ModelConfig

_OWN = "lcjax_shared_llm"
_DEPTH = "segment_tree_depth"
_CHUNK = 1_024  # of the language models; no field of the released code says it


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `lcjax.checkpoints.cepe.config_from_hf`, which reads all other checkpoints."""
    if _DEPTH not in hf:
        return cepe.config_from_hf(hf, where)
    config, count = hf_config.config_from_hf(hf, where), hf.get("num_cross_attn_layers")
    if type(count) is not int or not 1 <= abs(count) <= config.num_layers:
        raise InputError(
            f"{where}: num_cross_attn_layers={count!r} must be the layers that read the context, up"
            f" to {config.num_layers}, below 0 for the first ones"
        )
    states = lower_config(config, abs(count))
    if isinstance(inner := hf.get("encoder_config"), dict):
        rope = hf_config.config_from_hf({"model_type": "llama"} | inner, where).rope
        states = states.replace(rope=rope)
    memory = SharedLlm(states, **(_noted(hf[_OWN]) if _OWN in hf else _released(hf, where)))
    return config.replace(memory=memory)


def _noted(note: dict[str, Any]) -> dict[str, Any]:
    """What `config_to_hf` notes, as the fields of the memory."""
    fields = {key: note[key] for key in ("chunk", "placement", "positions")}
    tree = Tree(tuple(note["ratios"]), note["noise"])
    return fields | {"tree": tree, "policy": policy_of(note["policy"])}


def _released(hf: dict[str, Any], where: str) -> dict[str, Any]:
    """A folder of the released code, for chunks of 1,024 tokens; it never drew splits."""
    depth, text = hf[_DEPTH], str(hf.get("last_p", -1))
    first = text.strip("\"'()[] ").split(",")[0]
    try:
        kept = float(first) if "." in first else int(first)
        ratios = tuple(_ratio(_CHUNK >> level, kept) for level in range(1, depth + 1))
    except (ValueError, TypeError):
        raise InputError(
            f"{where}: last_p={text} with {_DEPTH}={depth!r} does not say how many tokens of a node"
            " are kept; correct them"
        ) from None
    return {
        "chunk": _CHUNK,
        "tree": Tree(ratios),
        "policy": QueryAware() if hf.get("do_retrieval", True) else Right(),
        "placement": "bottom" if hf["num_cross_attn_layers"] < 0 else "top",
        "positions": "released",
    }


def _ratio(length: int, kept: float) -> int:
    """The stride of a node: `kept` is a count, a fraction of its tokens, or up to 0 for all."""
    if kept <= 0:
        return 1
    count = int(length * kept) if isinstance(kept, float) else kept
    if not 1 <= count <= length:
        raise ValueError(count)
    return length // count


def misread_by_released(config: ModelConfig) -> str | None:
    """The setting of the memory that the released code has no field for, and what it reads."""
    memory = config.memory
    if not isinstance(memory, SharedLlm):
        return None
    if memory.placement == "interleaved":
        return "placement=interleaved as bottom"
    if len(set(_counts(memory))) > 1:
        ratios, count = list(memory.tree.ratios), _counts(memory)[0]
        return f"ratios={ratios} as trees that keep {count} tokens of every node"
    return None


def _counts(memory: SharedLlm) -> list[int]:
    """Tokens that are kept of a node at each level."""
    return [-(-(memory.chunk >> w) // r) for w, r in enumerate(memory.tree.ratios, 1)]


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """As `lcjax.checkpoints.cepe.config_to_hf`; what the released code reads beside it."""
    memory = config.memory
    if not isinstance(memory, SharedLlm):
        return cepe.config_to_hf(config, dtype=dtype)
    sign = 1 if memory.placement == "top" else -1
    counts = _counts(memory)
    return hf_config.config_to_hf(config.replace(memory=None), dtype=dtype) | {
        "architectures": [cepe.DECODER],
        "is_decoder": True,
        "do_cross_attention": True,
        "num_cross_attn_layers": sign * memory.layers,
        "last_p": f'"{counts[0]},{counts[0]}"',  # the released code keeps as many of every node
        _DEPTH: memory.tree.depth,
        "do_retrieval": memory.policy.query_dependent,
        "add_noise": False,  # it fails with true
        "encoder_hidden_size": memory.states.width,
        "encoder_config": hf_config.config_to_hf(memory.states, dtype=dtype),
        "train_encoder": False,
        _OWN: {
            "chunk": memory.chunk,
            "ratios": list(memory.tree.ratios),
            "noise": memory.tree.noise,
            "policy": policy_note(memory.policy),
            "placement": memory.placement,
            "positions": memory.positions,
        },
    }
