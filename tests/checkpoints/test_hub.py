"""Hub ids: which files are downloaded, and what is said of repositories that cannot be read."""

import shutil

import huggingface_hub
import pytest
from adapter_support import NEW_ROWS, base_tensors, low_rank, trained_whole, write_peft
from convert_support import assert_same, saved
from huggingface_hub.utils import filter_repo_objects

from lcjax.checkpoints import load, load_config, load_tokenizer
from lcjax.checkpoints.hub import find_encoder
from lcjax.checkpoints.safetensors_io import SINGLE
from lcjax.errors import InputError

NAME = "owner/model"
UNWANTED = (
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/params.json",
    "onnx/model.safetensors",
    "adapter_model.safetensors",
    "trainable_params.bin",
)


class Hub:
    """One repository in a folder, with the library's own rules for patterns of file names."""

    def __init__(self, root):
        self.repository, self.snapshot = root / "repository", root / "snapshot"
        self.snapshot.mkdir(parents=True)
        self.params, self.config = saved(self.repository)
        for name in UNWANTED:
            self.add(name)

    def add(self, name, data=b"not to be fetched"):
        file = self.repository / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def list_repo_files(self, name):
        assert name == NAME
        files = (f for f in self.repository.rglob("*") if f.is_file())
        return sorted(f.relative_to(self.repository).as_posix() for f in files)

    def snapshot_download(self, name, *, allow_patterns=None, ignore_patterns=None):
        for file in filter_repo_objects(
            self.list_repo_files(name),
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        ):
            (self.snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / file, self.snapshot / file)
        return str(self.snapshot)

    @property
    def fetched(self):
        return {f.relative_to(self.snapshot).as_posix() for f in self.snapshot.rglob("*.*")}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", made.list_repo_files)
    return made


def test_a_model_is_fetched_without_other_formats_of_its_weights(hub):
    hub.add("pytorch_model.bin")
    loaded, config, _ = load(NAME, allow_pickle=True)
    assert config == hub.config
    assert_same(loaded, hub.params)
    assert hub.fetched == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        SINGLE,
    }


def test_config_and_tokenizer_come_without_the_weights(hub):
    assert load_config(NAME) == hub.config
    assert load_tokenizer(NAME).vocab_size == 259
    assert "config.json" in hub.fetched and SINGLE not in hub.fetched


@pytest.mark.parametrize("files", [["pytorch_model.bin"], ["pytorch_model-00001-of-00002.bin"]])
def test_a_repository_of_pickles_gets_the_explanation_and_is_not_downloaded(hub, files):
    (hub.repository / SINGLE).unlink()
    hub.add("pytorch_model.bin.index.json", b"{}")
    for name in files:
        hub.add(name)
    with pytest.raises(InputError, match=rf"{files[0]}\).*can run any code.*--allow-pickle"):
        load(NAME)
    assert not hub.fetched & set(files)


def test_pickles_of_the_hub_are_read_when_allowed(hub):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    torch.save(load_file(hub.repository / SINGLE), hub.repository / "pytorch_model.bin")
    (hub.repository / SINGLE).unlink()
    assert_same(load(NAME, allow_pickle=True)[0], hub.params)


def test_repositories_without_readable_weights_say_what_they_have(hub):
    (hub.repository / SINGLE).unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors at the top.*it has .*config\.json"):
        load(NAME, allow_pickle=True)
    hub.add("model-q4_k_m.gguf")
    with pytest.raises(InputError, match=r"GGUF files \(model-q4_k_m\.gguf\); download one") as e:
        load(NAME)
    assert "\n" not in str(e.value)


def test_offline_without_cached_weights_the_folder_is_named(hub, monkeypatch):
    (hub.repository / SINGLE).unlink()

    def offline(name):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    with pytest.raises(InputError, match="no weights .* in .*snapshot, and the hub cannot be"):
        load(NAME)


ENCODER = {"modules.json", "vocab.txt", "1_Pooling/config.json", "config.json", SINGLE}


@pytest.mark.parametrize("pickled", [False, True])
def test_an_encoder_is_fetched_with_the_files_of_its_pooling(hub, pickled):
    for name in ENCODER - {SINGLE, "config.json"} | {"openvino/config.json"}:
        hub.add(name)
    if pickled:
        (hub.repository / SINGLE).unlink()
        hub.add("pytorch_model.bin")
    folder = find_encoder(NAME, allow_pickle=pickled)
    assert folder == hub.snapshot
    weights = "pytorch_model.bin" if pickled else SINGLE
    assert hub.fetched >= ENCODER - {SINGLE} | {weights}
    assert not any(name.startswith(("onnx", "openvino")) for name in hub.fetched)


@pytest.fixture
def adapters(hub, tmp_path):
    """LongLoRA's kind of repository, over a local base; the base's tensors."""
    base = base_tensors(tmp_path / "base")
    shutil.rmtree(hub.repository)
    write_peft(hub.repository, low_rank(base), tmp_path / "base")
    (hub.repository / "README.md").write_text("not to be fetched")
    return base


def test_adapters_of_the_hub_are_merged_into_their_base(hub, adapters, tmp_path):
    loaded, config, _ = load(NAME)
    assert config == load_config(tmp_path / "base")
    assert hub.fetched == {"adapter_config.json", "adapter_model.safetensors"}
    assert_same(loaded, load(hub.repository)[0])


def test_the_second_file_of_adapters_is_not_left_out_in_silence(hub, adapters):
    torch = pytest.importorskip("torch")
    whole = {name: torch.from_numpy(t) for name, t in trained_whole(adapters).items()}
    torch.save(whole, hub.repository / "trainable_params.bin")
    with pytest.raises(InputError, match=r"pickles \(trainable_params\.bin\).*--allow-pickle"):
        load(NAME, context=128)
    assert "trainable_params.bin" not in hub.fetched
    loaded, config, _ = load(NAME, context=128, allow_pickle=True)
    assert config.vocab_size == NEW_ROWS
    assert_same(loaded, load(hub.repository, context=128, allow_pickle=True)[0])
