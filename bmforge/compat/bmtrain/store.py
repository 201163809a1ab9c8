"""Saving and loading: one file, with the keys and values of the model on one process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.compat.bmtrain.parameter import full_shape, share_like, sum_plain_gradients_
from bmforge.compat.bmtrain.runtime import config, synchronize
from bmforge.errors import CheckpointError
from bmforge.files import replace_file
from bmforge.parallel import run_on_first

__all__ = ["allgather_objects", "broadcast_object", "load", "save"]


def save(model: nn.Module, file_name: str | Path, non_blocking: bool = False) -> None:
    """Write a model's `state_dict` for `torch.load`; the file appears whole or not at all.

    Args:
        model: the same on every process, all of which call this.
        file_name: what rank 0 writes.
        non_blocking: taken as False: when this returns, the file is there.

    Memory: rank 0 holds the whole model on the host, the others one parameter.
    """
    config.need("save")
    config.keeps_whole = config["rank"] == 0
    try:
        state = model.state_dict()
    finally:
        config.keeps_whole = True

    def write() -> None:
        on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        buffer = io.BytesIO()
        torch.save(on_host, buffer)
        replace_file(file_name, buffer.getvalue())

    run_on_first(write)
    synchronize()


def load(model: nn.Module, file_name: str | Path, strict: bool = True) -> Any:
    """Read what `save`, or torch on one process, has written; only rank 0 reads the file.

    Args:
        model: the same on every process, all of which call this.
        file_name: a file of a `state_dict`; nothing in it is executed.
        strict: raise for missing and unexpected keys.

    Returns:
        what `load_state_dict` returns.

    Raises:
        CheckpointError: the file cannot be read, or keys or shapes do not fit; all are listed.
    """
    config.need("load")

    def read() -> dict[str, Any]:
        try:
            found = torch.load(file_name, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file_name} cannot be loaded: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file_name} holds a {type(found).__name__}, not a state_dict.")
        return found

    state = _share_out(model, run_on_first(read))
    try:
        result = model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"{file_name} does not fit the model: {error}") from error
    sum_plain_gradients_(model)
    synchronize()
    return result


def _share_out(model: nn.Module, state: dict[str, Any] | None) -> dict[str, Any]:
    """Send what rank 0 has read to all; each keeps its shares."""
    if config["world_size"] == 1:
        assert state is not None
        return state
    heads = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in (state or {}).items()}
    heads = broadcast_object(heads)
    for module in model.modules():
        if callable(give_back := getattr(module, "give_back", None)):
            give_back()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shares: dict[str, Any] = {}
    for key, head in heads.items():
        value = head
        if isinstance(head, Tensor):
            value = torch.empty_like(head, device=config.device) if state is None else state[key]
            value = value.to(config.device).contiguous()
            dist.broadcast(value, src=0, group=config["comm"])
            param = parameters.get(key)
            if param is not None and value.shape == full_shape(param):
                value = share_like(param, value)
        shares[key] = value
    return shares


def broadcast_object(obj: Any, comm: Any = None, src: int = 0) -> Any:
    """Return what process `src` has."""
    config.need("broadcast_object")
    found = [obj]
    dist.broadcast_object_list(found, group_src=src, group=comm or config["comm"])
    return found[0]


def allgather_objects(obj: Any) -> list[Any]:
    """Return what all processes have, in their order."""
    config.need("allgather_objects")
    found: list[Any] = [None] * config["world_size"]
    dist.all_gather_object(found, obj, group=config["comm"])
    return found
