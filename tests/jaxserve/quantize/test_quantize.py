"""Quantised checkpoints: what is written reads back, goes on where it was stopped, and computes what it should."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint_config import FORMATS, METHODS, EvalConfig, QuantizeConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.evaluate import compare, evaluate, loaded
from jaxserve.models import ModelConfig, model_for
from jaxserve.quantize import quantize, source
from jaxserve.quantize.rotation import random_rotation, rotated, rotated_outer, without_norms
from jaxserve.quantize.run import Quantizer
from jaxserve.weights import open_checkpoint
from jaxserve.whole import forward
from server import cli
from tests.tiny import tiny_checkpoint

BITS = {"fp8": 8, "int8": 8, "int4": 4.25, "mxfp4": 4.25, "nvfp4": 4.5}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": True}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(compilation_cache_dir):
    """Every method runs the same few programs on the same tiny model."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", compilation_cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", tokenizer=True, **SIZES))


def plan(model: str, format: str = "int4", method: str = "rtn", **settings) -> QuantizeConfig:
    return QuantizeConfig(model, format, method, **{"group_size": 64, "samples": 8, "length": 64} | settings)


@partial(jax.jit, static_argnums=0)
def logits(c: ModelConfig, params):
    """Of tokens 0 to 63."""
    hidden, _ = forward(c, params, jnp.arange(64, dtype=jnp.int32), sequences=1)
    return model_for(c).logits(c, params, hidden)


@pytest.mark.parametrize(
    "format", [pytest.param(f, marks=pytest.mark.supports("quantising to", f)) for f in FORMATS]
)
def test_what_is_written_is_a_checkpoint_of_that_many_bits(model, tmp_path, format):
    report = quantize(plan(model, format), str(tmp_path / "q"), progress=False)
    plain, one, other = (
        open_checkpoint(p) for p in (model, str(tmp_path / "q"), str(tmp_path / "q" / "orbax"))
    )
    assert set(one.names()) == set(other.names()) == set(plain.names())
    for name in plain.names():
        np.testing.assert_array_equal(one.read(name), other.read(name))
        w, q = plain.read(name), one.read(name)
        if name.endswith("_proj.weight"):
            assert 0 < np.mean((w - q) ** 2) < 0.03 * np.mean(w**2)
            assert one.nbytes(name) <= w.size * BITS[format] / 8 + 4 * len(w) + 32
        else:
            np.testing.assert_array_equal(w, q)
    assert report["evaluation"]["kl"] > 0 and report["evaluation"]["top1"] > 0.3
    saved = json.loads((tmp_path / "q" / "report.json").read_text())
    assert saved["bytes_after"] < 0.6 * saved["bytes_before"]
    assert len(saved["relative_squared_output_error"]) == 14
    assert (tmp_path / "q" / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", METHODS[1:])
def test_every_method_gives_a_model_near_the_original(model, tmp_path, method):
    report = quantize(plan(model, "int8", method, learning_steps=2), str(tmp_path / "q"), progress=False)
    found = report["evaluation"]
    assert found["kl"] < 2e-3
    assert abs(found["perplexity"] / found["reference_perplexity"] - 1) < 0.02
    assert open_checkpoint(str(tmp_path / "q")).config["tie_word_embeddings"] is (
        method not in ("rotate", "spinquant", "mr-gptq")
    )


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_rotated_weights_are_the_same_model(tmp_path, arch):
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path / "m", arch, **SIZES)))
    c = ModelConfig.from_hf(checkpoint.config)
    tree = model_for(c).params(c)
    plain = source.read({k: v for k, v in tree.items() if k != "layers"}, checkpoint)
    layers = [source.read(layer, checkpoint) for layer in tree["layers"]]
    turn, heads = random_rotation(c.hidden_size), random_rotation(c.head_dim, 1)
    moved = [rotated(c, without_norms(c, layer), turn, heads) for layer in layers]

    params = rotated_outer(c, plain, turn) | {"layers": moved}
    got, want = logits(replace(c, tied=False), params), logits(c, plain | {"layers": layers})
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_it_goes_on_where_it_was_stopped(model, tmp_path, monkeypatch):
    wanted, whole, parts = plan(model, "mxfp4", "gptq"), tmp_path / "whole", tmp_path / "parts"
    Quantizer(wanted, whole).run(progress=False)
    write = Quantizer._write_layer

    def stops(self, number, *rest):
        if number:
            raise KeyboardInterrupt
        write(self, number, *rest)

    monkeypatch.setattr(Quantizer, "_write_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        Quantizer(wanted, parts).run(progress=False)
    written = []
    monkeypatch.setattr(
        Quantizer, "_write_layer", lambda self, n, *rest: (written.append(n), write(self, n, *rest))
    )
    again = Quantizer(wanted, parts)
    again.run(progress=False)
    assert written == [1] and len(again.errors) == 14
    one, other = open_checkpoint(str(whole)), open_checkpoint(str(parts))
    for name in one.names():
        np.testing.assert_array_equal(one.read(name), other.read(name))


def test_another_plan_or_another_folder_is_not_overwritten(model, tmp_path):
    quantize(plan(model), str(tmp_path / "q"), progress=False)
    with pytest.raises(CheckpointError, match=r"another quantisation.*expected seed=1; found seed=0"):
        quantize(plan(model, seed=1), str(tmp_path / "q"), progress=False)
    with pytest.raises(CheckpointError, match="is no quantisation"):
        quantize(plan(model), model, progress=False)


def test_settings_that_cannot_be_are_refused(model):
    for settings, words in (
        ({"format": "int3"}, "format='int3'.*int4"),
        ({"method": "magic"}, "method='magic'.*awq"),
        ({"group_size": 48}, "group_size=48.*32, 64, 128"),
        ({"samples": 2}, "samples=2 must be at least 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(model, **settings)


@pytest.mark.supports("tools", "jaxserve eval: perplexity, KL, agreement")
def test_evaluation_is_the_mean_over_the_tokens_of_a_file(model, tmp_path, capsys):
    lines = [{"text": "The sky is blue. " * 12}, {"messages": [{"role": "user", "content": "Why? " * 30}]}]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = evaluate(
        EvalConfig(model, str(tmp_path / "text.jsonl"), reference=model, context=64), progress=False
    )
    assert found.kl == pytest.approx(0, abs=1e-6) and found.top1 == 1
    m, tokens = loaded(model), np.arange(64, dtype=np.int32)
    values = np.asarray(logits(m.config, m.params), np.float64)
    logp = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    want = np.exp(-logp[np.arange(63), tokens[1:]].mean())
    assert compare(m, pieces=tokens[None]).perplexity == pytest.approx(want, rel=1e-5)
    assert cli.main(["eval", model, "--text", str(tmp_path / "text.jsonl"), "--context", "64"]) == 0
    assert f"perplexity: {found.perplexity:.6g}" in capsys.readouterr().out


@pytest.mark.supports("cache", "what 8 bits cost, by jaxserve eval")
def test_a_cache_in_8_bits_is_evaluated_beside_a_plain_one(model):
    kls = [
        evaluate(EvalConfig(model, reference=model, context=64, kv_cache_dtype=cache), progress=False).kl
        for cache in ("auto", "int8", "fp8", "fp8_e5m2")
    ]
    assert kls[0] == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]
    assert 1e-6 < kls[1] < kls[2] < kls[3] < 0.1  # type: ignore[operator]


@pytest.mark.supports("tools", "jaxserve quantize")
def test_from_the_command_line(model, tmp_path, capsys):
    argv = [
        "quantize",
        model,
        str(tmp_path / "q"),
        "--format",
        "nvfp4",
        "--method",
        "rtn",
        "--samples",
        "8",
        "--length",
        "64",
    ]
    assert cli.main(argv) == 0
    assert "perplexity:" in capsys.readouterr().out
    written = json.loads((tmp_path / "q" / "config.json").read_text())
    assert written["quantization_config"]["format"] == "nvfp4-pack-quantized"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", "{}", r"line 1: expected \{\"text\""),
        ("a.txt", "short", "fewer than one window"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(model, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        evaluate(EvalConfig(model, str(tmp_path / name), context=64), progress=False)
