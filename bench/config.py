"""Every setting of a load run, once: its flags are made from here."""

import math
from dataclasses import dataclass

from jaxserve.config import setting
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class LoadConfig:
    """What is measured, what is sent and when; names are `vllm bench serve`'s."""

    base_url: str | None = setting(None, "a running server to measure", metavar="URL")
    model: str | None = setting(
        None, "a checkpoint to measure with the engine in this process", metavar="MODEL"
    )
    served_model_name: str | None = setting(None, "model to ask the server for; its first one if not given")
    api_key: str | None = setting(None, "key that the server asks for", metavar="KEY")
    extra_body: dict | None = setting(None, "more fields for every request's body")
    num_prompts: int = setting(100, "requests a run")
    dataset: str | None = setting(
        None, 'lines of {"prompt": ..., "output_len": ...} to send instead of random tokens', metavar="FILE"
    )
    random_input_len: int = setting(128, "tokens of a random prompt")
    random_output_len: int = setting(64, "tokens of an answer")
    random_range_ratio: float = setting(0.0, "random lengths differ from these by up to this part")
    random_vocab_size: int | None = setting(
        None, "random token ids are below this: the model's vocabulary, or 32000 for a server"
    )
    request_rate: tuple[float, ...] = setting(
        (math.inf,), "arrivals a second; several rates are several runs, inf is all at once", metavar="R"
    )
    fixed_arrivals: bool = setting(False, "arrivals evenly spaced instead of a Poisson process")
    max_concurrency: int | None = setting(None, "most requests under way at once")
    num_warmups: int = setting(1, "requests sent first and not counted")
    metric_percentiles: tuple[float, ...] = setting((50, 90, 99), "percentiles to show", metavar="P")
    goodput: tuple[str, ...] = setting(
        (), "count the requests that meet all of these, in ms: ttft:500 tpot:50 e2el:5000", metavar="GOAL"
    )
    output: str | None = setting(None, "write the results as JSON", metavar="FILE")
    plot: str | None = setting(None, "write latency against load as PNG", metavar="FILE")

    def __post_init__(self):
        if (self.base_url is None) == (self.model is None):
            raise ConfigError(
                "name either --base-url of a running server or --model for the engine in this process"
            )
        for name in ("num_prompts", "random_input_len", "random_output_len", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if any(not rate > 0 for rate in self.request_rate):
            raise ConfigError(f"request_rate={self.request_rate} must be above 0")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio={self.random_range_ratio} must be 0 or more and below 1")
        if any(not 0 <= p <= 100 for p in self.metric_percentiles):
            raise ConfigError(f"metric_percentiles={self.metric_percentiles} must be between 0 and 100")
