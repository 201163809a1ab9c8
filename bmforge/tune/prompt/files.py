"""Reads template and label word files in OpenPrompt's formats, and writes those of a run.

Formats of label words: .txt or .csv with one class per line, words separated by commas, an empty
line between verbalizers; .json with one verbalizer or a list; .jsonl with one per line. A
verbalizer is a list with the words of every class, or a map class -> words.
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
    """Return the words of every class.

    Args:
        path: path of the file.
        choice: index of the verbalizer in the file.
        classes: class names in order; the words of a map are sorted into this order.

    Raises:
        ConfigError: the file is missing or malformed, or lacks this verbalizer or these classes.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as a verbalizer ({error}).") from error
    found = _read_lines(text) if file.suffix in (".txt", ".csv") else _read_json(text, file)
    if not 0 <= choice < len(found):
        raise ConfigError(
            f"{str(file)!r} has {len(found)} verbalizers; choice={choice} must be below that."
        )
    return _order(found[choice], file, classes)


def _read_lines(text: str) -> list[Any]:
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",") if word.strip()]
        if words:
            found[-1].append(words)
        elif found[-1]:
            found.append([])
    return [one for one in found if one]


def _read_json(text: str, file: Path) -> list[Any]:
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} is no JSON ({error}).") from error
    if isinstance(found, list) and found and all(isinstance(one, (dict, list)) for one in found):
        nested = all(isinstance(w, str) for one in found for w in one) and _are_rows(found)
        return [found] if nested else found
    return [found]


def _are_rows(found: list[Any]) -> bool:
    """Return True if the parsed value is a single verbalizer: a list of lists."""
    return all(isinstance(one, list) for one in found)


def _order(found: Any, file: Path, classes: Sequence[str]) -> list[list[str]]:
    """Return the words of one verbalizer, in the classes' order."""
    if isinstance(found, dict):
        if classes and set(found) != set(map(str, classes)):
            raise ConfigError(
                f"{str(file)!r} has words of {', '.join(found)}; the classes are "
                f"{', '.join(map(str, classes))}."
            )
        found = [found[str(name)] for name in classes] if classes else list(found.values())
    if not isinstance(found, list) or not all(isinstance(row, (str, list)) for row in found):
        raise ConfigError(
            f"{str(file)!r} is no verbalizer: needed are the words of every class, as a list or as "
            "a table class -> words."
        )
    rows = [[row] if isinstance(row, str) else row for row in found]
    if classes and len(rows) != len(classes):
        raise ConfigError(
            f"{str(file)!r} has words of {len(rows)} classes, and there are {len(classes)}: "
            f"{', '.join(map(str, classes))}."
        )
    return rows


def write_prompt(
    folder: Path, template: str, words: Sequence[Sequence[str]], classes: Sequence[str], card: str
) -> None:
    """Write a template, its label words and a README into a folder.

    Args:
        folder: target folder; created if it does not exist.
        template: text of the template.
        words: words of every class.
        classes: class names.
        card: text of the folder's README.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "template.txt", template + "\n")
    if words:
        table = {name: list(row) for name, row in zip(classes, words, strict=True)}
        text = json.dumps(table, indent=2, ensure_ascii=False)
        replace_file(folder / "verbalizer.json", text + "\n")
    replace_file(folder / "README.md", card)
