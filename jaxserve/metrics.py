"""Prometheus metrics under vLLM's exact names, so that its dashboards, autoscalers and gateways work unchanged.

A counter is named here without the `_total` that its samples carry. Everything has the label `model_name`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MILLISECONDS = tuple(m * 10.0**e for e in range(-3, 2) for m in (1, 2, 4, 6, 8))  # 1 ms to 80 s
_REQUEST_SECONDS = tuple(m * 10.0**e for e in range(-2, 4) for m in (1, 2, 5))  # 10 ms to 5000 s
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
FINISHED_REASONS = ("stop", "length", "abort", "error")
COMPILES = "jaxserve:compiles"


class Metrics:
    """What the engine counts, in a registry of its own; every method is cheap and may be called on any thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str):
        self.registry, self._model = registry, model_name
        gauge, counter = self._gauge, self._counter
        self._running = gauge("num_requests_running", "Requests computed in each step.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting for room.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Part of the cache pages in use; 1 is all.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = counter("prompt_tokens_cached", "Of those, found in the prefix cache.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._preemptions = counter("num_preemptions", "Times a request gave its pages back for another.")
        self._queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._expert_drops = counter("expert_drops", "Choices of an expert that found no room for the token.")
        self._corrupted = counter("corrupted_requests", "Requests ended because logits were not finite.")
        self._compiles = counter("compiles", "Steps compiled.", "jaxserve")
        self._compile_seconds = counter("compile_seconds", "Time spent compiling.", "jaxserve")
        self._warm = gauge("warm", "1 once every step is compiled.", "jaxserve")
        self._balancedness = gauge(
            "eplb_balancedness",
            "Mean of the rows of devices with experts over the most; 1 is even.",
            "jaxserve",
        )
        self._device_load = self._by_layer(
            "device_load_max_over_mean", "Rows of the busiest device with experts over the mean of all."
        )
        self._expert_load = self._by_layer(
            "expert_load_max_over_mean", "Rows of the most chosen expert over the mean of all."
        )
        self._moved = counter(
            "eplb_moved_bytes", "Weights of experts that went to other devices.", "jaxserve"
        )
        self._moving = counter("eplb_rebalance_seconds", "Time spent on placing experts anew.", "jaxserve")
        self._rebalances = Counter(
            "jaxserve:eplb_rebalances",
            "Times that experts were placed anew, and how that ended: done, given_up or failed.",
            ["model_name", "outcome"],
            registry=registry,
        )
        self._success = Counter(
            "vllm:request_success", "Requests finished.", ["model_name", "finished_reason"], registry=registry
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused.", ["model_name", "reason"], registry=registry
        )
        for reason in FINISHED_REASONS:
            self._success.labels(model_name, reason)
        self._add_histograms()

    def _add_histograms(self) -> None:
        seconds, tokens = self._histogram, self._histogram
        self._ttft = seconds("time_to_first_token_seconds", "From arrival to the first token.", _MILLISECONDS)
        self._gap = seconds("inter_token_latency_seconds", "Between two tokens of a choice.", _MILLISECONDS)
        self._tpot = seconds(
            "request_time_per_output_token_seconds", "The mean of that over a request.", _MILLISECONDS
        )
        self._e2e = seconds(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )
        self._queue = seconds(
            "request_queue_time_seconds", "Waiting before being computed.", _REQUEST_SECONDS
        )
        self._inference = seconds("request_inference_time_seconds", "Being computed.", _REQUEST_SECONDS)
        self._prefill = seconds("request_prefill_time_seconds", "Of that, the prompt.", _REQUEST_SECONDS)
        self._decode = seconds("request_decode_time_seconds", "Of that, the output.", _REQUEST_SECONDS)
        self._n_prompt = tokens("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._n_generated = tokens("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._params_n = tokens("request_params_n", "Choices asked for.", _CHOICES)
        self._params_max_tokens = tokens("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self._step_tokens = tokens("iteration_tokens_total", "New tokens computed in a step.", _STEP_TOKENS)

    def on_step(
        self,
        running: int,
        waiting: int,
        kv_usage: float,
        new_tokens: int,
        preemptions: int,
        prefix_queries: int,
        prefix_hits: int,
    ) -> None:
        """After a step: how things stand, and what was added to the counters since the last one."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)
        if new_tokens:
            self._step_tokens.observe(new_tokens)
        for counter, count in (
            (self._preemptions, preemptions),
            (self._queries, prefix_queries),
            (self._hits, prefix_hits),
        ):
            if count:
                counter.inc(count)

    def on_first_token(self, seconds: float) -> None:
        """A choice's first token came so long after the arrival of its request."""
        self._ttft.observe(seconds)
        self._generation_tokens.inc()

    def on_tokens(self, gap_seconds: float, count: int) -> None:
        """`count` more tokens of a choice came, `gap_seconds` after those before them (never its first)."""
        for _ in range(count):
            self._gap.observe(gap_seconds / count)
        self._generation_tokens.inc(count)

    def on_finished(
        self,
        reason: str,
        *,
        n_prompt: int,
        n_cached: int,
        n_generated: int,
        queue: float,
        prefill: float,
        decode: float,
        e2e: float,
        params_n: int,
        max_tokens: int | None,
    ) -> None:
        """A request ended, for one of FINISHED_REASONS; the times are in seconds."""
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(n_prompt)
        self._cached_tokens.inc(n_cached)
        self._n_prompt.observe(n_prompt)
        self._n_generated.observe(n_generated)
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        self._e2e.observe(e2e)
        self._params_n.observe(params_n)
        if n_generated > 1:
            self._tpot.observe(decode / (n_generated - 1))
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def on_rejected(self, reason: str) -> None:
        """A request found no room; the reason is a word like `queue_full`."""
        self._rejections.labels(self._model, reason).inc()

    def on_expert_drops(self, choices: int) -> None:
        """So many times a token's chosen expert had no room for it."""
        self._expert_drops.inc(choices)

    def on_expert_loads(self, layers: Sequence[int], experts: np.ndarray, devices: np.ndarray) -> None:
        """Rows of the last steps in each of these layers: [layers, experts], [layers, devices with experts]."""
        for family, rows in ((self._expert_load, experts), (self._device_load, devices)):
            for layer, most in zip(layers, _most_over_mean(rows), strict=True):
                family.labels(self._model, str(layer)).set(most)
        self._balancedness.set(float(np.mean(1 / _most_over_mean(devices))))

    def on_rebalance(self, outcome: str, seconds: float, nbytes: int) -> None:
        """Experts were placed anew: done, given_up or failed after so much work, with so many bytes moved."""
        self._rebalances.labels(self._model, outcome).inc()
        self._moving.inc(seconds)
        self._moved.inc(nbytes)

    def on_corrupted(self) -> None:
        """A request's logits were not finite."""
        self._corrupted.inc()

    def on_compile(self, seconds: float) -> None:
        """A step was compiled."""
        self._compiles.inc()
        self._compile_seconds.inc(seconds)

    def watch_warm(self, is_warm: Callable[[], bool]) -> None:
        """State whether the steps that are compiled behind the server are all there, whenever somebody asks."""
        self._warm.set_function(lambda: float(is_warm()))

    def set_cache_config(self, **labels: object) -> None:
        """State the cache's settings (as vLLM names them: block_size, num_gpu_blocks, ...); once per engine."""
        info = Gauge("vllm:cache_config_info", "Settings of the cache.", list(labels), registry=self.registry)
        info.labels(*(str(value) for value in labels.values())).set(1)

    def _gauge(self, name: str, help: str, prefix: str = "vllm") -> Gauge:
        return Gauge(f"{prefix}:{name}", help, ["model_name"], registry=self.registry).labels(self._model)

    def _by_layer(self, name: str, help: str) -> Gauge:
        return Gauge(f"jaxserve:{name}", help, ["model_name", "layer"], registry=self.registry)

    def _counter(self, name: str, help: str, prefix: str = "vllm") -> Counter:
        return Counter(f"{prefix}:{name}", help, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model)


def _most_over_mean(rows: np.ndarray) -> np.ndarray:
    """Of each layer; 1 where there were none."""
    mean = rows.mean(axis=1)
    return np.divide(rows.max(axis=1), mean, out=np.ones(len(rows)), where=mean > 0)
