"""Reads programs for the old packages and rewrites their import lines and listed texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = ["apply_edits", "copy_repository", "programs", "read_source", "rewrite_imports"]

_IMPORT = re.compile(r"^(\s*)(from|import)\s+(.+)$")
_SKIPPED = {".git", "__pycache__"}


def read_source(path: Path) -> str:
    """Return the Python source of a script, or of a notebook's code cells without magics."""
    text = path.read_text("utf-8", errors="ignore")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text).get("cells", []) if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    return "\n".join(line for line in lines if line[:1] not in ("%", "!"))


def programs(folder: Path, own: Iterable[str]) -> Iterator[Path]:
    """Yield the scripts and notebooks of a checkout.

    Args:
        folder: checkout.
        own: folders with the old package itself, relative to the checkout.
    """
    excluded = [folder / name for name in own]
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.ipynb")]):
        if not _SKIPPED & set(path.parts) and not any(path.is_relative_to(e) for e in excluded):
            yield path


def rewrite_imports(source: str, packages: Mapping[str, str]) -> str:
    """Replace the old packages in import lines.

    Args:
        source: Python source.
        packages: module of bmforge by old package.
    """
    return "\n".join(_rewrite_line(line, packages) for line in source.split("\n"))


def _rewrite_line(line: str, packages: Mapping[str, str]) -> str:
    match = _IMPORT.match(line)
    if match is None:
        return line
    indent, word, names = match.groups()
    if word == "from":
        package = re.split(r"[.\s]", names, maxsplit=1)[0]
        new = packages.get(package, package)
        return f"{indent}from {new}{names[len(package) :]}"
    parts = [_rewrite_name(part.strip(), packages) for part in names.split(",")]
    return f"{indent}import {', '.join(parts)}"


def _rewrite_name(name: str, packages: Mapping[str, str]) -> str:
    """Rewrite one name of an `import` line; `import a.b` still binds `a`."""
    dotted, _, alias = name.partition(" as ")
    package, _, inside = dotted.strip().partition(".")
    if package not in packages:
        return name
    new = packages[package] + (f".{inside}" if inside else "")
    if alias or not inside:
        return f"{new} as {alias.strip() or package}"
    return f"{packages[package]} as {package}, {new}"


def apply_edits(source: str, edits: Iterable[Mapping[str, str]]) -> str:
    """Apply regular expressions `find` with replacement `replace`, in order."""
    for edit in edits:
        source = re.sub(edit["find"], edit["replace"], source, flags=re.MULTILINE)
    return source


def copy_repository(
    folder: Path,
    target: Path,
    packages: Mapping[str, str],
    edits: Iterable[Mapping[str, str]],
    own: Iterable[str],
) -> None:
    """Copy a checkout without the old package itself, with rewritten Python files.

    Args:
        folder: checkout.
        target: folder of the copy, which must not exist.
        packages: module of bmforge by old package.
        edits: texts to replace in every Python file.
        own: folders with the old package itself, relative to the checkout.
    """
    excluded = [folder / name for name in own]
    edits = list(edits)
    for path in sorted(folder.rglob("*")):
        if _SKIPPED & set(path.parts) or any(path.is_relative_to(e) for e in excluded):
            continue
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.suffix == ".py":
            source = rewrite_imports(read_source(path), packages)
            copy.write_text(apply_edits(source, edits), encoding="utf-8")
        elif path.stat().st_size < 5_000_000:
            copy.write_bytes(path.read_bytes())
