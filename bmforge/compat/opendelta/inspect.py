"""OpenDelta's `utils.inspect`, which counts trainable parameters, and its model visualization.

The visualization is originally in bigmodelvis; it prints the tree of `bmforge tree`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.tree import Tree
from torch import nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.tune.delta.tree import draw_tree, fold_tree

__all__ = [
    "ask_targets", "inspect_module_statistics", "inspect_optimizer_statistics", "Visualization",
]  # fmt: skip


def ask_targets(backbone: nn.Module) -> list[str]:
    """Print the module tree of a backbone, and ask for the targets on the terminal.

    Raises:
        ConfigError: there is no terminal, or no target was typed.
    """
    Visualization(backbone).structure_graph()
    try:
        answer = Console().input("modified_modules, separated by commas: ")
    except (EOFError, OSError):
        answer = ""
    targets = [target for target in map(str.strip, answer.split(",")) if target]
    if not targets:
        raise ConfigError(
            "interactive_modify=True needs module names, but none were entered in the terminal. "
            "Enter module names, or pass modified_modules; `bmforge tree MODEL --html page.html` "
            "writes a page on which you can select them by clicking."
        )
    return targets


def _count(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the number of parameter elements, and how many of them are trainable."""
    listed = list(parameters)
    return sum(p.numel() for p in listed), sum(p.numel() for p in listed if p.requires_grad)


def inspect_module_statistics(module: nn.Module, verbose: bool = True) -> dict[str, Any]:
    """Return and log the number of trainable parameters of a module."""
    total, trained = _count(module.parameters())
    statistics = {
        "total_parameters": total,
        "trainable_parameters": trained,
        "trainable_ratio": trained / max(total, 1),
    }
    if verbose:
        get_logger().info("%s", statistics)
    return statistics


def inspect_optimizer_statistics(
    optimizer: torch.optim.Optimizer, verbose: bool = True
) -> dict[str, Any]:
    """Return and log the options of each parameter group and its number of parameters."""
    statistics: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        total, trained = _count(group["params"])
        statistics[f"param_group_{number}"] = {
            "total_parameters": total,
            "trainable_parameters": trained,
            **{name: value for name, value in group.items() if name != "params"},
        }
    statistics["total_parameters"] = sum(
        group_statistics["total_parameters"] for group_statistics in statistics.values()
    )
    if verbose:
        get_logger().info("%s", statistics)
    return statistics


class Visualization:
    """Prints a model as a tree of modules.

    Args:
        plm: any model.
    """

    def __init__(self, plm: nn.Module) -> None:
        self.plm = plm

    def structure_graph(
        self,
        rootname: str = "root",
        expand_params: bool = False,
        keep_non_params: bool = False,
        common_structure: bool = False,
        mapping: Any = None,
        only_common: bool = False,
        printTree: bool = True,
    ) -> Tree:
        """Print the module tree with adjacent equal modules merged, and return it as a rich tree.

        Args:
            rootname: name of the root.
            expand_params: accepted and ignored; parameters are shown with their modules.
            keep_non_params: also show modules without parameters.
            common_structure: not supported; must be False. Common module names can only be used
                as targets.
            mapping: not supported; must be None.
            only_common: not supported; must be False.
            printTree: print the tree.
        """
        if common_structure or mapping is not None or only_common:
            raise ConfigError(
                "common_structure, mapping and only_common were removed. "
                "docs/guides/adapters.md lists the common names for targets."
            )
        tree = draw_tree(fold_tree(self.plm, rootname, keep_non_params))
        if printTree:
            Console().print(tree)
        return tree
