"""One tiny model, compiled once for all tests of the engine."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from jaxserve.build import Built, build
from jaxserve.config import EngineConfig
from jaxserve.metrics import Metrics
from jaxserve.runner import DeviceRunner
from tests.engines import SIZES
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, compilation_cache_dir) -> Built:
    """A warm engine; `tests.engines.around` makes others on its runner."""
    return _built("llama", SIZES, tmp_path_factory, compilation_cache_dir)


@pytest.fixture(scope="session")
def tiny_of(tiny, tmp_path_factory, compilation_cache_dir) -> Callable[[str], Built]:
    """The same of any architecture."""

    @functools.cache
    def make(arch: str) -> Built:
        return tiny if arch == "llama" else _built(arch, SIZES, tmp_path_factory, compilation_cache_dir)

    return make


def _built(arch: str, sizes: dict[str, Any], tmp_path_factory, compilation_cache_dir: str) -> Built:
    path = tiny_checkpoint(tmp_path_factory.mktemp(arch), arch, tokenizer=True)
    config = EngineConfig(str(path), compilation_cache_dir=compilation_cache_dir, **sizes)
    built = build(config, Metrics(CollectorRegistry(), "tiny"))
    runner = built.engine.runner
    assert isinstance(runner, DeviceRunner) and runner.warm.wait(290)
    return built
