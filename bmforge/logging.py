"""Rank-aware log and progress: rank 0 speaks, the others only warn.

Progress goes to the terminal as one live line; where standard output is not a terminal a plain line
is printed now and then instead, so that log files stay readable.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressBar", "get_logger", "log_to_file", "process_rank", "track"]

T = TypeVar("T")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def process_rank() -> int:
    """Return this process's global rank as the launcher set it (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def get_logger() -> logging.Logger:
    """Return bmforge's logger; on the first call give it a handler for standard error."""
    logger = logging.getLogger("bmforge")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        rank = process_rank()
        prefix = "" if rank == 0 else f"[rank {rank}] "
        handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
        handler.addFilter(lambda record: not getattr(record, "file_only", False))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.propagate = False
    return logger


def log_to_file(path: str | Path) -> logging.Handler:
    """Append the log, plain and with times, to `path`; return the handler to remove it later."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    get_logger().addHandler(handler)
    return handler


class ProgressBar:
    """One live progress line on rank 0, silent elsewhere and where nobody is watching.

    Use as a context manager; ``advance(n, text)`` moves it on.

    Args:
        title: what is being done, for example ``"tokenise"``.
        total: number of units, or None when unknown.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        console = Console(file=sys.stderr)
        self._live = process_rank() == 0 and console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._task: TaskID = self._progress.add_task(title, total=total, text="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, amount: int = 1, text: str = "") -> None:
        """Move on by `amount` units and show `text` behind the bar."""
        self._progress.update(self._task, advance=amount, text=text)

    def log(self, text: str) -> None:
        """Write a line to the log; the terminal shows it only where no live line can be seen."""
        get_logger().info(text, extra={"file_only": self._live})


def track(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield from `items` while a progress bar counts them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with ProgressBar(title, total) as bar:
        for item in items:
            yield item
            bar.advance()
