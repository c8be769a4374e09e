"""Sums that a device keeps of experts' rows become totals and metrics: beyond 32 bits, and after they were lost."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxserve.expert_loads import FETCHED_EVERY, ExpertLoads, ExpertTraffic
from jaxserve.metrics import Metrics

STEP = np.array([[6, 1, 1, 0], [2, 2, 2, 2]])  # rows of a step in two layers


def on_device(rows: np.ndarray) -> ExpertLoads:
    """Sums as a device keeps them, two experts on each of two devices."""
    low = (rows % 2**32).astype(np.uint32).view(np.int32)
    return ExpertLoads(low, low.reshape(2, 2, 2).sum(axis=2, dtype=np.int32))


def test_totals_go_on_where_the_sums_of_the_device_run_over():
    traffic, rows = ExpertTraffic([1, 3], Metrics(CollectorRegistry(), "tiny")), np.zeros((2, 4), np.int64)
    np.testing.assert_array_equal(traffic.totals().experts, 0)
    for _ in range(5):
        rows = rows + STEP * 300_000_000
        traffic.on_step(on_device(rows))
        np.testing.assert_array_equal(traffic.totals().experts, rows)
        np.testing.assert_array_equal(traffic.totals().devices, rows.reshape(2, 2, 2).sum(axis=2))
    assert rows.max() > 2**32


def test_totals_go_on_when_the_device_begins_again():
    """As after an interrupt in the middle of a step."""
    traffic = ExpertTraffic([0, 1], Metrics(CollectorRegistry(), "tiny"))
    traffic.on_step(on_device(10 * STEP))
    traffic.totals()
    traffic.on_step(on_device(STEP))
    np.testing.assert_array_equal(traffic.totals().experts, 11 * STEP)


def test_metrics_are_of_the_last_steps_and_by_the_models_layers():
    registry = CollectorRegistry()
    traffic = ExpertTraffic([1, 3], Metrics(registry, "tiny"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"jaxserve:{name}", {"model_name": "tiny"} | labels)

    for n in range(1, FETCHED_EVERY):
        traffic.on_step(on_device(n * STEP[::-1]))
    assert value("expert_load_max_over_mean", layer="1") is None, "not fetched yet"
    for n in range(1, FETCHED_EVERY + 2):
        traffic.on_step(on_device((FETCHED_EVERY - 1) * STEP[::-1] + n * STEP))
    assert value("expert_load_max_over_mean", layer="1") == pytest.approx(3, rel=0.1)
    assert value("expert_load_max_over_mean", layer="3") == pytest.approx(1, rel=0.1)
    assert value("device_load_max_over_mean", layer="1") == pytest.approx(7 / 4, rel=0.1)
    assert value("eplb_balancedness") == pytest.approx((4 / 7 + 1) / 2, rel=0.1)
