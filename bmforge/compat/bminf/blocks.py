"""BMInf's list of blocks, of which those that do not fit come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import device_at, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import plan_weights
from bmforge.infer.engine.weights import place_
from bmforge.memory.spread import spread_blocks_
from bmforge.memory.streaming import Streamer

__all__ = ["TransformerBlockList", "place_blocks_"]

# What BMInf takes of the free memory where nobody says how much.
_SHARE = 0.9


def place_blocks_(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    limit_bytes: int | None,
    device: torch.device,
) -> Streamer | None:
    """Have a module's weights on a device within a limit; blocks that do not fit come and go.

    Args:
        model: in memory; its parameters in blocks take no gradients any more.
        blocks: name -> module of what may come and go.
        limit_bytes: of weights, buffers and slots; None takes 0.9 of what is free on an
            accelerator, and on a CPU, where all is in memory already, everything.
        device: where it computes.

    Raises:
        ConfigError: the limit is too small, with the smallest that works.
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
    """Blocks that run one after the other, of which as many stay as a limit lets.

    It is a list like any other: iterating, indexing and slicing give the blocks, which bring their
    weights themselves when they run. Blocks may differ.

    Args:
        layers: the blocks.
        gpus: numbers of accelerators, or pairs of one and its limit in bytes; each has as many
            blocks, in their order. On a CPU the numbers mean nothing and the limits count. Without
            any the blocks stay where they are.

    Raises:
        ConfigError: no blocks, or a limit that is too small, with the smallest that works.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gpus: Sequence[int | tuple[int, int | None]] = ()
    ) -> None:
        super().__init__(layers)
        places: dict[str, torch.device] = {}
        if gpus and not len(self):
            raise ConfigError("TransformerBlockList has no blocks; give at least one.")
        self.requires_grad_(False)
        each = -(-len(self) // max(1, len(gpus)))
        for place, entry in enumerate(gpus):
            index, limit = entry if isinstance(entry, tuple) else (entry, None)
            numbers = range(len(self))[place * each : (place + 1) * each]
            if numbers:
                share = nn.ModuleDict({str(number): self[number] for number in numbers})
                place_blocks_(share, dict(share.items()), limit, device_at(index))
                places |= dict.fromkeys(share, device_at(index))
        spread_blocks_(self, {name: at for name, at in places.items() if not is_host(at)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks on what the one before returned.

        Args:
            x: what the first block takes first.
            args: what every block takes besides.
            kwargs: likewise.

        Shape:
            x: as the blocks have it
        """
        for block in self:
            x = block(x, *args, **kwargs)
        return x
