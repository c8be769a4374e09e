"""The metrics that dashboards and autoscalers are wired to have vLLM's names, and count what they say."""

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import Metrics

NAMES = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"],
    "counter": [
        "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions", "request_success",
        "prefix_cache_queries", "prefix_cache_hits", "admission_rejections", "corrupted_requests",
    ],
    "histogram": [
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
    ],
}  # fmt: skip
FINISHED = dict(
    n_prompt=9, n_cached=4, n_generated=5, queue=1.0, prefill=2.0, decode=4.0, e2e=7.0, params_n=2
)


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(CollectorRegistry(), "m")
    metrics.set_cache_config(block_size=16, num_gpu_blocks=100)
    metrics.on_rejected("queue_full")
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_names_and_kinds_are_vllms(metrics):
    families = {
        f.name: f.type for f in text_string_to_metric_families(generate_latest(metrics.registry).decode())
    }
    for kind, names in NAMES.items():
        assert {f"vllm:{name}": kind for name in names}.items() <= families.items()
    assert families["jaxserve:compiles"] == families["jaxserve:compile_seconds"] == "counter"


def test_counters_end_in_total_and_carry_the_model(metrics):
    metrics.on_finished("stop", max_tokens=20, **FINISHED)
    for name in ("prompt_tokens", "prompt_tokens_cached", "prefix_cache_hits", "num_preemptions"):
        assert value(metrics, f"vllm:{name}_total") is not None
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0


def test_a_step_sets_gauges_and_adds_to_counters(metrics):
    for _ in range(2):
        metrics.on_step(3, 5, 0.25, 40, 1, 100, 60)
    metrics.on_step(1, 0, 0.5, 0, 0, 0, 0)
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert value(metrics, "vllm:num_preemptions_total") == 2
    assert value(metrics, "vllm:prefix_cache_queries_total") == 200
    assert value(metrics, "vllm:prefix_cache_hits_total") == 120
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 80


def test_tokens_are_counted_as_they_come(metrics):
    metrics.on_first_token(0.5)
    metrics.on_tokens(0.2, 1)
    metrics.on_tokens(0.6, 3)
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.8)
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.5


def test_a_finished_request_is_measured(metrics):
    metrics.on_finished("length", max_tokens=None, **FINISHED)
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == 6
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 9
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 4
    assert value(metrics, "vllm:request_params_max_tokens_count") == 0


def test_cache_settings_are_labels(metrics):
    labels = {"block_size": "16", "num_gpu_blocks": "100"}
    assert metrics.registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_two_engines_in_one_process_do_not_mix():
    first, second = (Metrics(CollectorRegistry(), "m") for _ in range(2))
    first.on_corrupted()
    first.on_compile(2.5)
    assert value(first, "vllm:corrupted_requests_total") == 1
    assert value(first, "jaxserve:compile_seconds_total") == 2.5
    assert value(second, "vllm:corrupted_requests_total") == 0


def test_threads_do_not_lose_counts(metrics):
    threads = [
        threading.Thread(target=lambda: [metrics.on_tokens(0.1, 1) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "vllm:generation_tokens_total") == 2000
