"""Rendering a template that came with a request: in a process of its own that cannot run long or grow large.

Jinja's sandbox keeps a template from Python's objects, but not from loops in loops or from doubling a string
forty times; only the operating system can.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.text.jinja_environment import compile_template, refusal, render_template

CPU_SECONDS = 1
WALL_SECONDS = 10  # the machine may be busy
MEMORY_BYTES = 1 << 30  # address space, the interpreter included
MAX_SOURCE, MAX_TEXT = 1 << 18, 1 << 22  # characters
PROGRAM = "from jaxserve.text.untrusted_template import main; main()"


def render_untrusted(source: str, variables: Mapping[str, Any]) -> str:
    """What the template writes; RequestError when it fails, takes too long or writes too much."""
    if len(source) > MAX_SOURCE:
        raise refusal(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are accepted")
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps([source, variables]).encode(),
            capture_output=True,
            timeout=WALL_SECONDS,
        )
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as why:
        raise refusal(
            f"the chat template did not finish within {CPU_SECONDS} s of computing and {MEMORY_BYTES >> 20} MiB"
        ) from why
    if answer["refusal"] is not None:
        raise refusal(answer["refusal"])
    return answer["text"]


def main() -> None:
    """Reads [source, variables] as JSON, writes {text, refusal}; killed by the system beyond its limits."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, variables = json.load(sys.stdin)
    text, why = None, None
    try:
        text = render_template(compile_template(source), variables)
        if len(text) > MAX_TEXT:
            text, why = (
                None,
                f"the chat template wrote {len(text)} characters; at most {MAX_TEXT} are accepted",
            )
    except RequestError as refused:
        why = str(refused)
    json.dump({"text": text, "refusal": why}, sys.stdout)
