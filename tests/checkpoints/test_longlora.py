"""LongLoRA's published folders: adapters, embeddings and norms over a base, positions by a factor.

The folders are pickles as its scripts write them: adapter_model.bin and trainable_params.bin.
"""

import json
import warnings

import numpy as np
import pytest
import tokenizers
from adapter_support import NEW_ROWS, base_tensors, low_rank, merged, trained_whole, write_peft
from convert_support import saved
from safetensors.numpy import load_file, save_file

from lcjax.checkpoints import ByteTokenizer, load
from lcjax.convert import main
from lcjax.errors import InputError
from lcjax.rope import Default, Linear, Yarn


def write_bin(path, tensors):
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(t).to(torch.float32) for name, t in tensors.items()}
    torch.save(state, path)


def published(folder, base, *, trainable=True, pickled=True):
    """(low-rank tensors, whole tensors) of a folder as it is published."""
    pairs, whole = low_rank(base), trained_whole(base)
    write_peft(folder, pairs, base="/models/authors/llama-2-7b")
    if pickled:
        (folder / "adapter_model.safetensors").unlink()
        write_bin(folder / "adapter_model.bin", pairs)
    if trainable and pickled:
        write_bin(folder / "trainable_params.bin", whole)
    elif trainable:
        save_file(whole, folder / "trainable_params.safetensors")
    return pairs, whole


def test_the_command_merges_a_published_folder_into_its_base(tmp_path, capsys):
    base = base_tensors(tmp_path / "base")
    pairs, whole = published(tmp_path / "longlora", base)
    where = [str(tmp_path / name) for name in ("longlora", "dst")]
    options = ["--base", str(tmp_path / "base"), "--context", "200", "--allow-pickle"]
    assert main([*where, *options]) == 0, capsys.readouterr().err

    want = merged(base, pairs, scale=2.0) | whole  # alpha 4, r 2
    mean = base["lm_head.weight"].astype(np.float64).mean(0, keepdims=True)
    want["lm_head.weight"] = np.concatenate([base["lm_head.weight"], mean])
    got = load_file(tmp_path / "dst" / "model.safetensors")
    assert set(got) == set(want)
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)
    changed = [n for n in base if got[n].shape != base[n].shape or (got[n] != base[n]).any()]
    assert not any("mlp" in name for name in changed) and len(changed) == 3 * (4 + 2) + 3

    written = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert written["vocab_size"] == NEW_ROWS and written["max_position_embeddings"] == 256
    assert written["rope_scaling"] == {"type": "linear", "factor": 4.0}  # ceil(200 / 64)
    assert load(tmp_path / "dst")[1].rope == Linear(theta=5e4, factor=4.0)


@pytest.mark.parametrize(
    ("rope", "context", "want"),
    [
        (Default(theta=1e4), 128, Linear(theta=1e4, factor=2.0)),
        (Default(theta=1e4), 129, Linear(theta=1e4, factor=3.0)),
        (Default(theta=1e4), 64, Default(theta=1e4)),
        (Linear(theta=1e4, factor=2.0), 256, Linear(theta=1e4, factor=2.0)),
        (Linear(theta=1e4, factor=8.0), 512, Linear(theta=1e4, factor=8.0)),
        (Linear(theta=1e4, factor=8.0), None, Linear(theta=1e4, factor=8.0)),
    ],
)
def test_the_factor_is_that_of_the_authors_code(tmp_path, rope, context, want):
    base = base_tensors(tmp_path / "base", rope=rope)
    published(tmp_path / "longlora", base, pickled=False)
    _, config, _ = load(tmp_path / "longlora", base=tmp_path / "base", context=context)
    assert (config.rope, config.max_length) == (want, 64)


def test_a_config_beside_the_adapters_gives_the_positions_unless_told_otherwise(tmp_path):
    base = base_tensors(tmp_path / "base")
    folder = tmp_path / "longlora"
    published(folder, base, pickled=False)
    scaling = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps(scaling))
    assert load(folder, base=tmp_path / "base")[1].rope == Linear(theta=5e4, factor=8.0)
    config = load(folder, base=tmp_path / "base", context=128)[1]
    assert config.rope == Linear(theta=5e4, factor=2.0)


def test_without_the_trained_length_nothing_is_guessed(tmp_path, capsys):
    base = base_tensors(tmp_path / "base")
    published(tmp_path / "longlora", base, pickled=False)
    command = [str(tmp_path / "longlora"), str(tmp_path / "dst"), "--base", str(tmp_path / "base")]
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "longlora: LongLoRA's adapters do not say" in error and "--context 32768" in error
    assert not (tmp_path / "dst").exists()


def test_a_base_with_another_position_method_is_not_interpolated(tmp_path):
    base = base_tensors(tmp_path / "base", rope=Yarn(theta=1e4, factor=4.0, original_length=64))
    published(tmp_path / "longlora", base, pickled=False)
    with pytest.raises(InputError, match=r"context=128 .*has rope type yarn; leave context"):
        load(tmp_path / "longlora", base=tmp_path / "base", context=128)


def add_tokens(folder, count):
    """A tokenizer beside the adapters that ends with [PAD], for which the base has no row."""
    ByteTokenizer().save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([*(f"<{i}>" for i in range(count - 1)), "[PAD]"])
    backend.save(str(folder / "tokenizer.json"))


def test_without_the_second_file_a_warning_says_what_stays_the_base_s(tmp_path):
    base = base_tensors(tmp_path / "base")
    published(tmp_path / "longlora", base, trainable=False, pickled=False)
    add_tokens(tmp_path / "longlora", NEW_ROWS - ByteTokenizer.vocab_size)
    with pytest.warns(UserWarning, match=r"no trainable_params\.bin, so embeddings and norms stay"):
        params, config, tokenizer = load(tmp_path / "longlora", base=tmp_path / "base", context=128)
    assert config.vocab_size == tokenizer.vocab_size == NEW_ROWS
    rows = np.asarray(params["embed"]["embedding"])  # [PAD] has one: the mean of the others
    np.testing.assert_array_equal(rows[:-1], base["model.embed_tokens.weight"])
    np.testing.assert_allclose(rows[-1], rows[:-1].mean(0), atol=1e-6)
    with pytest.raises(InputError, match="tokenizer has 265 ids but the model only 264"):
        load(tmp_path / "longlora", base=tmp_path / "base")  # any adapter: no row is made up


def test_the_whole_folder_gives_no_warning(tmp_path):
    base = base_tensors(tmp_path / "base")
    published(tmp_path / "longlora", base, pickled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path / "longlora", base=tmp_path / "base", context=128)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("second_only", [False, True])
def test_pickles_are_refused_unless_allowed(tmp_path, second_only):
    base = base_tensors(tmp_path / "base")
    pairs, _ = published(tmp_path / "longlora", base)
    if second_only:
        (tmp_path / "longlora" / "adapter_model.bin").unlink()
        save_file(pairs, tmp_path / "longlora" / "adapter_model.safetensors")
    name = "trainable_params" if second_only else "adapter_model"
    with pytest.raises(InputError, match=rf"pickles \({name}\.bin\).*--allow-pickle"):
        load(tmp_path / "longlora", base=tmp_path / "base", context=128)
    loaded = load(tmp_path / "longlora", base=tmp_path / "base", context=128, allow_pickle=True)
    assert loaded[1].vocab_size == NEW_ROWS


def test_the_wrong_base_is_refused_with_the_shapes(tmp_path):
    base = base_tensors(tmp_path / "base")
    published(tmp_path / "longlora", base, pickled=False)
    saved(tmp_path / "wide", width=40)
    saved(tmp_path / "more", vocab_size=300)
    words = r"do not fit .*wide; wrong shape: model\..* is for \[.*48\], not \[.*40\].*--base"
    with pytest.raises(InputError, match=words) as error:
        load(tmp_path / "longlora", base=tmp_path / "wide", context=128)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is for \[265, 48\], not \[300"):
        load(tmp_path / "longlora", base=tmp_path / "more", context=128)
