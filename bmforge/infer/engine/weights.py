"""Loads and places an engine's weights: resident, streamed, or spilled to disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.infer.engine.divide import find_staying
from bmforge.infer.engine.memory_plan import MemoryPlan
from bmforge.memory.direct_read import READ_THREADS, DirectReader
from bmforge.memory.naive_parallel import spread_blocks_
from bmforge.memory.spill import SpillFile
from bmforge.memory.streamed_experts import ExpertStreamer, stream_experts_
from bmforge.memory.streaming import ReadWeights, Streamer, stream_blocks_
from bmforge.models import load_weights_, weight_reader
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.records import units_of
from bmforge.shards import is_streamed
from bmforge.surgery import persistent_tensors

__all__ = ["place_", "read_weights_"]


def read_weights_(
    model: Any, files: WeightFiles, plan: MemoryPlan
) -> tuple[Sequence[Streamer | ExpertStreamer], Callable[[], None]]:
    """Load the weights of a meta model according to a plan.

    Returns:
        objects that load the streamed blocks or experts on demand, and a function that ends
        streaming and leaves every block on its current device

    Raises:
        CheckpointError: the files do not fit the model.
    """
    read = weight_reader(model, files, READ_THREADS)
    streamers: Sequence[Streamer | ExpertStreamer]
    with ExitStack() as cleanup:
        if plan.experts_bytes:
            streamer = stream_experts_(
                model, read.read_expert, device=plan.device, budget_bytes=plan.experts_bytes
            )
            cleanup.callback(streamer.close)
            streamers = [streamer]
        else:
            streamers = _stream_(model, [read] * len(plan.each()), plan, cleanup)
        load_weights_(
            model, files, device=plan.device, threads=READ_THREADS, elsewhere=plan.elsewhere
        )
        _spread_(model, plan, cleanup)
        return streamers, cleanup.pop_all().close


def place_(
    model: nn.Module,
    plan: MemoryPlan,
    directory: Path | None,
) -> tuple[Sequence[Streamer], Callable[[], None]]:
    """Place a model that is already in memory according to a plan.

    Streamed blocks are moved to the host, or to an unnamed file if the device is the host.

    Args:
        model: model in memory; its blocks are moved in place.
        plan: placement.
        directory: directory for the unnamed file; None means the system's temporary directory.

    Returns:
        objects that load the streamed blocks on demand, and a function that ends streaming, deletes
        the file and leaves every block on its current device

    Raises:
        ConfigError: the directory is not writable, or its disk is too small.
    """
    with ExitStack() as cleanup:
        reads = [_offload(model, device_plan, directory, cleanup) for device_plan in plan.each()]
        streamers = _stream_(model, reads, plan, cleanup)
        for name, device in plan.elsewhere.items():
            _move_(model.get_submodule(name), device)
        away = {id(t) for name in plan.elsewhere for t in _tensors_of(model.get_submodule(name))}
        _move_(model, plan.device, away)
        _spread_(model, plan, cleanup)
        return streamers, cleanup.pop_all().close


def _offload(
    model: nn.Module, plan: MemoryPlan, directory: Path | None, cleanup: ExitStack
) -> ReadWeights:
    """Move one device's streamed blocks to the host or a file; return a reader of these blocks.

    The file is a temporary one in `directory`, which `cleanup` will delete.
    """
    stays = find_staying(model)
    streamed = {
        name: tensor.detach()
        for name, tensor in persistent_tensors(model).items()
        if any(name.startswith(f"{block}.") for block in plan.moving) and not stays(name, tensor)
    }
    if not streamed or not is_host(plan.device):
        return _HostReader(streamed)
    sizes = (tensor.numel() * tensor.element_size() for tensor in streamed.values())
    size = sum(map(SpillFile.rounded, sizes))
    file = SpillFile(directory, size, "EngineConfig.spill_directory")
    cleanup.callback(file.close)
    return _SpillReader(file, streamed)


def _stream_(
    model: nn.Module, reads: Sequence[ReadWeights], plan: MemoryPlan, cleanup: ExitStack
) -> list[Streamer]:
    """Start a weight streamer for each device that has streamed blocks."""
    streamers = []
    for device_plan, read in zip(plan.each(), reads, strict=True):
        if device_plan.moving:
            streamer = stream_blocks_(
                model,
                read,
                device=device_plan.device,
                blocks=device_plan.moving,
                on_host=device_plan.on_host,
                stays=find_staying(model),
            )
            cleanup.callback(streamer.close)
            streamers.append(streamer)
    return streamers


def _spread_(model: nn.Module, plan: MemoryPlan, cleanup: ExitStack) -> None:
    """If the plan has several devices, let each block move its inputs to its own device."""
    if elsewhere := plan.elsewhere:
        blocks = (unit.name for unit in units_of(model) if unit.is_block)
        places = {name: elsewhere.get(name, plan.device) for name in blocks}
        cleanup.callback(spread_blocks_(model, places, plan.device))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _move_(module: nn.Module, device: torch.device, but: Collection[int] = ()) -> None:
    """Move resident tensors to a device in place, except those whose ``id()`` is in `but`."""
    for tensor in _tensors_of(module):
        if id(tensor) not in but and not is_streamed(tensor):
            tensor.data = tensor.data.to(device)


class _HostReader:
    """Callable that copies the named tensor from host memory into a target tensor."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._kept = tensors

    def __call__(self, name: str, target: Tensor) -> None:
        target.copy_(self._kept[name])


class _SpillReader:
    """Callable that reads the named tensor from an unnamed file into a target tensor."""

    def __init__(self, file: SpillFile, tensors: dict[str, Tensor]) -> None:
        self._reads = DirectReader()
        self._places = {}
        for name, tensor in tensors.items():
            region = file.reserve(tensor.numel() * tensor.element_size())
            region.write(0, tensor.cpu().contiguous())
            self._places[name] = region

    def __call__(self, name: str, target: Tensor) -> None:
        self._places[name].fill(target, self._reads.read_into)
