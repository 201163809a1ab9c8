"""How an engine's model comes to have its weights: read, streamed, or sent to disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.infer.engine.budget import MemoryPlan, find_staying
from bmforge.memory.direct_read import READ_THREADS, DirectReads
from bmforge.memory.experts_away import ExpertStreamer, stream_experts_
from bmforge.memory.spill import SpillFile
from bmforge.memory.streaming import ReadWeights, Streamer, stream_blocks_
from bmforge.models import load_weights_, weight_reader
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.shards import is_streamed
from bmforge.surgery import persistent_tensors

__all__ = ["place_", "read_weights_"]


def read_weights_(
    model: Any, files: WeightFiles, plan: MemoryPlan, device: torch.device
) -> Streamer | ExpertStreamer | None:
    """Give a model on meta its weights as planned; return what streams, if anything does.

    Raises:
        CheckpointError: the files do not fit the model.
    """
    read = weight_reader(model, files, READ_THREADS)
    streamer: Streamer | ExpertStreamer | None
    if plan.experts_bytes:
        streamer = stream_experts_(
            model, read.read_expert, device=device, budget_bytes=plan.experts_bytes
        )
    else:
        streamer = _stream_(model, read, plan, device)
    load_weights_(model, files, device=device, threads=READ_THREADS)
    return streamer


def place_(
    model: nn.Module,
    plan: MemoryPlan,
    device: torch.device,
    directory: Path | None,
    blocks: Sequence[str] | None = None,
) -> tuple[Streamer | None, Callable[[], None]]:
    """Move a model that is in memory to where the plan has its parts.

    Blocks that come and go wait on the host, or where that is the device in a file without a name.

    Args:
        model: as it is.
        plan: where everything goes.
        device: where it computes.
        directory: for the file; None takes the system's temporary directory.
        blocks: names of those that the plan is about; None: all that the model has.

    Returns:
        what streams, if anything does; and what gives the file back.

    Raises:
        ConfigError: the directory cannot be used, or its disk has less room than is needed.
    """
    moving = {*plan.on_host, *plan.on_disk}
    kept: dict[str, Tensor] = {}
    stays = find_staying(model)
    for name, tensor in persistent_tensors(model).items():
        if any(name.startswith(f"{block}.") for block in moving) and not stays(name, tensor):
            kept[name] = tensor.detach()
    close: Callable[[], None] = _nothing
    read: ReadWeights = _Kept(kept)
    if kept and is_host(device):
        sizes = (t.numel() * t.element_size() for t in kept.values())
        file = SpillFile(
            directory, sum(map(SpillFile.rounded, sizes)), "EngineConfig.spill_directory"
        )
        read, close = _Spilled(file, kept), file.close
        kept.clear()
    streamer = _stream_(model, read, plan, device, blocks)
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_streamed(tensor):
            tensor.data = tensor.data.to(device)
    return streamer, close


def _stream_(
    model: nn.Module,
    read: ReadWeights,
    plan: MemoryPlan,
    device: torch.device,
    blocks: Sequence[str] | None = None,
) -> Streamer | None:
    if not plan.moved_bytes:
        return None
    return stream_blocks_(
        model,
        read,
        device=device,
        blocks=blocks,
        resident=plan.resident,
        on_host=plan.on_host,
        stays=find_staying(model),
    )


class _Kept:
    """Tensors in host memory, by name."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        self._kept = kept

    def __call__(self, name: str, target: Tensor) -> None:
        target.copy_(self._kept[name])


class _Spilled:
    """Tensors in a file without a name, by name."""

    def __init__(self, file: SpillFile, kept: dict[str, Tensor]) -> None:
        self._reads = DirectReads()
        self._places = {}
        for name, tensor in kept.items():
            place = file.reserve(tensor.numel() * tensor.element_size())
            place.write(0, tensor.cpu().contiguous())
            self._places[name] = place

    def __call__(self, name: str, target: Tensor) -> None:
        self._places[name].fill(target, self._reads.read_into)


def _nothing() -> None:
    """There is nothing to give back."""
