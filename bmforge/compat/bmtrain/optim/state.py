"""Steps torch's optimizers on sharded parameters, and converts their states to ordinary tensors.

Most optimizers are elementwise and run on DTensors. `Rprop` is elementwise too, but uses an
operation without a DTensor rule, so it steps the local tensors. `Adafactor` needs rows and columns:
it steps full parameters, one at a time, and keeps its small states unsharded.

A state has local shards, or full tensors, which can be loaded on any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop, SparseAdam

from bmforge.compat.bmtrain.parameter import full_shape, set_values_, share_like, whole
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import CheckpointError, ConfigError
from bmforge.shards import local_tensor, shard_like

__all__ = [
    "check_optimizer", "keeps_whole", "step_shares", "all_parameters", "pack_state", "unpack_state",
]  # fmt: skip


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that `OptimManager` supports an optimizer.

    Raises:
        ConfigError: the optimizer is not supported; the message names alternatives.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times per step, which OptimManager can neither "
            "scale nor skip. Call optimizer.step(closure) yourself, on one process, or use "
            "bmt.optim.AdamOptimizer."
        )
    if isinstance(optimizer, SparseAdam) and config["world_size"] > 1:
        raise ConfigError(
            "SparseAdam needs sparse gradients, but distributed parameters have dense gradients. "
            "Use bmt.optim.AdamOptimizer, or one process."
        )


def keeps_whole(optimizer: Optimizer) -> bool:
    """Return True if every process keeps the optimizer's full, unsharded states."""
    return isinstance(optimizer, Adafactor) and bool(config["world_size"] > 1)


def step_shares(optimizer: Optimizer) -> None:
    """Step an optimizer on sharded parameters.

    Memory and Comm: Adafactor gathers one full parameter and its gradient at a time.
    """
    if config["world_size"] == 1 or not isinstance(optimizer, Adafactor | Rprop):
        optimizer.step()
        return
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if isinstance(optimizer, Rprop):
        with _in_place_of(optimizer, [[(p, _local_shard(p)) for p in params] for params in groups]):
            optimizer.step()
        return
    for index, params in enumerate(groups):
        for param in (p for p in params if p.grad is not None):
            stand_in = whole(param).clone()
            stand_in.grad = whole(param, param.grad)
            chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in groups]
            chosen[index] = [(param, stand_in)]
            with _in_place_of(optimizer, chosen):
                optimizer.step()
            set_values_(param, stand_in)


def _local_shard(param: Tensor) -> Tensor:
    """Return the local shard of a parameter, with the local shard of its gradient."""
    stand_in = local_tensor(param.detach())
    stand_in.grad = None if param.grad is None else local_tensor(param.grad)
    return stand_in


@contextmanager
def _in_place_of(optimizer: Optimizer, groups: list[list[tuple[Tensor, Tensor]]]) -> Iterator[None]:
    """Context manager: temporarily replace an optimizer's parameters with other tensors.

    `groups` contains, for each parameter group, pairs of a parameter and its replacement.
    """
    before = [group["params"] for group in optimizer.param_groups]
    pairs = [pair for group in groups for pair in group]
    states: dict[Any, Any] = optimizer.state
    try:
        for group, chosen in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [stand_in for _, stand_in in chosen]
        for param, stand_in in pairs:
            if param in states:
                own = states.pop(param)
                loaded = {k: local_tensor(v) for k, v in own.items() if isinstance(v, DTensor)}
                states[stand_in] = {**own, **loaded}
        yield
    finally:
        for param, stand_in in pairs:
            if stand_in in states:
                states[param] = states.pop(stand_in)
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


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
    return value if isinstance(value, DTensor) else shard_like(value, param)


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
