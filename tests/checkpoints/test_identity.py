"""What a checkpoint is told from another one by, under the same path."""

import shutil

import jax
import numpy as np
import pytest
from convert_support import edit_json, saved

from lcjax.checkpoints import ByteTokenizer, save_hf
from lcjax.checkpoints.load import identity
from lcjax.errors import InputError
from lcjax.files import write_whole


def test_other_weights_of_the_same_shapes_are_told_apart_and_copies_are_not(tmp_path):
    params, config = saved(tmp_path / "model")
    before = identity(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("about it")
    (tmp_path / "copy" / "eval").mkdir()
    assert identity(tmp_path / "copy") == before
    changed = {**params, "final_norm": jax.tree.map(lambda x: x + 1, params["final_norm"])}
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "model").iterdir()}
    save_hf(tmp_path / "model", changed, config, ByteTokenizer(), overwrite=True)
    assert sizes == {file.name: file.stat().st_size for file in (tmp_path / "model").iterdir()}
    assert identity(tmp_path / "model") != before


def test_a_config_counts_since_it_turns_the_weights_into_another_model(tmp_path):
    saved(tmp_path / "model")
    before = identity(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", rms_norm_eps=0.1)
    assert identity(tmp_path / "model") != before


@pytest.mark.parametrize("place", [0, 3_000_000, 6_000_000 - 1])
def test_of_a_large_file_parts_are_read_from_its_beginning_to_its_end(tmp_path, place):
    data = np.zeros(6_000_000, np.uint8)
    data.tofile(tmp_path / "a.gguf")
    data[max(place - 30_000, 0) : place + 30_000] = 1  # a training changes more than this
    before = identity(tmp_path / "a.gguf")
    data.tofile(tmp_path / "a.gguf")
    assert identity(tmp_path / "a.gguf") != before


def test_of_a_run_its_newest_checkpoint_counts_and_nothing_that_is_written_beside(tmp_path):
    write_whole(tmp_path / "config.yaml", "{}")
    write_whole(tmp_path / "base.json", "{}")
    write_whole(tmp_path / "checkpoints" / "9" / "state" / "d", "weights")
    before = identity(tmp_path)
    write_whole(tmp_path / "metrics.jsonl", "{}")
    write_whole(tmp_path / "eval" / "records" / "x.jsonl", "{}")
    assert identity(tmp_path) == before
    write_whole(tmp_path / "checkpoints" / "10" / "state" / "d", "weightz")
    newer = identity(tmp_path)
    assert newer != before
    shutil.rmtree(tmp_path / "checkpoints" / "9")
    assert identity(tmp_path) == newer


def test_adapters_count_with_their_base(tmp_path):
    saved(tmp_path / "model")
    (tmp_path / "adapters").mkdir()
    name = {"base_model_name_or_path": str(tmp_path / "model")}
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    edit_json(tmp_path / "adapters" / "adapter_config.json", **name)
    before = identity(tmp_path / "adapters")
    edit_json(tmp_path / "model" / "config.json", rms_norm_eps=0.1)
    assert identity(tmp_path / "adapters") != before
    with pytest.raises(InputError, match="absent"):
        identity(tmp_path / "adapters", tmp_path / "absent")
