"""Base class of blocks: a proxy that behaves like the wrapped module."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

from torch import nn

from bmforge.compat.bmtrain.runtime import config

__all__ = ["Facade", "claim_blocks_"]


class Facade(nn.Module):
    """Proxy for a module, with that module's parameters and names.

    `isinstance` is true for `Facade` and for the module's class, because Hugging Face models select
    by class the layers whose outputs they return as hidden states.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class of the wrapped module."""
        return type(vars(self).get("_module", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the proxy itself, not the wrapped module."""
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def claim_blocks_(model: nn.Module) -> None:
    """Register a model as the owner of its blocks, which are prefetched in the model's order.

    A model registers when it is first called, initialized or loaded. If several models contain a
    block, the largest one owns it.
    """
    model.__dict__["_claims"] = True
    if not config.is_ready or config["world_size"] == 1:
        return
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Facade) and module.__dict__.get("_claim", (0,))[0] < len(modules):
            module.__dict__["_claim"] = len(modules), weakref.ref(model)
