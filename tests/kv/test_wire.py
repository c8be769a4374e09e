"""Rows out of pages of one form and into pages of another are the same rows, and their checksums see any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv import wire
from pallas_kernels.pages import latent_page

START, COUNT, ROWS = 2, 14, 16  # of a sequence's tokens; two rows are padding


def pool(latent: bool, page_size: int, dtype: str, stacked: bool):
    page = latent_page(32, page_size, 16) if latent else (3, page_size, 16)
    layers = [jax.random.normal(jax.random.key(i), (9, *page)).astype(dtype) for i in range(2)]
    return jnp.stack(layers) if stacked else tuple(layers)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_rows_survive_another_page_size_and_form(latent, stacked):
    first, second = pool(latent, 8, "float32", stacked), pool(latent, 16, "float32", not stacked)
    at = wire.places([3, 5], 8, START, COUNT, ROWS)
    there = wire.places([4], 16, START, COUNT, ROWS)
    rows, sums = wire.take(first, at, latent=latent, dtype="float32")
    second = wire.put(second, rows, there)
    found, _ = wire.take(second, there, latent=latent, dtype="float32")
    for sent, got in zip(rows, found, strict=True):
        np.testing.assert_array_equal(sent[:COUNT], got[:COUNT])
    np.testing.assert_array_equal(wire.checksums(rows), sums)


def test_a_place_is_a_token_of_a_page_and_padding_goes_to_page_0():
    assert wire.places([7, 3], 4, 2, 5, 8).tolist() == [30, 31, 12, 13, 14, 0, 1, 2]
    assert wire.places([7], 4, 0, 2, 2, offset=100).tolist() == [428, 429]


def test_blocks_cover_the_tokens_in_few_sizes():
    assert wire.blocks(3, 600) == [(3, 256, 256), (259, 256, 256), (515, 85, 256)]
    assert wire.blocks(5, 5) == []
    assert wire.blocks(0, 100, 64) == [(0, 64, 64), (64, 36, 64)]


@pytest.mark.parametrize(
    "row_bytes, weights, size",
    [(46_080, 538_000_000, 64), (131_072, 16 * 10**9, 256), (70_272, 700 * 10**9, 256), (128, 10_000, 16)],
    ids=["SmolLM2-135M", "Llama-8B", "DeepSeek-V3", "tiny"],
)
def test_a_block_is_small_beside_what_a_step_reads(row_bytes, weights, size):
    assert wire.block_size(row_bytes, weights) == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checksum_sees_a_flipped_bit_a_swap_and_a_missing_row(dtype):
    rows = jax.random.normal(jax.random.key(0), (16, 3, 16)).astype(dtype)
    whole = wire.checksum(rows).tolist()
    bits = np.array(rows).view(np.uint8).copy()
    bits[7, 1, 3] ^= 1
    flipped = jnp.asarray(bits.view(rows.dtype))
    for other in (flipped, rows[::-1], rows.at[5].set(rows[6]), rows.at[15].set(jnp.zeros((), rows.dtype))):
        assert wire.checksum(other).tolist() != whole


def test_the_smaller_data_type_travels():
    assert wire.wire_dtype("float32", "bfloat16") == wire.wire_dtype("bfloat16", "float32") == "bfloat16"
