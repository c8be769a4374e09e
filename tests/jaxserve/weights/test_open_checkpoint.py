"""What a user may call a model: a folder, a file, or a hub name; anything else is refused with what to do."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights import open_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"


def test_a_folder_and_its_file_are_the_same_checkpoint():
    by_folder, by_file = (
        open_checkpoint(str(GOLDEN / place)) for place in ("llama", "llama/model.safetensors")
    )
    assert by_folder.config == by_file.config
    assert list(by_folder.names()) == list(by_file.names())


@pytest.mark.parametrize(
    "path", ["./nothing", "/no/where", "~/nothing/here", "a/b/c", "model.gguf", "x.safetensors", ""]
)
def test_a_path_that_is_not_there_is_refused_as_a_path(path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(path)


def test_a_revision_of_something_local_is_refused():
    with pytest.raises(CheckpointError, match=r"revision='main' is for hub names"):
        open_checkpoint(str(GOLDEN / "llama"), revision="main")


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"convert them to safetensors.*found pytorch_model\.bin"):
        open_checkpoint(str(tmp_path))


def test_several_models_in_a_folder_must_be_told_apart(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF models.*found a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a checkpoint file"):
        open_checkpoint(str(tmp_path / "model.onnx"))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_weights_need_their_config(folder, content):
    path = folder({"w": np.ones(2, np.float32)})
    (path / "config.json").unlink()
    if content is not None:
        (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(path))


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The hub library without a network and with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_name_without_a_network_says_what_to_do(offline):
    with pytest.raises(
        CheckpointError, match=r"'owner/model' is no local folder.*revision v1.*give the folder"
    ):
        open_checkpoint("owner/model", revision="v1")


def test_a_hub_name_is_found_in_the_local_cache(offline):
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = offline / "models--owner--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    shutil.copytree(GOLDEN / "qwen3", home / "snapshots" / commit)
    assert open_checkpoint("owner/model").config["model_type"] == "qwen3"
    assert open_checkpoint("owner/model", revision=commit).config["model_type"] == "qwen3"
