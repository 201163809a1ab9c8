"""Thin commands: each parses its arguments and calls one function.

Start reading at `commands.py`.
"""

from bmforge.cli.main import main

__all__ = ["main"]
