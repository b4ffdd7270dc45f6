"""What does not fit into memory is refused before it is read or made."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import LanguageModel
from lcjax.checkpoints import ByteTokenizer, save_hf
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError, OutOfMemoryError
from lcjax.generation.programs import InferenceJit
from lcjax.models import Decoder, cache, preset
from lcjax.models.decoder import random_params
from lcjax.parallel import device_memory, distributed
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import TrainConfig

CONFIG = preset("tiny").replace(vocab_size=ByteTokenizer().vocab_size)


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory of every device."""
    return lambda size: monkeypatch.setattr(device_memory, "free_bytes", lambda device: size)


@pytest.mark.parametrize("mesh", [None, Mesh(fsdp=8)], ids=["one_device", "eight"])
def test_a_checkpoint_that_does_not_fit_raises_input_error_before_it_is_read(
    tmp_path, free, monkeypatch, mesh
):
    params = random_params(CONFIG, 0)
    save_hf(tmp_path / "m", params, CONFIG, ByteTokenizer())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    free(2 * size)  # on eight devices norms and the like are copied
    LanguageModel.load(tmp_path / "m", mesh=mesh)
    free(size // 2 - 1)
    monkeypatch.setattr("lcjax.checkpoints.weights._read_block", pytest.fail)
    message = r"weights in float32 take .* GB, and .* has .* GB free; read them as bfloat16"
    with pytest.raises(InputError, match=message):
        LanguageModel.load(tmp_path / "m", mesh=mesh)


def test_a_cache_that_does_not_fit_raises_input_error(free):
    lm = LanguageModel.load(ModelSection(preset="tiny", dtype="float32"))
    config = lm.model.config
    size = 2 * 4 * 64 * config.num_layers * config.num_kv_heads * config.head_dim
    free(2 * size)
    cache.create(config, 1, 64)
    free(size)  # with the segments and positions of the slots it is more
    with pytest.raises(InputError, match="a cache for 1 rows of 64 tokens would take"):
        cache.create(config, 1, 64)
    assert cache.abstract_cache(config, 1, 64).capacity == 64  # of shapes alone nothing is asked
    with pytest.raises(InputError, match="read fewer rows at a time or shorter texts"):
        lm.generate(["x" * 200])


def test_devices_that_share_an_array_need_their_parts_only(free):
    mesh = make_mesh(Mesh(fsdp=8))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    copies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    free(8 * 100)
    array = jax.ShapeDtypeStruct((8, 25), jnp.float32, sharding=rows)
    device_memory.check_fits({"x": array}, "they", "stop")
    with pytest.raises(InputError, match="they take"):  # all CPU devices share one memory
        device_memory.check_fits({"x": array.update(sharding=copies)}, "they", "stop")


def test_unknown_free_memory_raises_no_error(free):
    free(None)
    device_memory.check_fits({"x": jax.ShapeDtypeStruct((2**50,), np.int8)}, "they", "stop")


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    device = jax.devices()[0]
    machine = device_memory.free_bytes(device)
    assert machine is None or machine > 2**26
    if machine is None:
        pytest.skip("this system does not tell its free memory")
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 700\n")
    monkeypatch.setattr(device_memory, "_LIMITS", tmp_path)
    assert device_memory.free_bytes(device) == 9000 - 5000 + 700
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.free_bytes(device) > 2**26
    (tmp_path / "memory").mkdir()  # version 1
    for name, text in (("limit_in_bytes", "7000"), ("usage_in_bytes", "5000")):
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 60\n")
    assert device_memory.free_bytes(device) == 7000 - 5000 + 60


def test_random_weights_that_do_not_fit_raise_input_error_before_they_are_drawn(free):
    free(1000)
    with pytest.raises(InputError, match="the random weights of a model in float32 take"):
        LanguageModel.load(ModelSection(preset="tiny"))


FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 77 bytes.\nmore"


def test_a_script_whose_device_is_full_ends_with_what_to_change(tmp_path, capsys):
    def run(config):
        (tmp_path / "run").mkdir()
        raise jax.errors.JaxRuntimeError(FULL)

    words = ["--model.preset=tiny", "--data.path=x", f"--run.folder={tmp_path / 'run'}"]
    assert distributed.main(TrainConfig, run, words) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "allocate 77 bytes" in line
    places = [line.index(way) for way in device_memory.TRAINING]
    assert places == sorted(places)
    assert "JaxRuntimeError" in (tmp_path / "run" / "error.txt").read_text()


def test_a_model_whose_device_is_full_says_what_to_change(monkeypatch):
    def full(*args, **options):
        raise jax.errors.JaxRuntimeError(FULL)

    lm = LanguageModel(Decoder(CONFIG), random_params(CONFIG, 0), ByteTokenizer())
    monkeypatch.setattr(InferenceJit, "_for", lambda *_: full)
    with pytest.raises(OutOfMemoryError, match=r"\(1\) a smaller batch_size.* allocate 77 bytes"):
        lm.generate([[1, 2, 3]])


def test_other_errors_of_xla_are_not_changed():
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL"), device_memory.explained(()):
        raise error


def test_the_page_about_full_devices_has_the_same_list():
    page = (Path(__file__).parents[2] / "docs" / "out_of_memory.md").read_text()
    for ways_out in (device_memory.TRAINING, device_memory.READING):
        assert "\n".join(f"{number}. {way}" for number, way in enumerate(ways_out, 1)) in page
