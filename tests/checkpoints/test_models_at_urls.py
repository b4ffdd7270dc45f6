"""Models at URLs: read by ranges, and written so that a killed export is not taken for a model."""

import jax
import numpy as np
import pytest
from convert_support import adapters, assert_same, random_params, saved, tiny_config
from gguf_support import write_gguf
from storage_support import dying_at, failing, memory, upload, web_server

from lcjax.checkpoints import ByteTokenizer, load, load_config, save_hf
from lcjax.checkpoints.adapters import PEFT_FOLDER, save_peft
from lcjax.checkpoints.hub import trains_retriever
from lcjax.checkpoints.load import identity
from lcjax.checkpoints.run_folder import MODEL_CONFIG, run_config
from lcjax.convert import main
from lcjax.errors import InputError
from lcjax.files import CHECKSUMS, PARTIAL, atomic_folder
from lcjax.storage import StorageError, remove

SHARDS = {"max_shard_bytes": 40_000}


def content(folder):
    files = folder.rglob("*")
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files if f.is_file()}


def write(folder, seed=0, **options):
    config = tiny_config()
    params = random_params(config, seed)
    save_hf(folder, params, config, ByteTokenizer(), **SHARDS | options)
    return params, config


def test_an_export_to_a_url_has_the_files_of_a_local_one(tmp_path):
    url = memory("models")
    params, config = write(tmp_path / "model", checksums=True)
    write(url / "model", checksums=True)
    assert content(url / "model") == content(tmp_path / "model")
    assert len([name for name in content(url / "model") if "safetensors" in name]) > 3
    loaded, loaded_config, tokenizer = load(str(url / "model"))
    assert loaded_config == config == load_config(f"{url}/model/")
    assert_same(loaded, params)
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert identity(str(url / "model")) == identity(tmp_path / "model")
    with pytest.raises(InputError, match=r"memory://models/model exists and is not empty"):
        write(url / "model")
    changed, _ = write(url / "model", seed=1, overwrite=True)
    assert_same(load(url / "model")[0], changed)
    assert CHECKSUMS not in content(url / "model")
    (url / "model" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"lcjax does not write notes.txt into a model folder"):
        write(url / "model", overwrite=True)


def test_a_damaged_file_at_a_url_is_named(tmp_path):
    url = memory("models") / "model"
    write(url, checksums=True)
    data = (url / "config.json").read_bytes()
    (url / "config.json").write_bytes(data.replace(b"64", b"65"))
    with pytest.raises(InputError, match="model/config.json is not as it was written"):
        load(url)


@pytest.mark.parametrize("read", [PEFT_FOLDER.has_config, trains_retriever, run_config])
def test_a_file_in_a_store_that_does_not_answer_is_neither_absent_nor_damaged(read):
    url = memory("models")
    for name in ("adapter_config.json", "config.yaml", MODEL_CONFIG):
        (url / name).write_text("{}")
    with failing(url, "cat_file"), pytest.raises(StorageError, match="connection reset"):
        read(url)


@pytest.mark.slow
def test_an_export_that_is_killed_at_any_change_is_no_model(store):
    """Afterwards the folder is written again; before, the old model or none can be opened."""
    old = None
    for overwrite in (False, True):
        with dying_at(None) as counts:
            new, _ = write(store / "whole", seed=1, overwrite=True)
        num_changes = counts.num_changes
        for change in range(1, num_changes + 1):
            folder = store / "model"
            remove(folder)
            if overwrite:
                old, _ = write(folder)
            with dying_at(change):
                write(folder, seed=1, overwrite=overwrite)
            if (folder / "config.json").is_file():
                is_new = (folder / PARTIAL).is_file() and change > 2
                assert_same(load(folder)[0], new if is_new else old)
            write(folder, seed=1, overwrite=True)
            assert_same(load(folder)[0], new)
            assert content(folder) == content(store / "whole")


def test_a_web_server_is_read_by_ranges(tmp_path):
    pytest.importorskip("aiohttp")
    params, _ = saved(tmp_path / "model")
    with web_server(tmp_path) as (url, requests):
        assert_same(load(f"{url}/model")[0], params)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    spans = [span for path, span in requests if "safetensors" in path and span]
    assert len(spans) > len(jax.tree.leaves(params))
    assert all(span is not None for path, span in requests if path.endswith("safetensors"))
    assert size > 100_000


def test_gguf_files_and_adapters_are_read_at_urls(tmp_path):
    _, config = saved(tmp_path / "base")
    write_gguf(tmp_path / "a.gguf", *_gguf(tmp_path / "base", config))
    url = upload(tmp_path, memory("models"))
    assert_same(load(f"{url}/a.gguf")[0], load(tmp_path / "a.gguf")[0])
    trained, lora = adapters()
    save_peft(url / "adapter", trained, lora, base=f"{url}/base")
    save_peft(tmp_path / "adapter", trained, lora, base=str(tmp_path / "base"))
    merged = load(f"{url}/adapter", base=f"{url}/base")[0]
    assert_same(merged, load(tmp_path / "adapter", base=tmp_path / "base")[0])
    assert PEFT_FOLDER.has_config(url / "adapter")


def _gguf(folder, config):
    from gguf_support import tensors_of

    return tensors_of(load(folder)[0], config, "llama"), config


def test_convert_reads_and_writes_urls(tmp_path, capsys):
    saved(tmp_path / "src")
    url = memory("models")
    assert main([str(tmp_path / "src"), f"{url}/model"]) == 0
    assert main([f"{url}/model", str(tmp_path / "dst")]) == 0
    without_sums = {n: d for n, d in content(tmp_path / "dst").items() if n != CHECKSUMS}
    assert without_sums == content(tmp_path / "src")
    capsys.readouterr()
    for words, message in [
        ([f"{url}/model", f"{url}/model"], "overlaps SRC="),
        ([f"{url}/model", f"{url}/model/inner"], "overlaps SRC="),
        ([f"{url}/none", f"{url}/other"], "none: no such file or folder"),
        ([f"{url}/model", "http://127.0.0.1:9/model"], "http://127.0.0.1:9/model"),
        ([f"{url}/model", "nonsense://x"], "nonsense:// is unknown"),
    ]:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert main([str(tmp_path / "src"), f"{url}/model"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([str(tmp_path / "src"), f"{url}/model", "--force"]) == 0


def test_a_check_that_runs_transformers_refuses_a_url(tmp_path, capsys):
    pytest.importorskip("torch")
    url = memory("models") / "model"
    write(url)
    assert main(["check", str(url), "--engine=transformers", "--run=40"]) == 2
    error = capsys.readouterr().err
    assert f"copy {url} to a disk" in error and error.count("\n") == 1


def test_a_block_that_fails_leaves_a_folder_that_is_marked(tmp_path):
    url = memory("models") / "model"
    with pytest.raises(KeyError), atomic_folder(url, PEFT_FOLDER, overwrite=False) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"")
        raise KeyError
    assert sorted(content(url)) == ["adapter_model.safetensors", PARTIAL]
    np.testing.assert_equal(PEFT_FOLDER.has_config(url), True)  # so that it may be replaced
