"""How many pages fit, and what is said when too few do."""

import logging

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxserve.build import build
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.memory import Memory, fitting_length, params_bytes, plan_pages
from jaxserve.metrics import Metrics
from jaxserve.models import ModelConfig, model_for
from jaxserve.runner import DeviceRunner
from sharding.params import stack_layers
from tests.tiny import tiny_checkpoint, tiny_config

MIB = 2**20
ROOMY = Memory(1000 * MIB, 1000 * MIB)


def planned(memory: Memory = ROOMY, other: int = 0, length: int = 10**6, page: int = MIB, **settings) -> int:
    return plan_pages(EngineConfig("m", **{"block_size": 16} | settings), page, other, length, memory)


def test_a_fraction_of_memory_less_what_else_is_there():
    pages = planned(gpu_memory_utilization=0.5, other=100 * MIB)
    assert 350 <= pages <= 400
    assert planned(gpu_memory_utilization=0.25, other=100 * MIB) < pages


def test_no_more_than_is_free_whatever_the_fraction():
    assert planned(Memory(1000 * MIB, 50 * MIB), gpu_memory_utilization=0.9) <= 50


def test_no_more_than_all_sequences_could_fill():
    assert planned(length=100, max_num_seqs=3, gpu_memory_utilization=0.9) == 3 * 7 + 1


def test_a_size_in_bytes_or_pages_wins():
    assert 6 <= planned(kv_cache_memory_bytes=7 * MIB) <= 7
    assert planned(num_gpu_blocks_override=5) == 6, "page 0 is used by nobody"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"gpu_memory_utilization": 0.1, "other": 100 * MIB}, "gpu_memory_utilization=0.1"),
        ({"kv_cache_memory_bytes": MIB}, "kv_cache_memory_bytes=1048576"),
        ({"gpu_memory_utilization": 0.1, "other": 999 * MIB}, "leaves 0.0 MiB"),
    ],
)
def test_too_little_says_how_much_a_page_takes(settings, words):
    with pytest.raises(ConfigError, match=r"a page of 16 tokens takes 1\.00 MiB") as refusal:
        planned(**settings)
    assert words in str(refusal.value)


def test_a_length_that_was_asked_for_is_served_or_refused(caplog):
    assert fitting_length(EngineConfig("m", block_size=16, max_model_len=64), 64, 5) == 64
    with pytest.raises(ConfigError, match=r"max_model_len=65 .* holds 64 tokens"):
        fitting_length(EngineConfig("m", block_size=16, max_model_len=65), 65, 5)
    assert not caplog.records
    assert fitting_length(EngineConfig("m", block_size=16), 65, 5) == 64
    assert "64 tokens" in caplog.text


def test_weights_count_once_however_they_are_kept():
    config = ModelConfig.from_hf(tiny_config())
    tree = model_for(config).params(config)
    stacked = tree | {"layers": stack_layers(tree["layers"])}
    assert params_bytes(tree, np.float32) == params_bytes(stacked, np.float32) > 0
    assert params_bytes(tree, jax.numpy.bfloat16) * 2 == params_bytes(tree, np.float32)


@pytest.fixture
def built(tmp_path, monkeypatch, compilation_cache_dir):
    """Build with these settings, all but the compiling."""
    monkeypatch.setattr(DeviceRunner, "compile", lambda *_, **__: None)
    path = str(tiny_checkpoint(tmp_path, tokenizer=True))

    def make(**settings):
        config = EngineConfig(path, compilation_cache_dir=compilation_cache_dir, **settings)
        return build(config, Metrics(CollectorRegistry(), "tiny"))

    return make


def test_a_small_cache_lowers_the_models_length_with_a_warning(built, caplog):
    with caplog.at_level(logging.WARNING):
        made = built(num_gpu_blocks_override=7)
    assert made.config.max_model_len == made.engine.limits.max_model_len == 7 * 16
    assert "the cache holds 112 tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"max_model_len=200 does not fit .* 112"):
        built(num_gpu_blocks_override=7, max_model_len=200)
    assert built(num_gpu_blocks_override=7, max_model_len=100).config.max_model_len == 100


def test_without_settings_the_models_own_length_is_served(built):
    made = built(max_num_seqs=2)
    assert made.config.max_model_len == 512 and made.config.dtype == "float32"
    assert made.engine.scheduler.cache.capacity_tokens >= 512
