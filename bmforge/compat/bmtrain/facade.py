"""The base class of blocks: a proxy that looks like the module it wraps."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

from torch import nn

from bmforge.compat.bmtrain.runtime import config

__all__ = ["Facade", "claim_blocks_"]


class Facade(nn.Module):
    """A proxy for another module, with that module's parameters and names.

    `isinstance` finds both classes: Hugging Face models look up by class the layers whose
    outputs they return as hidden states.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped module."""
        return type(vars(self).get("_module", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy as a proxy, not as the wrapped module."""
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def claim_blocks_(model: nn.Module) -> None:
    """Register a model with its blocks, which are prefetched within the largest such model.

    A model registers when it is first called, initialised or loaded.
    """
    model.__dict__["_claims"] = True
    if not config.is_ready or config["world_size"] == 1:
        return
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Facade) and module.__dict__.get("_claim", (0,))[0] < len(modules):
            module.__dict__["_claim"] = len(modules), weakref.ref(model)
