"""Checkpoints in 4 or 8 bits are read as the floats that they stand for."""

import json

import numpy as np
import pytest
from convert_support import assert_same
from family_models import hf_model

from lcjax.checkpoints import ByteTokenizer, load, save_hf
from lcjax.errors import InputError

torch = pytest.importorskip("torch")


def test_a_gpt_oss_in_mxfp4_holds_the_numbers_that_transformers_reads(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32}  # blocks have 32 numbers
    model = hf_model("gpt_oss", dtype=torch.bfloat16, **sizes)
    for form in ("floats", "codes"):
        model.save_pretrained(tmp_path / form)
        ByteTokenizer().save(tmp_path / form)
    state, rng = load_file(tmp_path / "floats/model.safetensors"), np.random.default_rng(0)
    codes = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 128, blocks.shape[:-1], dtype=np.uint8)
        scales[0, 0, 0] = 250 if "layers.0" in name else 1  # of numbers at the ends of the range
        blocks[0, 0, 0] = 0x12
        packed = torch.tensor(blocks), torch.tensor(scales)
        state[name] = convert_moe_packed_tensors(*packed).contiguous()
        codes |= {f"{name}_blocks": packed[0], f"{name}_scales": packed[1]}
    save_file(state, tmp_path / "floats/model.safetensors", {"format": "pt"})
    plain = {name: x for name, x in state.items() if f"{name}_blocks" not in codes}
    save_file(plain | codes, tmp_path / "codes/model.safetensors", {"format": "pt"})
    file = tmp_path / "codes/config.json"
    hf = json.loads(file.read_text())
    hf["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    file.write_text(json.dumps(hf))
    expected, config, _ = load(tmp_path / "floats")
    params, read, _ = load(tmp_path / "codes")
    assert read == config and config.param_dtype == "bfloat16"
    assert_same(params, expected)
    save_hf(tmp_path / "out", params, read, ByteTokenizer())
    assert_same(load(tmp_path / "out")[0], expected)

    name = "model.layers.1.mlp.experts.down_proj"
    codes[f"{name}_scales"] = codes[f"{name}_scales"][:, :-1].contiguous()
    save_file(plain | codes, tmp_path / "codes/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"{name}_scales .* are not as MXFP4 has them"):
        load(tmp_path / "codes")
    file.write_text(json.dumps(hf | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(InputError, match="quant_method='awq'. is not supported for model_type="):
        load(tmp_path / "codes")


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_matrices_in_fp8_have_the_numbers_times_the_scales_of_their_blocks(name, tmp_path):
    from safetensors.torch import load_file, save_file

    model = hf_model(name, dtype=torch.bfloat16)
    for form in ("floats", "codes"):
        model.save_pretrained(tmp_path / form)
        ByteTokenizer().save(tmp_path / form)
    state, rng = load_file(tmp_path / "floats/model.safetensors"), np.random.default_rng(0)
    codes = {}
    height, width = 32, 24  # the last blocks of some matrices have fewer numbers
    for key, tensor in state.items():
        if tensor.ndim < 2 or "embed" in key or "lm_head" in key or "mlp.gate." in key:
            codes[key] = tensor
            continue
        grid = [-(-size // part) for size, part in zip(tensor.shape, (height, width))]
        scales = torch.tensor(rng.uniform(0.001, 0.02, grid).astype(np.float32))
        each = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
        each = each[: tensor.shape[0], : tensor.shape[1]]
        codes[key] = (tensor.float() / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes[f"{key}_scale_inv"] = scales
        state[key] = (codes[key].float() * each).bfloat16()
    assert len(codes) > len(state)
    save_file(state, tmp_path / "floats/model.safetensors", {"format": "pt"})
    save_file(codes, tmp_path / "codes/model.safetensors", {"format": "pt"})
    file = tmp_path / "codes/config.json"
    hf = json.loads(file.read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [height, width]}
    settings |= {"activation_scheme": "dynamic", "fmt": "e4m3"}
    file.write_text(json.dumps(hf | {"quantization_config": settings}))
    expected, config, _ = load(tmp_path / "floats")
    params, read, _ = load(tmp_path / "codes")
    assert read == config and config.param_dtype == "bfloat16"
    assert_same(params, expected)

    for change, words in (
        ({"activation_scheme": "static"}, "activation_scheme='static' is not supported"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"weight_block_size": [16, 16]}, "_proj.weight_scale_inv .* are not as FP8"),
    ):
        file.write_text(json.dumps(hf | {"quantization_config": settings | change}))
        with pytest.raises(InputError, match=words) as caught:
            load(tmp_path / "codes")
        assert "\n" not in str(caught.value)
