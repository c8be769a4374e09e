"""Flags that people bring from vLLM and SGLang and that mean nothing here: each with the reason why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignFlag:
    """`harmless` is True when leaving the flag out changes no answer, or the values for which that holds."""

    names: tuple[str, ...]
    reason: str
    takes_value: bool = True
    harmless: bool | tuple[str, ...] = ()


def _switch(*names: str, reason: str, harmless: bool = False) -> ForeignFlag:
    return ForeignFlag(names, reason, takes_value=False, harmless=harmless or ())


_NO_CONTEXT = (
    "a sequence's cache is on one group of devices; --prefill-context-parallel-size divides its prompt"
)
_NO_TOOLS = "the answer's text is handed on as it is; tool calls and reasoning are not parsed out of it"
_NO_OFFLOAD = "weights and cached pages stay on the device"
_NO_LORA = "adapters are not applied; merge them into the checkpoint"
_NO_DRAFTS = "there is no speculative decoding"
_FORMAT = "the checkpoint's own files say how it is stored"

_SPECULATIVE = (
    "--speculative-config",
    "--speculative-algorithm",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)

FOREIGN = (
    ForeignFlag(("--decode-context-parallel-size", "-dcp"), _NO_CONTEXT, harmless=("1",)),
    ForeignFlag(("--all2all-backend",), "rows go by the device's own all-to-all"),
    _switch("--enable-dbo", reason="a step is one batch; its shared experts run while rows travel"),
    ForeignFlag(
        ("--distributed-executor-backend",),
        "start jaxserve on every host with --nnodes and --node-rank",
        harmless=("mp", "uni"),
    ),
    ForeignFlag(("--dist-init-addr",), "use --master-addr and --master-port"),
    _switch("--headless", reason="a --node-rank above 0 answers no requests", harmless=True),
    ForeignFlag(("--tool-call-parser", "--reasoning-parser", "--reasoning-config"), _NO_TOOLS),
    _switch("--enable-auto-tool-choice", reason=_NO_TOOLS),
    ForeignFlag(
        ("--kv-transfer-config", "--kv-events-config", "--disaggregation-mode"),
        "workers with --role prefill and --role decode hand pages over, and jaxserve route finds them",
    ),
    ForeignFlag(("--cpu-offload-gb",), _NO_OFFLOAD, harmless=("0",)),
    _switch("--enable-hierarchical-cache", reason=_NO_OFFLOAD),
    _switch("--enable-lora", reason=_NO_LORA),
    ForeignFlag(("--lora-modules", "--lora-paths", "--max-loras", "--max-lora-rank"), _NO_LORA),
    ForeignFlag(_SPECULATIVE, _NO_DRAFTS),
    ForeignFlag(("--load-format",), _FORMAT, harmless=("auto",)),
    ForeignFlag(("--quantization", "-q"), _FORMAT),
    ForeignFlag(
        ("--device",), "JAX picks the device; JAX_PLATFORMS=cpu, tpu or cuda in the environment overrides it"
    ),
    ForeignFlag(
        ("--swap-space",),
        "a preempted request is computed again, never swapped out (gone from vLLM too)",
        harmless=True,
    ),
    ForeignFlag(("--attention-backend",), "the kernel is chosen by device and shape"),
    ForeignFlag(
        ("--prefix-caching-hash-algo",), "pages are keyed by a cryptographic hash, always", harmless=True
    ),
    _switch(
        "--trust-remote-code",
        reason="no code of a checkpoint is ever run; architectures are built in",
        harmless=True,
    ),
    _switch(
        "--enforce-eager",
        reason="every step is compiled, once for each shape bucket, at the start",
        harmless=True,
    ),
    _switch("--enable-chunked-prefill", reason="prompts always go in chunks", harmless=True),
    _switch(
        "--no-enable-chunked-prefill",
        reason="prompts always go in chunks; a larger --max-num-batched-tokens makes longer ones",
    ),
    _switch(
        "--disable-log-requests", "--no-enable-log-requests", reason="requests are not logged", harmless=True
    ),
    _switch("--enable-prompt-tokens-details", reason="usage always has cached_tokens", harmless=True),
)
