"""Logits against transformers on random tiny models, at positions past the trained length."""

import functools
import json

import jax
import numpy as np
import pytest

from lcjax import checkpoints
from lcjax.checkpoints.build import ModelSection
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TRAINED, LENGTH = 32, 90
SIZES = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
HALF = 6  # rotary pairs of a head of 12 channels
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e3},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0] * HALF,
        "long_factor": [1.0 + j for j in range(HALF)],
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen2-mixed": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "num_hidden_layers": 4,
            "max_window_layers": 2,
        },
    ),
    "ministral": (
        "MinistralConfig",
        {
            "sliding_window": 11,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "glm4": ("Glm4Config", {"head_dim": 12, "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": 11, "num_hidden_layers": 4, "logit_scale": 1.5},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 11, "num_hidden_layers": 4}),
    "ministral3": ("Ministral3Config", {"head_dim": 12}),
}
PARTIAL = ("phi", "glm4")
NEW = ("glm4", "cohere2", "exaone4", "ministral3")


def _peer(family: str, rope: dict):
    name, extra = FAMILIES[family]
    if family == "ministral3":
        rope = {"original_max_position_embeddings": TRAINED, "llama_4_scaling_beta": 0.4} | rope
    if family in PARTIAL:
        rope = rope | {"partial_rotary_factor": 0.5}
        if "short_factor" in rope:
            rope |= {key: rope[key][: HALF // 2] for key in ("short_factor", "long_factor")}
    config = getattr(transformers, name)(**SIZES | extra, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mix-up would not show
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _peer_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@functools.partial(jax.jit, static_argnums=0)
def _our_logits(model, params, tokens, rotation):
    hidden = model.apply({"params": params}, tokens, rotation=rotation).hidden
    return model.apply({"params": params}, hidden, method="logits")


CASES = [
    # Phi rotates half of a head.
    (family, rope)
    if rope == "yarn" or family in ("llama", "phi") or (rope == "default" and family not in NEW)
    else pytest.param(family, rope, marks=pytest.mark.slow)
    for family in FAMILIES
    for rope in ROPES
]


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_logits_equal_transformers_there_and_back(family, rope, tmp_path):
    peer = _peer(family, ROPES[rope])
    peer.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    checkpoints.ByteTokenizer().save(tmp_path / "theirs")
    tokens = np.random.default_rng(1).integers(0, 256, (2, LENGTH))
    want = _peer_logits(peer, tokens)
    ours = LanguageModel.load(str(tmp_path / "theirs"))
    actual = _our_logits(ours.model, ours.params, tokens, ours.rotation(LENGTH))
    np.testing.assert_allclose(actual, want, atol=1e-4, rtol=0)
    assert np.abs(want).max() > 1

    params, config, tokenizer = checkpoints.load(tmp_path / "theirs")
    checkpoints.save_hf(tmp_path / "ours", params, config, tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    state = again.state_dict()
    assert set(state) == set(peer.state_dict())
    assert all(torch.equal(tensor, state[key]) for key, tensor in peer.state_dict().items())
    np.testing.assert_array_equal(_peer_logits(again, tokens), want)
    assert checkpoints.config_from_hf(again.config.to_dict()) == config
    reread, reread_config, _ = checkpoints.load(tmp_path / "ours")
    assert reread_config == config
    jax.tree.map(np.testing.assert_array_equal, reread, params)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [type(again).__name__]  # what other engines choose by


@pytest.mark.parametrize("family", ["llama", "ministral3"])
def test_left_padded_batches_generate_as_transformers(family, tmp_path):
    peer = _peer(family, ROPES["yarn"])
    peer.save_pretrained(tmp_path)
    checkpoints.ByteTokenizer().save(tmp_path)
    lm = LanguageModel.load(ModelSection(path=str(tmp_path)))
    prompts = [np.random.default_rng(s).integers(0, 256, n).tolist() for s, n in ((1, 9), (2, 47))]
    got = [[], []]
    for piece in lm.stream(prompts, Sampling(max_new_tokens=12, min_new_tokens=12)):
        got[piece.row] += piece.ids
    for prompt, ids in zip(prompts, got, strict=True):
        with torch.no_grad():
            want = peer.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        assert ids == want[0, len(prompt) :].tolist()
