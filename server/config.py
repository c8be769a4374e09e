"""Every setting of the HTTP server, once: the command line makes its flags from here."""

from dataclasses import dataclass, fields
from pathlib import Path

from jaxserve.config import setting
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """Where and to whom the server answers; names are vLLM's where the meaning is the same."""

    host: str = setting("0.0.0.0", "address to listen on")
    port: int = setting(8000, "port to listen on")
    served_model_name: tuple[str, ...] = setting(
        (), "names the model answers to; the first one is in the answers (default: the model as it was named)"
    )
    api_key: tuple[str, ...] = setting(
        (), "keys of which a caller must show one, on every route but /health, /livez and /readyz"
    )
    root_path: str = setting("", "path under which a proxy publishes the server")
    ssl_keyfile: str | None = setting(None, "private key for TLS")
    ssl_certfile: str | None = setting(None, "certificate for TLS")
    allowed_origins: tuple[str, ...] = setting(
        (), "origins whose browser pages may call the server; * for any"
    )
    sse_keep_alive_interval: float = setting(
        15.0,
        "seconds of silence in a stream after which a comment is sent, so that proxies keep it open; 0: never",
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests are given to finish when the server is told to stop"
    )
    chat_template: str | None = setting(
        None, "chat template to use instead of the model's: a file, or the text"
    )
    trust_request_chat_template: bool = setting(False, "let requests bring their own chat_template")
    allow_special_tokens_in_content: bool = setting(
        False,
        "read special tokens written in user messages as such; any user can then forge system turns",
    )
    trace_file: str | None = setting(
        None, "write each request's timeline there, as JSON lines", metavar="FILE"
    )
    otlp_endpoint: str | None = setting(
        None, "send each request's timeline to this OpenTelemetry collector (OTLP over HTTP)", metavar="URL"
    )
    max_body_bytes: int = setting(16 * 2**20, "largest request body; bigger ones are answered 413")
    uvicorn_log_level: str = setting(
        "info",
        "how much the HTTP layer logs; info has a line for each request",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )

    def __post_init__(self):
        for f in fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(
                    f"{f.name}={getattr(self, f.name)!r} is unknown; use one of {', '.join(choices)}"
                )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is none; use 1 to 65535, or 0 for any free one")
        for name in ("sse_keep_alive_interval", "shutdown_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of seconds, 0 or more")
        if self.max_body_bytes < 1024:
            raise ConfigError(
                f"max_body_bytes={self.max_body_bytes} would refuse every request; use 1024 or more"
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile; give both or neither")
        if not all(self.api_key):
            raise ConfigError("api_key has an empty key, which anybody can show; remove it")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"root_path={self.root_path!r} must start with / and not end with it, like /llm"
            )

    def template_text(self) -> str | None:
        """The text of `chat_template`, read from the file if it names one."""
        if self.chat_template is None or "{" in self.chat_template or "\n" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).expanduser().read_text(encoding="utf-8")
        except OSError as why:
            raise ConfigError(
                f"chat_template={self.chat_template!r} is neither a template nor a file that can be read ({why})"
            ) from why
