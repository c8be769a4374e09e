"""What is counted of prompts that come from other workers, or go there."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = tuple(m * 10.0**e for e in range(-3, 2) for m in (1, 2, 5))
REASONS = (
    "incompatible",
    "refused",
    "unreachable",
    "silent",
    "transfer",
    "corrupt",
    "no_room",
    "engine",
    "expired",
)


class HandoverMetrics:
    """Bytes, seconds, failures and expired leases, in the registry of the engine's metrics."""

    def __init__(self, registry: CollectorRegistry, label: str):
        """`label` is what the metrics call the model."""

        def counter(name: str, help: str) -> Counter:
            return Counter(f"jaxserve:{name}", help, ["model_name"], registry=registry).labels(label)

        self._sent = counter("kv_transfer_sent_bytes", "Bytes of cached rows offered to other workers.")
        self._received = counter(
            "kv_transfer_received_bytes", "Bytes of cached rows fetched and found in order."
        )
        self._hidden = counter(
            "kv_transfer_hidden_bytes", "Of those, fetched while the prompt was still computed."
        )
        self._tokens = counter("kv_transfer_tokens", "Prompt tokens that came from other workers.")
        self._expiries = counter("kv_transfer_lease_expiries", "Leases that were not renewed in time.")
        self._seconds = Histogram(
            "jaxserve:kv_transfer_seconds",
            "From asking for a prompt to having all of it.",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        ).labels(label)
        self._exposed = Histogram(
            "jaxserve:kv_transfer_exposed_seconds",
            "Of that, after the prompt was computed: what the transfer adds to the first token.",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        ).labels(label)
        self._failures = Counter(
            "jaxserve:kv_transfer_failures",
            "Prompts that did not come from another worker and were computed here.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._label = label
        for reason in REASONS:
            self._failures.labels(label, reason)

    def on_sent(self, size: int) -> None:
        self._sent.inc(size)

    def on_received(self, *, tokens: int, size: int, hidden: int, seconds: float, exposed: float) -> None:
        """A whole prompt has come."""
        self._tokens.inc(tokens)
        self._received.inc(size)
        self._hidden.inc(hidden)
        self._seconds.observe(seconds)
        self._exposed.observe(exposed)

    def on_failure(self, reason: str) -> None:
        """A prompt did not come; the reason is one of REASONS."""
        self._failures.labels(self._label, reason).inc()

    def on_expiry(self) -> None:
        self._expiries.inc()
