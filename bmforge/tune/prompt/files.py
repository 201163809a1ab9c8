"""Reads template and label word files in OpenPrompt's formats; writes the files of a run.

Formats of label words: .txt or .csv with one class per line, words separated by commas, and an
empty line between verbalizers; .json with one verbalizer or a list; .jsonl with one verbalizer per
line. A verbalizer is a list with the words of every class, or a dict from class name to words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.files import replace_file

__all__ = ["read_verbalizer", "write_prompt"]


def read_verbalizer(
    path: str | Path, choice: int = 0, classes: Sequence[str] = ()
) -> list[list[str]]:
    """Read the label words of every class from a file.

    Args:
        path: path of the file.
        choice: index of the verbalizer in the file.
        classes: class names in order; the words of a dict are sorted into this order.

    Raises:
        ConfigError: the file is missing or malformed, or does not contain the verbalizer or a
            class.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read as a verbalizer ({error}). Pass a UTF-8 file (.txt, "
            ".csv, .json or .jsonl)."
        ) from error
    verbalizers = _read_lines(text) if file.suffix in (".txt", ".csv") else _read_json(text, file)
    if not 0 <= choice < len(verbalizers):
        raise ConfigError(
            f"choice={choice} is out of range for {str(file)!r}, which has {len(verbalizers)} "
            f"verbalizers (allowed: 0 to {len(verbalizers) - 1})."
        )
    return _order(verbalizers[choice], file, classes)


def _read_lines(text: str) -> list[Any]:
    verbalizers: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",") if word.strip()]
        if words:
            verbalizers[-1].append(words)
        elif verbalizers[-1]:
            verbalizers.append([])
    return [verbalizer for verbalizer in verbalizers if verbalizer]


def _read_json(text: str, file: Path) -> list[Any]:
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{str(file)!r} is not valid JSON ({error}). Correct the file, or write a .txt file "
            "with one line of label words per class."
        ) from error
    if (
        isinstance(parsed, list)
        and parsed
        and all(isinstance(entry, (dict, list)) for entry in parsed)
    ):
        nested = all(isinstance(w, str) for entry in parsed for w in entry) and _are_rows(parsed)
        return [parsed] if nested else parsed
    return [parsed]


def _are_rows(parsed: list[Any]) -> bool:
    """Return True if the parsed value is a single verbalizer: a list of lists."""
    return all(isinstance(entry, list) for entry in parsed)


def _order(words: Any, file: Path, classes: Sequence[str]) -> list[list[str]]:
    """Sort the words of one verbalizer into the order of the classes."""
    if isinstance(words, dict):
        if classes and set(words) != set(map(str, classes)):
            raise ConfigError(
                f"{str(file)!r} has words for the classes {', '.join(words)}, but the task's "
                f"classes are {', '.join(map(str, classes))}. Use the class names of the task."
            )
        words = [words[str(name)] for name in classes] if classes else list(words.values())
    if not isinstance(words, list) or not all(isinstance(row, (str, list)) for row in words):
        raise ConfigError(
            f"{str(file)!r} is not a verbalizer (expected: a list with the words of every class, "
            "or an object from class name to words)."
        )
    rows = [[row] if isinstance(row, str) else row for row in words]
    if classes and len(rows) != len(classes):
        raise ConfigError(
            f"{str(file)!r} has words for {len(rows)} classes, but the task has {len(classes)} "
            f"classes: {', '.join(map(str, classes))}. Add words for each class."
        )
    return rows


def write_prompt(
    folder: Path, template: str, words: Sequence[Sequence[str]], classes: Sequence[str], card: str
) -> None:
    """Write a template, its label words and a README to a directory.

    Args:
        folder: target directory; created if it does not exist.
        template: text of the template.
        words: words of every class.
        classes: class names.
        card: text of README.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "template.txt", template + "\n")
    if words:
        table = {name: list(row) for name, row in zip(classes, words, strict=True)}
        text = json.dumps(table, indent=2, ensure_ascii=False)
        replace_file(folder / "verbalizer.json", text + "\n")
    replace_file(folder / "README.md", card)
