"""Counts what XLA compiles, so that a compile while serving cannot pass unseen."""

from collections.abc import Callable

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


def count_compiles(on_compile: Callable[[float], None]) -> None:
    """Call `on_compile(seconds)` after every compilation of this process from now on."""

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == _EVENT:
            on_compile(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
