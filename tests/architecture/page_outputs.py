"""Compares the output that a page shows with the output of the commands before it.

A `text` block right after commands that are run is their output: the commands must print each of
its lines, apart from numbers, directories, processors and lines with "...".
`<!-- not run: reason -->` before the block excludes it.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")
FOLDER = re.compile(r"/\S+/")
# The start of a run names the machine's own processor: "on 1 x AMD EPYC; run directory".
PROCESSOR = re.compile(r"(?<= on )\d+ x [^;]+(?=; run directory )")


def normalize(line: str) -> str:
    """Return a line without its numbers, processors, absolute directories and repeated spaces."""
    return " ".join(NUMBER.sub("#", FOLDER.sub("", PROCESSOR.sub("#", line))).split())


def unprinted_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a page's block that the commands did not print."""
    lines = {normalize(line) for line in re.split(r"[\r\n]", printed)}
    return [
        line
        for line in shown.splitlines()
        if "..." not in line and normalize(line) not in lines | {""}
    ]
