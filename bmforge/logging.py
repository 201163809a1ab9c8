"""Rank-aware logging and progress bars: rank 0 logs everything, other ranks only warnings.

On a terminal, progress is one live line. Otherwise a line is logged every ten seconds, so that log
files stay readable and long work does not look stuck.
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

__all__ = ["ProgressBar", "get_logger", "log_loading", "log_to_file", "process_rank", "track"]

T = TypeVar("T")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Seconds between plain progress lines without a terminal.
LINE_EVERY_S = 10.0
_NARROW = 80  # terminal columns below which the bar is short


def process_rank() -> int:
    """Return this process's global rank from the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def get_logger() -> logging.Logger:
    """Return bmforge's logger; the first call adds a handler for standard error."""
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


def log_loading() -> None:
    """Log on rank 0 that PyTorch is being imported, unless it is imported already.

    The import takes seconds, and up to a minute on a busy machine. Like all messages, this one is
    written to standard error also without a terminal, so that log files show what a job does.
    """
    if "torch" not in sys.modules:
        get_logger().info("loading PyTorch ...")


def log_to_file(path: str | Path) -> logging.Handler:
    """Append the log to a file, as plain text with timestamps; return the log handler."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    get_logger().addHandler(handler)
    return handler


class ProgressBar:
    """Progress on rank 0: a live line on a terminal, otherwise a log line every ten seconds.

    Use it as a context manager and call ``advance(n, text)``.

    Args:
        title: name of the work, such as ``"tokenize"``.
        total: number of units of work; None if unknown.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        console = Console(file=sys.stderr)
        is_first = process_rank() == 0
        self._live = is_first and console.is_terminal
        self._title, self._total, self._done, self._text = title, total, 0, ""
        # On a narrow terminal the text is cut, and the remaining time stays visible.
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
        has_plain_lines = is_first and not self._live
        self._reporter = (
            threading.Thread(target=self._report, daemon=True) if has_plain_lines else None
        )

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        if self._reporter is not None:
            self._reporter.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
        self._ended.set()
        if self._reporter is not None:
            self._reporter.join()

    def advance(self, amount: int = 1, text: str = "") -> None:
        """Advance by `amount` units and show `text` after the bar."""
        self._done, self._text = self._done + amount, text
        self._progress.update(self._task, advance=amount, text=text)

    def log(self, text: str) -> None:
        """Write a line to the log file, and also to standard error unless a live line is shown."""
        self._has_spoken = True
        get_logger().info(text, extra={"file_only": self._live})

    def _report(self) -> None:
        """Log the progress at intervals, unless something else was logged in the meantime.

        This runs in its own thread, because a single unit of work may take minutes.
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
    """Progress bar column with a text after the bar, truncated at the end of the line."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")


def track(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield the elements of `items` and count them in a progress bar."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with ProgressBar(title, total) as bar:
        for item in items:
            yield item
            bar.advance()
