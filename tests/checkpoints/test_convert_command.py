"""`python -m lcjax.convert SRC DST`."""

import jax
import jax.numpy as jnp
import pytest
from convert_support import assert_same, edit_json, saved
from gguf_support import write_gguf

from lcjax.checkpoints import load
from lcjax.convert import main
from lcjax.files import CHECKSUMS
from lcjax.rope import Yarn


def test_a_model_is_converted_and_cast(tmp_path, capsys):
    params, config = saved(tmp_path / "src")
    assert (
        main([str(tmp_path / "src"), str(tmp_path / "dst"), "--no-checksums", "--dtype=bfloat16"])
        == 0
    )
    loaded, loaded_config, _ = load(tmp_path / "dst")
    assert loaded_config == config.replace(param_dtype="bfloat16")
    assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert "3 layers, bfloat16" in capsys.readouterr().out
    assert not (tmp_path / "dst" / CHECKSUMS).exists()


def test_checksums_are_written_and_compared(tmp_path, capsys):
    saved(tmp_path / "src")
    assert main([str(tmp_path / "src"), str(tmp_path / "dst")]) == 0
    assert main([str(tmp_path / "dst"), str(tmp_path / "again")]) == 0
    edit_json(tmp_path / "dst" / "config.json", rms_norm_eps=1e-3)
    capsys.readouterr()
    assert main([str(tmp_path / "dst"), str(tmp_path / "other")]) == 2
    assert "dst/config.json is not as it was written" in capsys.readouterr().err


def test_a_method_that_needs_no_training_is_exported(tmp_path, capsys):
    params, config = saved(tmp_path / "src")
    command = [str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main([*command, "--rope.type=yarn", "--rope.factor=8", "--rope.beta_fast=16"]) == 0
    rope = Yarn(theta=5e4, factor=8.0, beta_fast=16.0, original_length=64)
    loaded, loaded_config, _ = load(tmp_path / "dst")
    assert loaded_config == config.replace(rope=rope)
    assert_same(loaded, params)
    capsys.readouterr()
    for words, message in (
        (["--rope.type=yarn"], "rope.factor is missing"),
        (["--rope.type=yarn", "--rope.factor=0.5"], "rope.factor=0.5 must be a number x >= 1"),
        (["--rope.type=yarrn"], "did you mean yarn?"),
        (["--rope.type=clex"], "clex is learned, and this checkpoint has no weights for it"),
        (["--pattern.type=sliding"], "unrecognized arguments: --pattern.type=sliding"),
    ):
        assert main([command[0], str(tmp_path / "other"), *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("error: ") == 1
        assert not (tmp_path / "other").exists()


def test_a_destination_with_files_needs_force(tmp_path, capsys):
    saved(tmp_path / "src")
    saved(tmp_path / "dst", "phi")
    command = [str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "dst exists and is not empty" in said and "replace it with --force\n" in said
    assert load(tmp_path / "dst")[1].norm == "layer"
    assert main([*command, "--force"]) == 0
    assert load(tmp_path / "dst")[1].norm == "rms"


def test_a_destination_that_is_holds_or_lies_in_the_source_is_refused(tmp_path, capsys):
    params, _ = saved(tmp_path / "a" / "b")
    saved(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "b" / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    before = sorted(tmp_path.rglob("*"))
    inside = ("a/b/new", "a/b/new/deep", "a/b/empty", "link/new")
    pairs = [("a/b", dst) for dst in ("a/b", "a", "a/b/c", "link", *inside)]
    for src, dst in (*pairs, ("link", "a/b"), ("link", "a")):
        for force in ([], ["--force"]):
            assert main([str(tmp_path / src), str(tmp_path / dst), *force]) == 2
            assert main(["absent", str(tmp_path / dst), "--base", str(tmp_path / src), *force]) == 2
            said = capsys.readouterr().err.splitlines()
            assert len(said) == 2
            assert "overlaps SRC=" in said[0] and "overlaps --base=" in said[1]
    assert sorted(tmp_path.rglob("*")) == before
    assert_same(load(tmp_path / "a" / "b")[0], params)


def test_a_folder_beside_a_file_of_the_source_may_be_written(tmp_path):
    params, config = saved(tmp_path / "src")
    write_gguf(tmp_path / "m.gguf", params, config)
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "copy")]) == 0
    assert_same(load(tmp_path / "copy")[0], params)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: src, dst; write python -m lcjax.convert SRC DST"),
        (["a", "b", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["a", "b", "--context", "-5"], "argument --context: -5 must be a number of tokens"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["absent", "b"], "absent: no such file or folder"),
        (["m.gguf", "b"], "m.gguf: truncated"),
    ],
)
def test_a_mistake_is_one_line_without_usage_or_bar(words, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert main(words) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert not (tmp_path / "b").exists()
