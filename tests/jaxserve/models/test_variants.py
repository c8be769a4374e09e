"""Every config field that changes the maths does so as in transformers; see `variants`."""

import numpy as np
import pytest

from jaxserve.models import ModelConfig, model_for
from jaxserve.weights import load, open_checkpoint
from tests.jaxserve.models.running import GOLDEN, Run
from tests.jaxserve.models.variants import PROMPT, VARIANTS
from tests.tiny import tiny_checkpoint

EXPECTED = np.load(GOLDEN / "variants" / "logits.npz")
SUPPORTS = {"smollm3, one layer without rope": "smollm3", "ministral, mixed layers": "ministral"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.supports("models", SUPPORTS[name]) if name in SUPPORTS else ())
        for name in VARIANTS
    ],
)
def test_variant(name, tmp_path):
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path, **VARIANTS[name])))
    config = ModelConfig.from_hf(checkpoint.config, max_model_len=len(PROMPT))
    params = load(model_for(config).params(config), checkpoint, np.float32, progress=False)
    np.testing.assert_allclose(Run(config, params).step({0: PROMPT}), EXPECTED[name], rtol=1e-4, atol=5e-4)
