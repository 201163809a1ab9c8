"""Explains a wrong command line in one sentence, instead of the option parser's box of text."""

from __future__ import annotations

import re

from bmforge.errors import suggest

__all__ = ["explain_box"]

_TITLES = {"Value error", "Missing argument", "Invalid choice", "Parsing error"}
_TITLES |= {"Unrecognized options", "Required options"}
_KINDS = {"INT": "an integer", "FLOAT": "a number", "STR": "a text", "PATH": "a path"}
_KINDS["{None}"] = "None"


def explain_box(text: str) -> str:
    """Return the message of tyro as one sentence, with advice.

    Args:
        text: tyro's output on standard error: blocks in a frame, divided by horizontal lines. The
            first block is the problem, which is wrapped; others have the type of the option.
    """
    blocks = [block for block in _split(text) if block and " ".join(block) not in _TITLES]
    if not blocks:
        return text.strip()
    problem = " ".join(blocks[0]).partition(" Got errors:")[0]
    if match := re.match(r"Error parsing (--\S+): (.*)", problem):
        name, reason = match.groups()
        quoted = re.search(r"'([^']*)'\W*$", reason)
        kinds = [line.partition(" ")[2] for b in blocks[1:] for line in b if line.startswith(name)]
        if quoted is None or not kinds:
            return f"{name}: {_end(reason)}"
        kind = " or ".join(_KINDS.get(part, part) for part in kinds[0].split("|"))
        return f"{name} {quoted[1]} is not valid (needed: {kind}). Correct the value."
    if match := re.match(r"Error parsing \S+: (.*)", problem):
        return _end(match[1])  # the error of a dataclass, which is a sentence
    if match := re.match(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \(", problem):
        wrong, name = match.groups()
        choices = sorted(re.findall(r"'([^']*)'", problem[match.end() :]))
        return (
            f"{name} {wrong} is not supported (supported: {', '.join(choices)})."
            f"{suggest(wrong, choices)}"
        )
    if match := re.match(r"Missing value for argument '(.*)'. Expected (\d+)", problem):
        count = "a value" if match[2] == "1" else f"{match[2]} values"
        return f"{match[1]} needs {count}. Write the value after the name of the option."
    if match := re.match(r"Unrecognized options: (.*)", problem):
        return f"unexpected argument: {match[1]}. --help lists the options."
    missing = [line for line in blocks[0] if line.startswith("--")]
    if problem.startswith("Missing from") and missing:
        return f"{missing[0].split()[0]} is missing. Pass {' and '.join(missing)}."
    return _end(problem)


def _split(text: str) -> list[list[str]]:
    """Return the lines of each block, without the frame."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        content = line.strip(" │|")
        if re.match(r"[╭╰+─]|-{3,}$", content):  # the frame, or a line
            blocks.append([])
        elif content:
            blocks[-1].append(content)
    return blocks


def _end(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
