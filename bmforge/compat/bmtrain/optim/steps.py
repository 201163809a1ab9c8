"""Steps torch's optimizers on sharded parameters.

Most optimizers are elementwise and run on DTensors. `Rprop` is elementwise too, but uses an
operation without a DTensor rule, so it steps the local tensors. `Adafactor` needs rows and columns:
it steps full parameters, one at a time, and keeps its small states unsharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop, SparseAdam

from bmforge.compat.bmtrain.parameter import set_values_, whole
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError
from bmforge.shards import local_tensor

__all__ = ["check_optimizer", "keeps_whole", "step_shares"]


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
    """Context manager: temporarily replace an optimizer's parameters with other tensors."""
    before = [group["params"] for group in optimizer.param_groups]
    pairs = [pair for group in groups for pair in group]
    states: dict[Any, Any] = optimizer.state
    try:
        for group, chosen in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [stand_in for _, stand_in in chosen]
        for param, stand_in in pairs:
            if param in states:
                own = states.pop(param).items()
                states[stand_in] = {key: _plain(value) for key, value in own}
        yield
    finally:
        for param, stand_in in pairs:
            if stand_in in states:
                states[param] = states.pop(stand_in)
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def _plain(value: Any) -> Any:
    """Return the local tensor of an optimizer state, which is a DTensor after loading."""
    return local_tensor(value) if isinstance(value, DTensor) else value
