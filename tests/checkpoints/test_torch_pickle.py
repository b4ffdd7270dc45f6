"""Pickled weights: refused by default, tensors only when allowed, nothing is ever run."""

import contextlib
import io
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import pytest
from convert_support import assert_same, edit_json, saved

from lcjax.checkpoints import load
from lcjax.checkpoints.safetensors_io import SINGLE, SafetensorsFolder
from lcjax.checkpoints.torch_pickle import TorchFolder, bin_files
from lcjax.errors import InputError


class Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def write_zip(path, pickled, storages=()):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("model/data.pkl", pickled)
        for key, data in storages:
            archive.writestr(f"model/data/{key}", data)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_pickles_are_refused_with_an_explanation_and_a_way_out(tmp_path):
    saved(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*can run any code.*--allow-pickle"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_in_a_torch_file_are_read_when_allowed(tmp_path, torch, dtype):
    params, _ = saved(tmp_path, param_dtype=dtype)
    from safetensors.torch import load_file

    state = load_file(tmp_path / SINGLE)
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].T.contiguous().T  # a view with other strides
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / SINGLE).unlink()
    loaded, config, _ = load(tmp_path, allow_pickle=True)
    assert config.param_dtype == dtype
    assert_same(loaded, params)


def test_parameters_and_shared_storages_are_read(tmp_path, torch):
    base = torch.arange(12.0)
    state = {"p": torch.nn.Parameter(base[2:6].reshape(2, 2)), "q": base[6:], "step": 3}
    torch.save(state, tmp_path / "pytorch_model.bin")
    folder = TorchFolder(tmp_path)
    assert set(folder.tensors) == {"p", "q"}
    assert folder.rows("p", 1, 2).tolist() == [[4.0, 5.0]]
    assert folder.rows("q", 0, 6).tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, os.mkdir, print])
def test_a_pickle_that_calls_anything_is_refused_and_not_run(tmp_path, function):
    trap = tmp_path / "trap"
    write_zip(tmp_path / "pytorch_model.bin", pickle.dumps({"x": Call(function, str(trap))}))
    with pytest.raises(InputError, match=r"refused: it calls .*do not open"):
        TorchFolder(tmp_path)
    assert not trap.exists()


def test_a_pickle_cannot_change_the_reader(tmp_path):
    # BUILD sets attributes on the allowed function itself.
    out = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__call__K\x01sb."
    write_zip(tmp_path / "pytorch_model.bin", out)
    with pytest.raises(InputError, match="not a torch checkpoint"):
        TorchFolder(tmp_path)


def test_a_tensor_outside_its_storage_is_refused(tmp_path, torch):
    torch.save({"x": torch.zeros(4)}, tmp_path / "m.bin")
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        root = archive.namelist()[0].split("/")[0]
        pickled = archive.read(f"{root}/data.pkl")
    longer = pickled.replace(b"K\x04\x85", b"K\x09\x85")
    later = pickled.replace(b"K\x00K", b"K\x02K")
    for wrong in (longer, later):
        assert wrong != pickled
        write_zip(tmp_path / "pytorch_model.bin", wrong, [("0", bytes(16))])
        with pytest.raises(InputError, match="x does not lie inside its storage"):
            TorchFolder(tmp_path)


def test_files_that_are_no_torch_checkpoint_are_refused(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("readme.txt", "hello")
    for data in (b"", b"\x80\x02}q\x00.", stream.getvalue(), stream.getvalue()[:40]):
        (tmp_path / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(InputError, match="not a torch checkpoint"):
            TorchFolder(tmp_path)


def test_shards_are_those_of_the_index_unless_there_is_one_whole_file(tmp_path):
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"x": "pytorch_model-00001-of-00001.bin"}}')
    with pytest.raises(InputError, match=r"shards are missing: pytorch_model-00001-of-00001\.bin"):
        bin_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert bin_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    for damaged in ('{"weight_map": {"x": 3}}', "[" * 100_000):
        index.write_text(damaged)
        with pytest.raises(InputError, match="not an index of shards"):
            bin_files(tmp_path)


def test_safetensors_win_over_pickles_beside_them(tmp_path):
    params, _ = saved(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert_same(load(tmp_path, allow_pickle=True)[0], params)
    assert SafetensorsFolder(tmp_path).tensors
    edit_json(tmp_path / "config.json", model_type="gpt2")
    with pytest.raises(InputError, match="gpt2"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path, torch):
    for number in (1, 2):
        values = {"x": torch.full((2,), float(number)), str(number): torch.zeros(2)}
        torch.save(values, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    with pytest.raises(InputError, match="x is in two files; remove the stray one"):
        TorchFolder(tmp_path)


def test_a_damaged_file_is_read_inside_its_members_or_refused(tmp_path, torch):
    file = tmp_path / "pytorch_model.bin"
    base = torch.arange(60.0)
    torch.save({"x": base[:30].reshape(5, 6).T, "y": base[30:], "z": torch.zeros(0, 3)}, file)
    good, draw = file.read_bytes(), random.Random(0)
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        directory, pickled = archive.start_dir, archive.getinfo(archive.namelist()[0])
        text = archive.read(pickled)
    storage, numbers = base.numpy().tobytes(), set()
    for case in range(150):
        data = bytearray(good)
        if case % 3 == 0:  # a field of the directory
            place = draw.randrange(directory, len(data) - 8)
            data[place : place + 4] = draw.choice([b"\xff" * 4, bytes(4), draw.randbytes(4)])
        elif case % 3 == 1:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:  # the pickle, with the right checksum
            changed = bytearray(text)
            changed[draw.randrange(len(changed))] = draw.choice(b"\x00\xffKMR}(t\x85\x8aqrhb")
            write_zip(file, bytes(changed), [("0", storage)])
            data = file.read_bytes()
        file.write_bytes(data if case % 10 else data[: draw.randrange(len(data))])
        with contextlib.suppress(InputError):
            folder = TorchFolder(tmp_path)
            for name, info in folder.tensors.items():
                rows = folder.rows(name, 0, info.shape[0])
                numbers |= set(rows.ravel().tolist()) if rows.dtype == np.float32 else set()
    assert 60 <= len(numbers) < 200  # others than 0 ... 59 are those with a flipped bit


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of 2**31 entries
        b"\x80\x02)" + b"\x85" * 100_000 + b"}\x85.",
        b"\x80\x02})" + b"q\x00h\x00\x86" * 100 + b"K\x01s.",  # hashing it takes forever
        b"\x80\x02}\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x02}" + b"(" * 100_000 + b"u.",
    ],
)
def test_no_pickle_takes_all_memory_or_time(tmp_path, pickled):
    write_zip(tmp_path / "pytorch_model.bin", pickled)
    with contextlib.suppress(InputError):
        assert TorchFolder(tmp_path).tensors == {}


def test_members_lie_in_the_file_in_places_of_their_own(tmp_path, torch):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(1000)}, file)
    good = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        names, start = archive.namelist(), archive.start_dir
        contents = {name: archive.read(name) for name in names}
    sizes = struct.pack("<II", 4000, 4000)
    huge = good[:start] + good[start:].replace(sizes, struct.pack("<II", 10**9, 10**9))
    first, second = (good.index(b"PK\1\2", start), good.index(b"PK\1\2", start + 4))
    moved = bytearray(good)
    moved[second + 42 : second + 46] = good[first + 42 : first + 46]  # where the member is
    packed, twice = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    with zipfile.ZipFile(twice, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for name in [*names, names[0]]:
            archive.writestr(name, contents[name])
    for data in (huge, bytes(moved), packed.getvalue(), twice.getvalue()):
        assert data != good
        file.write_bytes(data)
        with pytest.raises(InputError, match="not a torch checkpoint"):
            TorchFolder(tmp_path)
    torch.save({"x": torch.zeros(3)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="not a torch checkpoint of version 1.6 or later"):
        TorchFolder(tmp_path)
