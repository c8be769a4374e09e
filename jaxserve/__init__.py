"""jaxserve: a TPU-first inference runtime for large language models, in JAX and Pallas."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.request import CompletionOutput, Delta, Logprob, Request, RequestOutput
    from jaxserve.sampling.params import SamplingParams
    from jaxserve.step import Step

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "Logprob",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Step",
]
_PLACES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "SamplingParams": "sampling.params",
    "Step": "step",
}


def __getattr__(name: str):
    """Import on first use: the command line answers `--help` without starting JAX."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(f"jaxserve.{_PLACES.get(name, 'request')}"), name)
