"""Import directions between subpackages, and no import cycle anywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from source import FILES, PACKAGE, short_name, subpackage_of, tree_of

# Files directly below `bmforge`: every subpackage may import them.
BASE_MODULES = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}

# subpackage -> subpackages it may import, besides the base modules and itself
ALLOWED: dict[str, set[str]] = {
    "nn": set(),
    "memory": set(),
    "tokenizers": set(),
    "models": {"nn", "tokenizers"},
    "data": {"tokenizers"},
    "parallel": {"memory", "nn"},
    "train": {"parallel", "memory", "data"},
    "tune": {"nn", "data", "tokenizers"},
    "compress": {"nn", "models"},
    "infer": {"nn", "memory", "parallel", "models", "tune", "compress", "data", "tokenizers"},
    "serve": {"infer", "models", "tokenizers"},
    "align": {
        *("nn", "memory", "tokenizers", "models", "data", "parallel", "train", "tune"),
        *("compress", "infer"),
    },
    "testing": {
        *("nn", "tokenizers", "memory", "models", "parallel", "data", "train", "tune"),
        *("compress", "infer", "align"),
    },
    "compat": {"*"},
    "recipes": {"*"},
    "cli": {"*"},
}
FORBIDDEN_NAMES = {"utils", "common", "misc", "legacy", "experiments"}
# Sizes of the import cycles that still exist, largest first; they may only shrink.
LARGEST_CYCLES: list[int] = []


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a tree imports, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_subpackages(tree: ast.AST) -> set[str]:
    names = {n.split(".")[1] for n in imported_names(tree) if n.startswith("bmforge.")}
    return names - {"__version__"}


def test_imports_go_in_one_direction() -> None:
    offenders = []
    for path in FILES:
        own = subpackage_of(path)
        imported = imported_subpackages(tree_of(path)) - {own}
        if own in BASE_MODULES:
            allowed = BASE_MODULES
        elif "*" in ALLOWED.get(own, {"*"}):
            continue
        else:
            allowed = ALLOWED[own] | BASE_MODULES
        if imported - allowed:
            offenders.append(f"{short_name(path)} imports {sorted(imported - allowed)}")
    assert not offenders, "\n".join(offenders)


def module_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, anywhere in its source."""
    modules = {
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in FILES
    }
    return {
        name: {n for n in imported_names(tree_of(path)) if n in modules} - {name}
        for name, path in modules.items()
        if path.name != "__init__.py"  # importing a submodule runs its package first anyway
    }


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one node (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], out: list[str]) -> None:
        stack = [(start, iter(sorted(edges.get(start, ()))))]
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            target = next((t for t in targets if t not in seen and t in edges), None)
            if target is None:
                out.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(sorted(edges[target]))))

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets & graph.keys():
            reverse[target].add(node)
    seen.clear()
    components = []
    for node in reversed(order):
        if node not in seen:
            component: list[str] = []
            visit(node, reverse, component)
            components.append(set(component))
    return [c for c in components if len(c) > 1]


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert cycles(graph) == [{"b", "c"}]


def test_no_module_imports_itself_through_others() -> None:
    sizes = sorted(map(len, cycles(module_graph())), reverse=True)
    listed = "\n".join(" ".join(sorted(c)) for c in cycles(module_graph()))
    assert len(sizes) <= len(LARGEST_CYCLES), listed
    assert all(a <= b for a, b in zip(sizes, LARGEST_CYCLES, strict=False)), listed


def test_every_subpackage_is_listed_and_documented() -> None:
    for folder in {p.parent for p in FILES} - {PACKAGE}:
        assert folder.name not in FORBIDDEN_NAMES
        assert folder.relative_to(PACKAGE).parts[0] in ALLOWED
        init = folder / "__init__.py"
        assert init.exists(), f"{folder} has no __init__.py"
        assert ast.get_docstring(tree_of(init)), f"{init} has no docstring"


def test_files_named_in_package_docstrings_exist() -> None:
    missing = []
    for folder in sorted({p.parent for p in FILES}):
        text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
            if not ((folder / name).exists() or (PACKAGE / name).exists()):
                missing.append(f"{short_name(folder / '__init__.py')} names {name}")
    assert not missing, "\n".join(missing)
