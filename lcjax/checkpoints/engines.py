"""A table of how inference engines read the rope and the windows of a `config.json`.

The facts come from the engines' sources, at the versions and in the files that the table names. The
rotation that an engine computes is a RoPE method of `lcjax.rope`, so that `engine_check` compares
numbers. For a new release of an engine, read its files and edit its entry in `ENGINES`. A family
that an entry omits is "not known": its files were not read. These are Ministral; for llama.cpp, the
families after Phi-2, whose files were not read at the version of its entry; and for tpu-inference,
the families that run in vLLM's Transformers backend (OLMo 2 and 3, SmolLM3).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lcjax.rope import NTK, Default, Llama3, LongRope, Rope, Yarn, from_hf

RIGHT, WRONG, REFUSED, UNKNOWN = "right", "wrong", "refused", "not known"
_ORIGINAL = "original_max_position_embeddings"
_OTHER_KEYS = ("rope_scaling", "rope_theta", "lcjax_rope")  # keys besides `rope_parameters`


class Settings(NamedTuple):
    """A `config.json` as one engine reads it."""

    hf: dict[str, Any]
    rope: dict[str, Any]  # the section of `hf` that this engine reads, with `rope_type`
    theta: float
    trained: int  # the trained length
    target: int  # number of tokens of the longest text that its method is for

    @property
    def kind(self) -> str:
        return self.rope["rope_type"]

    @property
    def max_length(self) -> int:
        return self.hf["max_position_embeddings"]

    def original(self) -> int:
        """Returns the trained length; a missing one defaults as in transformers."""
        return self.hf.get(_ORIGINAL) or self.rope.get(_ORIGINAL) or self.max_length


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an engine reads one type of rope.

    `compute` is None if the engine refuses the type, or if its source does not determine the result
    (`verdict`). `advice` and `note` are formatted with the values of `engine_check`.
    """

    compute: Callable[[Settings], Rope] | None
    reason: str = ""
    advice: str = ""
    verdict: str = REFUSED
    note: str = ""  # shown even if the engine is right


@dataclasses.dataclass(frozen=True)
class Family:
    """How an engine reads one family of models.

    `ropes` maps rope types to readings; the key "*" is for every other type. `windows` is "config"
    (the config's windows are used), "none" (ignored), or "uniform" (refused if layers differ).
    """

    ropes: Mapping[str, Reading]
    windows: str = "config"
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key that fails -> verdict
    head_dim: bool = True  # whether num_heads * head_dim may differ from the width


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine; `families` is by model type, and None means that it refuses the type.

    `foreign`, `memory`, `landmark` and `dual_chunk` are verdicts with their reasons: for a model
    class that the engine lacks, for a memory in a model class that it has, for Landmark attention,
    and for Dual Chunk Attention.
    """

    name: str
    version: str
    sources: tuple[str, ...]
    keys: tuple[str, ...]  # keys of config.json that hold the rope; the first one takes precedence
    families: Mapping[str, Family | None]
    foreign: tuple[str, str]
    memory: tuple[str, str]
    landmark: tuple[str, str]
    dual_chunk: tuple[str, str] = (
        UNKNOWN,
        "how it reads dual_chunk_attention_config is not known",
    )
    # Advice if the engine serves other lengths than the method is for, else empty
    limit: Callable[[Settings], str] | None = None
    fallback: tuple[str, str] | None = None  # an earlier engine whose code it can run, and how
    gguf: Reading | None = None  # of the metadata of a GGUF file; None: not known


def _standard(s: Settings) -> Rope:
    """Returns the rope as in transformers, whose rules `lcjax.rope.from_hf` follows."""
    hf = {k: v for k, v in s.hf.items() if k not in _OTHER_KEYS}
    rope = from_hf(hf | {"rope_parameters": s.rope | {"rope_theta": s.theta}})
    return rope.resolve(theta=s.theta, length=s.max_length)


def _plain(s: Settings) -> Rope:
    return Default(theta=s.theta)


def _plain_10000(s: Settings) -> Rope:
    return Default(theta=10_000.0)


def _vllm_dynamic(s: Settings) -> Rope:
    """Returns one base for all lengths: that of `max_position_embeddings` tokens."""
    trained = s.rope.get("max_trained_positions") or s.max_length
    alpha = s.rope.get("alpha") or s.rope["factor"] * s.max_length / trained - s.rope["factor"] + 1
    return NTK(theta=s.theta, alpha=float(alpha))


def _vllm_longrope(s: Settings) -> Rope:
    """Returns one set of divisors for all texts: long if `target` exceeds the trained length."""
    original = s.original()
    long = s.target > original
    scale = s.max_length / original
    attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    divisors = tuple(s.rope["long_factor" if long else "short_factor"])
    return LongRope(
        theta=s.theta,
        short_factor=divisors,
        long_factor=divisors,
        original_length=original,
        attention_factor=s.rope.get("long_mscale" if long else "short_mscale") or attention,
    )


def _tpu_llama3(s: Settings) -> Rope:
    """Returns Llama 3's formula for any keys, without a scale, as `apply_rope_scaling` does."""
    if s.kind == "default" and "factor" not in s.rope:
        return _plain(s)
    has_length = s.kind in ("llama3", "yarn", "longrope", "su")  # transformers fills in the length
    return Llama3(
        theta=s.theta,
        factor=float(s.rope.get("factor") or 8.0),
        low_freq_factor=float(s.rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(s.rope.get("high_freq_factor", 4.0)),
        original_length=s.original() if has_length else int(s.rope.get(_ORIGINAL, 8192)),
    )


def _sglang_yarn(s: Settings) -> Rope:
    """Ignores `attention_factor` and `truncate`; uses `mscale` even without `mscale_all_dim`."""
    factor = float(s.rope["factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return Yarn(
        theta=s.theta,
        factor=factor,
        original_length=s.original(),
        beta_fast=float(s.rope.get("beta_fast", 32.0)),
        beta_slow=float(s.rope.get("beta_slow", 1.0)),
        attention_factor=mscale(s.rope.get("mscale", 1.0))
        / mscale(s.rope.get("mscale_all_dim", 0.0)),
    )


def _llama_cpp_yarn(s: Settings) -> Rope:
    """Reads the factor and the trained length; everything else is the default."""
    return Yarn(theta=s.theta, factor=float(s.rope["factor"]), original_length=s.original())


def _llama_cpp_gguf(s: Settings) -> Rope:
    rope = {k: v for k, v in s.rope.items() if k not in ("beta_fast", "beta_slow")}
    return _standard(s._replace(rope=rope))


def _vllm_limit(s: Settings) -> str:
    """Returns advice on `--max-model-len`, whose default multiplies most lengths by the factor."""
    limit = s.max_length
    if s.kind not in ("llama3", "longrope", "su") and s.hf["model_type"] != "gemma3_text":
        limit = (s.original() if s.kind == "yarn" else limit) * (s.rope.get("factor") or 1)
    if limit < s.target:
        return (
            f"serves at most {limit:g} tokens; for {s.target} add --hf-overrides"
            f" '{{\"max_position_embeddings\": {s.target}}}'"
        )
    if limit > s.target and s.kind == "linear":
        return (
            f"start it with --max-model-len {s.target}: the default is the factor times"
            " max_position_embeddings"
        )
    return ""


_STATIC = ("default", "linear", "yarn", "llama3")
_TRANSFORMERS_ROPES = {
    "*": Reading(_standard),
    **dict.fromkeys(
        ("dynamic", "longrope", "su"),
        Reading(
            _standard,
            note="while it writes past the trained length, cached keys keep the frequencies of the"
            " length at which they were read",
        ),
    ),
}
_VLLM_ROPES = {
    "*": Reading(_standard),
    "dynamic": Reading(
        _vllm_dynamic,
        "its dynamic rope has one base for all texts, that of max_position_embeddings tokens"
        " (dynamic_ntk_scaling_rope.py), and tables of so many positions",
    ),
    **dict.fromkeys(
        ("longrope", "su"),
        Reading(
            _vllm_longrope,
            "its longrope takes long_factor for every text where --max-model-len is above the"
            " trained length, else short_factor, and derives the scale from"
            " max_position_embeddings (phi3_long_rope_scaled_rope.py)",
            "for the scale add short_mscale and long_mscale (here {scale:.6g}) to rope_parameters"
            " in config.json; texts up to {trained} tokens need a server with --max-model-len"
            " {trained}",
            note="start it with --max-model-len {target}: the default is {trained}",
        ),
    ),
}
_VLLM_BACKEND_ROPES = {
    **dict.fromkeys(_STATIC, Reading(_standard)),
    "*": Reading(
        None,
        "runs transformers' own module in batches (models/transformers), whose lengths its source"
        " does not tell apart",
        verdict=UNKNOWN,
    ),
}
_TPU_ROPES = {
    "*": Reading(
        _tpu_llama3,
        "its JAX models send every type but default, proportional and mrope through Llama 3's"
        " formula, without a scale (layers/jax/rope_interface.py)",
    ),
}
_LLAMA_CPP_ROPES = {
    "default": Reading(_plain),
    "linear": Reading(_standard),
    "llama3": Reading(_standard),
    "yarn": Reading(
        _llama_cpp_yarn,
        "for this architecture it reads no beta_fast and beta_slow (32 and 1), no truncate and no"
        " attention_factor (the scale is 0.1 ln(factor) + 1)",
        "{betas}",
    ),
    "dynamic": Reading(
        _plain,
        "the conversion writes no scaling for dynamic, and it has no such rope",
        "for texts of {target} tokens start it with --rope-freq-base {base:.8g}",
    ),
    **dict.fromkeys(
        ("longrope", "su"),
        Reading(_plain, "the conversion writes the factors of longrope for Phi-3 only"),
    ),
}
_PHI2_ROPE = Reading(
    _plain_10000,
    "the conversion of Phi writes neither rope_theta nor a scaling (conversion/phi.py)",
    "{flags}",
)
_SGLANG_ROPES = {
    "default": Reading(_plain),
    "llama3": Reading(
        _plain,
        "its class for llama3 overrides _compute_inv_freq, which the rotation does not call, so the"
        " scaling is lost (layers/embeddings.py)",
    ),
    "yarn": Reading(
        _sglang_yarn,
        "its yarn reads neither attention_factor nor truncate, and mscale without mscale_all_dim",
    ),
    "*": Reading(None, "raises 'Unknown RoPE scaling type' (layers/embeddings.py)"),
}
_SGLANG_QWEN2, _SGLANG_QWEN3, _SGLANG_GEMMA2 = (
    Reading(_plain, f"its {name} ignores rope_scaling: the rotation is plain (models/{file}.py)")
    for name, file in (("Qwen2", "qwen2"), ("Qwen3", "qwen3"), ("Gemma 2", "gemma2"))
)
_TPU_BACKEND = Reading(
    None, "runs vLLM's Transformers backend, which was not looked at", verdict=UNKNOWN
)

ENGINES = (
    Engine(
        name="transformers",
        version="5.23.0",
        sources=("modeling_rope_utils.py", "models/*/modeling_*.py", "models/*/configuration_*.py"),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_TRANSFORMERS_ROPES),
            "mistral": Family(_TRANSFORMERS_ROPES),
            "qwen2": Family(_TRANSFORMERS_ROPES),
            "phi": Family(_TRANSFORMERS_ROPES),
            "ministral": Family(_TRANSFORMERS_ROPES),
            "smollm3": Family(_TRANSFORMERS_ROPES),
            **dict.fromkeys(
                ("qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "granite"),
                Family(_TRANSFORMERS_ROPES),
            ),
        },
        foreign=(WRONG, "it picks the class by model_type and leaves the memory's weights out"),
        memory=(WRONG, "it leaves the memory's weights out, with a warning"),
        landmark=(REFUSED, "it does not know model_type llama_with_landmark"),
        dual_chunk=(
            WRONG,
            "it ignores dual_chunk_attention_config: equal up to chunk_size - local_size tokens",
        ),
    ),
    Engine(
        name="vllm",
        version="0.33.0",
        sources=(
            "vllm/model_executor/layers/rotary_embedding/",
            "vllm/model_executor/models/{llama,mistral,qwen2,registry}.py",
            "vllm/model_executor/models/{qwen3,gemma2,gemma3,phi3,granite}.py",
            "vllm/model_executor/models/transformers/{base,utils}.py",
            "vllm/model_executor/layers/attention/attention.py",
            "vllm/config/model.py",
            "vllm/engine/arg_utils.py",
        ),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_VLLM_ROPES),
            "mistral": Family(_VLLM_ROPES),
            "qwen2": Family(_VLLM_ROPES, windows="uniform", head_dim=False),
            "phi": Family(_VLLM_BACKEND_ROPES),
            # Extends its Qwen2; the output projection of the attention has no bias.
            "qwen3": Family(_VLLM_ROPES, windows="uniform", biases={"attention_bias": REFUSED}),
            **dict.fromkeys(
                ("gemma2", "gemma3_text", "phi3", "granite"),
                Family(_VLLM_ROPES),
            ),
            **dict.fromkeys(("olmo2", "olmo3", "smollm3"), Family(_VLLM_BACKEND_ROPES)),
        },
        foreign=(REFUSED, "it has no model class {architecture}"),
        memory=(REFUSED, "its loader stops at weights that the model class lacks"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
        limit=_vllm_limit,
    ),
    Engine(
        name="tpu-inference",
        version="0.32.0, b8692ff01",
        sources=(
            "tpu_inference/layers/jax/rope_interface.py",
            "tpu_inference/models/jax/{llama3,qwen2,qwen3}.py",
            "tpu_inference/models/common/model_loader.py",
        ),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_TPU_ROPES, biases={"attention_bias": REFUSED, "mlp_bias": REFUSED}),
            "qwen2": Family(_TPU_ROPES, windows="none"),
            # It has no JAX model of these and runs vLLM's.
            **dict.fromkeys(
                ("mistral", "gemma2", "gemma3_text", "phi3", "granite"), Family(_VLLM_ROPES)
            ),
            "phi": Family({"*": _TPU_BACKEND}),
            "qwen3": Family(_TPU_ROPES, windows="none", biases={"attention_bias": REFUSED}),
        },
        foreign=(REFUSED, "vLLM, which reads the config, has no model class {architecture}"),
        memory=(REFUSED, "its loader stops at weights that the model class lacks"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
        limit=_vllm_limit,
        fallback=("vllm", "set MODEL_IMPL_TYPE=vllm, which runs vLLM's own model"),
    ),
    Engine(
        name="sglang-jax",
        version="cddbf6f1c",
        sources=(
            "python/sgl_jax/srt/layers/embeddings.py",
            "python/sgl_jax/srt/models/{llama,qwen2,qwen3,gemma2,registry}.py",
        ),
        keys=("rope_scaling",),  # with transformers 4.57, which it requires
        families={
            "llama": Family(_SGLANG_ROPES, biases={"mlp_bias": WRONG}),
            "qwen2": Family({"*": _SGLANG_QWEN2}, windows="none"),
            "qwen3": Family({"*": _SGLANG_QWEN3}, windows="none"),
            "gemma2": Family({"*": _SGLANG_GEMMA2}),
            **dict.fromkeys(
                ("mistral", "phi", "gemma3_text", "olmo2", "olmo3", "phi3", "granite", "smollm3")
            ),
        },
        foreign=(REFUSED, "it has no model class {architecture}"),
        memory=(WRONG, "it loads the weights that its model class has and leaves the others out"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
    ),
    Engine(
        name="llama.cpp",
        version="0c1e57098",
        sources=(
            "conversion/{base,llama,qwen,phi}.py",
            "src/llama-context.cpp",
            "src/llama-model.cpp",
            "src/models/{llama,qwen2,phi2}.cpp",
        ),
        keys=("rope_parameters", "rope_scaling"),
        families={
            "llama": Family(_LLAMA_CPP_ROPES),
            "mistral": Family(_LLAMA_CPP_ROPES, windows="none"),
            "qwen2": Family(
                _LLAMA_CPP_ROPES
                | {
                    "llama3": Reading(_plain, "its conversion of Qwen2 writes no factors of llama3")
                },
                windows="none",
                head_dim=False,
            ),
            "phi": Family({"*": _PHI2_ROPE}),
        },
        foreign=(REFUSED, "its conversion does not know the class {architecture}"),
        memory=(REFUSED, "its conversion stops at weights that it cannot map"),
        landmark=(
            WRONG,
            "its conversion looks at the class alone, LlamaForCausalLM: all tokens are seen and"
            " landmarks are ordinary tokens",
        ),
        gguf=Reading(
            _llama_cpp_gguf,
            "it reads beta_fast and beta_slow for other architectures only (src/models)",
            "{betas}",
        ),
    ),
)
