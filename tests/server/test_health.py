"""Health, metrics and version: what operators see is how the engine is, not whether the HTTP process runs."""

import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.mark.parametrize(
    "state, health, live, ready",
    [
        ("starting", 200, 200, 503),
        ("ready", 200, 200, 200),
        ("draining", 200, 200, 503),
        ("stalled", 503, 503, 503),
        ("dead", 503, 503, 503),
    ],
)
async def test_health_follows_the_engine(client, engine, state, health, live, ready):
    engine.state = state
    got = [await client.get(path) for path in ("/health", "/livez", "/readyz")]
    assert [response.status_code for response in got] == [health, live, ready]
    assert all(response.json()["status"] == state for response in got)
    heads = [await client.head(path) for path in ("/health", "/livez", "/readyz")]
    assert [(response.status_code, response.text) for response in heads] == [
        (health, ""),
        (live, ""),
        (ready, ""),
    ]


async def test_metrics_are_prometheus_text(client, engine):
    engine.full = True
    await client.post("/v1/completions", json={"prompt": "x"})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    (sample,) = [s for s in families["vllm:admission_rejections"].samples if s.name.endswith("_total")]
    assert (sample.labels["reason"], sample.value) == ("queue_full", 1)


async def test_the_version_is_told(client):
    assert set((await client.get("/version")).json()) == {"version"}
