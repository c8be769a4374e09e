"""What a compiled program sends between devices is counted as often as it happens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.plan.collectives import Traffic, collectives


def program(fn, shape: tuple[int, ...], spec: P) -> str:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros(shape, jnp.float32)).compile().as_text() or ""


def test_a_sum_over_devices_is_counted_with_its_bytes():
    assert collectives(program(lambda x: jax.lax.psum(x, "x"), (8, 16), P("x"))) == [
        Traffic("all-reduce", 1, 2 * 16 * 4)
    ]


def test_loops_count_as_often_as_they_turn():
    def body(_, x):
        return jax.lax.all_to_all(x, "x", 0, 0) + 1

    def nested(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.fori_loop(0, 5, body, x), x)

    (sent,) = collectives(program(nested, (16, 8), P("x")))
    assert (sent.kind, sent.calls) == ("all-to-all", 15)


def test_what_is_only_done_on_a_condition_is_left_out():
    def maybe(x):
        return jax.lax.cond(x[0, 0] > 0, partial(jax.lax.psum, axis_name="x"), lambda x: x, x)

    text = program(maybe, (8, 16), P("x"))
    assert "all-reduce" in text and collectives(text) == []


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("%a = bf16[4,8]{1,0} all-gather-start(%x)", Traffic("all-gather", 1, 64)),
        ("%a = (s32[2,3]{1,0}, f8e4m3fn[10]{0}) all-reduce(%x, %y)", Traffic("all-reduce", 1, 34)),
        ("%a = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x)", Traffic("all-gather", 1, 32)),
        ("%expert_exchange.2 = bf16[6,128]{1,0} custom-call(%x)", Traffic("expert_exchange", 1, 1536)),
    ],
)
def test_results_are_counted_in_bytes(line, sent):
    text = f"HloModule m\n\nENTRY %main (x: f32[1]) -> f32[1] {{\n  {line}\n}}\n"
    assert collectives(text) == [sent]
