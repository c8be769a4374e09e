"""After the warm-up nothing compiles, whatever requests ask for; and a compile would be counted."""

import logging
from dataclasses import replace

import jax
import numpy as np

from jaxserve.buckets import first_needed
from jaxserve.request import Request
from jaxserve.runner import DeviceRunner
from tests.engines import Traffic, counted
from tests.jaxserve.test_nothing_changes_the_tokens import KINDS

COMPILES = "jaxserve:compiles_total"


def test_nothing_compiles_after_the_warm_up(tiny):
    engine = tiny.engine
    jax.clear_caches()  # nor is anything used that another test happened to compile
    assert counted(engine.metrics, "jaxserve:warm") == 1
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


def test_a_step_that_does_not_compile_behind_the_server_is_done_without(tiny, monkeypatch, caplog):
    runner: DeviceRunner = tiny.engine.runner
    needed = first_needed(runner._buckets)
    bad, good = [bucket for bucket in runner._buckets if bucket not in needed][:2]
    half = DeviceRunner(runner.step, runner.params, runner.pool, runner.state, runner._buckets)
    compiled = []

    def compile(bucket, options=None):
        if bucket == bad:
            raise RuntimeError("no room")
        compiled.append(bucket)

    monkeypatch.setattr(half, "_compile", compile)
    with caplog.at_level(logging.ERROR):
        half._compile_all([bad, good])
    assert compiled == [good] and half.warm.is_set()
    assert f"{bad} does not compile" in caplog.text
