"""Command lines run inside the pool's workers: a case costs no start of a process."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bmforge.cli import main
from bmforge.testing import run_distributed


@dataclass(frozen=True)
class Said:
    """Exit status, standard output and standard error of one process."""

    status: int
    out: str
    err: str


@contextlib.contextmanager
def largest_file(limit_bytes: int | None) -> Iterator[None]:
    """Let this process write no file beyond a size: what a full disk does, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def call(arguments: Sequence[str], limit_bytes: int | None = None) -> Said:
    """Run `bmforge ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    logging.getLogger("bmforge").handlers.clear()  # so that the log goes where it is caught
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with largest_file(limit_bytes):
                status = main(arguments)
        except SystemExit as stop:  # from the parser of the options
            status = int(stop.code or 0)
    logging.getLogger("bmforge").handlers.clear()
    return Said(status, out.getvalue(), err.getvalue())


def bmforge(*arguments: str | Path, world: int = 1, limit_bytes: int | None = None) -> list[Said]:
    """Run a command on `world` processes; return what each said."""
    return run_distributed(call, world, [str(a) for a in arguments], limit_bytes)


def assert_refused(said: Sequence[Said], *words: str) -> None:
    """Every process ended with 2 and one message that holds all the words, and no traceback."""
    for one in said:
        assert one.status == 2, one
        assert "Traceback" not in one.err, one.err
        told = one.err + one.out
        flat = " ".join(told.replace("│", " ").split())
        for word in words:
            assert word in flat, told
    texts = {one.err.partition("error: ")[2] for one in said}
    assert len(texts) == 1, texts


def files_below(folder: Path) -> dict[str, bytes]:
    """Path and contents of every file, to see that nothing was lost or written."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
