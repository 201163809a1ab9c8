"""Import finder that resolves the module paths and names of the old packages.

A program may import a name by the path of the file that defined it upstream
(`openprompt.plms.seq2seq.T5TokenizerWrapper`). The packages here have fewer files.
`upstream_modules.toml` lists the upstream paths. A path resolves to the file of that name if there
is one, otherwise to an empty module. Names that the module does not define are looked up in the
other modules of the package; for a removed name the error says what to use instead.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dis import opmap
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from bmforge.compat.names import PAGES, Row, load_table, removed_message
from bmforge.errors import suggest

__all__ = ["UpstreamFinder", "install", "module_paths"]

_HERE = Path(__file__).parent
_PREFIX = "bmforge.compat."
_EXPORTS = re.compile(r"^__all__ \+?= \[[^\]]*\]", re.MULTILINE)


@cache
def module_paths(package: str) -> frozenset[str]:
    """Return the dotted module paths of an old package, without the package's own name."""
    text = (_HERE / "upstream_modules.toml").read_text("utf-8")
    return frozenset(tomllib.loads(text).get(package, "").split())


@cache
def _exports(package: str) -> dict[str, frozenset[str]]:
    """Return the names in `__all__` of each module of a package, read without importing it."""
    exports = {}
    for file in sorted((_HERE / package).rglob("*.py")):
        lists = " ".join(_EXPORTS.findall(file.read_text("utf-8")))
        parts = file.relative_to(_HERE / package).with_suffix("").parts
        path = ".".join(part for part in parts if part != "__init__")
        exports[path] = frozenset(re.findall(r'"(\w+)"', lists))
    return exports


def _names_below(package: str, inside: str) -> list[str]:
    """Return the sorted public names of all modules below the subpackage `inside`."""
    before = f"{inside}." if inside else ""
    exports = _exports(package).items()
    return sorted({name for path, names in exports if path.startswith(before) for name in names})


class UpstreamFinder(MetaPathFinder):
    """Import finder for the module paths of the old packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inside = fullname.removeprefix(_PREFIX).partition(".")
        if not fullname.startswith(_PREFIX) or package not in PAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is None:  # a directory that an update left behind
            spec = None
        if spec is None and inside not in module_paths(package):
            return None
        if spec is None:
            return ModuleSpec(fullname, _EmptyLoader(package, inside), is_package=True)
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FileLoader(fullname, spec.loader.path)
        has_submodules = any(path.startswith(f"{inside}.") for path in module_paths(package))
        if spec.submodule_search_locations is None and has_submodules:
            # A package upstream, but a single file here: without a search path, Python would not
            # use this finder for its submodules.
            spec.submodule_search_locations = []
        return spec


class _EmptyLoader(Loader):
    """Loader of modules without a file, whose names are in the other modules of the package."""

    def __init__(self, package: str, inside: str) -> None:
        self.package, self.inside = package, inside

    def exec_module(self, module: ModuleType) -> None:
        row = _find_row(self.package, self.inside)
        if row is not None and row.state == "gone":
            raise ImportError(_advice(self.package, self.inside, row))
        vars(module).update(__getattr__=_lookup(module, self.package, self.inside), __all__=[])


class _FileLoader(SourceFileLoader):
    """Loader of files, which looks up the names that a file does not define.

    The `__init__.py` of a package may be only a docstring: its names are those of its modules.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        package, _, inside = module.__name__.removeprefix(_PREFIX).partition(".")
        vars(module).setdefault("__getattr__", _lookup(module, package, inside))
        if "__all__" not in vars(module):
            vars(module)["__all__"] = _names_below(package, inside)


def _lookup(module: ModuleType, package: str, inside: str) -> Callable[[str], Any]:
    """Create the `__getattr__` function of a module, which looks names up in its package."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        path = f"{inside}.{name}".lstrip(".")
        if path in module_paths(package):
            return importlib.import_module(f"{module.__name__}.{name}")
        row = _find_row(package, path)
        if row is None or row.state != "gone":
            for home in _defining_modules(package, inside, name):
                setattr(module, name, getattr(home, name))
                return getattr(home, name)
            row = row or _find_row(package, name, last=True)
        message = _advice(package, path, row)
        if row is not None and row.state == "gone":
            raise ImportError(message)
        # `hasattr` needs an AttributeError, but `from ... import` would drop its message.
        if _is_from_import(sys._getframe(1)):
            raise ImportError(message)
        hint = suggest(name, getattr(module, "__all__", ()))
        raise AttributeError(f"{message.removesuffix('.')}.{hint}")

    return lookup


def _is_from_import(frame: FrameType) -> bool:
    """Return True if a frame is executing `from ... import name`."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def _defining_modules(package: str, inside: str, name: str) -> Iterator[ModuleType]:
    """Yield the modules that define a name, starting with the nearest parent of `inside`."""
    exports = _exports(package)
    parents = [".".join(inside.split(".")[:n]) for n in range(inside.count("."), 0, -1)]
    for path in (parent for parent in parents if parent in exports):
        parent = importlib.import_module(f"{_PREFIX}{package}.{path}")
        if name in vars(parent).get("__all__", ()):
            yield parent
    first = inside.split(".")[0]
    for path in sorted(exports, key=lambda path: (path.split(".")[0] != first, path)):
        if name in exports[path] and path != inside:
            yield importlib.import_module(f"{_PREFIX}{package}.{path}".rstrip("."))


def _find_row(package: str, name: str, last: bool = False) -> Row | None:
    """Return the table row of a name; with `last`, `name` is the last part of a dotted name."""
    for rows in load_table(package).values():
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
