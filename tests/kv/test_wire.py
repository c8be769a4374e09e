"""Rows out of pages of one form and into pages of another are the same rows, and their checksums see any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv import wire
from pallas_kernels.int4_rows import latent_bytes
from pallas_kernels.page_write import page_write
from pallas_kernels.pages import LOW_BITS, ScaledPages, latent_page, plain_and_scales

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
    if stacked:
        (last,), (summed,) = wire.take(first, at, np.int32(1), layers=1, latent=latent, dtype="float32")
        np.testing.assert_array_equal(last, rows[1])
        np.testing.assert_array_equal(summed, sums[1])
        second = (*wire.put(second[:1], rows[:1], there), *wire.put(second[1:], rows[1:], there))
    else:
        second = wire.put(wire.put(second, rows[1:], there, np.int32(1)), rows[:1], there, np.int32(0))
    found, _ = wire.take(second, there, latent=latent, dtype="float32")
    for sent, got in zip(rows, found, strict=True):
        np.testing.assert_array_equal(sent[:COUNT], got[:COUNT])
    np.testing.assert_array_equal(wire.checksums(rows), sums)


def low_bits(latent: bool, page_size: int, cache: str, stacked: bool):
    """Two layers of empty pages with scales."""
    packed = cache == "int4"
    if latent:
        page = latent_page(latent_bytes(32, 16) if packed else 32, page_size, 16)
        scales = (2 * 3 if packed else 2, page_size // 2)
    else:
        page, scales = (3, page_size, 8 if packed else 16), (2, 3, page_size)
    layer = ScaledPages(jnp.zeros((9, *page), LOW_BITS[cache]), jnp.zeros((9, *scales)))
    return jax.tree.map(lambda x: jnp.stack([x, x]), layer) if stacked else (layer, layer)


@pytest.mark.parametrize("cache", LOW_BITS)
@pytest.mark.parametrize("latent", [False, True])
def test_rows_are_quantised_on_the_way_as_page_write_does_and_then_travel_as_they_are(latent, cache):
    plain = pool(latent, 8, "float32", False)
    at = wire.places([3, 5], 8, START, COUNT, ROWS)
    there = wire.places([4], 16, START, COUNT, ROWS)
    rows, _ = wire.take(plain, at, latent=latent, dtype="float32")
    written = [
        page_write(layer, row, jnp.asarray(there))
        for layer, row in zip(low_bits(latent, 16, cache, False), rows, strict=True)
    ]
    small, sums = wire.take(plain, at, latent=latent, dtype=cache)
    assert (
        small[0].dtype == jnp.uint8
        and small[0].shape[1:] == wire.row_form(rows[0].shape[1:], cache, 16).shape
    )
    arrived = wire.put(low_bits(latent, 16, cache, False), small, there)
    np.testing.assert_array_equal(wire.checksums(small), sums)
    for got, wanted in zip(arrived, written, strict=True):
        for ours, theirs in zip(plain_and_scales(got), plain_and_scales(wanted), strict=True):
            ours, theirs = (np.asarray(x)[1:].view(np.uint8) for x in (ours, theirs))  # without the padding
            np.testing.assert_array_equal(ours, theirs)
    stack = wire.put(
        low_bits(latent, 8, cache, True), wire.take(arrived, there, latent=latent, dtype=cache)[0], at
    )
    back, _ = wire.take(stack, at, latent=latent, dtype=cache)
    for sent, got in zip(small, back, strict=True):
        np.testing.assert_array_equal(sent[:COUNT], got[:COUNT])


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


def test_a_checksum_sees_another_scale():
    plain = pool(True, 8, "float32", False)
    rows, sums = wire.take(plain, np.arange(ROWS, dtype=np.int32), latent=True, dtype="int8")
    other = np.array(rows[0])
    other[3, -1] ^= 1  # the scale's sign, exponent or mantissa
    assert wire.checksum(jnp.asarray(other)).tolist() != sums[0].tolist()


def test_the_smaller_data_type_travels_and_nothing_is_rounded_twice():
    assert wire.wire_dtype("float32", "bfloat16") == wire.wire_dtype("bfloat16", "float32") == "bfloat16"
    assert wire.wire_dtype("bfloat16", "int8") == wire.wire_dtype("int8", "int8") == "int8"
    for receiver in ("bfloat16", "fp8_e4m3"):
        with pytest.raises(ValueError, match=f"of int8 cannot become rows of {receiver}"):
            wire.wire_dtype("int8", receiver)
