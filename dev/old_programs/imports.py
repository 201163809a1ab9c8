"""Checks the imports of old packages in programs; nothing else of the programs is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rewrite import programs, read_source, rewrite_imports

__all__ = ["Imports", "check_repository"]


@dataclass
class Imports:
    """Imports of the programs of a repository, by outcome.

    Args:
        resolved: programs whose imports all resolve.
        replaced: errors that name a replacement, by program.
        failed: other errors, by program.
        unreadable: programs that are not valid Python.
    """

    resolved: list[str] = field(default_factory=list)
    replaced: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def check_repository(folder: Path, packages: Mapping[str, str], own: list[str]) -> Imports:
    """Import every name of the old packages that the programs of a checkout import."""
    result = Imports()
    for path in programs(folder, own):
        name = str(path.relative_to(folder))
        try:
            tree = ast.parse(rewrite_imports(read_source(path), packages))
        except SyntaxError:
            result.unreadable.append(name)
            continue
        pairs = set(_names(tree))
        errors = sorted(filter(None, (_error(*pair) for pair in pairs)))
        bare = [error for error in errors if "docs/migrating/" not in error]
        if bare:
            result.failed[name] = bare
        elif errors:
            result.replaced[name] = errors
        elif pairs:
            result.resolved.append(name)
    return result


def _names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the imports from bmforge; name is "" for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((m, n) for m, n in pairs if m.startswith("bmforge.compat"))


@cache
def _error(module: str, name: str) -> str:
    """Return the error of an import, or "" if it resolves."""
    try:
        exec(f"from {module} import {name}" if name else f"import {module}", {})
    except Exception as error:  # any error of an import is what this script reports
        return f"{type(error).__name__}: {error}"
    return ""
