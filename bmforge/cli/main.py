"""Entry point: runs the command, and prints errors as sentences instead of tracebacks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bmforge import __version__
from bmforge.errors import BmforgeError, ConfigError
from bmforge.interrupts import before_output

if TYPE_CHECKING:  # imported by `_run`, where Ctrl-C is handled
    from bmforge.cli.commands import Command

__all__ = ["main"]

_PIPE_CLOSED = 141  # 128 + SIGPIPE
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bmforge COMMAND ...`` and return the exit status.

    The status is 0 on success, 2 for a user error, and 130 if the command was interrupted. As in
    other programs, it is 141 if the program that reads the output has ended (``bmforge info NAME |
    head``).
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # raises write errors here instead of at interpreter exit
    except BrokenPipeError:
        _drop_output()
        return _PIPE_CLOSED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich turns it into SystemExit
            return _PIPE_CLOSED
        raise


def _run(arguments: list[str]) -> int:
    """Run a command; print an error to standard error as a sentence."""
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"bmforge {__version__}")
        return 0
    try:
        with before_output():
            from bmforge.cli.commands import COMMANDS, run_command
            from bmforge.cli.foreign_options import suggest_command

        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_overview(COMMANDS))
            return 0
        if arguments[0] not in COMMANDS:
            raise ConfigError(
                f"unknown command {arguments[0]!r}.{suggest_command(arguments[0], COMMANDS)} "
                f"Commands: {', '.join(COMMANDS)}."
            )
        run_command(arguments[0], arguments[1:])
        return 0
    except BmforgeError as error:
        from bmforge.cli.option_names import name_options, options_of

        _say(name_options(str(error), options_of(arguments[0]), arguments[1:]))
        return 2
    except OSError as error:
        if error.errno in _DISK_FULL:
            _say(
                f"the disk is full: {error}. Free disk space and run the same command "
                "again; completed work is kept."
            )
        elif error.filename is not None:
            name = error.filename if error.filename2 is None else error.filename2
            _say(
                f"{error.strerror}: {str(name)!r}. Check that the path exists and that you "
                "may read and write it, or choose another path."
            )
        else:
            raise
        return 2
    except KeyboardInterrupt as stop:
        message = str(stop) or "stopped."
        if _is_first_to_report(message):
            print(message, file=sys.stderr)
        return 130
    finally:
        _leave_process_group()


def _say(problem: str) -> None:
    from bmforge.logging import process_rank

    rank = process_rank()
    if _is_first_to_report(problem):
        print(f"{f'[rank {rank}] ' if rank else ''}error: {problem}", file=sys.stderr)


def _is_first_to_report(text: str) -> bool:
    """Return True if this torchrun process is the first to report a message.

    Other processes do not print the message. The error directories of all processes have a common
    parent, in which a file marks the message as reported.
    """
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own:
        return True
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        (Path(own).parent.parent / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _drop_output() -> None:
    """Redirect standard output to the null device, because its reader has closed the pipe."""
    with contextlib.suppress(
        OSError, ValueError
    ):  # stdout may be replaced by an object without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave_process_group() -> None:
    """Destroy the process group, if this process is in one, without importing torch."""
    parallel = sys.modules.get("bmforge.parallel")
    if parallel is not None and hasattr(parallel, "shutdown_distributed"):
        parallel.shutdown_distributed()


def _overview(commands: Mapping[str, Command]) -> str:
    lines = [f"bmforge {__version__}", "", "usage: bmforge COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<12}{command.about}" for name, command in commands.items()]
    lines += ["", "`bmforge COMMAND --help` lists a command's options."]
    return "\n".join([*lines, "Switches are enabled with --NAME and disabled with --no-NAME."])
