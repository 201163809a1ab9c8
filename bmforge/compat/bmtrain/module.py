"""Modules with sharded parameters, which are gathered for computation and saved in full.

`Facade` is the base class of blocks, a proxy that behaves like the wrapped module. `join_blocks_`
joins a model's blocks under one `fully_shard` root, so that each block prefetches the next. A
single block is its own root. Blocks are joined when the first of them runs, not earlier:
`fully_shard` needs the complete tree and parameters on their final device.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from bmforge.compat.bmtrain.parameter import (
    Origin,
    full_shape,
    gather,
    has_values_,
    make_parameter,
    need_values,
    origin_of,
    share_like,
    whole,
)
from bmforge.compat.bmtrain.runtime import config

__all__ = ["DistributedModule", "Facade", "claim_blocks_", "join_blocks_", "make_distributed_"]
__all__ += ["reshard_blocks_"]


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


def reshard_blocks_(model: nn.Module) -> None:
    """Reshard the parameters of all blocks, and free the full ones."""
    for module in model.modules():
        if callable(give_back := getattr(module, "give_back", None)):
            give_back()


class _Root(nn.Module):
    """Parent module of the blocks; it has no parameters itself."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self) -> None:
        """Do nothing; calling it makes `fully_shard` join the blocks."""


def join_blocks_(block: Facade) -> None:
    """Join a block with the other blocks of its registered model and set up prefetching.

    Each block prefetches the next one in the same list or module.

    Memory: two blocks are gathered at a time.
    """
    _, find_model = block.__dict__.get("_claim", (0, lambda: block))
    model = find_model() or block
    blocks = dict.fromkeys(_inside(first) for first in _outermost(model) if _waits(first))
    root = _Root(list(blocks))
    fully_shard(root, mesh=config.world)
    for inner in blocks:
        inner.__dict__["_joined"] = True
    for parent in model.modules():
        row = [_inside(m) for m in parent.children() if isinstance(m, Facade)]
        for first, two in pairwise(m for m in row if m in blocks):
            first.set_modules_to_forward_prefetch([two])
            two.set_modules_to_backward_prefetch([first])
    root()


def _inside(block: Facade) -> Any:
    return block.__dict__["_module"]


def _waits(block: Facade) -> bool:
    inner = _inside(block)
    return isinstance(inner, FSDPModule) and "_joined" not in inner.__dict__


def _outermost(module: nn.Module) -> Iterator[Facade]:
    """Yield the outermost blocks of a model."""
    if isinstance(module, Facade):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


class DistributedModule(nn.Module):
    """Module like torch.nn.Module, for `DistributedParameter`s.

    Reading a parameter returns the full tensor, gathered once per call of the module. Inside a
    `Block`, the block gathers all parameters. `state_dict` is the same as on a single process.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and cache the gathered parameters until it returns."""
        if self.__dict__.get("_gathered") is not None:
            return super().__call__(*args, **kwargs)
        if "_claims" not in self.__dict__:
            need_values(self)
            claim_blocks_(self)
        self.__dict__["_gathered"] = {}
        try:
            with config.own_random(self.training):
                return super().__call__(*args, **kwargs)
        finally:
            self.__dict__["_gathered"] = None

    def __getattr__(self, name: str) -> Any:
        """All-gather the parameter if it is sharded."""
        value = super().__getattr__(name)
        if not isinstance(value, DTensor):
            return value
        origin = origin_of(value)
        if origin is not None and origin.in_block:
            return value
        cache = self.__dict__.get("_gathered")
        if cache is None:
            return gather(value)
        key = name, torch.is_grad_enabled()
        if key not in cache:
            cache[key] = gather(value)
        return cache[key]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, param in self._parameters.items():
            if param is not None and not keep_vars and prefix + name in destination:
                value = whole(param)
                destination[prefix + name] = value.cpu() if config.keeps_whole else value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, param in self._parameters.items():
            value = state_dict.get(prefix + name)
            if param is None or value is None or isinstance(value, DTensor):
                continue
            if value.shape == full_shape(param):  # otherwise torch raises an error with the shapes
                state_dict[prefix + name] = share_like(param, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if prefix + name in state_dict:
                has_values_(tensor)


def make_distributed_(model: nn.Module) -> None:
    """Shard all parameters of a model in place; tied parameters stay tied.

    Its modules become `DistributedModule`s; class names stay the same.
    """
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in list(model.modules()):
        own: dict[str, Any] = module._parameters
        for name, param in own.items():
            if param is None or origin_of(param) is not None:
                continue
            if id(param) not in new:
                new[id(param)] = param, make_parameter(param, Origin(), param.requires_grad)
            own[name] = new[id(param)][1]
        buffers: dict[str, Tensor | None] = module._buffers
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                empty: Any = torch.empty_like(buffer, device=config.device)
                empty.is_empty = True
                buffers[name] = empty
            elif buffer is not None:
                buffers[name] = buffer.to(config.device)
        kind = type(module)
        if not isinstance(module, DistributedModule | Facade):
            # Hugging Face looks up by class name which outputs a layer can record, so the name is
            # kept.
            names: Any = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            module.__class__ = type(kind.__name__, (DistributedModule, kind), names)
