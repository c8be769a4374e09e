"""Experts' matrices in whole lines, as accelerators' kernels need them: zeros at their ends change nothing."""

import jax
import numpy as np
import pytest

from jaxserve.models import ModelConfig, feed_forward, model_for
from jaxserve.weights import open_checkpoint
from jaxserve.weights.packing import is_packable, pack
from pallas_kernels.formats import dequantise
from sharding.params import Param
from tests.jaxserve.models.running import GOLDEN, Run, golden_config, golden_params, golden_prompts


@pytest.fixture
def in_lines(monkeypatch):
    monkeypatch.setattr(feed_forward, "platform", lambda: "tpu")


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_moe"])
def test_padded_experts_compute_the_same(arch, in_lines):
    config = golden_config(arch)
    params = golden_params(arch, config)
    shapes = {name: leaf.shape for name, leaf in params["layers"][0]["experts"].items()}
    assert all(n % feed_forward.LINES == 0 for n in shapes["gate"][1:] + shapes["down"][1:])
    prompt = golden_prompts(arch)[1]
    logits = Run(config, params).step({0: prompt["ids"]})
    expected = np.load(GOLDEN / arch / "logits.npz")[f"logits_{prompt['length']}"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=5e-4)


def test_packed_experts_are_padded_with_zeros(in_lines):
    checkpoint = open_checkpoint(str(GOLDEN / "gpt_oss_mxfp4"))
    config = ModelConfig.from_hf(checkpoint.config)
    params = model_for(config).params(config)["layers"][0]["experts"]
    for name in ("gate", "up", "down"):
        param: Param = params[name]
        assert is_packable(param, checkpoint)
        packed = pack(param, checkpoint)
        assert packed.shape == param.shape
        values = np.asarray(dequantise(jax.tree.map(np.asarray, packed)))
        source = param.source if isinstance(param.source, str) else param.source[0]
        np.testing.assert_array_equal(values, param.of(checkpoint.read(source)))
