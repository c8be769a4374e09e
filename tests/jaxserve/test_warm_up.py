"""After the warm-up nothing compiles, whatever requests ask for; and a compile would be counted."""

from dataclasses import replace

import jax
import numpy as np

from jaxserve.request import Request
from tests.engines import Traffic, counted
from tests.jaxserve.test_nothing_changes_the_tokens import KINDS

COMPILES = "jaxserve:compiles_total"


def test_nothing_compiles_after_the_warm_up(tiny):
    engine = tiny.engine
    jax.clear_caches()  # nor is anything used that another test happened to compile
    before = counted(engine.metrics, COMPILES)
    traffic = Traffic(engine)
    for again in range(2):
        for kind, (prompt, params) in enumerate(KINDS):
            traffic.add(Request(f"{kind} {again}", prompt, params, hidden_states=kind % 2 == 0))
        traffic.finish()
    for length in (1, 2, 23, 24, 25, 120, 126):
        traffic.add(Request(f"of {length}", [*range(length)], replace(KINDS[0][1], max_tokens=2)))
        traffic.finish()
    assert len(traffic.done) == 2 * len(KINDS) + 7
    assert counted(engine.metrics, COMPILES) == before


def test_a_compile_would_be_counted(tiny):
    metrics = tiny.engine.metrics
    before = counted(metrics, COMPILES), counted(metrics, "jaxserve:compile_seconds_total")
    offset = len(jax.devices()) + before[0]
    jax.jit(lambda x: x * 3 + offset)(np.float32(1)).block_until_ready()
    assert counted(metrics, COMPILES) == before[0] + 1
    assert counted(metrics, "jaxserve:compile_seconds_total") > before[1]
