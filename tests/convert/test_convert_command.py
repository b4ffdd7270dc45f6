"""`python -m lcjax.convert SRC DST`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from convert_support import assert_same, saved

from lcjax.convert import load
from lcjax.convert.__main__ import main


def test_a_model_is_converted_and_cast(tmp_path, capsys):
    params, config = saved(tmp_path / "src")
    assert main([str(tmp_path / "src"), str(tmp_path / "dst"), "--dtype", "bfloat16"]) == 0
    loaded, loaded_config, _ = load(tmp_path / "dst")
    assert loaded_config == config.replace(param_dtype="bfloat16")
    assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert "3 layers, bfloat16" in capsys.readouterr().out


def test_a_destination_with_files_needs_force(tmp_path, capsys):
    saved(tmp_path / "src")
    saved(tmp_path / "dst", "phi")
    command = [str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main(command) == 2
    assert "dst exists and is not empty" in capsys.readouterr().err
    assert load(tmp_path / "dst")[1].norm == "layer"
    assert main([*command, "--force"]) == 0
    assert load(tmp_path / "dst")[1].norm == "rms"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_model_is_not_converted_onto_itself(tmp_path, capsys, force):
    params, _ = saved(tmp_path / "src")
    assert main([str(tmp_path / "src"), str(tmp_path / "src"), *force]) == 2
    assert_same(load(tmp_path / "src")[0], params)


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-m", "lcjax.convert", str(tmp_path / "m.gguf"), str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "m.gguf: truncated" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "d").exists()
