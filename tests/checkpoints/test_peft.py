"""Adapter folders: written whole or not at all, over a base that `peft` can open."""

import json

import numpy as np
import pytest
from convert_support import adapters, saved
from safetensors.numpy import load_file

import lcjax.checkpoints.adapters
from lcjax.checkpoints.adapters import base_name, save_peft
from lcjax.errors import InputError
from lcjax.models import unstack_layers


def test_an_interrupted_save_leaves_the_old_adapters_and_no_half_ones(tmp_path, monkeypatch):
    save_peft(tmp_path / "a", *adapters(rank=2), base="org/model")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lcjax.checkpoints.adapters, "write_hf_json", full)  # after the weights
    for target in ("a", "new"):
        with pytest.raises(InputError, match="No space left"):
            save_peft(tmp_path / target, *adapters(rank=3), base="org/model", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert load_file(tmp_path / "a" / "adapter_model.safetensors")[name].shape == (2, 48)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 2


def test_adapters_of_separate_layers_are_written_as_those_of_stacked_ones(tmp_path):
    params, config = adapters()
    params["layers"]["attention"]["query"]["lora_a"] = np.arange(3.0 * 48 * 2).reshape(3, 48, 2)
    for name, tree in (("stacked", params), ("separate", unstack_layers(params, config))):
        save_peft(tmp_path / name, tree, config, base=None)
    stacked, separate = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("stacked", "separate")
    )
    assert stacked == separate


def test_adapters_are_replaced_only_when_asked(tmp_path):
    save_peft(tmp_path / "a", *adapters(), base="org/model")
    with pytest.raises(InputError, match="exists and is not empty"):
        save_peft(tmp_path / "a", *adapters(), base="org/model")


@pytest.mark.parametrize(
    ("base", "written"),
    [
        ("org/model", "org/model"),
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny", None),  # a preset: random weights
        ("absent/model.gguf", None),
        (None, None),
    ],
)
def test_the_base_is_a_name_that_transformers_opens_or_null(tmp_path, base, written):
    save_peft(tmp_path / "a", *adapters(), base=base)
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == written


def test_local_bases_are_absolute_folders_that_transformers_opens(tmp_path, monkeypatch):
    saved(tmp_path / "hf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert base_name("hf") == str((tmp_path / "hf").resolve())
    assert base_name("m.gguf") is None
    assert base_name("run") is None
    saved(run / "model")
    assert base_name("run") == str((run / "model").resolve())
