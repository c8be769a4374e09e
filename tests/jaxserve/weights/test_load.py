"""Loading: every Param gets its values in the dtype asked for, without a second copy; what does not fit is refused."""

import io
import logging
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights import load, open_checkpoint
from jaxserve.weights.arrays import aligned_empty, convert_into
from sharding.params import Cut, Param

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((6, 8)).astype(np.float32)


def test_a_tree_keeps_its_form_and_reshapes_split_axes(folder):
    checkpoint = open_checkpoint(str(folder({"q": Q, "norm": np.ones(8, np.float32)})))
    tree = {
        "layers": [{"q": Param((2, 3, 8), ("heads", None, None), "q")}],
        "norm": Param((8,), (None,), "norm"),
    }
    loaded = load(tree, checkpoint, np.float32)
    np.testing.assert_array_equal(loaded["layers"][0]["q"], Q.reshape(2, 3, 8))
    assert isinstance(loaded["norm"], jax.Array) and loaded["norm"].dtype == np.float32


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tuple_of_sources_is_stacked_in_the_order_given(folder, shards):
    tensors = {f"e{i}": Q + i for i in range(4)}
    names = ("e2", "e0", "e3", "e1")
    stack = Param((4, 2, 3, 8), ("experts", "heads", None, None), names)
    loaded = load([stack], open_checkpoint(str(folder(tensors, shards=shards))), ml_dtypes.bfloat16)
    expected = np.stack([tensors[name] for name in names]).reshape(stack.shape).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded[0], expected)


def test_one_tensor_may_fill_several_leaves(folder):
    checkpoint = open_checkpoint(str(folder({"w": Q})))
    loaded = load([Param((6, 8), (None, None), "w"), Param((48,), (None,), "w")], checkpoint, np.float32)
    np.testing.assert_array_equal(loaded[1], Q.reshape(48))
    np.testing.assert_array_equal(loaded[0], Q)


def test_an_optional_tensor_that_is_absent_is_none(folder):
    tree = {"w": Param((6, 8), (None, None), "w"), "bias": Param((6,), (None,), "bias", optional=True)}
    loaded = load(tree, open_checkpoint(str(folder({"w": Q}))), np.float32)
    assert loaded["bias"] is None
    loaded = load(tree, open_checkpoint(str(folder({"w": Q, "bias": Q[:, 0].copy()}))), np.float32)
    np.testing.assert_array_equal(loaded["bias"], Q[:, 0])


@pytest.mark.parametrize(
    "source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_rounded_to_nearest(source, target):
    array = (RNG.standard_normal((3, 1001)) * 8).astype(source)
    out = aligned_empty(array.shape, np.dtype(target))
    assert convert_into(out, array)
    np.testing.assert_array_equal(out, array.astype(target))


def test_every_bfloat16_and_float16_becomes_its_float32():
    bits = np.arange(1 << 16, dtype=np.uint16)
    for source in (np.float16, ml_dtypes.bfloat16):
        out = aligned_empty(bits.shape, np.dtype(np.float32))
        assert convert_into(out, bits.view(source))
        finite = np.isfinite(out)
        np.testing.assert_array_equal(out[finite].astype(source).view(np.uint16), bits[finite])
        assert finite.sum() == np.isfinite(bits.view(source)).sum()


@pytest.mark.parametrize("target", [np.float16, ml_dtypes.bfloat16])
def test_a_dtype_that_cannot_hold_the_values_is_refused(folder, target):
    values = np.ones(600_000, np.float32)
    values[-1] = 3.4e38
    checkpoint = open_checkpoint(str(folder({"w": values})))
    with pytest.raises(CheckpointError, match=rf"overflow {np.dtype(target)}.*tensor w.*float32"):
        load([Param(values.shape, (None,), "w")], checkpoint, target)


def test_an_infinity_that_was_stored_is_not_an_overflow(folder):
    checkpoint = open_checkpoint(str(folder({"w": np.array([np.inf, 1], np.float32)})))
    assert np.isinf(load([Param((2,), (None,), "w")], checkpoint, np.float16)[0][0])


@pytest.mark.parametrize("shape", [(8, 6), (4, 12), (6, 9), (12, 4), (6, 2, 2)])
def test_a_shape_that_would_scramble_or_lose_values_is_refused(folder, shape):
    checkpoint = open_checkpoint(str(folder({"w": Q})))
    with pytest.raises(CheckpointError, match=r"wrong shape.*tensor w; file .*expected \[.*found \[6, 8\]"):
        load([Param(shape, (None,) * len(shape), "w")], checkpoint, np.float32)


def test_a_stack_has_a_place_for_each_source():
    with pytest.raises(AssertionError, match=r"\(3, 6, 8\) hold 2 sources"):
        Param((3, 6, 8), (None, None, None), ("a", "b"))


def test_a_stack_of_stacks_is_filled_in_order(folder):
    tensors = {f"{i}": np.full((2, 3), i, np.float32) for i in range(6)}
    stack = Param((2, 3, 2, 3), (None, "experts", None, None), tuple("204135"))
    (made,) = load([stack], open_checkpoint(str(folder(tensors))), np.float32)
    np.testing.assert_array_equal(made[..., 0, 0], [[2, 0, 4], [1, 3, 5]])


def test_parts_of_a_tensor_become_weights_of_their_own(folder):
    checkpoint = open_checkpoint(str(folder({"w": Q, "k": Q.astype(np.float64)})))
    even = Param((3, 8), ("ffn", None), "w", cut=Cut(0, 6, slice(0, None, 2)))
    heads = Param((2, 1, 8), ("heads", None, None), "w", cut=Cut(-2, 3, slice(2, 3)))
    swapped = Param((8, 2), (None, None), "w", swapped=True, cut=Cut(1, 6, slice(1, 6, 3)))
    kept = Param((6, 8), (None, None), "k", dtype="float32")
    got = load([even, heads, swapped, kept], checkpoint, np.float16)
    expected = [Q[0::2], Q.reshape(2, 3, 8)[:, 2:], Q.T[:, 1::3], Q]
    for one, values in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, values.astype(np.float32 if one is got[3] else np.float16))
    assert [str(one.dtype) for one in got] == ["float16"] * 3 + ["float32"]
    with pytest.raises(CheckpointError, match=r"expected \[7, 8\]; found \[6, 8\]"):
        load([Param((3, 8), (None, None), "w", cut=Cut(0, 7, slice(0, 3)))], checkpoint, np.float32)


def test_a_missing_tensor_is_refused_by_name(folder):
    path = folder({"model.norm.weight": np.ones(4, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"lacks a tensor.*tensor model\.norms\.weight.*model\.norm\.weight"
    ) as why:
        load([Param((4,), (None,), "model.norms.weight")], open_checkpoint(str(path)), np.float32)
    assert why.value.file == str(path)


def test_integers_are_not_taken_for_weights(folder):
    checkpoint = open_checkpoint(str(folder({"w": np.ones((4, 4), np.int8)})))
    with pytest.raises(CheckpointError, match=r"stored as integers.*found int8"):
        load([Param((4, 4), (None, None), "w")], checkpoint, np.float32)


def test_tensors_left_over_are_named_once_but_not_the_expected_ones(folder, caplog):
    tensors = {"w": Q, "extra.weight": Q, "lm_head.weight": Q, "layers.0.rotary_emb.inv_freq": Q}
    path = str(folder(tensors, tie_word_embeddings=True))
    with caplog.at_level(logging.WARNING):
        load([Param((6, 8), (None, None), "w")], open_checkpoint(path), np.float32)
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["extra.weight"]


def test_on_cpu_the_converted_array_is_the_array_jax_uses(folder, monkeypatch):
    made = []

    def remembered(shape, dtype):
        made.append(aligned_empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr("jaxserve.weights.loading.aligned_empty", remembered)
    loaded = load(
        [Param((6, 8), (None, None), "w")], open_checkpoint(str(folder({"w": Q}))), ml_dtypes.bfloat16
    )
    assert loaded[0].unsafe_buffer_pointer() == made[0].ctypes.data


def test_an_aligned_tensor_of_the_right_dtype_is_the_mapped_file_itself(folder):
    for name in ("a" * n for n in range(1, 65)):  # the header's length decides the alignment
        checkpoint = open_checkpoint(str(folder({name: Q})))
        view = checkpoint.read(name)
        if view.ctypes.data % 64 == 0:
            loaded = load([Param((6, 8), (None, None), name)], checkpoint, np.float32)
            assert loaded[0].unsafe_buffer_pointer() == view.ctypes.data
            np.testing.assert_array_equal(loaded[0], Q)
            return
    pytest.fail("no header length gave an aligned tensor")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_goes_to_a_terminal_with_its_speed(folder, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    load([Param((6, 8), (None, None), "w")], open_checkpoint(str(folder({"w": Q}))), np.float32)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Loading weights" in shown and "192/192 bytes" in shown


@pytest.mark.parametrize("terminal, progress", [(False, True), (True, False)])
def test_without_a_terminal_there_is_one_line_in_the_log(folder, monkeypatch, caplog, terminal, progress):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    path = str(folder({"w": Q}))
    with caplog.at_level(logging.INFO, "jaxserve"):
        load([Param((6, 8), (None, None), "w")], open_checkpoint(path), np.float32, progress=progress)
    assert stream.getvalue() == ""
    (record,) = caplog.records
    assert (
        "loaded 1 tensors" in record.getMessage()
        and "MB/s" in record.getMessage()
        and path in record.getMessage()
    )
