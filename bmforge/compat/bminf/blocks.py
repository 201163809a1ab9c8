"""BMInf's list of blocks, of which those that do not fit come and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import device_at, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import plan_weights
from bmforge.infer.engine.weights import place_
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
    return place_(model, plan, device, None, list(blocks))[0]


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
        self._devices: list[torch.device | None] = [None] * len(self)
        if gpus and not len(self):
            raise ConfigError("TransformerBlockList has no blocks; give at least one.")
        self.requires_grad_(False)
        each = -(-len(self) // max(1, len(gpus)))
        for place, entry in enumerate(gpus):
            index, limit = entry if isinstance(entry, tuple) else (entry, None)
            numbers = range(len(self))[place * each : (place + 1) * each]
            if numbers:
                self._place(numbers, device_at(index), limit)

    def _place(self, numbers: range, device: torch.device, limit: int | None) -> None:
        share = nn.ModuleDict({str(number): self[number] for number in numbers})
        place_blocks_(share, dict(share.items()), limit, device)
        for number in numbers:
            self._devices[number] = device

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks on what the one before returned.

        Args:
            x: what the first block takes first.
            args: what every block takes besides.
            kwargs: likewise.

        Shape:
            x: as the blocks have it
        """
        for device, block in zip(self._devices, self, strict=True):
            if device is not None and not is_host(device):
                x, *args = _moved((x, *args), device)  # type: ignore[assignment]
                kwargs = dict(zip(kwargs, _moved(kwargs.values(), device), strict=True))
            x = block(x, *args, **kwargs)
        return x


def _moved(values: Any, device: torch.device) -> Iterator[Any]:
    for value in values:
        yield value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
