"""The entry point: finds the command, and shows errors as sentences."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence

from bmforge import __version__
from bmforge.cli.commands import COMMANDS, Command, run_command
from bmforge.errors import BmforgeError, ConfigError, suggest
from bmforge.logging import process_rank

__all__ = ["main"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bmforge COMMAND ...`` and return the exit status: 0, or 2 for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"bmforge {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(COMMANDS))
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise ConfigError(
                f"unknown command {arguments[0]!r}.{suggest(arguments[0], COMMANDS)} "
                f"Commands: {', '.join(COMMANDS)}."
            )
        run_command(arguments[0], arguments[1:])
        return 0
    except BmforgeError as error:
        rank = process_rank()
        print(f"{f'[rank {rank}] ' if rank else ''}error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        print(
            f"error: the disk is full: {error}. Make room and run the same command again; what was "
            "finished before is still there.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    finally:
        _leave_the_others()


def _leave_the_others() -> None:
    """Part from other processes, where any were joined: nothing is imported to do so."""
    parallel = sys.modules.get("bmforge.parallel")
    if parallel is not None and hasattr(parallel, "shutdown_distributed"):
        parallel.shutdown_distributed()


def _overview(commands: Mapping[str, Command]) -> str:
    lines = [f"bmforge {__version__}", "", "usage: bmforge COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<12}{command.about}" for name, command in commands.items()]
    lines += ["", "`bmforge COMMAND --help` lists a command's options."]
    return "\n".join([*lines, "A switch is on as --NAME and off as --no-NAME."])
