"""Readers of the texts that the data benchmarks use.

DATA is a folder with ``ag_news/test.csv`` (class, title, text), ``tang_poetry.jsonl`` (field text),
``tinyshakespeare.txt`` and ``eprstmt`` (Chinese reviews). The docstrings are those of Python's
standard library.
"""

from __future__ import annotations

import ast
import csv
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "Texts",
    "read_docstrings",
    "read_news",
    "read_poems",
    "read_reviews",
    "read_texts",
]

SHORTEST_DOCSTRING = 200
Texts = tuple[list[str], list[str]]
"""English and Chinese texts."""


def read_news(data: Path, titles: bool = False) -> list[str]:
    """Return English news items.

    Args:
        data: folder of the texts.
        titles: begin each item with its title.
    """
    with (data / "ag_news" / "test.csv").open(encoding="utf-8", newline="") as file:
        return [f"{title}\n{text}" if titles else text for _, title, text in csv.reader(file)]


def read_poems(data: Path) -> list[str]:
    """Return Chinese poems, in traditional characters."""
    lines = (data / "tang_poetry.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def read_reviews(data: Path) -> list[str]:
    """Return Chinese reviews without duplicates, in simplified characters."""
    lines = [
        line
        for path in sorted((data / "eprstmt").glob("*.json*"))
        for line in path.read_text("utf-8").splitlines()
    ]
    return list(dict.fromkeys(json.loads(line)["sentence"] for line in lines if line.strip()))


def read_texts(data: Path) -> Texts:
    """Return English texts (news and plays) and Chinese texts (poems)."""
    plays = (data / "tinyshakespeare.txt").read_text("utf-8").split("\n\n")
    return [*read_news(data), *plays], read_poems(data)


def read_docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library with at least 200 characters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if "test" in str(path) or "site-packages" in str(path):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST_DOCSTRING:
                    yield text
