"""Folders written by transformers are read, and folders written here are opened by it."""

import os
from typing import ClassVar

import numpy as np
import pytest
from convert_support import TEXTS, assert_same, needs_smollm2, random_params, tiny_config

from lcjax.attention import Bidirectional
from lcjax.checkpoints import ByteTokenizer, load, load_tokenizer, save_hf
from lcjax.files import read_json

os.environ.setdefault("USE_TF", "0")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_the_released_encoder_loads_its_bias_under_both_names(tmp_path, torch):
    from torch import nn
    from transformers import LlamaModel, LlamaPreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class LlamaForMLM(LlamaPreTrainedModel):
        """The parameters of CEPE's class of this name."""

        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config):
            super().__init__(config)
            self.model = LlamaModel(config)
            self.lm_dense = nn.Linear(config.hidden_size, config.hidden_size)
            self.lm_layer_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
            self.lm_bias = nn.Parameter(torch.zeros(config.vocab_size))
            self.lm_head.bias = self.lm_bias
            self.post_init()

    config = tiny_config("tied", pattern=Bidirectional(), mlm_head=True)
    params = random_params(config)
    save_hf(tmp_path / "ours", params, config, ByteTokenizer())
    model, report = LlamaForMLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for bias in (model.lm_bias, model.lm_head.bias):
        np.testing.assert_array_equal(bias.detach(), params["mlm"]["bias"])
    model.save_pretrained(tmp_path / "theirs")
    ByteTokenizer().save(tmp_path / "theirs")
    assert_same(load(tmp_path / "theirs")[0], params)


def test_bfloat16_bits_are_those_of_torch(tmp_path, torch):
    from family_models import hf_model

    model = hf_model("llama").bfloat16()
    model.save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    params, config, _ = load(tmp_path)
    assert config.param_dtype == "bfloat16"
    theirs = model.model.layers[1].self_attn.q_proj.weight.detach().float().numpy()
    ours = np.asarray(params["layers"]["attention"]["query"]["kernel"][1], np.float32)
    np.testing.assert_array_equal(ours.reshape(48, -1).T, theirs)


def test_the_byte_tokenizer_is_opened_by_transformers_with_equal_ids(tmp_path, torch):
    from transformers import AutoTokenizer

    config = tiny_config()
    save_hf(tmp_path / "m", random_params(config), config, ByteTokenizer())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in TEXTS[:-1]:
        ids = ByteTokenizer().encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)


@needs_smollm2
def test_smollm2_gives_the_ids_of_transformers_for_text_of_every_kind(tmp_path):
    from transformers import AutoTokenizer

    ours = load_tokenizer("smollm2-135m-instruct")
    ours.save(tmp_path)
    theirs, reread = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert reread.fingerprint == ours.fingerprint
    rng = np.random.default_rng(0)
    ranges = [(9, 14), (32, 127), (0xA0, 0x180), (0x370, 0x400), (0x4E00, 0x4E40), (0x660, 0x66A)]
    ranges += [(0x300, 0x310), (0x2000, 0x200D), (0x1F600, 0x1F640)]
    letters = [chr(c) for start, stop in ranges for c in range(start, stop)]
    random_texts = ["".join(rng.choice(letters, rng.integers(1, 60))) for _ in range(200)]
    for text in [*TEXTS[:-1], *random_texts]:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"] == reread.encode(text)
        assert ours.decode(ids) == text
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    chat = ours.render_chat(messages)
    assert chat == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode(chat, allow_special=True) == ids
    assert read_json(tmp_path / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
