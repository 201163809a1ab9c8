"""Module tree of a model, with adjacent equal modules folded and parameters marked as trained.

`tree_page` renders it as an HTML page, `draw_tree` in a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree
from torch import nn

from bmforge.tune.delta.address import WORDS

__all__ = ["Counts", "OwnTensor", "ModuleRun", "draw_tree", "fold_tree", "short_count", "walk_rows"]

# Role of a parameter -> its style in a terminal.
_STYLES = {"trained": "bright_blue", "frozen": "bright_black", "delta": "magenta"}


@dataclass(frozen=True)
class OwnTensor:
    """A parameter registered directly on a module.

    Args:
        name: name in the module.
        shape: global shape.
        is_trained: True if the parameter requires gradients.
        is_delta: True if the parameter belongs to an adapter.
        is_again: True if the parameter is tied to one that appears earlier in the tree.
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    is_delta: bool
    is_again: bool

    @property
    def whose(self) -> str:
        """Return the parameter's role: "delta", "trained" or "frozen"."""
        return "delta" if self.is_delta else "trained" if self.is_trained else "frozen"


@dataclass(frozen=True)
class Counts:
    """Parameter counts of a module.

    Args:
        total: number of parameters of the module and its submodules, including adapters.
        trained: number of trained parameters among them.
        delta: number of adapter parameters among them.
    """

    total: int = 0
    trained: int = 0
    delta: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Add the counts of two modules."""
        return Counts(
            self.total + other.total, self.trained + other.trained, self.delta + other.delta
        )


@dataclass(frozen=True)
class ModuleRun:
    """Entry of the tree: adjacent modules with the same structure, and the contents of one.

    Args:
        name: displayed name, such as ``attn``, ``layers.0-11`` or ``q_proj, k_proj``.
        kind: class name of the modules.
        targets: adapter targets that match the modules; () for the root and for modules of an
            adapter.
        tensors: parameters registered directly on one of the modules.
        counts: parameter counts of all modules of the entry.
        children: entries of the submodules of one of the modules.
    """

    name: str
    kind: str
    targets: tuple[str, ...]
    tensors: tuple[OwnTensor, ...]
    counts: Counts
    children: tuple[ModuleRun, ...] = ()


@dataclass(frozen=True)
class _Node:
    """One module of the unfolded tree.

    Args:
        name: name in its parent.
        kind: class name.
        tensors: parameters registered directly on the module.
        children: submodules that are shown.
        is_delta: True for an adapter module, or a module inside one.
        is_list: True for a container without computation.
        look: structure key; modules with equal keys have the same structure.
        counts: parameter counts of the module and its submodules.
    """

    name: str
    kind: str
    tensors: tuple[OwnTensor, ...]
    children: tuple[_Node, ...]
    is_delta: bool
    is_list: bool
    look: Any
    counts: Counts


def fold_tree(model: nn.Module, root: str = "model", keep_empty: bool = False) -> ModuleRun:
    """Return a model's tree, with adjacent modules of equal structure folded into one entry.

    Args:
        model: any model; may be on the meta device.
        root: name shown for the root.
        keep_empty: True to also show modules without parameters.
    """
    return _row(_read(root, model, set(), False, keep_empty), root, "")


def _read(name: str, module: nn.Module, seen: set[int], is_delta: bool, keep_empty: bool) -> _Node:
    is_delta = is_delta or bool(getattr(module, "is_delta", False))
    tensors, counts = [], Counts()
    for key, parameter in module.named_parameters(recurse=False):
        is_again, size = id(parameter) in seen, math.prod(parameter.shape)
        seen.add(id(parameter))
        trains = parameter.requires_grad
        tensors.append(OwnTensor(key, tuple(parameter.shape), trains, is_delta, is_again))
        if not is_again:
            counts += Counts(size, size * trains, size * is_delta)
    read = [
        _read(key, child, seen, is_delta, keep_empty)
        for key, child in module._modules.items()
        if child is not None
    ]
    children = tuple(n for n in read if keep_empty or n.tensors or n.children)
    counts = sum((child.counts for child in children), counts)
    kind, own = type(module).__name__, tuple(tensors)
    look = kind, own, tuple((child.name, child.look) for child in children)
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return _Node(name, kind, own, children, is_delta, is_list, look, counts)


def _row(node: _Node, name: str, target: str) -> ModuleRun:
    """Convert a module to an entry; a ModuleList of equal modules becomes a single entry."""
    runs = list(_runs(node))
    if len(runs) == 1 and node.is_list and target:
        run_row = _run_row(node, runs[0], target)
        return replace(run_row, name=f"{name}.{run_row.name}")
    children = tuple(_run_row(node, run, target) for run in runs)
    targets = () if node.is_delta or not target else (_write_target(target),)
    return ModuleRun(name, node.kind, targets, node.tensors, node.counts, children)


def _runs(node: _Node) -> Iterator[list[_Node]]:
    """Yield groups of adjacent equal modules: entries of a list, and modules without children."""

    def alike(child: _Node) -> Any:
        is_folded = child.name.isdigit() or not (child.children or child.is_delta)
        return (child.name.isdigit(), child.look) if is_folded else child.name

    for _, run in groupby(node.children, alike):
        yield list(run)


def _run_row(owner: _Node, run: Sequence[_Node], target: str) -> ModuleRun:
    first, before = run[0], f"{target}." if target else ""
    if len(run) == 1:
        return _row(first, first.name, before + first.name)
    counts = sum((node.counts for node in run), Counts())
    if first.name.isdigit():
        row = _row(first, f"{first.name}-{run[-1].name}", before + _numbers(owner, run))
        return replace(row, counts=counts)
    names = [node.name for node in run]
    row = _row(first, ", ".join(names), before + first.name)
    targets = tuple(_write_target(before + name) for name in names)
    return replace(row, targets=targets if row.targets else (), counts=counts)


def _numbers(owner: _Node, run: Sequence[_Node]) -> str:
    """Return a pattern for the indices of a run of list entries; ``*`` for the whole list."""
    if len(run) == len(owner.children):
        return "*"
    return f"({'|'.join(node.name for node in run)})"


def _write_target(target: str) -> str:
    """Write a target in user syntax.

    The target is written as a regular expression if it selects a subset of the layers, or if the
    module name is also a generic target name, which would match more modules.
    """
    if target in WORDS:
        return f"[r]^{target}$"
    if "(" not in target:
        return target
    parts = re.split(r"(\*|\([\d|]+\))", target)
    turned = (r"\d+" if p == "*" else p if p.startswith("(") else re.escape(p) for p in parts)
    return f"[r]^{''.join(turned)}"


def walk_rows(row: ModuleRun, depth: int = 0) -> Iterator[tuple[int, ModuleRun]]:
    """Yield every entry of a tree with its depth, from top to bottom."""
    yield depth, row
    for child in row.children:
        yield from walk_rows(child, depth + 1)


def short_count(count: int) -> str:
    """Abbreviate a number of parameters, for example as 11.31B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.{2 if count < 100 * size else 1}f}{unit}"
    return str(count)


def draw_tree(row: ModuleRun) -> Tree:
    """Return a `rich.tree.Tree`: trained in blue, frozen in gray, adapters in magenta."""
    tree = Tree(_label(row), guide_style="bright_black")
    _hang(tree, row)
    return tree


def _hang(tree: Tree, row: ModuleRun) -> None:
    for child in row.children:
        _hang(tree.add(_label(child)), child)


def _label(row: ModuleRun) -> Text:
    text = Text(row.name, "bold", no_wrap=True, overflow="ellipsis")
    text.append(f"  {row.kind}", "not bold green")
    for tensor in row.tensors:
        size = ", ".join(map(str, tensor.shape))
        again = ", again" if tensor.is_again else ""
        text.append(f"  {tensor.name} ({size}{again})", f"not bold {_STYLES[tensor.whose]}")
    text.append(f"  {short_count(row.counts.total)}", "not bold")
    if 0 < row.counts.trained < row.counts.total:
        whose = "delta" if row.counts.trained <= row.counts.delta else "trained"
        added = f"  {short_count(row.counts.trained)} trained"
        text.append(added, f"not bold {_STYLES[whose]}")
    return text
