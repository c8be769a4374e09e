"""What a config.json says is honoured or refused by name, never ignored."""

import json
import logging
import math
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.layers.moe import Routing
from jaxserve.models import ModelConfig, model_for
from jaxserve.models.sizes import Latent
from sharding.params import Cut, Param
from tests.jaxserve.models.running import GOLDEN
from tests.tiny import tiny_config


def config(arch: str = "llama", max_model_len: int | None = None, **fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(arch, **fields), max_model_len)


def test_unknown_model_type_lists_the_known():
    with pytest.raises(
        ConfigError, match=r"'mamba' is not supported; supported are deepseek_v2, .*gemma3, .*qwen3"
    ):
        config("mamba")
    with pytest.raises(ConfigError, match="model_type None"):
        ModelConfig.from_hf({})


@pytest.mark.parametrize(
    "arch, fields, named",
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act as one of silu"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation as one of gelu_pytorch_tanh"),
        ("llama", {"hidden_size": None}, "hidden_size as a whole number"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers as a whole number"),
        ("llama", {"num_attention_heads": 3}, "num_key_value_heads=2 does not divide num_attention_heads=3"),
        (
            "llama",
            {"hidden_size": 30, "head_dim": None},
            "hidden_size as a multiple of num_attention_heads=4",
        ),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps as a number"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta as a number"),
        ("llama", {"sliding_window": 64}, "sliding_window=64"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("llama", {"partial_rotary_factor": 0.4}, "partial_rotary_factor as an even part of head_dim=8"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window as true"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types as a list of"),
        ("qwen3", {"layer_types": ["full_attention"]}, "an entry for each of 2 layers"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "only causal attention"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "'proportional' is not supported",
        ),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling as an object"),
        ("llama", {"rope_parameters": {"full_attention": {}, "factor": 2}}, "alone when nested"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
    ],
)
def test_refused_by_name(arch, fields, named):
    with pytest.raises(ConfigError, match=named):
        config(arch, **fields)


def test_neutral_values_of_foreign_fields_are_fine():
    config(use_sliding_window=False, clip_qkv=None, num_local_experts=0, layer_types=["full_attention"] * 2)
    config("qwen2", sliding_window=131072, use_sliding_window=False, max_window_layers=70)


def test_windows_per_layer():
    assert config("mistral", layers=3).windows == (16, 16, 16)
    assert config("mistral", sliding_window=None).windows == (0, 0)
    assert config("qwen2", layers=3, use_sliding_window=True, max_window_layers=2).windows == (0, 0, 16)
    assert config("gemma2", layers=4).windows == (16, 0, 16, 0)
    assert config("gemma3_text", layers=7).windows == (16,) * 5 + (0, 16)
    assert config("olmo3", layers=5).windows == (16, 16, 16, 0, 16)
    listed = ["full_attention", "sliding_attention"]
    assert config("gemma2", layer_types=listed).windows == (0, 16)


def test_ropes_follow_the_layers():
    gemma = config(
        "gemma3_text", layers=7, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=1e6
    )
    full, local = (gemma.ropes[gemma.layer_ropes[i]].frequencies for i in (5, 0))
    assert full[0] == 1 / 8 and full[1] == pytest.approx(1e6 ** (-1 / 4) / 8)
    assert local[0] == 1 and local[1] == pytest.approx(1e4 ** (-1 / 4))
    smol = config("smollm3", layers=4, sliding_window=None)
    assert [any(smol.ropes[i].frequencies) for i in smol.layer_ropes] == [True, True, True, False]
    assert len(config("llama").ropes) == 1


def test_length_comes_from_the_config_and_its_scaling():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config().max_model_len == 512
    assert config(rope_scaling=yarn).max_model_len == 2048
    assert config(max_model_len=100).max_model_len == 100


def test_length_beyond_the_config_is_refused():
    with pytest.raises(
        ConfigError, match=r"max_model_len=513 is beyond the 512 positions .* use at most 512"
    ):
        config(max_model_len=513)


def test_length_that_relies_on_scaling_is_warned_of(caplog):
    scaling = {"rope_type": "linear", "factor": 2.0}
    with caplog.at_level(logging.WARNING):
        assert config(max_model_len=1024, rope_scaling=scaling).max_model_len == 1024
    assert "max_model_len=1024 is beyond max_position_embeddings=512" in caplog.text
    with pytest.raises(ConfigError, match="beyond the 1024 positions"):
        config(max_model_len=1025, rope_scaling=scaling)


@pytest.mark.parametrize(
    "outer, inner", [("gemma3", "gemma3_text"), ("mistral3", "ministral3"), ("mistral3", "mistral")]
)
def test_a_multimodal_config_is_read_for_its_decoder(outer, inner):
    text = tiny_config(inner)
    wrapped = ModelConfig.from_hf({"model_type": outer, "text_config": text, "vision_config": {}})
    assert wrapped.name == inner and wrapped.windows == config(inner).windows
    leaves = model_for(wrapped).params(wrapped)
    assert leaves["layers"][0]["q"].source == "language_model.model.layers.0.self_attn.q_proj.weight"
    assert leaves["head"].source == "language_model.lm_head.weight"


def test_released_gemma3_4b_leaves_most_to_its_defaults():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    made = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert (made.heads, made.kv_heads, made.head_dim, made.vocab_size) == (8, 4, 256, 262208)
    assert made.tied and made.max_model_len == 131072 and made.attention_scale == 1 / 16
    assert made.windows[:7] == (1024,) * 5 + (0, 1024) and made.dtype == "bfloat16"


def test_params_follow_the_config():
    made = config("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    tree = model_for(made).params(made)
    assert "head" not in tree and len(tree["layers"]) == 2
    assert tree["layers"][1]["down_bias"] == Param((32,), (None,), "model.layers.1.mlp.down_proj.bias")
    assert model_for(made).cache_shape(made, 16) == (2, 16, 16)


def test_configs_are_hashable_and_equal_by_value():
    hf = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    assert hash(ModelConfig.from_hf(hf)) == hash(ModelConfig.from_hf(hf))


@pytest.mark.parametrize(
    "arch, fields, named",
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob as false"),
        ("deepseek_v3", {"n_group": 3}, "n_group as a divisor of the 256 experts"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group as at most n_group=8"),
        (
            "deepseek_v3",
            {"n_routed_experts": 32, "topk_group": 1},
            "num_experts_per_tok as at most the 4 experts that may",
        ),
        ("deepseek_v3", {"scoring_func": "sqrtsoftplus"}, "scoring_func as one of softmax, sigmoid"),
        ("deepseek_v3", {"topk_method": "best"}, "topk_method as one of greedy, group_limited_greedy"),
        ("deepseek_v3", {"index_topk": 64}, "index_topk=64"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace as a whole number"),
        ("deepseek_v3", {"moe_layer_freq": [1]}, "an entry for each of 2 layers"),
        ("llama", {"kv_lora_rank": 16}, "kv_lora_rank=16"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers as a list of layer numbers"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size=16"),
        ("mixtral", {"num_experts_per_tok": 9}, "at most the 8 experts"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "layer_types as a list of"),
    ],
)
def test_experts_refused_by_name(arch, fields, named):
    with pytest.raises(ConfigError, match=named):
        config(arch, **{"sliding_window": None, "first_k_dense_replace": 0} | fields)


def mixture_layers(arch: str, **fields: Any) -> tuple[bool, ...] | None:
    mixture = config(arch, sliding_window=None, **fields).mixture
    return mixture and mixture.layers


def test_which_layers_have_experts():
    assert mixture_layers("mixtral") == (True, True)
    assert mixture_layers("qwen3_moe", layers=6, decoder_sparse_step=2, mlp_only_layers=[3]) == (
        False, True, False, False, False, True,
    )  # fmt: skip
    assert mixture_layers("qwen3_moe", mlp_only_layers=[0, 1]) is None
    assert mixture_layers("qwen3_moe", num_experts=0) is None
    assert mixture_layers("deepseek_v2", layers=3) == (True,) * 3
    assert mixture_layers("deepseek_v3", layers=5, first_k_dense_replace=1, moe_layer_freq=2) == (
        False, False, True, False, True,
    )  # fmt: skip
    listed = {"layers": 4, "first_k_dense_replace": 0, "moe_layer_freq": [0, 1, 1, 0, 1]}
    assert mixture_layers("deepseek_v3", **listed) == (False, True, True, False)
    assert mixture_layers("deepseek_v3", first_k_dense_replace=2) is None
    assert mixture_layers("glm4_moe", n_routed_experts=None) is None


def test_how_experts_are_chosen():
    def routing(arch: str, **fields: Any):
        made = config(arch, **{"layers": 4, "sliding_window": None} | fields).mixture
        assert made
        return made.routing, made.selection_bias, made.shared_ffn_size

    assert routing("deepseek_v3") == (Routing(256, 8, "sigmoid", 8, 4, 2, True, 2.5), True, 2048)
    assert routing("kimi_k2", n_group=None, topk_group=None, n_shared_experts=None) == (
        Routing(256, 8, "sigmoid", 1, 1, 2, True, 2.5), True, 0,
    )  # fmt: skip
    assert routing("deepseek_v2", n_shared_experts=2, moe_intermediate_size=100) == (
        Routing(64, 6), False, 200,
    )  # fmt: skip
    limited = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert routing("deepseek_v2", **limited)[0] == Routing(64, 6, "softmax", 8, 3)
    assert routing("deepseek_v2", n_group=8, topk_group=3)[0] == Routing(64, 6)  # greedy knows no groups
    assert routing("qwen3_moe")[0] == Routing(128, 8)
    assert routing("qwen3_moe", norm_topk_prob=True, num_local_experts=16)[0] == Routing(
        16, 8, normalised=True
    )
    assert routing("gpt_oss", sliding_window=16, experts_per_token=3)[0] == Routing(128, 3, normalised=True)


def test_latents_follow_the_config():
    made = config("deepseek_v3", layers=4, sliding_window=None, q_lora_rank=None, attention_bias=True)
    first = model_for(made).params(made)["layers"][0]
    assert made.latent == Latent(512, None, 128, 64, 128, bias=True) and made.kv_heads == 1
    assert first["q"].source.endswith("q_proj.weight") and "q_a" not in first
    assert first["k_up"].cut == Cut(1, 256, slice(0, 128)) and first["v_up"].shape == (4, 128, 512)
    assert "kv_a_bias" in first and "o_bias" in first
    assert made.attention_scale == pytest.approx(192**-0.5)
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale_all_dim": 0.707}
    scaled = config("deepseek_v2", sliding_window=None, rope_scaling=yarn | {"mscale": 0.707})
    assert scaled.attention_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert scaled.ropes[0].magnitude == 1 and len(scaled.ropes[0].frequencies) == 32
