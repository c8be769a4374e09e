"""An engine starts from steps that were compiled elsewhere, and answers as one that compiled its own."""

import logging
from pathlib import Path

import jax
import pytest
from prometheus_client import CollectorRegistry

from jaxserve.build import Built, build
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.request import Request
from jaxserve.runner import DeviceRunner, _shape
from jaxserve.sampling.params import SamplingParams
from jaxserve.saved_steps import save_step
from tests.engines import Traffic
from tests.tiny import tiny_checkpoint

SMALL = {
    "max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 8,
    "num_gpu_blocks_override": 12, "compilation_cache_dir": "",
}  # fmt: skip


def engine(model: str, **settings) -> Built:
    built = build(EngineConfig(model, **SMALL | settings), Metrics(CollectorRegistry(), "tiny"))
    assert runner_of(built).warm.wait(120)
    return built


def runner_of(built: Built) -> DeviceRunner:
    assert isinstance(built.engine.runner, DeviceRunner)
    return built.engine.runner


def save(runner: DeviceRunner, folder: Path) -> None:
    params, pool, state = jax.tree.map(_shape, (runner.params, runner.pool, runner.state))
    for bucket in runner._compiled:
        lowered = runner.step.lower(params, pool, state, bucket)
        save_step(folder, lowered, lowered.compile())


def answer(built: Built) -> list[int]:
    traffic = Traffic(built.engine)
    traffic.add(Request("a", [*range(3, 30)], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    traffic.finish()
    return traffic.done["a"].outputs[0].token_ids


@pytest.mark.supports("tools", "starting from steps compiled elsewhere (--save-compiled, --load-compiled)")
@pytest.mark.parametrize("devices", [1, 2])
def test_an_engine_starts_from_saved_steps(tmp_path, caplog, devices):
    model, saved = str(tiny_checkpoint(tmp_path / "model", tokenizer=True)), tmp_path / "compiled"
    own = engine(model, tensor_parallel_size=devices)
    save(runner_of(own), saved)
    with caplog.at_level(logging.WARNING):
        loading = engine(model, tensor_parallel_size=devices, load_compiled=str(saved))
    assert "it is compiled" not in caplog.text
    assert answer(loading) == answer(own)


def test_steps_that_are_not_there_or_broken_are_compiled(tmp_path, caplog):
    model, saved = str(tiny_checkpoint(tmp_path / "model", tokenizer=True)), tmp_path / "compiled"
    saved.mkdir()
    with caplog.at_level(logging.WARNING):
        own = engine(model, load_compiled=str(saved))
    runner = runner_of(own)
    assert caplog.text.count("of these settings and versions: it is compiled") == len(runner._compiled)
    save(runner, saved)
    for file in saved.iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        again = engine(model, load_compiled=str(saved))
    assert caplog.text.count("cannot be loaded") == len(runner._compiled)
    assert answer(again) == answer(own)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder; `jaxserve plan --save-compiled` makes it"):
        engine(str(tmp_path), load_compiled=str(tmp_path / "nowhere"))
