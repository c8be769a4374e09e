"""Every setting of the commands on checkpoints, `quantize` and `eval`, once: flags are made from these fields."""

from dataclasses import dataclass

from jaxserve.config import CACHE_DTYPES, setting
from jaxserve.errors import ConfigError

FORMATS = ("fp8", "int8", "int4", "mxfp4", "nvfp4")
METHODS = ("rtn", "gptq", "awq", "smoothquant", "rotate", "spinquant", "mr-gptq")
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class QuantizeConfig:
    """How a model is quantised."""

    source: str  # anything that can be served
    format: str = setting("int4", "what weights are stored as", choices=FORMATS)
    method: str = setting("gptq", "how they are rounded", choices=METHODS)
    group_size: int = setting(128, "weights that share a scale, in int4: 32, 64 or 128")
    calibration: str | None = setting(
        None, "text to calibrate with, .txt or .jsonl (default: a short one of our own)", metavar="FILE"
    )
    samples: int = setting(32, "windows of that text at most; every fourth is kept to judge by")
    length: int = setting(256, "tokens of a window")
    eval_text: str | None = setting(None, "text to judge by instead", metavar="FILE")
    learning_steps: int = setting(12, "steps in which spinquant learns its rotation")
    seed: int = setting(0, "of random rotations and of the order of documents")

    def __post_init__(self):
        for name, known in (("format", FORMATS), ("method", METHODS), ("group_size", GROUP_SIZES)):
            if (found := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={found!r} is unknown; use one of {', '.join(map(str, known))}")
        for name, least in (("samples", 4), ("length", 2), ("learning_steps", 1)):
            if (found := getattr(self, name)) < least:
                raise ConfigError(f"{name}={found} must be at least {least}")


@dataclass(frozen=True)
class EvalConfig:
    """What is measured on what."""

    model: str
    text: str | None = setting(
        None, "what to predict, .txt or .jsonl (default: our own text)", metavar="FILE"
    )
    reference: str | None = setting(None, "a model with the same tokenizer to compare with", metavar="MODEL")
    context: int = setting(512, "tokens of a window; windows know nothing of each other")
    max_tokens: int | None = setting(None, "of the text at most")
    dtype: str = setting("float32", "of the computation", choices=("float32", "bfloat16", "float16"))
    kv_cache_dtype: str = setting(
        "auto",
        "of cached keys and values or latents; the reference's are those of the computation",
        choices=CACHE_DTYPES,
    )
    output: str | None = setting(None, "write the results as JSON", metavar="FILE")

    def __post_init__(self):
        if not self.model:
            raise ConfigError("no model was named; give a folder, a .gguf file or a hub name")
        for name, least in (("context", 2), ("max_tokens", 1)):
            if (found := getattr(self, name)) is not None and found < least:
                raise ConfigError(f"{name}={found} must be at least {least}")
