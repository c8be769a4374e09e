"""Experts are calibrated on the tokens that the router sends them."""

import shutil

import numpy as np
import pytest

from jaxserve.checkpoint_config import QuantizeConfig
from jaxserve.errors import ConfigError
from jaxserve.models import model_for
from jaxserve.quantize import quantize, source
from jaxserve.quantize.experts import expert_inputs, steadied
from jaxserve.quantize.gptq import gptq
from jaxserve.quantize.layerwise import Layerwise
from jaxserve.quantize.observe import Inputs
from jaxserve.quantize.rounding import quantised
from jaxserve.quantize.run import Quantizer
from jaxserve.quantize.smoothing import output_error
from jaxserve.weights import open_checkpoint
from pallas_kernels.formats import dequantise, int4
from tests.jaxserve.models.running import GOLDEN, golden_config
from tests.tiny import tiny_tokenizer

ARCH, NUMBER = "qwen3_moe", 1
FORMAT = int4(32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(ARCH)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / ARCH / file, folder / file)
    tiny_tokenizer(folder, vocab=512)
    return str(folder)


def test_an_expert_is_given_the_rows_that_chose_it():
    rng = np.random.default_rng(0)
    rows, ids = (
        rng.standard_normal((50, 8), np.float32),
        rng.integers(0, 3, (50, 2)),
    )  # of expert 3 nobody thinks
    weights = {
        "gate": rng.standard_normal((4, 6, 8), np.float32),
        "up": rng.standard_normal((4, 6, 8), np.float32),
        "gate_bias": rng.standard_normal((4, 6), np.float32),
    }
    found = expert_inputs(weights, rows, ids, clamp=None)  # type: ignore[arg-type]
    for expert in range(4):
        mine = rows[(ids == expert).any(axis=1)]
        gate = mine @ weights["gate"][expert].T + weights["gate_bias"][expert]
        hidden = gate / (1 + np.exp(-gate)) * (mine @ weights["up"][expert].T)
        for name, want in (("gate", mine), ("up", mine), ("down", hidden)):
            x = found[name][expert]
            np.testing.assert_allclose(x.gram, want.T @ want, rtol=1e-4, atol=1e-3)
            assert x.count == len(mine)
    assert found["up"][3].count == 0 and steadied(found["up"][3]) is None


def test_correlations_of_few_rows_are_trusted_less():
    gram = np.array([[2.0, 1.9], [1.9, 2.0]], np.float32)
    few, many = (Inputs(gram * n, gram[0], gram, n) for n in (4, 4000))
    for x, most in ((few, 0.2), (many, 0.95)):
        held = steadied(x)
        assert held is not None and held.gram[0, 1] / held.gram[0, 0] < most
    assert steadied(many).gram[0, 1] / steadied(many).gram[0, 0] > 0.9  # type: ignore[union-attr]


@pytest.mark.supports("quantising", "GPTQ of experts")
def test_gptq_of_experts_has_less_output_error_also_on_other_text(model):
    checkpoint, c = open_checkpoint(model), golden_config(ARCH)
    params = model_for(c).params(c)
    embed = source.read(params["embed"], checkpoint)
    layers = [source.read(layer, checkpoint) for layer in params["layers"][: NUMBER + 1]]
    tokens = np.random.default_rng(0).integers(0, c.vocab_size, (16, 128))
    seen = []
    for part in (tokens[:12], tokens[12:]):
        stream = Layerwise(c, embed, part)
        for number, layer in enumerate(layers[:-1]):
            stream.advance(number, layer)
        seen.append(stream.see(NUMBER, layers[-1], ["experts.gate", "experts.down"]))
    assert len(seen[0]) == 2 * c.mixture.routing.experts  # type: ignore[union-attr]
    for calibrated, judged in ((0, 0), (0, 1)):
        moved, plain = 0.0, 0.0
        for path, x in seen[calibrated].items():
            _, name, expert = path.split(".")
            w, gram, held = layers[-1]["experts"][name][int(expert)], seen[judged][path].gram, steadied(x)
            assert held is not None
            moved += output_error(w, dequantise(gptq(w, held.gram, FORMAT)), gram)
            plain += output_error(w, dequantise(quantised(w, FORMAT, np.diag(held.gram))), gram)
        assert moved < plain


def test_every_expert_of_a_mixture_is_written_and_reported(model, tmp_path):
    plan = QuantizeConfig(model, "int4", "gptq", group_size=32, samples=8, length=64)
    report = quantize(plan, str(tmp_path / "q"), progress=False)
    experts = [name for name in report["relative_squared_output_error"] if ".experts." in name]
    assert len(experts) == 3 * 8 * golden_config(ARCH).num_layers
    assert 0 < report["evaluation"]["kl"] < 0.5


def test_methods_that_scale_columns_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"awq puts scales into the norms .* use gptq or rtn"):
        Quantizer(QuantizeConfig(model, "int4", "awq", group_size=32), tmp_path / "q")
