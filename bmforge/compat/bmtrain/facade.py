"""What a block is to the model around it."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

from torch import nn

from bmforge.compat.bmtrain.runtime import config

__all__ = ["Facade", "claim_blocks_"]


class Facade(nn.Module):
    """A module that stands for another one, with that one's parameters and names.

    To `isinstance` it is of both classes: Hugging Face finds by their class the layers whose
    outputs it returns as hidden states.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the module it stands for."""
        return type(vars(self).get("_module", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy as what it is."""
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def claim_blocks_(model: nn.Module) -> None:
    """Let the blocks of a model know it: those of the largest model that claims them run together.

    A model claims its blocks when it is called first, or when it is drawn or loaded.
    """
    model.__dict__["_claims"] = True
    if not config.is_ready or config["world_size"] == 1:
        return
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Facade) and module.__dict__.get("_claim", (0,))[0] < len(modules):
            module.__dict__["_claim"] = len(modules), weakref.ref(model)
