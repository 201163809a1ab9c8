"""Import finder that resolves the module paths of the old packages.

A program may import a name by the path of the file that defined it upstream
(`openprompt.plms.seq2seq.T5TokenizerWrapper`). The packages here have fewer files. For each module
path in `upstream_modules.toml` that has no file here, the finder creates a module that looks its
names up in the rest of the package: the class where there is one, else an ImportError that names
the replacement.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from bmforge.compat.names import PAGES, Row, Table, removed_message

__all__ = ["UpstreamFinder", "install", "module_paths"]

_HERE = Path(__file__).parent
_PREFIX = "bmforge.compat."


@cache
def module_paths(package: str) -> frozenset[str]:
    """Return the dotted module paths of an old package, without the package's own name."""
    text = (_HERE / "upstream_modules.toml").read_text("utf-8")
    return frozenset(tomllib.loads(text).get(package, "").split())


class UpstreamFinder(MetaPathFinder):
    """Import finder for modules of the old packages that have no file here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inside = fullname.removeprefix(_PREFIX).partition(".")
        if not fullname.startswith(_PREFIX) or inside not in module_paths(package):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            spec = ModuleSpec(fullname, _UpstreamLoader(package, inside), is_package=True)
        elif spec.submodule_search_locations is None and _has_submodules(package, inside):
            # A package upstream that is one file here: without a path, Python would not ask this
            # finder for its submodules.
            spec.submodule_search_locations = []
        return spec


class _UpstreamLoader(Loader):
    """Loader that creates modules whose names are looked up in the other modules of the package."""

    def __init__(self, package: str, inside: str) -> None:
        self.package, self.inside = package, inside

    def exec_module(self, module: ModuleType) -> None:
        table = _table_of(self.package)
        row = _find_row(table, self.inside)
        if row is not None and row.state == "gone":
            raise ImportError(_advice(self.package, self.inside, row))

        def lookup(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if f"{self.inside}.{name}" in module_paths(self.package):
                return importlib.import_module(f"{module.__name__}.{name}")
            value = find_name(self.package, self.inside, name)
            setattr(module, name, value)
            return value

        vars(module).update(__getattr__=lookup, __all__=[])


def find_name(package: str, inside: str, name: str) -> Any:
    """Return the object that replaces `package.inside.name`.

    Raises:
        ImportError: the name has no counterpart; the message names the alternative.
    """
    row = _find_row(_table_of(package), f"{inside}.{name}")
    if row is None or row.state != "gone":
        for module in _candidates(package, inside):
            if name in getattr(module, "__all__", ()):
                return getattr(module, name)
        row = row or _find_row(_table_of(package), name, last=True)
    raise ImportError(_advice(package, f"{inside}.{name}", row))


def _candidates(package: str, inside: str) -> Iterator[ModuleType]:
    """Yield the modules of a package that may define a name, nearest parents first."""
    root = _HERE / package
    files = sorted(root.rglob("*.py"))
    paths = [".".join(f.relative_to(root).with_suffix("").parts) for f in files]
    own = {path.removesuffix("__init__").rstrip(".") for path in paths}
    parents = [".".join(inside.split(".")[:n]) for n in range(inside.count("."), -1, -1)]
    subpackage = inside.split(".")[0]
    nearest = [p for p in parents if p in own]
    siblings = sorted((own - {*nearest}), key=lambda p: (p.split(".")[0] != subpackage, p))
    for path in (*nearest, *siblings):
        yield importlib.import_module(f"{_PREFIX}{package}.{path}".rstrip("."))


def _has_submodules(package: str, inside: str) -> bool:
    return any(path.startswith(f"{inside}.") for path in module_paths(package))


def _table_of(package: str) -> Table:
    table: Table = importlib.import_module(f"{_PREFIX}{package}.names").NAMES
    return table


def _find_row(table: Table, name: str, last: bool = False) -> Row | None:
    """Return the table row of a dotted name, or with `last` of its last component."""
    for rows in table.values():
        for row in rows:
            if any(n == name or (last and n.rpartition(".")[2] == name) for n in row.names):
                return row
    return None


def _advice(package: str, name: str, row: Row | None) -> str:
    page = f"See docs/{PAGES[package]}."
    if row is not None and row.state == "gone":
        return f"{removed_message(f'{package}.{name}', row.note)} {page}"
    return f"{package}.{name} does not exist in bmforge. {page}"


def install() -> None:
    """Register the finder with the import system, once."""
    if not any(isinstance(finder, UpstreamFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, UpstreamFinder())
