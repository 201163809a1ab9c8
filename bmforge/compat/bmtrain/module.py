"""Modules with sharded parameters, which are gathered for computation and saved in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.compat.bmtrain.facade import Facade, claim_blocks_
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

__all__ = ["DistributedModule", "make_distributed_"]


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
    """Replace all parameters of a model with distributed ones of the same values and ties.

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
