"""What compiling leaves behind: a count, so that a compile while serving cannot pass unseen, and memory."""

import ctypes
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


def give_back_memory() -> None:
    """Let the C library return what the compiler freed: it keeps 100 MB and more of every step otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)
