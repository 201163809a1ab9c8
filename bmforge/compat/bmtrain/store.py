"""Single-file checkpoints, which equal the state dict of the unsharded model."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.compat.bmtrain.block import TransformerBlockList
from bmforge.compat.bmtrain.module import claim_blocks_, reshard_blocks_
from bmforge.compat.bmtrain.param_init import sum_plain_gradients_
from bmforge.compat.bmtrain.parameter import full_shape, share_like
from bmforge.compat.bmtrain.runtime import config, synchronize
from bmforge.errors import CheckpointError
from bmforge.files import replace_atomically
from bmforge.logging import get_logger
from bmforge.parallel import run_on_first
from bmforge.shards import local_tensor

__all__ = [
    "allgather_object", "allgather_objects", "broadcast_object", "load", "published_parameters",
    "save",
]  # fmt: skip

State = dict[str, Any]


def save(model: nn.Module, file_name: str | Path, non_blocking: bool = False) -> None:
    """Write a model's `state_dict` for `torch.load`; the file is replaced atomically.

    Args:
        model: model, the same on every process; all processes call this.
        file_name: path that rank 0 writes.
        non_blocking: return once the values are gathered and copied, and write in the background.
            The next `save`, `config["save_thread"].join()` and the end of the program wait for it.

    Raises:
        OSError: the file cannot be written; for a background write the next `save` raises it.

    Memory: the full model on rank 0's host, one parameter on other ranks.
    """
    config.need("save")
    run_on_first(_finish_writing)
    state = _state_on(config["rank"] == 0, model.state_dict)
    # The program may change its working directory before the file is written.
    path = Path(file_name).absolute()
    if not non_blocking:
        run_on_first(lambda: _write(state, path))
    elif config["rank"] == 0:
        tensors = chain(model.parameters(), model.buffers())
        own = {local_tensor(tensor).untyped_storage().data_ptr() for tensor in tensors}
        copies = {
            key: v.clone() if isinstance(v, Tensor) and v.untyped_storage().data_ptr() in own else v
            for key, v in state.items()
        }
        config.saving = Writing(partial(_write, copies, path))
        config.saving.start()
    synchronize()


class Writing(threading.Thread):
    """Background thread that writes a checkpoint; `finish` raises the error if writing failed."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(name="bmforge save")
        self._write = write
        self._problem: Exception | None = None

    def run(self) -> None:
        """Write the file."""
        try:
            self._write()
        except Exception as error:
            self._problem = error
            get_logger().error("a model was not saved: %s", error)

    def finish(self) -> None:
        """Wait until the file is written; raise the error if writing failed."""
        self.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


def _finish_writing() -> None:
    if config.saving is not None:
        config.saving.finish()


def _state_on(keeps: bool, collect: Callable[[], State]) -> State:
    """Return the state dict that `collect` builds, on the CPU if `keeps`, else on `meta`."""
    config.keeps_whole = keeps
    try:
        state = collect()
    finally:
        config.keeps_whole = True
    return {k: v.detach().cpu() if keeps and isinstance(v, Tensor) else v for k, v in state.items()}


def _write(state: State, path: Path) -> None:
    with replace_atomically(path) as file:
        torch.save(state, file)


def _save_to_rank0(model: nn.Module, destination: State | None = None, prefix: str = "") -> State:
    """Return a model's full `state_dict` on rank 0, on the host; {} on other ranks.

    A program may override `state_dict` of its model with a method that calls this function.
    """
    return _gather_state(model, config["rank"] == 0, destination, prefix)


def _save_to_local_rank0(
    model: nn.Module, destination: State | None = None, prefix: str = ""
) -> State:
    """Return a model's full `state_dict` on the first rank of each machine; {} on other ranks."""
    return _gather_state(model, config["local_rank"] == 0, destination, prefix)


def _gather_state(model: nn.Module, keeps: bool, into: State | None, prefix: str) -> State:
    collect = partial(nn.Module.state_dict, model, prefix=prefix)
    state = _state_on(keeps, collect)
    into = {} if into is None else into
    if keeps:
        into.update(state)
    return into


def _save_to_infer_model(model: nn.Module, infer_model: Any) -> None:
    """Pass a model's weights to an inference engine on each machine, one block at a time.

    Args:
        model: model, the same on every process; all processes call this.
        infer_model: object on the first process of each machine; its `load_layer_state_dict` is
            called with the weights of each block, and then of the other modules, on the host;
            the names are those of the full model.

    Memory: one block.
    """
    keeps, within = config["local_rank"] == 0, []
    for name, module in model.named_modules():
        if isinstance(module, TransformerBlockList):
            prefix = f"{name}." if name else ""
            within.append(prefix)
            for key, block in module._modules.items():
                part = _save_to_local_rank0(block, prefix=f"{prefix}{key}.")
                if keeps:
                    infer_model.load_layer_state_dict(part)
    remaining: State = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if not prefix.startswith(tuple(within)):
            collect = partial(_own_state, module, prefix)
            remaining.update(_state_on(keeps, collect))
    if keeps:
        infer_model.load_layer_state_dict(remaining)


def _own_state(module: nn.Module, prefix: str) -> State:
    state: State = {}
    module._save_to_state_dict(state, prefix, False)
    return state


def load(model: nn.Module, file_name: str | Path, strict: bool = True) -> Any:
    """Load a file that `save` or, on one process, `torch.save` wrote; only rank 0 reads the file.

    Args:
        model: model, the same on every process; all processes call this.
        file_name: path of a `state_dict`; it is read with `weights_only`.
        strict: True to raise on missing and unexpected keys.

    Returns:
        The result of `load_state_dict`.

    Raises:
        CheckpointError: the file cannot be read, or keys or shapes do not match (the message lists
            all).
    """
    config.need("load")
    claim_blocks_(model)

    def read() -> dict[str, Any]:
        try:
            # Zip files can be memory-mapped, so that only used tensors are read.
            is_mapped = zipfile.is_zipfile(file_name)
            loaded = torch.load(file_name, map_location="cpu", weights_only=True, mmap=is_mapped)
        except Exception as error:
            raise CheckpointError(
                f"{file_name} cannot be loaded ({error}). Pass a file that bmt.save or torch.save "
                "wrote."
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"{file_name} contains a {type(loaded).__name__} (needed: a state dict). Pass a "
                "file in which model.state_dict() was saved."
            )
        return loaded

    state = _share_out(model, run_on_first(read))
    try:
        result = model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"{file_name} does not match the model. Load it into the model that was saved. {error}"
        ) from error
    sum_plain_gradients_(model)
    synchronize()
    return result


def _share_out(model: nn.Module, state: dict[str, Any] | None) -> dict[str, Any]:
    """Broadcast the state dict from rank 0; each process keeps only its shards."""
    if config["world_size"] == 1:
        assert state is not None
        return state
    heads = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in (state or {}).items()}
    heads = broadcast_object(heads)
    reshard_blocks_(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for own, published in published_parameters(model).items():
        parameters.setdefault(published, parameters[own])
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


def published_parameters(model: nn.Module) -> dict[str, str]:
    """Return a dict from a model's parameter names to those in published checkpoints.

    A module whose parameter names differ from those in its checkpoints defines the method
    `published_parameters`.
    """
    names = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        list_names = getattr(module, "published_parameters", None)
        for own, published in (list_names() if callable(list_names) else {}).items():
            names[before + own] = before + published
    return names


def broadcast_object(obj: Any, comm: Any = None, src: int = 0) -> Any:
    """Broadcast a Python object from rank `src` to all ranks."""
    config.need("broadcast_object")
    objects = [obj]
    dist.broadcast_object_list(objects, group_src=src, group=comm or config["comm"])
    return objects[0]


def allgather_objects(obj: Any, comm: Any = None) -> list[Any]:
    """All-gather Python objects; return them in rank order."""
    config.need("allgather_objects")
    group = config["comm"] if comm is None else comm
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


allgather_object = allgather_objects  # older name in BMTrain
