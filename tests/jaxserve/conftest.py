"""One tiny model, compiled once for all tests of the engine."""

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
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    config = EngineConfig(str(path), compilation_cache_dir=compilation_cache_dir, **SIZES)
    built = build(config, Metrics(CollectorRegistry(), "tiny"))
    runner = built.engine.runner
    assert isinstance(runner, DeviceRunner) and runner.warm.wait(290)
    return built
