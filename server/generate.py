"""`jaxserve generate`: prompts from arguments, stdin or JSON lines, completed in this process."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, RequestError

_OWN_FIELDS = ("id", "prompt", "messages")  # of an input row; all others are sampling parameters


def run(
    config: EngineConfig,
    prompts: list[str],
    source: str | None,
    target: str | None,
    sampling: dict[str, Any],
    *,
    chat: bool,
) -> None:
    """Complete every row: as text to stdout, or to `target` as JSON lines in the order of the input."""
    rows = read_rows(prompts, source, chat)
    params = [sampling_of(number, row, sampling) for number, row in enumerate(rows)]
    llm = LLM(config)
    inputs = [_prompt(row, llm.tokenizer) for row in rows]
    outputs = llm.generate(inputs, params, use_tqdm=target is not None and sys.stderr.isatty())
    with _opened(target, "w") as file:
        for row, output in zip(rows, outputs, strict=True):
            if target is None:
                lines = [choice.text for choice in output.outputs]
            else:
                lines = [json.dumps(_result(row, output), ensure_ascii=False)]
            file.writelines(line + "\n" for line in lines)


def read_rows(prompts: list[str], source: str | None, chat: bool) -> list[dict[str, Any]]:
    """The requests as dicts with `prompt` or `messages`; a bare text is a user's message when `chat`."""
    if prompts and source:
        raise ConfigError("prompts were given both as arguments and by --input; leave one out")
    if source:
        with _opened(source, "r") as file:
            rows = [_row(number, line) for number, line in enumerate(file, 1) if line.strip()]
    else:
        if not prompts and sys.stdin.isatty():
            raise ConfigError("no prompts: give them as arguments, on stdin (one a line), or by --input FILE")
        texts = prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        rows = [{"prompt": text} for text in texts]
    if chat:
        rows = [
            {"messages": [{"role": "user", "content": row.pop("prompt")}], **row} if "prompt" in row else row
            for row in rows
        ]
    if not rows:
        raise ConfigError("the input holds no prompt")
    return rows


def _row(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {number} of the input is not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f"line {number} of the input must be an object with either a prompt or messages")
    return row


def sampling_of(number: int, row: dict[str, Any], sampling: dict[str, Any]) -> SamplingParams:
    """A row's own fields over those of the command line; ConfigError naming the one that cannot be."""
    own = {name: value for name, value in row.items() if name not in _OWN_FIELDS}
    unknown = own.keys() - {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown:
        raise ConfigError(
            f"request {number + 1}: {min(unknown)} is neither {', '.join(_OWN_FIELDS)} nor a sampling parameter"
        )
    try:
        return SamplingParams(**sampling | own)
    except RequestError as error:
        raise ConfigError(f"request {number + 1}: {error}") from None


def _prompt(row: dict[str, Any], tokenizer) -> Any:
    """What `LLM.generate` takes: text, or token ids for messages."""
    if "messages" in row:
        token_ids, _ = tokenizer.encode_chat(row["messages"])
        return token_ids
    return row["prompt"]


def _result(row: dict[str, Any], output) -> dict[str, Any]:
    given = {name: row[name] for name in _OWN_FIELDS if name in row}
    choices = [
        {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
        for choice in output.outputs
    ]
    return {**given, "outputs": choices, "prompt_tokens": len(output.prompt_token_ids)}


@contextlib.contextmanager
def _opened(path: str | None, mode: str) -> Iterator[Any]:
    """The file at `path`; None and - are the standard streams."""
    if path in (None, "-"):
        yield sys.stdin if mode == "r" else sys.stdout
        return
    try:
        file = open(path, mode, encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from None
    with file:
        yield file
