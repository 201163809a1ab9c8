"""OpenDelta's model visualization (from bigmodelvis), which prints the tree of `bmforge tree`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.tree import Tree
from torch import nn

from bmforge.errors import ConfigError
from bmforge.tune.delta.tree import draw_tree, fold_tree

__all__ = ["Visualization"]


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
