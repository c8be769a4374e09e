"""Latent attention gives the same absorbed and expanded, keeps its latents and nothing else, and chooses by cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.expanded import expanded_attention
from jaxserve.models import ModelConfig, decoder, latent
from jaxserve.plan.cost import expanded_is_cheaper
from pallas_kernels import chip
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.pages import ScaledPages, latent_page, packed, quantise
from tests.jaxserve.models.running import golden_config

C, R, N, NOPE, V, PAGE = 32, 8, 3, 12, 10, 4


def cache(lens: list[int], pages_each: int, rng: np.random.Generator):
    """(pages with NaN wherever no token is, page table): each sequence's pages in an order that is not sorted."""
    count = len(lens) * pages_each
    table = 1 + rng.permutation(count).reshape(len(lens), pages_each).astype(np.int32)
    values = np.full((count + 1, PAGE, C + R), np.nan, np.float32)
    for row, length in zip(table, lens, strict=True):
        for s in range(length):
            values[row[s // PAGE], s % PAGE] = rng.normal(size=C + R)
    return jnp.asarray(values), jnp.asarray(table)


def absorbed(q, pages, table, starts, lens, k_up, v_up, scale):
    q_latent = jnp.einsum("tnh,nhc->tnc", q[..., :NOPE], k_up)
    out, _ = mla_attention(q_latent, q[..., NOPE:], pages, table, starts, lens, scale=scale)
    return jnp.einsum("tnc,nvc->tnv", out, v_up)


@pytest.mark.supports("attention", "latent attention, absorbed and expanded")
@pytest.mark.parametrize("kept", ["float32", "8 bits"])
@pytest.mark.parametrize(
    "new, lens, padding",
    [((200,), (200,), 0), ((70,), (330,), 10), ((40, 1, 150, 0, 2), (700, 9, 150, 0, 40), 7)],
    ids=["a prompt", "a chunk", "mixed"],
)
def test_expanded_equals_absorbed(new, lens, padding, kept):
    rng = np.random.default_rng(0)
    tokens, table = cache(list(lens), 176, rng)
    pages = packed(tokens[..., :C], tokens[..., C:])
    if kept == "8 bits":
        values, scales = quantise(tokens, jnp.float8_e4m3fn)
        pages = ScaledPages(
            packed(values[..., :C], values[..., C:]), jnp.swapaxes(scales.reshape(-1, PAGE // 2, 2), -2, -1)
        )
    starts = jnp.asarray([0, *np.cumsum(new)], jnp.int32)
    q = jnp.asarray(rng.normal(size=(sum(new) + padding, N, NOPE + R)), jnp.float32)
    up = [jnp.asarray(rng.normal(size=(N, width, C)) / 5, jnp.float32) for width in (NOPE, V)]
    args = (q, pages, table, starts, jnp.asarray(lens, jnp.int32), *up)
    got = jax.jit(expanded_attention, static_argnames=("scale", "shortest"))(*args, scale=0.3, shortest=2)
    want = np.array(jax.jit(absorbed, static_argnames="scale")(*args, scale=0.3))
    ones = [at for at, rows in zip(np.asarray(starts), new, strict=False) if rows == 1]
    np.testing.assert_array_equal(np.asarray(got)[[*ones, *range(sum(new), len(q))]], 0)
    kept_rows = [t for t in range(sum(new)) if t not in ones]
    np.testing.assert_allclose(np.asarray(got)[kept_rows], want[kept_rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_the_cache_holds_the_latent_and_the_rope_key(arch):
    c = golden_config(arch)
    assert c.latent and np.prod(decoder.cache_shape(c, 16)) == 16 * (c.latent.rank + c.latent.rope_dim)


def test_deepseek_keeps_576_values_a_token():
    assert np.prod(latent_page(512, 64)) == 64 * 576
    c = ModelConfig.from_hf(DEEPSEEK_V3)
    assert decoder.cache_shape(c, 64) == (9, 32, 128) and decoder.cache_axes(c) == (None, None, None)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "max_position_embeddings": 163840, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "first_k_dense_replace": 3,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def test_a_rank_that_pages_do_not_divide_is_padded():
    c = ModelConfig.from_hf(DEEPSEEK_V3 | {"kv_lora_rank": 500, "max_position_embeddings": 163840})
    assert decoder.cache_shape(c, 64) == (9, 32, 128)


SIZES = {"rank": 512, "rope": 64, "made": 256, "heads": 128}


def test_prompts_are_expanded_where_that_costs_less():
    def expands(tokens: int, seqs: int, context: int = 8192, chip=None) -> bool:
        return expanded_is_cheaper(**SIZES, tokens=tokens, seqs=seqs, context=context, chip=chip)

    # By operations alone: from 2 N C (nope + V) / 2 N (2 C - nope - V) = 171 tokens a sequence on.
    assert not expands(128, 1) and expands(256, 1) and not expands(256, 2) and expands(8192, 8)
    assert not expands(170, 1, context=1 << 20) and expands(172, 1, context=1 << 20)
    # On a chip the scores of the expanded form go through its memory; that of v5e is slow.
    assert not expands(8192, 1, chip=chip.CHIPS["v5e"])
    assert not expands(8, 8, chip=chip.CHIPS["v5p"])


def test_a_step_has_one_form_by_its_sizes():
    c = golden_config("deepseek_v3")
    for tokens, expected in ((1, False), (24, False), (64, True)):
        assert latent.expands(c, tokens, 1, 20 * 8, 4) is expected
