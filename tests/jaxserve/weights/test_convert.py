"""The converted form: restoring equals loading from the source bit for bit, and no half or damaged one is accepted."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights import convert, load, open_checkpoint

TENSORS = {
    "model.embed_tokens.weight": np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32),
    "model.norm.weight": np.linspace(-3, 3, 16).astype(ml_dtypes.bfloat16),
    "model.half": np.linspace(-3, 3, 16).astype(np.float16),
    "model.ids": np.arange(5, dtype=np.int32),
}
GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def source(folder) -> Path:
    path = folder(TENSORS)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.mark.supports("checkpoints", "Orbax (converted)")
def test_restoring_equals_reading_the_source_bit_for_bit(source, tmp_path):
    convert(str(source), str(tmp_path / "out"))
    original, restored = open_checkpoint(str(source)), open_checkpoint(str(tmp_path / "out"))
    assert restored.format == "orbax" and restored.config == original.config
    assert set(restored.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read = restored.read(name)
        assert (read.dtype, restored.dtype(name), restored.shape(name)) == (
            tensor.dtype,
            tensor.dtype,
            tensor.shape,
        )
        assert read.tobytes() == tensor.tobytes()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("name", ["relative", "with a space, %20, # and ?"])
def test_a_converted_folder_may_be_named_as_any_other(source, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    convert(str(source), name)
    assert open_checkpoint(name).read("model.ids").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_model_loads_the_same_from_both(tmp_path, params_of, dtype):
    source = open_checkpoint(str(GOLDEN / "qwen3"))
    convert(source.path, str(tmp_path / "out"), progress=False)
    restored = open_checkpoint(str(tmp_path / "out"))
    params = params_of(source)
    for name, array in load(params, restored, dtype).items():
        np.testing.assert_array_equal(array, load({name: params[name]}, source, dtype)[name])


def test_many_parts_hold_what_one_would(source, tmp_path, monkeypatch):
    convert(str(source), str(tmp_path / "one"))
    monkeypatch.setattr("jaxserve.weights.conversion.PART", 40)
    convert(str(source), str(tmp_path / "many"))
    assert len(list((tmp_path / "many" / "weights").iterdir())) == len(TENSORS)
    hashes = {json.loads((tmp_path / d / "jaxserve.json").read_text())["sha256"] for d in ("one", "many")}
    assert len(hashes) == 1
    restored = open_checkpoint(str(tmp_path / "many"))
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(restored.read(name), tensor)


def test_a_dtype_converts_the_floats_and_the_config(source, tmp_path):
    convert(str(source), str(tmp_path / "out"), dtype="bfloat16")
    restored = open_checkpoint(str(tmp_path / "out"))
    assert restored.config["torch_dtype"] == "bfloat16"
    for name, tensor in TENSORS.items():
        expected = tensor if tensor.dtype == np.int32 else tensor.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(restored.read(name), expected)


def test_a_conversion_can_be_converted_again(source, tmp_path):
    convert(str(source), str(tmp_path / "a"))
    convert(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b" / "chat_template.jinja").is_file()
    np.testing.assert_array_equal(
        open_checkpoint(str(tmp_path / "b")).read("model.half"), TENSORS["model.half"]
    )


def test_what_is_there_is_kept_unless_it_is_an_earlier_conversion(source, tmp_path):
    out = tmp_path / "out"
    convert(str(source), str(out))
    with pytest.raises(CheckpointError, match="overwrite=True"):
        convert(str(source), str(out))
    convert(str(source), str(out), dtype="float32", overwrite=True)
    assert open_checkpoint(str(out)).dtype("model.half") == np.float32
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        convert(str(source), str(source), overwrite=True)
    assert (source / "model.safetensors").is_file()


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_a_conversion_that_fails_leaves_nothing_behind(folder, tmp_path, dtype):
    path = folder({"a": np.ones(4, np.float32), "w": np.full(4, 1e30, np.float32)})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"overflow float16; .*tensor w|cannot convert to dtype 'int4'"):
        convert(str(path), str(tmp_path / "out"), dtype=dtype)
    assert sorted(tmp_path.iterdir()) == before


def _lose_manifest(out: Path) -> None:
    (out / "jaxserve.json").unlink()


def _edit_manifest(out: Path) -> None:
    manifest = (out / "jaxserve.json").read_text()
    (out / "jaxserve.json").write_text(manifest.replace('"float16"', '"float64"'))


def _other_version(out: Path) -> None:
    manifest = json.loads((out / "jaxserve.json").read_text())
    (out / "jaxserve.json").write_text(json.dumps(manifest | {"version": 99}))


def _cut_manifest(out: Path) -> None:
    text = (out / "jaxserve.json").read_text()
    (out / "jaxserve.json").write_text(text[: len(text) // 2])


def _lose_part(out: Path) -> None:
    shutil.rmtree(out / "weights" / "00000")


def _lose_data(out: Path) -> None:
    for file in out.glob("weights/00000/ocdbt.process_0/d/*"):
        file.unlink()


def _flip_data(out: Path) -> None:
    """One bit of every data file, in the middle of the values."""
    for file in out.glob("weights/00000/ocdbt.process_0/d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [_lose_manifest, _edit_manifest, _other_version, _cut_manifest, _lose_part, _lose_data, _flip_data],
)
def test_a_damaged_conversion_is_refused(source, tmp_path, damage):
    convert(str(source), str(tmp_path / "out"))
    damage(tmp_path / "out")
    with pytest.raises(CheckpointError):
        checkpoint = open_checkpoint(str(tmp_path / "out"))
        for name in checkpoint.names():
            checkpoint.read(name)


def test_a_gguf_brings_its_tokenizer_along(tmp_path):
    from jaxserve.demo import demo_model
    from jaxserve.errors import ConfigError
    from jaxserve.text import load_tokenizer
    from jaxserve.weights.text_files import write_text_files

    try:
        path = demo_model("smollm2")
    except ConfigError as why:
        pytest.skip(str(why))
    write_text_files(open_checkpoint(path), tmp_path)
    before, after = load_tokenizer(path), load_tokenizer(str(tmp_path))
    text = "Hello, wörld!  <|im_start|>user\n1234"
    assert after.encode(text) == before.encode(text)
    assert (after.eos_token_ids, after.bos_token_id) == (before.eos_token_ids, before.bos_token_id)
    assert after.chat_template is not None and before.chat_template is not None
    assert after.chat_template.templates == before.chat_template.templates
