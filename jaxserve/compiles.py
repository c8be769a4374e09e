"""Counts what XLA compiles, so that a compile while serving cannot pass unseen."""

from collections.abc import Callable

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


def count_compiles(on_compile: Callable[[float], None]) -> Callable[[], None]:
    """Call `on_compile(seconds)` after every compilation of this process, until the function returned is called."""

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == _EVENT:
            on_compile(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)
