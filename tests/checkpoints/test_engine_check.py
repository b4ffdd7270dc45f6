"""`python -m lcjax.convert check`: what inference engines make of an export."""

import contextlib
import datetime
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert_support import edit_json, random_params, saved, tiny_config
from gguf_support import write_gguf

from lcjax.attention import Landmark, Sliding, Streaming
from lcjax.checkpoints import config_from_hf, config_to_hf, engine_check
from lcjax.checkpoints.engine_check import ENGINES, NAMES, check, check_config
from lcjax.checkpoints.families import FAMILIES
from lcjax.convert import main
from lcjax.errors import InputError
from lcjax.memory import Cepe, RetroSection
from lcjax.models import LayerKind
from lcjax.models.mixer import GatedDeltaNet
from lcjax.rope import (
    E2LLM,
    NTK,
    Clex,
    Default,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NoRotation,
    Yarn,
)

THETA, TRAINED, DIM = 5e4, 1024, 16
SHORT = tuple(np.linspace(1.0, 1.5, DIM // 2))
LONG = tuple(np.linspace(1.5, 8.0, DIM // 2))
ROPES = {
    "default": Default(theta=THETA),
    "ntk": NTK(theta=THETA, alpha=8.0),
    "linear": Linear(theta=THETA, factor=4.0),
    "dynamic": DynamicNTK(theta=THETA, factor=4.0, original_length=TRAINED),
    "lceg": DynamicNTK(theta=THETA, factor=2.0, original_length=TRAINED, min_length=4096),
    "yarn": Yarn(theta=THETA, factor=4.0, original_length=TRAINED),
    "yarn_betas": Yarn(theta=THETA, factor=4.0, original_length=TRAINED, beta_fast=4.0),
    "yarn_factor": Yarn(theta=THETA, factor=4.0, original_length=TRAINED, attention_factor=1.0),
    "yarn_exact": Yarn(theta=THETA, factor=4.0, original_length=TRAINED, truncate=False),
    "yarn_mscale": Yarn(
        theta=THETA, factor=4.0, original_length=TRAINED, mscale=0.7, mscale_all_dim=1.3
    ),
    "yarn_turns": Yarn(
        theta=THETA, factor=4.0, original_length=TRAINED, ramp="frequency", beta_fast=4.0
    ),
    "llama3": Llama3(theta=THETA, factor=4.0, original_length=TRAINED),
    "longrope": LongRope(
        theta=THETA, short_factor=SHORT, long_factor=LONG, original_length=TRAINED, factor=4.0
    ),
    "longrope_one": LongRope(
        theta=THETA, short_factor=LONG, long_factor=LONG, original_length=TRAINED, factor=4.0
    ),
    "clex": Clex(theta=THETA, original_length=TRAINED, max_factor=4),
    "e2_llm": E2LLM(theta=THETA, original_length=TRAINED),
    "e2_llm_fixed": E2LLM(theta=THETA, original_length=TRAINED, factor=4.0),
}
# Rows of the table in docs/data.md, whose columns are NAMES, and what they are of.
DOCUMENTED = {
    "`default`, `ntk`": ("default", "ntk"),
    "`linear`": ("linear", "e2_llm_fixed"),
    "`dynamic_ntk`": ("dynamic",),
    "`yarn`": ("yarn",),
    "`yarn`, other `beta_fast`, `beta_slow`": ("yarn_betas",),
    "`yarn`, other `attention_factor` or `truncate: false`": ("yarn_factor", "yarn_exact"),
    "`yarn`, `ramp: frequency`": ("yarn_turns",),
    "`llama3`": ("llama3",),
    "`longrope`": ("longrope",),
    "`clex`, `e2_llm` by length": ("clex", "e2_llm"),
}
OTHERS = {
    "lceg": "right right wrong refused right",
    "yarn_mscale": "right right wrong right wrong",
    "longrope_one": "right right wrong refused wrong",
}


def config(rope, family="llama", **changes):
    sizes = {"width": 96, "head_dim": DIM, "max_length": 4 * TRAINED}
    return tiny_config(family, rope=rope, **sizes | changes)


def rows(hf, **changes):
    return {row.engine: row for row in check_config(hf | changes, "model").rows}


def verdicts(hf, **changes):
    words = (row.verdict.replace("not known", "unknown") for row in rows(hf, **changes).values())
    return " ".join(words)


WORDS = {"right", "wrong", "refused", "not known"}
SENTENCES = dict.fromkeys(("reason", "advice", "note", "formula"), str)
ROPE_KEYS = SENTENCES | {"reads": list, "ignores": list, "needs": list, "defaults": dict}
ROPE_KEYS |= {"sets": dict, "verdict": str}
FAMILY_KEYS = {"ropes": dict, "windows": str, "biases": dict}
FAMILY_KEYS |= {"head_dim": bool, "keeps_length": bool}
NAMED = dict.fromkeys(("name", "version"), str) | {"date": datetime.date, "families": dict}
JUDGED = ("foreign", "memory", "landmark", "dual_chunk")
NAMED |= dict.fromkeys(("sources", "keys", *JUDGED), list)
ENGINE_KEYS = NAMED | {"gguf": dict, "multiplies_length": list, "fallback": list}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["name"])
def test_each_fact_has_a_known_form_a_date_a_version_and_sources(engine):
    def check_keys(facts, kinds):
        assert facts.keys() <= kinds.keys()
        assert all(isinstance(value, kinds[key]) for key, value in facts.items())

    check_keys(engine, ENGINE_KEYS)
    assert NAMED.keys() <= engine.keys() and engine["sources"] and engine["version"]
    assert engine["families"].keys() <= FAMILIES.keys()
    for verdict, reason in (engine[key] for key in JUDGED):
        assert verdict in WORDS and reason
    ropes = [engine["gguf"]] if "gguf" in engine else []
    for family in filter(None, engine["families"].values()):
        check_keys(family, FAMILY_KEYS)
        assert family.get("windows", "none") in ("none", "uniform")
        assert set(family.get("biases", {}).values()) <= WORDS
        assert "*" in family["ropes"] or set(family["ropes"]) >= {*ROPE_TYPES}
        ropes += family["ropes"].values()
    for facts in ropes:
        check_keys(facts, ROPE_KEYS)
        assert facts.get("verdict", "wrong") in WORDS
        assert facts.get("formula", "vllm_dynamic") in engine_check._FORMULAS
    if "fallback" in engine:
        assert engine["fallback"][0] in NAMES[: NAMES.index(engine["name"])]


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3")


def documented_table():
    docs = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in docs.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == len(NAMES) + 1}


@pytest.mark.parametrize("name", ROPES)
def test_each_engine_has_the_verdict_that_the_documentation_gives(name):
    table, hf = documented_table(), config_to_hf(config(ROPES[name]))
    expected = {n: " ".join(table[row]) for row, names in DOCUMENTED.items() for n in names}
    assert verdicts(hf) == (expected | OTHERS)[name]
    for row in rows(hf).values():
        assert row.verdict == "right" or (row.reason and row.advice)
        assert "\n" not in row.reason + row.advice


def test_the_table_of_the_documentation_has_the_versions_of_the_facts():
    table = documented_table()
    for engine, column in zip(ENGINES, table.pop("rope"), strict=True):
        assert column.endswith(engine["version"])
    assert table.keys() == DOCUMENTED.keys()


# Formulas of the engines, written again from their sources without the library's ropes.


def plain(theta=THETA):
    return theta ** (-np.arange(0, DIM, 2) / DIM), 1.0


def llama3(factor=8.0, original=8192, low=1.0, high=4.0):
    """tpu_inference/layers/jax/rope_interface.py, apply_rope_scaling."""
    f, wave = plain()[0], 2 * math.pi / plain()[0]
    smooth = (original / wave - low) / (high - low)
    middle = (1 - smooth) * f / factor + smooth * f
    f = np.where(wave < original / high, f, np.where(wave > original / low, f / factor, middle))
    return f, 1.0


def yarn(scale, fast=32.0, slow=1.0, factor=4.0, truncate=True):
    """yarn_scaling_rope.py of vLLM; embeddings.py of SGLang-JAX; ggml_rope_yarn_corr_dims."""

    def dim(turns):
        return DIM * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dim(fast), dim(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    ramp = np.clip((np.arange(DIM // 2) - low) / max(high - low, 0.001), 0, 1)
    f = plain()[0]
    return f / factor * ramp + f * (1 - ramp), scale


def mscale(factor=4.0, weight=1.0):
    return 0.1 * weight * math.log(factor) + 1.0


def divided(divisors, scale):
    return plain()[0] / np.asarray(divisors), scale


PHI3_SCALE = math.sqrt(1 + math.log(4) / math.log(TRAINED))  # of 4 x TRAINED positions
FORMULAS = {
    ("linear", "vllm"): divided([4.0], 1.0),
    ("linear", "tpu-inference"): llama3(4.0),
    ("dynamic", "vllm"): plain(),
    ("dynamic", "tpu-inference"): llama3(4.0),
    ("dynamic", "llama.cpp"): plain(),
    ("yarn", "vllm"): yarn(mscale()),
    ("yarn", "tpu-inference"): llama3(4.0, TRAINED),
    ("yarn", "sglang-jax"): yarn(mscale()),
    ("yarn", "llama.cpp"): yarn(mscale()),
    ("yarn_betas", "vllm"): yarn(mscale(), 4.0),
    ("yarn_betas", "sglang-jax"): yarn(mscale(), 4.0),
    ("yarn_betas", "llama.cpp"): yarn(mscale()),
    ("yarn_factor", "vllm"): yarn(1.0),
    ("yarn_factor", "sglang-jax"): yarn(mscale()),
    ("yarn_factor", "llama.cpp"): yarn(mscale()),
    ("yarn_exact", "vllm"): yarn(mscale(), truncate=False),
    ("yarn_exact", "sglang-jax"): yarn(mscale()),
    ("yarn_mscale", "vllm"): yarn(mscale(weight=0.7) / mscale(weight=1.3)),
    ("yarn_mscale", "sglang-jax"): yarn(mscale(weight=0.7) / mscale(weight=1.3)),
    ("llama3", "vllm"): llama3(4.0, TRAINED),
    ("llama3", "tpu-inference"): llama3(4.0, TRAINED),
    ("llama3", "sglang-jax"): plain(),
    ("longrope", "vllm"): divided(LONG, PHI3_SCALE),
    ("longrope", "tpu-inference"): llama3(4.0, TRAINED),
    ("longrope", "llama.cpp"): plain(),
    ("longrope_one", "vllm"): divided(LONG, PHI3_SCALE),
    ("e2_llm", "vllm"): plain(),
}


@pytest.mark.parametrize(("name", "engine"), FORMULAS, ids=str)
def test_a_verdict_is_that_of_the_formula_in_the_engines_source(name, engine):
    frequencies, scale = FORMULAS[name, engine]
    difference = 0.0
    for length in (TRAINED, 4 * TRAINED):
        ours, our_scale = ROPES[name].frequencies(DIM, length)
        relative = np.abs(frequencies / ours - 1).max()
        difference = max(difference, relative, abs(scale / our_scale - 1))
    row = rows(config_to_hf(config(ROPES[name])))[engine]
    assert row.verdict == ("right" if difference < 1e-6 else "wrong")
    assert row.difference == pytest.approx(difference, abs=1e-6)
    assert row.verdict == "right" or difference > 1e-3


@pytest.mark.parametrize("name", [name for name in ROPES if name != "clex"])
def test_transformers_verdicts_are_those_of_its_own_functions(name):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = config_to_hf(config(ROPES[name]))
    theirs = LlamaConfig(**json.loads(json.dumps(hf)))
    kind = theirs.rope_parameters["rope_type"]
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    function = ROPE_INIT_FUNCTIONS.get(kind, default)
    differences = []
    for length in (TRAINED, 4 * TRAINED):
        f, scale = function(theirs, device=torch.device("cpu"), seq_len=length)
        ours, our_scale = ROPES[name].frequencies(DIM, length)
        differences += [np.abs(f.numpy() / ours - 1).max(), abs(scale / our_scale - 1)]
    row = rows(hf)["transformers"]
    assert row.verdict == ("right" if max(differences) < 2e-6 else "wrong")
    assert row.difference == pytest.approx(max(differences), abs=2e-6)


def test_an_engine_reads_the_keys_of_the_transformers_that_it_requires():
    """transformers 5 writes rope_parameters alone, which transformers 4 does not know."""
    hf = config_to_hf(config(ROPES["yarn"]))
    del hf["rope_scaling"], hf["rope_theta"]
    row = rows(hf)["sglang-jax"]
    assert row.verdict == "wrong" and "rope default (theta=10000)" in row.reason
    assert rows(hf)["vllm"].verdict == rows(hf)["llama.cpp"].verdict == "right"


def test_the_way_out_leads_to_a_right_model():
    """For dynamic NTK: another base, of which all engines compute the same at that length."""
    dynamic, target = ROPES["dynamic"], 4 * TRAINED
    result = rows(config_to_hf(config(dynamic)))
    ntk = NTK(theta=THETA, alpha=dynamic.alpha(target))
    assert f"--rope.type=ntk --rope.alpha={ntk.alpha:g} " in result["vllm"].advice
    f, _ = dynamic.frequencies(DIM, target)
    np.testing.assert_allclose(ntk.frequencies(DIM, target)[0], f, rtol=1e-6)
    assert set(verdicts(config_to_hf(config(ntk))).split()) == {"right"}
    base = float(result["llama.cpp"].advice.split("--rope-freq-base ")[1])
    np.testing.assert_allclose(plain(base)[0], f, rtol=1e-6)

    tpu = rows(config_to_hf(config(ROPES["yarn"])))["tpu-inference"]
    assert "MODEL_IMPL_TYPE=vllm" in tpu.advice
    betas = rows(config_to_hf(config(ROPES["yarn_betas"])))["llama.cpp"]
    assert betas.advice == "start it with --yarn-beta-fast 4 --yarn-beta-slow 1"
    e2 = rows(config_to_hf(config(ROPES["e2_llm"])))["transformers"]
    assert "--rope.type=linear --rope.factor=4 " in e2.advice

    hf = config_to_hf(config(ROPES["yarn_turns"]))
    advice = rows(hf)["vllm"].advice
    scale = float(advice.split("(here ")[1].split(")")[0])
    for key in ("rope_parameters", "rope_scaling"):
        hf[key] = hf[key] | {"short_mscale": scale, "long_mscale": scale}
    del hf["lcjax_rope"]  # it would contradict the changed keys
    assert rows(hf)["vllm"].verdict == "right"


def test_vllm_names_its_limit_where_the_method_is_for_more():
    hf = config_to_hf(config(ROPES["llama3"], max_length=TRAINED))
    assert rows(hf)["vllm"].advice == ""
    old = {k: v for k, v in hf.items() if k != "lcjax_max_length"}
    row = rows(old | {"max_position_embeddings": TRAINED})["vllm"]
    assert row.verdict == "right"
    override = json.loads(row.advice.split("--hf-overrides ")[1].strip("'"))
    assert override == {"max_position_embeddings": 4 * TRAINED}
    for name, advice in (("yarn", ""), ("linear", f"start it with --max-model-len {4 * TRAINED}")):
        row = rows(config_to_hf(config(ROPES[name], max_length=TRAINED)))["vllm"]
        assert row.verdict == "right" and row.advice.split(":")[0] == advice


MIXED_ROPE = (LayerKind(repeat=2), LayerKind(rope=NoRotation()))
MIXED_WINDOW = (LayerKind(repeat=2, pattern=Sliding(window=100)), LayerKind())


# (family, changes of the config, verdicts)
FAMILY_CASES = [
    ("llama", {"pattern": Sliding(window=100)}, "right right right refused wrong"),  # mistral
    ("llama", {"pattern": Sliding(window=4096)}, "right right right refused right"),
    ("qwen2", {}, "right right right right right"),
    ("qwen2", {"pattern": Sliding(window=100)}, "right right wrong wrong wrong"),
    ("qwen2", {"rope": ROPES["llama3"]}, "right right right wrong wrong"),
    ("qwen2", {"rope": ROPES["linear"]}, "right right wrong wrong right"),
    ("qwen2", {"head_dim": 8, "width": 96}, "right refused right right refused"),
    ("phi", {}, "right right unknown refused wrong"),
    ("phi", {"rope": Default(theta=1e4)}, "right right unknown refused right"),
    ("phi", {"rope": ROPES["dynamic"]}, "right unknown unknown refused wrong"),
    ("llama_biases", {}, "right right refused wrong right"),
    # SmolLM3, Ministral, and no rotation at all
    ("llama", {"layers": MIXED_ROPE}, "right right unknown refused unknown"),
    ("llama", {"layers": MIXED_WINDOW}, "right unknown unknown unknown unknown"),
    ("llama", {"rope": NoRotation()}, "right right unknown refused unknown"),
]


@pytest.mark.parametrize(("family", "changes", "expected"), FAMILY_CASES, ids=str)
def test_families_and_windows(family, changes, expected):
    ours = config(**{"rope": ROPES["default"], "family": family} | changes)
    assert verdicts(config_to_hf(ours)) == expected
    result = check_config(config_to_hf(ours), "model")
    for layer, _ in ours.layer_counts:
        assert f"rope {layer.rope.type}" in result.position


def test_layers_with_and_without_a_window_are_judged():
    hf = config_to_hf(config(ROPES["default"], "qwen2"))
    changes = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    assert verdicts(hf, **changes) == "right refused wrong wrong wrong"
    # Without a layer that has it, no engine may apply the window.
    changes["max_window_layers"] = 3
    assert set(verdicts(hf, **changes).split()) == {"right"}


SIZES = {
    "vocab_size": 264, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4 * TRAINED,
    "sliding_window": 100,
}  # fmt: skip
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
HF_LONG = {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)}


GEMMA3 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3}
PHI3 = {"rope_scaling": HF_LONG, "original_max_position_embeddings": TRAINED}
HALF = {"use_sliding_window": True, "max_window_layers": 3}
# Verdicts of llama.cpp are not known for any of them.
LATER_CASES = [
    ("qwen3", {"head_dim": 32}, "right right right right"),
    ("qwen3", {"rope_scaling": HF_YARN}, "right right wrong wrong"),
    ("qwen3", {"attention_bias": True}, "right refused refused right"),
    ("qwen3", HALF, "right refused wrong wrong"),
    ("gemma2", {}, "right right right right"),
    ("gemma2", {"rope_scaling": HF_YARN}, "right right right wrong"),
    ("gemma3_text", {}, "right right right refused"),
    ("gemma3_text", GEMMA3, "right right right refused"),
    ("olmo2", {}, "right right unknown refused"),
    ("olmo3", {"rope_scaling": HF_YARN}, "right right unknown refused"),
    ("phi3", {}, "right right right refused"),
    ("phi3", PHI3, "right wrong wrong refused"),
    ("granite", {"rope_theta": 1e7}, "right right right refused"),
    # Of these, the files of transformers alone were read.
    *(
        (kind, changes, "right unknown unknown unknown")
        for kind, changes in (
            *(("arcee", {}), ("seed_oss", {}), ("ernie4_5", {}), ("glm", {"rope_theta": 1e7})),
            *(
                ("glm4", {"rope_scaling": HF_YARN}),
                ("cohere", {}),
                ("cohere2", {}),
                ("exaone4", {}),
            ),
            ("ministral3", {}),
            *(("qwen3_next", {}), ("qwen3_5_text", {"rope_scaling": HF_YARN})),
            ("qwen3_5_moe_text", {}),
        )
    ),
]


@pytest.mark.parametrize(("kind", "changes", "expected"), LATER_CASES, ids=str)
def test_later_families_have_the_verdicts_that_the_sources_give(kind, changes, expected):
    """In the form that is published, and in the one that lcjax writes."""
    hf = {"model_type": kind, "head_dim": DIM} | SIZES | changes
    for form in (hf, config_to_hf(config_from_hf(hf)) | {"head_dim": hf["head_dim"]}):
        assert verdicts(form) == f"{expected} unknown"
        differences = [row.difference for row in rows(form).values() if row.verdict == "right"]
        assert all(x is None or x < 1e-6 for x in differences)


def test_dual_chunk_attention_is_ignored_by_transformers_and_not_known_of_others():
    dual = {"chunk_size": 512, "local_size": 64, "original_max_position_embeddings": TRAINED}
    hf = {"model_type": "qwen2"} | SIZES | {"dual_chunk_attention_config": dual}
    assert verdicts(hf) == "wrong" + 4 * " unknown"
    assert check_config(hf, "model").pattern == "dual chunk attention"


def test_each_type_of_layers_is_compared_with_its_own_rope(monkeypatch):
    hf = {"model_type": "gemma3_text", "head_dim": DIM, "rope_theta": 1e6} | SIZES
    one_base = {"reads": [], "sets": {"rope_type": "default", "rope_theta": 1e6}}
    facts = {"ropes": {"*": one_base | {"reason": "it has one base"}}}
    engine = ENGINES[NAMES.index("vllm")] | {"families": {"gemma3_text": facts}}
    monkeypatch.setattr(engine_check, "ENGINES", (engine,))
    row = check_config(hf, "model", ("vllm",)).rows[0]
    assert row.verdict == "wrong" and "it has one base" in row.reason
    row = check_config(hf | {"rope_local_base_freq": 1e6}, "model", ("vllm",)).rows[0]
    assert row.verdict == "right"


def test_a_smollm3_without_a_base_has_that_of_transformers():
    hf = config_to_hf(config(Default(theta=2e6), layers=MIXED_ROPE))
    hf = {key: value for key, value in hf.items() if not key.startswith("rope_")}
    assert rows(hf)["transformers"].verdict == "right"


@pytest.mark.parametrize(
    "change", [{"no_rope_layer_interval": 0}, {"no_rope_layers": 3}, {"no_rope_layers": ["1"]}]
)
def test_layers_without_rotation_that_nobody_can_read_are_refused(change):
    hf = config_to_hf(config(Default(theta=2e6), layers=MIXED_ROPE))
    with pytest.raises(InputError, match="no_rope_layer.* must be"):
        rows(hf, **change)


def test_memories_and_landmarks_are_refused_or_left_out():
    plain_config = config(ROPES["default"])
    encoder = plain_config.replace(num_layers=1, tie_embeddings=True, max_length=8)
    cepe = config_to_hf(plain_config.replace(memory=Cepe(encoder, 3)))
    assert verdicts(cepe) == "wrong" + 4 * " refused"
    assert "LlamaForCausalContextLM" in rows(cepe)["vllm"].reason
    retro = config_to_hf(plain_config.replace(memory=RetroSection().memory(plain_config)))
    assert verdicts(retro) == "wrong refused refused wrong refused"
    landmark = Landmark(block=8, token=3, train_length=64)
    landmark = config_to_hf(plain_config.replace(pattern=landmark))
    assert verdicts(landmark) == 4 * "refused " + "wrong"
    quantized = config_to_hf(plain_config) | {"quantization_config": {"quant_method": "awq"}}
    assert set(verdicts(quantized).split()) == {"right"}
    with pytest.raises(InputError, match="model_type='gemma' is not supported"):
        rows(quantized, model_type="gemma")


def test_a_run_folder_is_judged_by_what_it_exports(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    for pattern, verdict in ((None, "right"), (Streaming(sinks=4, recent=28), "refused")):
        run = config(ROPES["default"])
        run = run if pattern is None else run.replace(pattern=pattern)
        monkeypatch.setattr("lcjax.checkpoints.engine_check.load_config", lambda path, run=run: run)
        result = check(tmp_path)
        assert {row.verdict for row in result.rows} == {verdict}
    assert "transformers has no llama model with model.pattern=" in result.rows[0].reason
    layers = (LayerKind(pattern=pattern, rope=ROPES["ntk"]), *MIXED_ROPE)
    run = config(ROPES["default"], layers=layers, num_layers=4)
    monkeypatch.setattr("lcjax.checkpoints.engine_check.load_config", lambda path: run)
    result = check(tmp_path)
    for words in ("rope ntk", "rope default", "rope none"):
        assert words in result.position
    assert "Streaming" in result.pattern and "Causal" in result.pattern
    run = config(ROPES["default"], mixer=GatedDeltaNet(2, 2, 8, 8))  # in all layers
    monkeypatch.setattr("lcjax.checkpoints.engine_check.load_config", lambda path: run)
    assert check(tmp_path).pattern == "gated_delta_net"


def test_layers_without_attention_are_in_the_description():
    hf = {"model_type": "qwen3_5_text", "head_dim": DIM} | SIZES
    assert check_config(hf, "model").pattern == "full attention and gated_delta_net"


def test_of_a_gguf_file_llama_cpp_is_judged(tmp_path):
    small = tiny_config()
    yarn_keys = (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda w: w.add_rope_scaling_factor(4.0),
        lambda w: w.add_rope_scaling_orig_ctx_len(64),
    )
    params = random_params(small)
    write_gguf(tmp_path / "m.gguf", params, small, metadata=yarn_keys)
    result = check(tmp_path / "m.gguf")
    assert [row.verdict for row in result.rows] == 4 * ["not known"] + ["right"]
    betas = (
        *yarn_keys[:2],
        lambda w: w.add_rope_scaling_orig_ctx_len(TRAINED),
        lambda w: w.add_rope_scaling_yarn_beta_fast(1.5),
    )
    write_gguf(tmp_path / "b.gguf", params, small, metadata=betas)
    (row,) = check(tmp_path / "b.gguf", ["llama.cpp"]).rows
    assert row.verdict == "wrong" and "--yarn-beta-fast 1.5" in row.advice


# The command


def test_the_exit_status_is_that_of_the_engines_in_the_table(tmp_path, capsys):
    saved(tmp_path / "m", rope=Yarn(theta=5e4, factor=4.0, original_length=64))
    folder = str(tmp_path / "m")
    assert main(["check", folder]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: rope yarn (theta=50000, factor=4")
    column = lines[1].index("verdict")
    judged = " ".join(line[column:].split()[0] for line in lines[2:7])
    assert judged == "right right wrong right right"
    assert main(["check", folder, "--engine", "vllm", "--engine=llama.cpp"]) == 0
    assert "tpu-inference" not in capsys.readouterr().out
    assert main(["check", folder, "--engine", "tpu-inference", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["verdict"] == "wrong" and "b8692ff01" in row["version"] and row["sources"]
    assert datetime.date.fromisoformat(row["date"])
    assert result["lengths"] == [64, 256]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "folder; write python -m lcjax.convert check FOLDER"),
        (["absent"], "absent: no such file or folder"),
        (["m", "--engine", "vlm"], "invalid choice: 'vlm'"),
        (["m", "--run", "0"], "argument --run: 0 must be a number of tokens"),
        (["m", "n"], "unrecognized arguments: n; write python -m lcjax.convert check FOLDER"),
        (["empty"], "empty/config.json: no such file; is this a Hugging Face model folder?"),
        (["bad"], "rope_type='warp' of the Hugging Face config is not known"),
    ],
)
def test_a_mistake_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "m")
    saved(tmp_path / "bad")
    warp = {"rope_type": "warp"}
    edit_json(tmp_path / "bad" / "config.json", rope_parameters=warp, rope_scaling=warp)
    (tmp_path / "empty").mkdir()
    assert main(["check", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_source_of_the_name_check_is_still_converted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "check")
    assert main(["./check", "dst"]) == 0
    assert main(["check", "dst"]) in (0, 1)  # the subcommand, of the folder dst
    assert main(["check", "new"]) == 2
    assert "a source folder of this name is written ./check" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("yarn", 0), ("e2_llm", 1)])
def test_a_run_compares_logits_with_transformers(tmp_path, capsys, name, status):
    pytest.importorskip("torch")
    with pytest.warns(UserWarning) if status else contextlib.nullcontext():
        saved(tmp_path / "m", rope=ROPES[name])
    assert main(["check", str(tmp_path / "m"), "--engine=transformers", "--run=1200"]) == status
    said = capsys.readouterr().out
    assert "(run)" in said and "logits of texts of 32 and 1200 tokens differ by" in said
