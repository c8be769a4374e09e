"""What the router counts, for Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.router.worker import Worker

_SECONDS = tuple(m * 10.0**e for e in range(-3, 2) for m in (1, 2, 4, 6, 8))


class RouterMetrics:
    """Counters under `jaxserve_router:`; those of a worker carry its address."""

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        counter = self._counter
        self.requests = counter("requests", "Requests that came.", "path", "status")
        self._given = counter("requests_given", "Times a request was given to a worker.", "worker")
        self._failed = counter("requests_failed", "Times a worker failed a request.", "worker")
        self._again = counter("requests_again", "Requests given to another worker.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests.", "worker")
        self._predicted = counter(
            "predicted_hit_tokens", "Of those, expected in the worker's cache.", "worker"
        )
        self._real = counter("real_hit_tokens", "Of those, found there.", "worker")
        self._hit_error = counter("hit_error_tokens", "Sum of the differences, without sign.", "worker")
        self._split = counter("split_decisions", "Whether a prompt is computed elsewhere, and why.", "reason")
        self._moves = counter("role_moves", "Workers that were given another role.", "role")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From giving a request to its first token."
        )
        self._error = self._histogram(
            "time_to_first_token_error_seconds", "By how much that was mispredicted."
        )

    def follow(self, workers: Callable[[], Iterable[Worker]], clock: Callable[[], float]) -> None:
        """Show what the workers are like whenever somebody asks."""
        self.registry.register(_Workers(workers, clock))

    def on_given(self, worker: str) -> None:
        self._given.labels(worker).inc()

    def on_failed(self, worker: str) -> None:
        self._failed.labels(worker).inc()

    def on_again(self, reason: str) -> None:
        """A request was given to another worker: a `retry`, a `hedge`, or it was `continued` in the middle."""
        self._again.labels(reason).inc()

    def on_first_token(self, worker: str, predicted: float, real: float) -> None:
        self._ttft.labels(worker).observe(real)
        self._error.labels(worker).observe(abs(real - predicted))

    def on_answered(self, worker: str, prompt: int, predicted_hit: int, real_hit: int) -> None:
        self._prompt.labels(worker).inc(prompt)
        self._predicted.labels(worker).inc(predicted_hit)
        self._real.labels(worker).inc(real_hit)
        self._hit_error.labels(worker).inc(abs(predicted_hit - real_hit))

    def on_split(self, reason: str) -> None:
        self._split.labels(reason).inc()

    def on_move(self, role: str) -> None:
        self._moves.labels(role).inc()

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jaxserve_router:{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(
            f"jaxserve_router:{name}", help, ["worker"], registry=self.registry, buckets=_SECONDS
        )


class _Workers(Collector):
    """Gauges that are read off the workers."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], clock: Callable[[], float]):
        self._workers, self._clock = workers, clock

    def collect(self) -> Iterable[GaugeMetricFamily]:
        state = _gauge("worker_state", "1 for the state that a worker is in.", "worker", "role", "state")
        breaker = _gauge("worker_breaker_open", "1 while a worker is left alone for failing.", "worker")
        pages = _gauge("worker_pages", "Cache pages that a worker can find.", "worker")
        running = _gauge("worker_requests", "Requests that a worker has.", "worker")
        resyncs = _gauge("worker_resyncs", "Times its cache events had a gap.", "worker")
        for worker in self._workers():
            state.add_metric([worker.url, worker.role, "leaving" if worker.leaving else worker.state], 1)
            breaker.add_metric([worker.url], worker.breaker.state(self._clock()) == "open")
            pages.add_metric([worker.url], len(worker.mirror.pages))
            running.add_metric([worker.url], worker.requests)
            resyncs.add_metric([worker.url], worker.resyncs)
        return [state, breaker, pages, running, resyncs]


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jaxserve_router:{name}", help, labels=labels)
