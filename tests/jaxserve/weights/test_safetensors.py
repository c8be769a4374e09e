"""Safetensors: what the library writes is what we read, and no file, however broken, gives anything but a refusal."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from jaxserve.errors import CheckpointError
from jaxserve.weights import open_checkpoint
from jaxserve.weights.mapped import MappedFile
from jaxserve.weights.safetensors import read_header

DTYPES = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.supports("checkpoints", "safetensors")
def test_what_the_library_writes_is_read_bit_for_bit(folder, dtype):
    values = np.random.default_rng(0).integers(0, 2, (3, 5, 7)).astype(dtype)
    tensors = {"a": values, "scalar": np.array(values[0, 0, 0]), "empty": values[:0]}
    checkpoint = open_checkpoint(str(folder(tensors)))
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tensor.shape, tensor.dtype)
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize(
    "code, dtype", [("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)]
)
def test_eight_bit_floats_keep_their_bits(tmp_path, code, dtype):
    bits = np.arange(256, dtype=np.uint8)
    file = raw_file(
        tmp_path, {"w": {"dtype": code, "shape": [256], "data_offsets": [0, 256]}}, bits.tobytes()
    )
    read = open_checkpoint(str(file)).read("w")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read.view(np.uint8), bits)


@pytest.mark.supports("checkpoints", "safetensors (sharded)")
def test_shards_equal_the_single_file(folder):
    rng = np.random.default_rng(1)
    tensors = {f"model.layers.{i}.w": rng.standard_normal((4, 6)).astype(np.float32) for i in range(7)}
    single, sharded = (open_checkpoint(str(folder(tensors, shards=n))) for n in (1, 3))
    assert set(single.names()) == set(sharded.names())
    for name in tensors:
        np.testing.assert_array_equal(single.read(name), sharded.read(name))
    files = [sharded.file(name) for name in sharded.names()]
    assert files == sorted(files), "each shard is passed through once"


def test_a_read_is_a_view_of_the_file(folder):
    checkpoint = open_checkpoint(str(folder({"w": np.ones((64, 64), np.float32)})))
    array = checkpoint.read("w")
    assert not array.flags.owndata and not array.flags.writeable


def raw_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with exactly this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "config.json").write_text("{}")
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "a header longer than the file": (b"{}", {"length": 1 << 62}),
    "a header of nothing": (b"", {}),
    "no JSON": (b"{nonsense", {}),
    "no object": (b"[1, 2]", {}),
    "JSON nested without end": (b"[" * 100_000, {}),
    "not UTF-8": (b'{"\xff": 1}', {}),
    "a name twice": (
        b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', {}
    ),
    "an unsupported dtype": ({"w": entry("F4")}, {}),
    "a dtype that is no string": ({"w": entry(["F32"])}, {}),
    "a negative size": ({"w": entry(shape=(-2,))}, {}),
    "a size that is no integer": ({"w": entry(shape=(2.0,))}, {}),
    "a size that is true": ({"w": entry(shape=(True, 2))}, {}),
    "exabytes": ({"w": entry(shape=(1 << 60,), offsets=(0, 1 << 62))}, {}),
    "nothing times exabytes": ({"w": entry(shape=(0, 1 << 40, 1 << 40), offsets=(0, 0))}, {}),
    "too many dimensions": ({"w": entry(shape=(1,) * 200 + (2,))}, {}),
    "bytes that do not match": ({"w": entry(shape=(3,))}, {}),
    "offsets beyond the end": ({"w": entry(shape=(4,), offsets=(0, 16))}, {}),
    "offsets backwards": ({"w": entry(offsets=(8, 0))}, {}),
    "negative offsets": ({"w": entry(offsets=(-8, 0))}, {}),
    "a gap at the start": ({"w": entry(shape=(1,), offsets=(4, 8))}, {}),
    "bytes left over": ({"w": entry(shape=(1,), offsets=(0, 4))}, {}),
    "overlapping tensors": ({"w": entry(), "v": entry(shape=(1,), offsets=(4, 8))}, {}),
    "a field missing": ({"w": {"dtype": "F32", "shape": [2]}}, {}),
    "an entry that is no object": ({"w": 7}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_is_checked_before_it_is_believed(tmp_path, case):
    header, options = HOSTILE[case]
    file = raw_file(tmp_path, header, bytes(8), **options)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(str(file))
    assert refusal.value.file == str(file)
    if isinstance(header, dict):
        assert refusal.value.tensor in ("w", "v") or "after the last" in str(refusal.value)


def test_a_truncated_file_names_the_tensor_and_both_sizes(folder):
    path = folder({"a": np.ones(100, np.float32), "b": np.ones(100, np.float32)})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"truncated.*tensor b.*expected \d+ bytes.*found \d+ bytes"):
        open_checkpoint(str(path))


def test_an_empty_file_and_a_stub_are_refused(folder):
    path = folder({"a": np.ones(2, np.float32)})
    for content in (b"", b"123"):
        (path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"empty|too short"):
            open_checkpoint(str(path))


INDICES = {
    "a missing shard": ({"w": "model-00009-of-00009.safetensors"}, "shard is missing"),
    "a shard outside": ({"w": "../secret.safetensors"}, "outside its folder"),
    "an absolute shard": ({"w": "/etc/passwd"}, "outside its folder"),
    "a tensor its shard lacks": ({"ghost": "model-00001-of-00002.safetensors"}, "does not hold"),
    "no map": ({}, "malformed index"),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_is_checked_against_the_shards(folder, case):
    where, problem = INDICES[case]
    path = folder({"w": np.ones(2, np.float32), "v": np.ones(2, np.float32)}, shards=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=problem) as refusal:
        open_checkpoint(str(path))
    assert refusal.value.tensor == next(iter(where), "")


def test_an_unknown_tensor_is_refused_with_the_nearest_names(folder):
    checkpoint = open_checkpoint(str(folder({"model.layers.0.q_proj.weight": np.ones(2, np.float32)})))
    with pytest.raises(CheckpointError, match=r"nearest names model\.layers\.0\.q_proj\.weight"):
        checkpoint.read("model.layers.0.q_proj.weights")


TENSORS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "norm": np.ones(5, ml_dtypes.bfloat16)}
WHOLE = save(TENSORS)


@given(st.integers(0, len(WHOLE) - 1))
def test_no_truncation_goes_unnoticed(tmp_path_factory, length):
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    file.write_bytes(WHOLE[:length])
    with pytest.raises(CheckpointError):
        read_header(MappedFile(str(file)))


@given(st.dictionaries(st.integers(0, len(WHOLE) - 59), st.integers(0, 255), min_size=1, max_size=3))
def test_a_damaged_header_gives_a_refusal_or_tensors_within_the_file(tmp_path_factory, damage):
    content = bytearray(WHOLE)
    for at, byte in damage.items():
        content[at] = byte
    file = MappedFile(str(_written(tmp_path_factory.mktemp("bad") / "f", bytes(content))))
    try:
        entries = read_header(file)
    except CheckpointError:
        return
    for found in entries.values():
        array = file.view(found.offset, found.nbytes).view(found.dtype).reshape(found.shape)
        assert array.nbytes == found.nbytes


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_two_shards_with_one_tensor_need_an_index(tmp_path):
    from jaxserve.weights.safetensors import SafetensorsCheckpoint

    shards = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for shard in shards:
        save_file({"w": np.ones(2, np.float32)}, shard)
    with pytest.raises(CheckpointError, match="two shards"):
        SafetensorsCheckpoint(str(tmp_path), shards, {})
