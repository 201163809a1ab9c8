"""Converts optimizer states to ordinary tensors: local shards, or full tensors.

A full state can be loaded on any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.compat.bmtrain.optim.steps import keeps_whole
from bmforge.compat.bmtrain.parameter import full_shape, share_like, whole
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import CheckpointError, ConfigError
from bmforge.shards import laid_out_like, local_tensor

__all__ = ["all_parameters", "pack_state", "unpack_state"]

State = dict[str, Any]


def all_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order of their indices in its state."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def pack_state(optimizer: torch.optim.Optimizer, gather: bool) -> State:
    """Return a `state_dict` of ordinary tensors: local shards, or with `gather` full tensors.

    Raises:
        ConfigError: `gather` is set and the model has a pipeline.
    """
    if gather and config["pipe_size"] > 1:
        raise ConfigError(
            "gather=True is not supported with a pipeline, whose stages have different states. "
            "Save one file per rank."
        )
    packed: State = torch.optim.Optimizer.state_dict(optimizer)
    state = {}
    for index, param in enumerate(all_parameters(optimizer)):
        if index in packed["state"]:
            entries = packed["state"][index].items()
            state[index] = {key: _pack(param, value, gather) for key, value in entries}
    return {**packed, "state": state, "is_whole": gather or keeps_whole(optimizer)}


def _pack(param: Tensor, value: Any, gather: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if gather and value.dim() and local_tensor(value).shape == local_tensor(param).shape:
        return whole(param, _like(param, value)).cpu()
    return local_tensor(value)


def _like(param: Tensor, value: Tensor) -> Tensor:
    """Convert a local tensor to a DTensor that is sharded like `param`."""
    return value if isinstance(value, DTensor) else laid_out_like(value, param)


def unpack_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> State:
    """Convert a state saved by `pack_state` to one for this process's shards.

    A full state (`gather=True`) can be loaded with any number of processes.

    Raises:
        CheckpointError: the number of parameters or a shape differs.
    """
    params = all_parameters(optimizer)
    saved = sum(len(group["params"]) for group in state["param_groups"])
    if saved != len(params):
        raise CheckpointError(
            f"the state has {saved} parameters, but the optimizer has {len(params)}. Create the "
            "optimizer with the same parameters as when the state was saved."
        )
    if keeps_whole(optimizer):
        return {"state": dict(state["state"]), "param_groups": state["param_groups"]}
    states = {
        index: {key: _unpack(params[index], v, state.get("is_whole")) for key, v in entries.items()}
        for index, entries in state["state"].items()
    }
    return {"state": states, "param_groups": state["param_groups"]}


def _unpack(param: Tensor, value: Any, is_whole: bool | None) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or isinstance(value, DTensor):
        return value
    if is_whole:
        return share_like(param, value) if value.shape == full_shape(param) else value
    local_shape = local_tensor(param).shape
    if value.shape != local_shape:
        raise CheckpointError(
            f"an optimizer state has shape={tuple(value.shape)}, but this process needs "
            f"{tuple(local_shape)}, because the state was saved with another number of processes. "
            "Save it with gather=True."
        )
    return _like(param, value.to(param.device))
