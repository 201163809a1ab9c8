"""BMInf's block list, which streams the blocks that exceed a memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import device_at, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import plan_weights
from bmforge.infer.engine.weights import place_
from bmforge.memory.naive_parallel import spread_blocks_
from bmforge.memory.streaming import Streamer

__all__ = ["TransformerBlockList", "place_blocks_"]

# Fraction of the free memory that BMInf uses by default.
_SHARE = 0.9


def place_blocks_(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    limit_bytes: int | None,
    device: torch.device,
) -> Streamer | None:
    """Move a model to a device within a memory limit; stream the blocks that do not fit.

    Args:
        model: model in memory; parameters of its blocks are frozen.
        blocks: dict from name to module of the blocks that may be streamed.
        limit_bytes: limit on weights, buffers and streaming slots (device memory for streamed
            blocks) in bytes (default: 0.9 of the free memory of an accelerator; no limit on a CPU).
        device: compute device.

    Raises:
        ConfigError: the limit is too small; the message names the smallest possible limit.
    """
    for block in blocks.values():
        block.requires_grad_(False)
    if limit_bytes is None:
        if is_host(device):
            return None
        limit_bytes = int(_SHARE * memory_room_bytes(device))
    plan = plan_weights(model, device, limit_bytes, blocks)
    return next(iter(place_(model, plan, None)[0]), None)


class TransformerBlockList(nn.ModuleList):
    """Sequential list of blocks; those that do not fit a memory limit are streamed.

    Iterating, indexing and slicing return the blocks, which load their weights when they run.
    Blocks may have different structures.

    Args:
        layers: the blocks.
        gpus: accelerator indices, or pairs of index and limit in bytes; blocks are divided over
            them in order. On a CPU the indices are ignored and only the limits apply. If it is
            empty, blocks are not moved.

    Raises:
        ConfigError: there are no blocks, or a limit is too small; the message names the smallest
            possible limit.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gpus: Sequence[int | tuple[int, int | None]] = ()
    ) -> None:
        super().__init__(layers)
        places: dict[str, torch.device] = {}
        if gpus and not len(self):
            raise ConfigError("TransformerBlockList has no blocks. Pass at least one.")
        self.requires_grad_(False)
        each = -(-len(self) // max(1, len(gpus)))
        for gpu, entry in enumerate(gpus):
            index, limit = entry if isinstance(entry, tuple) else (entry, None)
            numbers = range(len(self))[gpu * each : (gpu + 1) * each]
            if numbers:
                share = nn.ModuleDict({str(number): self[number] for number in numbers})
                place_blocks_(share, dict(share.items()), limit, device_at(index))
                places |= dict.fromkeys(share, device_at(index))
        spread_blocks_(self, {name: at for name, at in places.items() if not is_host(at)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks in sequence.

        Args:
            x: input of the first block.
            args: further arguments of every block.
            kwargs: keyword arguments of every block.

        Shape:
            x: input of the first block
        """
        for block in self:
            x = block(x, *args, **kwargs)
        return x
