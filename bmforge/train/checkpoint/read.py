"""Loads a checkpoint into a model on any layout: validates everything, then copies."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bmforge.errors import CheckpointError
from bmforge.logging import get_logger
from bmforge.records import find_parallel_record
from bmforge.shards import (
    Box,
    local_box,
    local_tensor,
    put_values_,
    shard_like,
    source_of,
)
from bmforge.train.checkpoint.base import find_other_base
from bmforge.train.checkpoint.format import file_path, shard_name
from bmforge.train.checkpoint.peers import Peers
from bmforge.train.checkpoint.rng import reseed_rng, restore_rng
from bmforge.train.checkpoint.state import (
    NOT_SETTINGS,
    dtype_name,
    kind_of,
    model_tensors,
    optimizer_parameters,
    state_tensor_name,
    write_state,
)

__all__ = ["ChunkReader", "apply_checkpoint", "check_fit", "restore_generators"]

_LISTED_PROBLEMS = 20


class ChunkReader:
    """Reads any rectangular region (`Box`) of a saved tensor, from the shards that overlap it.

    Use it as a context manager.

    Args:
        path: verified checkpoint directory.
        manifest: manifest of the checkpoint.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self._path = path
        self._tensors: dict[str, Any] = manifest["tensors"]
        self._records: dict[str, Any] = manifest["files"]
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def file(self, name: str) -> Any:
        """Return the open safetensors file with this name."""
        if name not in self._files:
            where = file_path(self._path, name, self._records[name])
            handle = safe_open(where, framework="pt")
            self._files[name] = self._stack.enter_context(handle)
        return self._files[name]

    def whole_box(self, name: str) -> Box:
        """Return the region (offsets and lengths) that covers the whole tensor."""
        shape = tuple(self._tensors[name]["shape"])
        return Box((0,) * len(shape), shape)

    def read(self, name: str, box: Box) -> Tensor:
        """Return the region `box` of the saved tensor `name`, on the host, in the saved dtype."""
        record = self._tensors[name]
        result = torch.empty(box.lengths, dtype=getattr(torch, record["dtype"]))
        # Chunks do not overlap, as `write_checkpoint` checks that their sizes add up to the
        # tensor's, so counting the copied elements is enough to find gaps.
        missing = box.numel
        for chunk in record["chunks"]:
            source = Box(tuple(chunk["offsets"]), tuple(chunk["lengths"]))
            common = source.intersect(box)
            if common is None:
                continue
            part = self._slice(chunk, source, common)
            result[common.relative_to(box).slices] = part
            missing -= common.numel
        if missing:
            raise CheckpointError(
                f"checkpoint {self._path} is incomplete: no shard contains {missing} elements of "
                f"{name}. Restore the checkpoint from a copy."
            )
        return result

    def _slice(self, chunk: dict[str, Any], source: Box, common: Box) -> Tensor:
        file = self.file(chunk["file"])
        if common == source:
            return file.get_tensor(chunk["key"])
        return file.get_slice(chunk["key"])[common.relative_to(source).slices]


@dataclass(frozen=True)
class _Fit:
    """Result of comparing the model with the manifest on one process."""

    names: set[str]
    parameters: set[str]
    problems: list[_Problem]


@dataclass(frozen=True)
class _Problem:
    """Difference between model and manifest; a fatal one raises an error even with strict=False."""

    text: str
    fatal: bool = False


def check_fit(
    path: Path,
    manifest: dict[str, Any],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    peers: Peers,
    strict: bool,
) -> None:
    """Raise an error, the same on every process, unless the checkpoint fits this model.

    With ``strict=False`` only shapes must agree; other differences are listed in a warning.

    Raises:
        CheckpointError: tensors are missing or unexpected, or have a different shape or dtype; the
            message lists them.
    """
    # Gather before raising: a process that raised alone would leave the others waiting.
    fits: list[_Fit | str] = peers.gather(_compare(manifest, model, optimizers, strict))
    failures = [fit for fit in fits if isinstance(fit, str)]
    if failures:
        raise CheckpointError(failures[0])
    compared = [fit for fit in fits if isinstance(fit, _Fit)]
    problems = list(dict.fromkeys(problem for fit in compared for problem in fit.problems))
    other = find_other_base(manifest, model, peers)
    problems += [] if other is None else [_Problem(other)]
    saved = {name for name in manifest["tensors"] if name.startswith("model/")}
    # A name is unexpected only if no process has it: each pipeline stage has part of the model.
    extra = saved.difference(*(fit.names for fit in compared))
    problems += [
        _Problem(f"only in the checkpoint: {name.removeprefix('model/')}") for name in sorted(extra)
    ]
    # A process on a pipeline stage without trained parameters has no optimizer.
    if manifest["optimizer"] is not None and any(fit.parameters for fit in compared):
        unexpected = set(manifest["optimizer"]).difference(*(fit.parameters for fit in compared))
        problems += [
            _Problem(f"only in the checkpoint: optimizer state of {name}")
            for name in sorted(unexpected)
        ]
    if not problems:
        return
    if strict or any(problem.fatal for problem in problems):
        raise CheckpointError(_misfit_message(path, problems))
    if peers.rank == 0:
        get_logger().warning("%s", _misfit_message(path, problems))


def _misfit_message(path: Path, problems: list[_Problem]) -> str:
    shown = [problem.text for problem in problems[:_LISTED_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - _LISTED_PROBLEMS} more")
    return (
        f"checkpoint {path} does not match this model and optimizer "
        f"({len(problems)} differences):\n  "
        + "\n  ".join(shown)
        + "\nBuild the model and the optimizer with the configuration of the saved run, or choose "
        "another output directory."
    )


def _compare(
    manifest: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> _Fit | str:
    """Compare this process's tensors with the manifest; errors are returned as text.

    Other processes wait for the result, so no exception may be raised.
    """
    tensors = model_tensors(model)
    problems: list[_Problem] = []
    away = {f"model/{name}" for name in manifest.get("base", {}).get("names", ())}
    for name, tensor in tensors.items():
        if name in away:
            continue
        problem = _compare_tensor(name, tensor, manifest["tensors"].get(name))
        problems += [problem] if problem else []
    parameters: set[str] = set()
    saved = manifest["optimizer"]
    if optimizers and saved is None:
        problems.append(_Problem("the checkpoint has no optimizer state"))
    try:
        for name, _, _, optimizer in optimizer_parameters(model, optimizers):
            parameters.add(name)
            kind = kind_of(optimizer)
            if saved is None:
                continue
            if name not in saved:
                problems.append(_Problem(f"not in the checkpoint: optimizer state of {name}"))
            elif saved[name]["optimizer"] != kind:
                was = saved[name]["optimizer"]
                problems.append(
                    _Problem(f"{name} was trained by {was}, but is now trained by {kind}")
                )
    except CheckpointError as error:
        return str(error)
    return _Fit(set(tensors), parameters, problems)


def _compare_tensor(name: str, tensor: Tensor, record: dict[str, Any] | None) -> _Problem | None:
    shown = name.removeprefix("model/")
    if record is None:
        return _Problem(f"not in the checkpoint: {shown}")
    if local_tensor(tensor.detach()).is_meta:
        return _Problem(f"{shown} is on the meta device (call to_empty first)", fatal=True)
    saved_shape, shape = tuple(record["shape"]), tuple(tensor.shape)
    if saved_shape != shape:
        return _Problem(
            f"{shown}: shape {saved_shape} in the checkpoint, {shape} in the model", fatal=True
        )
    dtype = dtype_name(source_of(tensor).dtype)
    if record["dtype"] != dtype:
        return _Problem(f"{shown}: dtype {record['dtype']} in the checkpoint, {dtype} in the model")
    return None


@torch.no_grad()
def apply_checkpoint(
    path: Path, manifest: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Copy a validated checkpoint into the model and the optimizers.

    Memory:
        One local shard of a tensor at a time, on the host.
    """
    with ChunkReader(path, manifest) as reader:
        for name, tensor in model_tensors(model).items():
            box = local_box(tensor)
            if name in manifest["tensors"] and box.numel:
                put_values_(tensor, reader.read(name, box))
        saved = manifest["optimizer"] or {}
        for name, parameter, group, optimizer in optimizer_parameters(model, optimizers):
            entry = saved.get(name)
            if entry is None or entry["optimizer"] != kind_of(optimizer):
                continue
            values = dict(entry["values"])
            for key in entry["tensors"]:
                values[key] = _state_tensor(reader, name, key, parameter, group, optimizer)
            write_state(optimizer, parameter, values)
        _restore_groups(model, optimizers, saved)
    record = find_parallel_record(model)
    for streamer in () if record is None else record.streamers:
        streamer.forget()  # blocks that are on the device have the old weights


def _state_tensor(
    reader: ChunkReader,
    name: str,
    key: str,
    parameter: Tensor,
    group: dict[str, Any],
    optimizer: Optimizer,
) -> Tensor:
    """Read one tensor of a parameter's optimizer state, with the required layout and device.

    A tensor of the parameter's shape is sharded like the parameter; other tensors are replicated. A
    `step` counter is on the host unless the optimizer is fused or capturable.
    """
    saved_name = state_tensor_name(name, key)
    full_box = reader.whole_box(saved_name)
    present = optimizer.state.get(parameter, {}).get(key)
    # State that the optimizer has already created shows the layout it needs.
    if isinstance(present, DTensor):
        return _read_like(reader, saved_name, present)
    if key != "step" and full_box.lengths == tuple(parameter.shape):
        return _read_like(reader, saved_name, parameter)
    value = reader.read(saved_name, full_box)
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value if on_host else value.to(local_tensor(parameter).device)


def _read_like(reader: ChunkReader, name: str, pattern: Tensor) -> Tensor:
    """Read this process's shard of `name` into a new tensor with the layout of `pattern`."""
    value = reader.read(name, local_box(pattern))
    local = local_tensor(pattern)
    result = torch.empty_like(local, dtype=value.dtype, requires_grad=False)
    result.copy_(value.reshape(local.shape))
    return shard_like(result, pattern)


def _restore_groups(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: dict[str, Any]
) -> None:
    """Set the saved hyper-parameters of every parameter group."""
    entries_of_group: dict[int, list[dict[str, Any]]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for name, _, group, optimizer in optimizer_parameters(model, optimizers):
        entry = saved.get(name)
        if entry is not None and entry["optimizer"] == kind_of(optimizer):
            groups[id(group)] = group
            entries_of_group.setdefault(id(group), []).append(entry["group"])
    for key, group in groups.items():
        first = entries_of_group[key][0]
        if any(other != first for other in entries_of_group[key]):
            get_logger().warning(
                "a parameter group contains parameters that were saved with different "
                "settings, so the current settings of the group are used"
            )
            continue
        for name, value in first.items():
            _restore_setting(group, name, value)


def _restore_setting(group: dict[str, Any], name: str, value: Any) -> None:
    if name in NOT_SETTINGS:
        return
    current = group.get(name)
    if isinstance(current, Tensor):
        current.fill_(value)
    elif isinstance(value, list) and not isinstance(current, list):
        # JSON has no tuples, and optimizers expect betas as one.
        group[name] = tuple(value)
    else:
        group[name] = value


def restore_generators(path: Path, manifest: dict[str, Any], peers: Peers) -> None:
    """Restore this process's generators; if the world size has changed, reseed them and warn."""
    if manifest["world_size"] == peers.world_size:
        with ChunkReader(path, manifest) as reader:
            file = reader.file(shard_name(peers.rank, peers.world_size))
            keys = [key for key in file.keys() if key.startswith("rng/")]  # noqa: SIM118
            restore_rng({key: file.get_tensor(key) for key in keys})
        return
    if peers.rank == 0:
        get_logger().warning(
            (
                "the checkpoint was saved by %d processes and is loaded by %d, so the random "
                "generators are seeded with (seed=%d, step=%d, rank)"
            ),
            manifest["world_size"],
            peers.world_size,
            manifest["seed"],
            manifest["step"],
        )
    reseed_rng(manifest["seed"], manifest["step"], peers.rank)
