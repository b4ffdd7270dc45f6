"""safetensors files as others write them, and every way in which they are damaged."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from lcjax.checkpoints.safetensors_io import INDEX, SINGLE, SafetensorsFolder, write_file
from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import InputError

ARRAYS = {
    "a": np.arange(35, dtype=np.float32).reshape(5, 7),
    "b.half": np.linspace(-1, 1, 12, dtype=np.float16).reshape(3, 2, 2),
    "c.brain": np.arange(9).astype(ml_dtypes.bfloat16),
}


def write(path, arrays=ARRAYS):
    infos = {name: TensorInfo(a.shape, a.dtype.name) for name, a in arrays.items()}
    write_file(path, infos, arrays.items())


def craft(path, header, body=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(name="x", **changes):
    """A header of one sound tensor of two floats, with changes."""
    return {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_the_reference_library_reads_what_is_written(tmp_path):
    write(tmp_path / SINGLE)
    theirs = safetensors.numpy.load_file(tmp_path / SINGLE)
    assert set(theirs) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(theirs[name].astype(np.float32), array.astype(np.float32))
        assert theirs[name].dtype == array.dtype


def test_rows_of_what_the_reference_library_wrote_are_read(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / SINGLE)
    folder = SafetensorsFolder(tmp_path)
    assert folder.tensors["c.brain"] == TensorInfo((9,), "bfloat16")
    for name, array in ARRAYS.items():
        rows = folder.rows(name, 1, 3)
        assert rows.dtype == array.dtype
        np.testing.assert_array_equal(rows, array[1:3])


def test_only_the_bytes_of_the_rows_are_read(tmp_path):
    write(tmp_path / SINGLE)
    folder = SafetensorsFolder(tmp_path)
    data = bytearray((tmp_path / SINGLE).read_bytes())
    (tmp_path / SINGLE).write_bytes(data[: data.index(ARRAYS["a"][3].tobytes())])
    np.testing.assert_array_equal(folder.rows("a", 1, 3), ARRAYS["a"][1:3])


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_noticed_before_any_tensor_is_read(tmp_path, keep):
    write(tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:keep])
    with pytest.raises(InputError, match=rf"{SINGLE}: .*truncated") as error:
        SafetensorsFolder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        (b"{not json", b"", "header is damaged"),
        (b"[1, 2]", b"", "header is damaged"),
        ({"x": {"dtype": "F32", "shape": [2]}}, b"", "header is damaged"),
        (
            {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"1234",
            "x has 4 bytes, but",
        ),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123456", "2 bytes more"),
        (entry(shape=[2.0]), b"12345678", r"x has shape \[2\.0\]"),
        (entry(shape=[-1, -2]), b"12345678", r"x has shape \[-1, -2\]"),
        (entry(shape=["2"]), b"12345678", r"x has shape \['2'\]"),
        (entry(shape=[True, 2]), b"12345678", r"x has shape \[True, 2\]"),
        (entry(shape="2"), b"12345678", "x has shape '2'"),
        (entry(shape=None), b"12345678", "x has shape None"),
        (entry(dtype=["F32"]), b"12345678", r"x has dtype \['F32'\]"),
        (entry(data_offsets=[0.0, 8.0]), b"12345678", r"x has data_offsets \[0\.0, 8\.0\]"),
        (entry(data_offsets=[-8, 0]), b"12345678", r"x has data_offsets \[-8, 0\]"),
        (entry(data_offsets=[8, 0]), b"12345678", r"x has data_offsets \[8, 0\]"),
        (entry(data_offsets=[8]), b"12345678", "header is damaged"),
        (entry(data_offsets=[2**62, 2**62 + 8]), b"12345678", "truncated"),
        (entry() | entry("y"), b"12345678", "y overlaps x|x overlaps y"),
        (entry() | entry("y", data_offsets=[4, 12]), b"123456789abc", "y overlaps x"),
        (b"[" * 100_000, b"", "header is damaged"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path, header, body, words):
    craft(tmp_path / SINGLE, header, body)
    with pytest.raises(InputError, match=words) as error:
        SafetensorsFolder(tmp_path)
    assert "\n" not in str(error.value)


def test_an_absurd_header_length_is_named(tmp_path):
    (tmp_path / SINGLE).write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match="a header of 1,099,511,627,776 bytes"):
        SafetensorsFolder(tmp_path)


def test_numbered_files_without_an_index_must_be_all_there(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": ARRAYS["a"]})
    with pytest.raises(InputError, match=r"1 of 2 shards are missing beside model-00001.*index"):
        SafetensorsFolder(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", {"b.half": ARRAYS["b.half"]})
    for other in ("consolidated.safetensors", "adapter_model.safetensors"):
        write(tmp_path / other)
    assert set(SafetensorsFolder(tmp_path).tensors) == {"a", "b.half"}


def test_other_dtypes_are_listed_as_they_are_for_the_check_that_names_them(tmp_path):
    craft(
        tmp_path / SINGLE,
        {"x": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}},
        b"abc",
    )
    assert SafetensorsFolder(tmp_path).tensors["x"].dtype == "F8_E4M3"


def test_an_index_may_not_lead_out_of_its_folder(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(InputError, match="files outside its folder"):
        SafetensorsFolder(tmp_path)
    for damaged in ('{"weight_map": [1', '{"weight_map": {"x": 3}}', '{"weight_map": {"x": [1]}}'):
        (tmp_path / INDEX).write_text(damaged)
        with pytest.raises(InputError, match="not an index of shards"):
            SafetensorsFolder(tmp_path)


def test_one_whole_file_wins_over_an_index_beside_it(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(InputError, match=r"1 of 1 shards are missing: model-1\.safetensors"):
        SafetensorsFolder(tmp_path)
    write(tmp_path / SINGLE)
    assert set(SafetensorsFolder(tmp_path).tensors) == set(ARRAYS)


def test_the_writer_insists_on_the_announced_order_and_shape(tmp_path):
    infos = {"x": TensorInfo((2,), "float32")}
    with pytest.raises(ValueError, match="is not x"):
        write_file(tmp_path / "f", infos, [("x", np.zeros(3, np.float32))])
