"""Rank-aware log and progress: rank 0 speaks, the others only warn.

Progress goes to the terminal as one live line; where standard error is no terminal, a plain line is
written every ten seconds instead, so that log files stay readable and long work is not silent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["ProgressBar", "get_logger", "log_to_file", "process_rank", "track"]

T = TypeVar("T")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Between plain lines of progress, where there is no terminal.
LINE_EVERY_S = 10.0
_NARROW = 80  # columns of a terminal; with fewer the bar is short


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
    """One live progress line on rank 0; without a terminal a plain line every ten seconds.

    Use as a context manager; ``advance(n, text)`` moves it on.

    Args:
        title: what is being done, for example ``"tokenise"``.
        total: number of units, or None when unknown.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        console = Console(file=sys.stderr)
        is_first = process_rank() == 0
        self._live = is_first and console.is_terminal
        self._title, self._total, self._done, self._text = title, total, 0, ""
        # Where the line is too short for all, the text gives way, and the time left stays.
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24 if console.width >= _NARROW else 8),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            _Note(),
            console=console,
            disable=not self._live,
        )
        self._task: TaskID = self._progress.add_task(title, total=total, text="")
        self._ended = threading.Event()
        self._has_spoken = False
        tells = is_first and not self._live
        self._teller = threading.Thread(target=self._tell, daemon=True) if tells else None

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        if self._teller is not None:
            self._teller.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
        self._ended.set()
        if self._teller is not None:
            self._teller.join()

    def advance(self, amount: int = 1, text: str = "") -> None:
        """Move on by `amount` units and show `text` behind the bar."""
        self._done, self._text = self._done + amount, text
        self._progress.update(self._task, advance=amount, text=text)

    def log(self, text: str) -> None:
        """Write a line to the log; the terminal shows it only where no live line can be seen."""
        self._has_spoken = True
        get_logger().info(text, extra={"file_only": self._live})

    def _tell(self) -> None:
        """Say how far it is, again and again, unless something else was said in the meantime.

        In a thread of its own, because a single unit may take minutes.
        """
        start = time.monotonic()
        while not self._ended.wait(LINE_EVERY_S):
            if not self._has_spoken:
                of = "" if self._total is None else f" of {self._total}"
                more = f", {self._text}" if self._text else ""
                passed = round(time.monotonic() - start)
                get_logger().info("%s: %d%s%s (%d s)", self._title, self._done, of, more, passed)
            self._has_spoken = False


class _Note(ProgressColumn):
    """The text behind the bar, cut off where the line ends."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")


def track(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield from `items` while a progress bar counts them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with ProgressBar(title, total) as bar:
        for item in items:
            yield item
            bar.advance()
