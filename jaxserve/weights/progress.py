"""A progress bar with bytes per second on a terminal's stderr, and nothing anywhere else."""

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A context in which `advance(nbytes)` moves the bar towards `total` bytes."""

    def __init__(self, total: int, label: str = "Loading weights", visible: bool = True):
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not (visible and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)
