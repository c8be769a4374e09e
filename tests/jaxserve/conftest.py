"""One tiny model, compiled once for all tests of the engine."""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from jaxserve.build import Built, build
from jaxserve.config import EngineConfig
from jaxserve.metrics import Metrics
from jaxserve.runner import DeviceRunner
from tests.engines import SIZES
from tests.jaxserve.models.running import GOLDEN
from tests.tiny import tiny_checkpoint, tiny_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, compilation_cache_dir) -> Built:
    """A warm engine; `tests.engines.around` makes others on its runner."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    return _warm(EngineConfig(str(path), compilation_cache_dir=compilation_cache_dir, **SIZES))


@pytest.fixture(scope="module")
def golden(tmp_path_factory, compilation_cache_dir) -> Callable[..., Built]:
    """The same around a model of tests/golden, for fewer sequences at a time: fewer steps to compile."""

    @functools.cache
    def make(arch: str, **settings: Any) -> Built:
        folder = tmp_path_factory.mktemp(arch)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(GOLDEN / arch / file, folder)
        tiny_tokenizer(folder, vocab=512)
        few = SIZES | {"max_num_seqs": 4} | settings
        return _warm(EngineConfig(str(folder), compilation_cache_dir=compilation_cache_dir, **few))

    return make


def _warm(config: EngineConfig) -> Built:
    built = build(config, Metrics(CollectorRegistry(), "tiny"))
    runner = built.engine.runner
    assert isinstance(runner, DeviceRunner) and runner.warm.wait(290)
    return built
