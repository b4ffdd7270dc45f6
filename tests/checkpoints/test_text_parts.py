"""The text part of models with images is read as a model of its family."""

import functools

import numpy as np
import pytest
from family_models import SIZES, YARN

from lcjax import LanguageModel
from lcjax.checkpoints import ByteTokenizer, config_from_hf, config_to_hf, save_hf
from lcjax.errors import InputError

torch = pytest.importorskip("torch")

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def saved_randomised(model, folder):
    """Saves a model whose biases and norms are random, too; returns it."""
    model = model.eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in path))
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return model


def gemma3_of_images(folder):
    """Saves a Gemma 3 of images and text as transformers does; returns it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    text = sizes | {
        "num_hidden_layers": 6,
        "head_dim": 20,
        "sliding_window": 7,
        "query_pre_attn_scalar": 30,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=259,
        eos_token_id=[258, 257],
    )
    return saved_randomised(Gemma3ForConditionalGeneration(config), folder)


def mistral3_of_images(folder, kind):
    """Saves a Ministral 3, or a Mistral, of images and text as transformers does; returns it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    rope = {"llama_4_scaling_beta": 0.4} if kind == "ministral3" else {}
    rope = YARN | {"rope_theta": 1e6} | rope
    config = Mistral3Config(
        text_config=sizes | {"model_type": kind, "head_dim": 20, "rope_parameters": rope},
        vision_config=VISION | {"model_type": "pixtral"},
        image_token_index=259,
        tie_word_embeddings=False,
        eos_token_id=[258, 257],
    )
    return saved_randomised(Mistral3ForConditionalGeneration(config), folder)


def qwen3_5_of_images(folder):
    """Saves a Qwen3.5 of images and text as transformers does; returns it."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    text = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    text |= {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision | {"out_hidden_size": SIZES["hidden_size"]},
        image_token_id=259,
        tie_word_embeddings=False,
        eos_token_id=[258, 257],
    )
    return saved_randomised(Qwen3_5ForConditionalGeneration(config), folder)


def llama4_of_images(folder):
    """Saves a Llama 4 of images and text as transformers does; returns it."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    text = sizes | {
        "head_dim": 20,
        "intermediate_size": 24,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 7,
        "eos_token_id": [258, 257],
    }
    outputs = {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64}
    config = Llama4Config(text_config=text, vision_config=VISION | outputs, image_token_index=259)
    return saved_randomised(Llama4ForConditionalGeneration(config), folder)


def gemma4_of_images(folder, kind):
    """Saves a Gemma 4 of images and text as transformers does; returns it."""
    import transformers

    torch.manual_seed(0)
    text = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    text |= {
        "num_hidden_layers": 6,
        "head_dim": 20,
        "global_head_dim": 24,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
    }
    vision = {
        "Gemma4": {
            **VISION,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 16,
        },
        "Gemma4Unified": {"mm_embed_dim": 32, "mm_posemb_size": 16, "patch_size": 4},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=259,
        video_token_id=259,
        audio_token_id=259,
        eos_token_id=[258, 257],
    )
    return saved_randomised(
        getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder
    )


OF_IMAGES = {
    "Gemma4ForCausalLM": functools.partial(gemma4_of_images, kind="Gemma4"),
    "Gemma4UnifiedForCausalLM": functools.partial(gemma4_of_images, kind="Gemma4Unified"),
    "Qwen3_5ForCausalLM": qwen3_5_of_images,
    "Llama4ForCausalLM": llama4_of_images,
    "Gemma3ForCausalLM": gemma3_of_images,
    "Ministral3ForCausalLM": functools.partial(mistral3_of_images, kind="ministral3"),
    "MistralForCausalLM": functools.partial(mistral3_of_images, kind="mistral"),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OF_IMAGES)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_of_images_has_its_logits(tmp_path, prefix, architecture):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "hf"
    folder.mkdir()
    model = OF_IMAGES[architecture](folder)
    state = load_file(folder / "model.safetensors")
    texts = {name.rpartition("language_model.")[2].removeprefix("model.") for name in state if
             "language_model." in name}  # fmt: skip
    last = f"layers.{model.config.text_config.num_hidden_layers - 1}.self_attn."
    assert f"{last}q_proj.weight" in texts and len(texts) < len(state)
    assert (f"{last}q_norm.weight" in texts) == (architecture[:5] in ("Gemma", "Qwen3"))
    renamed, heads = {}, {"language_model.model.": "language_model.lm_head.weight"}
    for name, tensor in state.items():
        if name.endswith("lm_head.weight"):  # of a model that is not tied
            renamed[heads.get(prefix, "lm_head.weight")] = tensor
            continue
        inner = name.rpartition("language_model.")[2].removeprefix("model.")
        renamed[prefix + inner if inner in texts else name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"left out \d+ tensors of the image encoder") as seen:
        lm = LanguageModel.load(folder)
    assert len([w for w in seen if "image encoder" in str(w.message)]) == 1
    assert set(lm.tokenizer.eos_ids) >= {257, 258}
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    if architecture == "Llama4ForCausalLM":  # the whole model (5.24.0) fails without images
        model = model.language_model
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
    actual = lm.logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())

    save_hf(tmp_path / "out", lm.params, lm.config, lm.tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again).__name__ == architecture
    with torch.no_grad():
        exported = again(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(exported, expected, atol=1e-4 * np.abs(expected).max())


# The config.json of Gemma 3 4B and 27B, without the image encoder.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GEMMA3_27B = GEMMA3_4B | {
    "text_config": GEMMA3_4B["text_config"]
    | {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    }
}


# Llama 4 Scout, without keys that have transformers' default.
LLAMA4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "max_position_embeddings": 10_485_760,
        "model_type": "llama4_text",
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "torch_dtype": "bfloat16",
}


GEMMA4 = {
    "model_type": "gemma4",
    "text_config": {"model_type": "gemma4_text", "num_kv_shared_layers": 10},
    "dtype": "bfloat16",
}
GEMMA4_UNIFIED = {
    "model_type": "gemma4_unified",
    "text_config": {"model_type": "gemma4_unified_text", "attention_k_eq_v": True},
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("hf", "vocab_size"),
    [
        *((GEMMA3_4B, 262_208), (GEMMA3_27B, 262_208), (LLAMA4_SCOUT, 202_048)),
        *((GEMMA4, 262_144), (GEMMA4_UNIFIED, 262_144)),
    ],
)
def test_what_text_config_leaves_out_is_what_transformers_takes(hf, vocab_size):
    from transformers import AutoConfig

    config, kind = config_from_hf(hf), hf["text_config"]["model_type"]
    whole = type(AutoConfig.for_model(hf["model_type"]))
    full = whole.from_dict(hf).get_text_config().to_dict()
    assert config == config_from_hf(full | {"dtype": "bfloat16"})
    assert kind in (config.family, config_to_hf(config)["model_type"])
    assert config.param_dtype == "bfloat16" and config.vocab_size == vocab_size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config=None must be an object"),
        ({"text_config": {"model_type": "gemma2"}}, "must be an object that describes a gemma3_te"),
        ({"text_config": {"vocab_size": "many"}}, "text_config: vocab_size='many' must be a whole"),
        (
            {"text_config": GEMMA3_4B["text_config"] | {"use_bidirectional_attention": True}},
            "use_bidirectional_attention=True is not supported",
        ),
    ],
)
def test_a_text_part_that_lcjax_does_not_compute_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        config_from_hf(GEMMA3_4B | change)


@pytest.mark.parametrize("text", [None, {}, SIZES, SIZES | {"model_type": "llama"}])
def test_the_text_part_of_a_mistral3_must_state_its_type(text):
    with pytest.raises(
        InputError, match="must be an object that describes a mistral or ministral3"
    ):
        config_from_hf({"model_type": "mistral3", "text_config": text})
