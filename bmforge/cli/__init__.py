"""Thin commands: each parses its arguments and calls one function.

Start reading at `commands.py`, the table of commands; `options.py` has their options, and each
command its file, which is imported when there is something to run.
"""

from bmforge.cli.main import main

__all__ = ["main"]
