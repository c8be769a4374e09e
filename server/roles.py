"""Settings of a worker that hands prompts over, or takes them: the command line makes its flags from here."""

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from jaxserve.config import setting
from jaxserve.errors import ConfigError

ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True)
class RoleConfig:
    """What a worker is for, and how pages reach it from others."""

    role: str | None = setting(
        None,
        "let other workers take prompts from this one, and this one from others; what a router sees it as",
        choices=ROLES,
    )
    prefill_url: tuple[str, ...] = setting(
        (), "workers that compute long prompts for this one, in turn; a router may name others"
    )
    prefill_devices: int = setting(
        0,
        "devices of this process, beside the model's own, on which long prompts are computed (tensor parallel)",
    )
    split_min_tokens: int = setting(
        256, "prompts of which fewer tokens are missing in the cache are computed here all the same"
    )
    kv_transfer: str = setting(
        "jax",
        "how pages come here: from device to device, or as a plain stream by way of host memory",
        choices=("jax", "tcp"),
    )
    kv_transfer_host: str = setting("127.0.0.1", "address of this machine at which other workers fetch pages")
    kv_layer_groups: int = setting(
        4,
        "about so many programs compute a chunk of a prompt here, one after the other: the pages of their layers leave "
        "while the next ones run; 1 if all are to leave together",
    )
    kv_lease_seconds: float = setting(
        10.0, "seconds that pages are kept for a worker that does not say it is alive"
    )
    kv_silence_timeout: float = setting(
        5.0, "seconds without a word or a block after which a prompt is computed here instead"
    )

    def __post_init__(self):
        if self.role is not None and self.role not in ROLES:
            raise ConfigError(f"role={self.role!r} is unknown; use one of {', '.join(ROLES)}")
        if self.prefill_url and self.role not in ("decode", "both"):
            raise ConfigError("prefill_url has no effect without role=decode or role=both; set one of them")
        if self.prefill_devices < 0:
            raise ConfigError(f"prefill_devices={self.prefill_devices} must be at least 0")
        if self.prefill_devices and (self.prefill_url or self.role not in ("decode", "both")):
            raise ConfigError(
                "prefill_devices is for prompts that this process computes itself: it needs role=decode or role=both, "
                "and no prefill_url"
            )
        if self.role is None:
            idle = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
            if idle:
                raise ConfigError(
                    f"{', '.join(idle)}: no effect without a role; set role to one of {', '.join(ROLES)}"
                )
        for url in self.prefill_url:
            if not is_address(url):
                raise ConfigError(f"prefill_url={url!r} is no address; write http://HOST:PORT")
        for name in ("kv_lease_seconds", "kv_silence_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of seconds above 0")
        for name in ("split_min_tokens", "kv_layer_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


def is_address(url: str) -> bool:
    """Whether a worker can be asked there: http or https, a host, perhaps a port and a path, and nothing else."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port out of range, half of an IPv6 address
        return False
    return bool(known) and url.isascii() and url.isprintable() and not set(url) & set(" @?#")
