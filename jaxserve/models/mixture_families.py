"""The model_types of Hugging Face with experts, as field values of the one decoder structure; see `families`."""

from typing import Any

from jaxserve.layers.moe import Routing
from jaxserve.layers.rope import yarn_magnitude
from jaxserve.models.families import FULL, SILU, SLIDING, Family, biases, every, listed_kinds, mistral_kinds
from jaxserve.models.fields import Fields
from jaxserve.models.sizes import Latent, Mixture


def _mixtral(f: Fields) -> dict[str, Any]:
    routing = _checked(
        f, Routing(f.count("num_local_experts"), f.count("num_experts_per_tok"), normalised=True)
    )
    every_layer = (True,) * f.count("num_hidden_layers")
    mixture = Mixture(routing, f.count("intermediate_size"), every_layer, names="mixtral")
    return {"activation": f.choice("hidden_act", SILU, "silu"), "mixture": mixture}


def _qwen3_moe(f: Fields) -> dict[str, Any]:
    count, step = f.count("num_hidden_layers"), f.count("decoder_sparse_step")
    dense = f.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise f.wrong("mlp_only_layers", "a list of layer numbers", dense)
    experts = f.whole("num_experts" if f.get("num_local_experts") is None else "num_local_experts")
    f.get("num_experts")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(count))
    mixture = None
    if experts and any(layers):
        routing = Routing(experts, f.count("num_experts_per_tok"), normalised=f.flag("norm_topk_prob"))
        mixture = Mixture(_checked(f, routing), f.count("moe_intermediate_size"), layers)
    activation = f.choice("hidden_act", SILU, "silu")
    return biases(f) | {"activation": activation, "qk_norm": "head", "mixture": mixture}


def _qwen3_moe_kinds(f: Fields, count: int) -> list[str]:
    on = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    f.get("max_window_layers")  # unlike in Qwen 3 without experts, of no effect
    return [SLIDING if on else FULL] * count


def _glm4_moe(f: Fields) -> dict[str, Any]:
    return {
        "activation": f.choice("hidden_act", SILU, "silu"),
        "qkv_bias": f.flag("attention_bias"),
        "qk_norm": "head" if f.flag("use_qk_norm") else None,
        "mixture": _deepseek_mixture(f, normalised=f.flag("norm_topk_prob")),
    }


def _gpt_oss(f: Fields) -> dict[str, Any]:
    top = "num_experts_per_tok" if f.get("experts_per_token") is None else "experts_per_token"
    # The softmax of the chosen logits is that of all, made to sum to one.
    routing = _checked(f, Routing(f.count("num_local_experts"), f.count(top), normalised=True))
    f.get("num_experts_per_tok")
    mixture = Mixture(
        routing,
        f.count("intermediate_size"),
        (True,) * f.count("num_hidden_layers"),
        names="gpt_oss",
        biases=True,
        clamp=(f.number("swiglu_limit"), f.number("swiglu_alpha")),
    )
    activation = f.choice("hidden_act", SILU, "silu")
    return biases(f) | {"activation": activation, "sinks": True, "mixture": mixture}


def _gpt_oss_kinds(f: Fields, count: int) -> list[str]:
    return listed_kinds(f, count) or every(2, count)


def _deepseek_v2(f: Fields) -> dict[str, Any]:
    if f.flag("norm_topk_prob"):
        raise f.wrong(
            "norm_topk_prob", "false: DeepSeek's code and transformers differ in what true means here", True
        )
    return _deepseek(f) | {"mixture": _deepseek_mixture(f, normalised=False)}


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    return _deepseek(f) | {"mixture": _deepseek_mixture(f, normalised=f.flag("norm_topk_prob"))}


def _deepseek(f: Fields) -> dict[str, Any]:
    latent = Latent(
        rank=f.count("kv_lora_rank"),
        query_rank=None if f.get("q_lora_rank") is None else f.count("q_lora_rank"),
        nope_dim=f.count("qk_nope_head_dim"),
        rope_dim=f.count("qk_rope_head_dim"),
        value_dim=f.count("v_head_dim"),
        interleaved=f.flag("rope_interleave"),
        bias=f.flag("attention_bias"),
    )
    scaling = f.mapping("rope_scaling") or f.mapping("rope_parameters")
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if scaling.get("mscale_all_dim"):
        scale *= yarn_magnitude(float(scaling.get("factor") or 1), float(scaling["mscale_all_dim"])) ** 2
    return {
        "activation": f.choice("hidden_act", SILU, "silu"),
        "latent": latent,
        "kv_heads": 1,  # the latent is that of all heads
        "attention_scale": scale,
    }


# How `topk_method` chooses: whether in groups, how many of a group's best make its score, whether a bias sways it.
TOP_METHODS = {
    "greedy": (False, 1, False),
    "group_limited_greedy": (True, 1, False),
    "noaux_tc": (True, 2, True),
}
SCORING = {"softmax": "softmax", "sigmoid": "sigmoid"}


def _deepseek_mixture(f: Fields, normalised: bool) -> Mixture | None:
    count, experts, first = (
        f.count("num_hidden_layers"),
        f.whole("n_routed_experts"),
        f.whole("first_k_dense_replace"),
    )
    layers = tuple(i >= first and on for i, on in enumerate(_on_frequency(f, count)))
    if not experts or not any(layers):
        return None
    grouped, group_score, biased = TOP_METHODS[f.choice("topk_method", {k: k for k in TOP_METHODS}, "greedy")]
    groups = f.whole("n_group") or 1
    routing = Routing(
        experts,
        f.count("num_experts_per_tok"),
        scores=f.choice("scoring_func", SCORING, "softmax"),
        groups=groups if grouped else 1,
        top_groups=f.count("topk_group") if grouped and groups > 1 else 1,
        group_score=group_score,
        normalised=normalised,
        scale=f.number("routed_scaling_factor", 1.0),
    )
    width = f.count("moe_intermediate_size")
    return Mixture(
        _checked(f, routing),
        width,
        layers,
        shared_ffn_size=f.whole("n_shared_experts") * width,
        selection_bias=biased,
    )


def _on_frequency(f: Fields, count: int) -> list[bool]:
    """Which layers may have experts: every so many, or as a list says."""
    every = f.get("moe_layer_freq")
    if isinstance(every, list | tuple):
        return [bool(on) for on in f.listed("moe_layer_freq", count) or ()][:count]
    every = f.count("moe_layer_freq", 1)
    return [i % every == 0 for i in range(count)]


def _checked(f: Fields, r: Routing) -> Routing:
    if r.experts % r.groups:
        raise f.wrong("n_group", f"a divisor of the {r.experts} experts", r.groups)
    if r.top_groups > r.groups:
        raise f.wrong("topk_group", f"at most n_group={r.groups}", r.top_groups)
    allowed = r.experts // r.groups * r.top_groups
    if r.top > allowed:
        raise f.wrong("num_experts_per_tok", f"at most the {allowed} experts that may be chosen", r.top)
    return r


def _rope_dim(f: Fields) -> int:
    return f.count("qk_rope_head_dim")


GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True, "moe_layer_freq": 1,
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK | {
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1407,
    "topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK | {
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
}  # fmt: skip

MIXTURE_FAMILIES = {
    "mixtral": Family(
        _mixtral, mistral_kinds,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "num_key_value_heads": 8},
    ),
    "qwen3_moe": Family(
        _qwen3_moe, _qwen3_moe_kinds,
        defaults={
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
            "sliding_window": 4096, "num_key_value_heads": 4,
        },
    ),
    "glm4_moe": Family(
        _glm4_moe,
        defaults={
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_oss": Family(
        _gpt_oss, _gpt_oss_kinds,
        defaults={
            "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128,
            "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rope_parameters": GPT_OSS_ROPE,
        },
    ),
    "deepseek_v2": Family(_deepseek_v2, head_dim=_rope_dim, defaults=DEEPSEEK_V2),
    "deepseek_v3": Family(_deepseek_v3, head_dim=_rope_dim, defaults=DEEPSEEK_V3),
    "kimi_k2": Family(_deepseek_v3, head_dim=_rope_dim, defaults=DEEPSEEK_V3),
}  # fmt: skip
