"""The package's source files, parsed once for all architecture tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bmforge"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text("utf-8"))


def subpackage_of(path: Path) -> str:
    """Return the first path component below `bmforge`, without `.py`."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py") if parts else ""


def short_name(path: Path) -> str:
    """Return a file's path relative to the package."""
    return str(path.relative_to(PACKAGE))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all function definitions of a tree, nested ones included."""
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def last_name(node: ast.AST) -> str:
    """Return the last component of a dotted expression: `parameter` for `a.parameter`."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def assigned_attributes(tree: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that statements or `setattr` with a literal name assign."""
    attributes: list[ast.Attribute] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            attributes.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "object.__setattr__",
        ):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                attributes.append(ast.Attribute(owner, name.value, lineno=node.lineno))
    return attributes
