"""OpenDelta's picture of a model, which came from bigmodelvis: the tree of `bmforge tree`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.tree import Tree
from torch import nn

from bmforge.compat.names import missing_names
from bmforge.compat.opendelta.names import NAMES
from bmforge.errors import ConfigError
from bmforge.tune.delta.tree import draw_tree, fold_tree

__all__ = ["Visualization"]


class Visualization:
    """Draws a model.

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
        """Print the modules, equal neighbours as one, and return rich's tree of them.

        Args:
            rootname: what the whole is called.
            expand_params: not needed: parameters stand behind their modules.
            keep_non_params: show modules without parameters as well.
            common_structure: gone: common words are targets, and no names of modules.
            mapping: likewise.
            only_common: likewise.
            printTree: print it.
        """
        if common_structure or mapping is not None or only_common:
            raise ConfigError(
                "common_structure, mapping and only_common are gone: docs/deltas.md lists the "
                "common words that targets know."
            )
        tree = draw_tree(fold_tree(self.plm, rootname, keep_non_params))
        if printTree:
            Console().print(tree)
        return tree


__getattr__ = missing_names("opendelta", NAMES, __all__, "visualization")
