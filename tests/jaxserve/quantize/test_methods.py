"""Each way of quantising beats plain rounding by what it is meant to lessen, on a layer of a real model."""

from functools import cache
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.demo import demo_model
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig, model_for
from jaxserve.quantize import source
from jaxserve.quantize.gptq import gptq
from jaxserve.quantize.layerwise import Layerwise
from jaxserve.quantize.methods import METHODS, check_scalable, scaled
from jaxserve.quantize.rotation import (
    block_rotation,
    check_rotatable,
    hadamard,
    learned_rotation,
    random_rotation,
    without_norms,
)
from jaxserve.quantize.rounding import quantised
from jaxserve.quantize.smoothing import output_error
from jaxserve.text import load_tokenizer
from jaxserve.text_windows import split, windows
from jaxserve.weights import open_checkpoint
from pallas_kernels.formats import INT8_CHANNEL, MXFP4, NVFP4, dequantise, int4, quantise
from tests.tiny import tiny_config

FORMATS = {"int4": int4(64), "mxfp4": MXFP4, "nvfp4": NVFP4}
NUMBER = 2  # of the layer
RNG = np.random.default_rng(0)


@cache
def real():
    """SmolLM2's layer with what it is given on some text, and on other text."""
    try:
        path = demo_model()
    except ConfigError as why:
        pytest.skip(str(why))
    checkpoint = open_checkpoint(path)
    c = ModelConfig.from_hf(checkpoint.config)
    params = model_for(c).params(c)
    embed = source.read(params["embed"], checkpoint)
    layers = [source.read(layer, checkpoint) for layer in params["layers"][: NUMBER + 1]]
    paths = ["q", "k", "v", "o", "gate", "up", "down"]
    seen = []
    for tokens in split(windows(None, load_tokenizer(path), 128, 16)):
        stream = Layerwise(c, embed, tokens)
        for number, layer in enumerate(layers[:-1]):
            stream.advance(number, layer)
        seen.append(stream.see(NUMBER, layers[-1], paths))
    return SimpleNamespace(
        config=c, layers=layers, layer=layers[-1], seen=seen[0], others=seen[1], paths=paths
    )


def error(w, q, gram) -> float:
    return output_error(w, dequantise(q), gram)


def test_what_a_layer_is_given_is_what_its_weights_are_multiplied_by():
    r = real()
    assert sorted(r.seen) == sorted(r.paths)
    for path in r.paths:
        assert r.seen[path].gram.shape == (r.layer[path].shape[1],) * 2
    np.testing.assert_array_equal(r.seen["q"].gram, r.seen["v"].gram)
    np.testing.assert_array_equal(r.seen["gate"].largest, r.seen["up"].largest)
    x = r.seen["q"].sample
    normalised = x / (r.layer["attn_in"] + r.config.norm_offset)
    np.testing.assert_allclose(np.mean(normalised**2, axis=1), 1, rtol=0.02)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_chosen_scales_have_less_error_than_those_of_the_largest_value(format):
    r, gram = real(), None
    for path in ("q", "down"):
        w = r.layer[path][:64]
        gram = np.eye(w.shape[1], dtype=np.float32)
        assert error(w, quantised(w, format), gram) < 0.97 * error(w, quantise(w, format), gram)


@pytest.mark.supports("quantising", "GPTQ")
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_gptq_has_less_output_error_than_rounding_also_on_other_text(format):
    r = real()
    for path in ("k", "o"):
        w, gram = r.layer[path], r.seen[path].gram
        q, plain = gptq(w, gram, format), quantised(w, format, np.diag(gram))
        assert error(w, q, gram) < 0.8 * error(w, plain, gram)
        other = r.others[path].gram
        assert error(w, q, other) < error(w, plain, other)


def test_gptq_of_uncorrelated_inputs_is_rounding():
    w = RNG.standard_normal((8, 256)).astype(np.float32)
    got, want = gptq(w, np.eye(256, dtype=np.float32), MXFP4), quantised(w, MXFP4, np.ones(256, np.float32))
    np.testing.assert_array_equal(dequantise(got), dequantise(want))


def test_gptq_of_inputs_that_are_always_zero_is_finite():
    w, x = (
        RNG.standard_normal((4, 100)).astype(np.float32),
        RNG.standard_normal((300, 100)).astype(np.float32),
    )
    x[:, 7] = 0
    assert np.isfinite(dequantise(gptq(w, x.T @ x, int4(32)))).all()


def same_outputs(r, layer) -> None:
    """The layer computes what it did."""
    stream = Layerwise(
        r.config, RNG.standard_normal((32, r.config.hidden_size)).astype(np.float32), np.arange(32)[None]
    )
    before = stream.stream
    stream.advance(NUMBER, r.layer)
    want, stream.stream = stream.stream[0], before
    stream.advance(NUMBER, layer)
    np.testing.assert_allclose(stream.stream[0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.supports("quantising", "AWQ")
def test_awq_has_less_output_error_than_rounding_and_changes_no_output():
    r, format = real(), FORMATS["int4"]
    layer, seen = scaled(r.config, METHODS["awq"].scales, r.layer, r.seen, format)
    same_outputs(r, layer)
    for paths in (("q", "k", "v"), ("gate",), ("down",)):  # the rows of "up" have another size now
        got = sum(error(layer[p], quantised(layer[p], format), seen[p].gram) for p in paths)
        want = sum(error(r.layer[p], quantised(r.layer[p], format), r.seen[p].gram) for p in paths)
        assert got < want


@pytest.mark.supports("quantising", "SmoothQuant")
def test_smoothquant_makes_activations_of_8_bits_more_exact():
    r = real()
    layer, seen = scaled(r.config, METHODS["smoothquant"].scales, r.layer, r.seen, INT8_CHANNEL)
    same_outputs(r, layer)

    def both_rounded(w, x) -> float:
        exact = x @ w.T
        rounded = dequantise(quantise(x, INT8_CHANNEL)) @ dequantise(quantised(w, INT8_CHANNEL)).T
        return float(np.mean((rounded - exact) ** 2) / np.mean(exact**2))

    got = [both_rounded(layer[p], seen[p].sample) for p in ("q", "up", "down")]
    want = [both_rounded(r.layer[p], r.seen[p].sample) for p in ("q", "up", "down")]
    assert np.sum(got) < np.sum(want)


@pytest.mark.parametrize("n", [1, 2, 12, 16, 64, 96, 576, 20, 768])
def test_hadamard_matrices_are_orthogonal_and_flat(n):
    h = hadamard(n)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(np.abs(h), n**-0.5)


@pytest.mark.parametrize("n", [7, 36, 48])
def test_rotations_of_any_size_are_orthogonal(n):
    for r in (random_rotation(n), block_rotation(n, 16)):
        np.testing.assert_allclose(r @ r.T, np.eye(n), atol=1e-12)


@pytest.mark.supports("quantising", "Hadamard rotations (QuaRot)")
def test_rotated_weights_round_better():
    r = real()
    layer, turn = without_norms(r.config, r.layer), random_rotation(r.config.hidden_size)
    for path in ("q", "k", "gate"):
        w, gram = layer[path], np.eye(r.config.hidden_size, dtype=np.float32)
        turned = (w @ turn).astype(np.float32)
        format = FORMATS["int4"]
        assert error(turned, quantised(turned, format), gram) < error(w, quantised(w, format), gram)


@pytest.mark.supports("quantising", "learned rotations (SpinQuant)")
def test_learning_a_rotation_lessens_the_rounding_error():
    r, format = real(), FORMATS["nvfp4"]
    layer = without_norms(r.config, r.layer)
    part = {
        path: w[:96] if path not in ("o", "down") else w[:, :96] for path, w in layer.items() if w.ndim == 2
    }
    start = random_rotation(r.config.hidden_size)
    turn = learned_rotation([part], start, format, 6)
    np.testing.assert_allclose(turn @ turn.T, np.eye(len(turn)), atol=1e-5)

    def rounding_error(turn) -> float:
        turned = [(part[p] @ turn).astype(np.float32) for p in ("q", "k", "v", "gate", "up")]
        turned += [(turn.T @ part[p]).astype(np.float32) for p in ("o", "down")]
        return sum(error(w, quantised(w, format), np.eye(w.shape[1], dtype=np.float32)) for w in turned)

    assert rounding_error(turn) < 0.995 * rounding_error(start)


@pytest.mark.supports("quantising", "micro-rotated GPTQ (MR-GPTQ)")
@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=["mxfp4", "nvfp4"])
def test_micro_rotated_gptq_has_less_output_error_than_rounding(format):
    r = real()
    layer = without_norms(r.config, r.layer)
    turn = block_rotation(r.config.hidden_size, format.block[1])
    for path in ("q", "k"):
        scale = r.layer["attn_in"] + np.float32(r.config.norm_offset)
        gram = r.seen[path].gram / np.outer(scale, scale)
        w, turned = layer[path], (layer[path] @ turn).astype(np.float32)
        moved = (turn.T @ gram @ turn).astype(np.float32)
        assert error(turned, gptq(turned, moved, format), moved) < 0.8 * error(w, quantised(w, format), gram)


@pytest.mark.parametrize("arch", ["olmo2", "qwen3_moe"])
def test_models_without_the_norms_that_are_needed_are_refused(arch):
    fields = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    c = ModelConfig.from_hf(tiny_config(arch, **(fields if arch == "qwen3_moe" else {})))
    with pytest.raises(ConfigError, match="use gptq or rtn"):
        check_rotatable(c, "rotate")
    with pytest.raises(ConfigError, match="use gptq or rtn"):
        check_scalable(c, "awq")


def test_the_reference_of_an_observed_layer_is_itself():
    r = real()
    layer = {name: jnp.asarray(value) for name, value in r.layer.items()}
    same_outputs(r, layer)
