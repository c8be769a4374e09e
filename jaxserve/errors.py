"""The errors a user can cause: each says what was asked, what was found and what to do."""


class JaxserveError(Exception):
    """Anything jaxserve refuses on purpose; everything else is a bug of ours."""


class ConfigError(JaxserveError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(JaxserveError):
    """A checkpoint that cannot be read: names the tensor, the file, what was expected and what was found."""

    def __init__(
        self, problem: str, *, tensor: str = "", file: str = "", expected: str = "", found: str = ""
    ):
        self.tensor, self.file, self.expected, self.found = tensor, file, expected, found
        details = [
            f"{name} {value}"
            for name, value in (("tensor", tensor), ("file", file), ("expected", expected), ("found", found))
            if value
        ]
        super().__init__("; ".join([problem, *details]))


class RequestError(JaxserveError):
    """A request that can never be served as it stands (HTTP 400, or 404 for a model that is not here).

    `param` names the offending field, `code` is the machine-readable reason of the OpenAI error body.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        self.param, self.code = param, code
        super().__init__(message)


class OverloadedError(JaxserveError):
    """No room for this request now (HTTP 429 when the queue is full, 503 while draining or starting).

    `retry_after` is in seconds.
    """

    def __init__(self, message: str, *, retry_after: float, draining: bool = False):
        self.retry_after, self.draining = retry_after, draining
        super().__init__(message)


class EngineError(JaxserveError):
    """The engine failed under a request that was in order (HTTP 500)."""
