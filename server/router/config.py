"""Every setting of the router, once: the command line makes its flags from here."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxserve.config import setting
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class RouterConfig:
    """Which workers there are, and how requests are given to them."""

    workers: tuple[str, ...] = setting((), "addresses of workers, like http://10.0.0.1:8000", metavar="URL")
    workers_file: str | None = setting(
        None, "file with an address a line, read again when it changes", metavar="FILE"
    )
    workers_dns: str | None = setting(
        None,
        "http://NAME:PORT: every address that NAME resolves to is a worker, asked again every few seconds",
    )
    worker_api_key: str | None = setting(
        None, "key that the workers ask for, sent instead of the caller's", metavar="KEY"
    )
    tokenizer: str | None = setting(
        None,
        "model whose tokenizer and chat template are used here to see which worker has most of a prompt; "
        "without it a worker is asked for the tokens",
        metavar="MODEL",
    )
    routing_policy: str = setting(
        "cost",
        "cost: where the answer is expected soonest; round-robin: each in turn",
        choices=("cost", "round-robin"),
    )
    retries: int = setting(2, "other workers that a request is given to, one after another, when one fails")
    hedge_after: float | None = setting(
        None, "seconds without a first byte after which a request is also given to a second worker"
    )
    hedge_limit: float = setting(0.05, "largest part of all requests that may be given to a second worker")
    lost_after: float = setting(5.0, "seconds of silence after which a worker counts as gone")
    tpot_target: float | None = setting(
        None,
        "seconds a token that callers are promised; long prompts that would break it are computed on a prefill worker",
    )
    plan_roles: bool = setting(
        False, "move workers between prefill and decode as the mix of prompts and answers changes"
    )

    def __post_init__(self) -> None:
        if not (self.workers or self.workers_file or self.workers_dns):
            raise ConfigError("no workers: give --workers URL..., --workers-file FILE or --workers-dns URL")
        for url in (*self.workers, *filter(None, (self.workers_dns,))):
            check_url(url)
        if self.workers_dns and not urlsplit(self.workers_dns).port:
            raise ConfigError(
                f"workers_dns={self.workers_dns!r} names no port; write it like http://NAME:8000"
            )
        if self.routing_policy not in ("cost", "round-robin"):
            raise ConfigError(f"routing_policy={self.routing_policy!r} is unknown; use cost or round-robin")
        if self.retries < 0:
            raise ConfigError(f"retries={self.retries} must not be negative")
        if not 0 <= self.hedge_limit <= 1:
            raise ConfigError(f"hedge_limit={self.hedge_limit} must be between 0 and 1")
        for name in ("hedge_after", "lost_after", "tpot_target"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be a number of seconds above 0")


def check_url(url: str) -> str:
    """The address as it is kept; ConfigError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a worker; write it like http://10.0.0.1:8000")
    return url.rstrip("/")
