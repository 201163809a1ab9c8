"""Drawing a tensor by its name, so that every layout draws the same.

A weight is drawn in blocks of rows, each from a generator seeded by (seed, parameter name, block
number). A rank draws only the blocks that its rows touch, on the CPU, and copies its part.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bmforge.nn.part import Derived, TensorNote
from bmforge.shards import local_box, local_tensor

__all__ = ["draw_normal_", "draw_tensor_", "fill_"]

# Fixed for ever: another block size would draw other weights.
_BLOCK_ELEMENTS = 1 << 16


def draw_tensor_(tensor: Tensor, name: str, note: TensorNote, std: float, seed: int) -> None:
    """Fill this process's part of a part's tensor.

    Args:
        tensor: what is filled.
        name: its whole name, which decides what is drawn.
        note: what its part says of it.
        std: of what it is derived from, where it is derived.
        seed: decides the rest.
    """
    draw = note.draw
    if isinstance(draw, Derived):
        owner = name.rpartition(".")[0]
        draw_normal_(tensor, f"{owner}.{draw.base}", std, seed, draw)
    elif isinstance(draw, float):
        draw_normal_(tensor, name, draw, seed)
    elif draw == "numbers":
        first = local_box(tensor).offsets[0]
        local = local_tensor(tensor.detach())
        local.copy_(torch.arange(first, first + local.shape[0]))
    else:
        fill_(tensor, {"zeros": 0.0, "ones": 1.0}[draw])


@torch.no_grad()
def fill_(tensor: Tensor, value: float) -> None:
    """Fill this process's part of a tensor with one number."""
    local_tensor(tensor).fill_(value)


@torch.no_grad()
def draw_normal_(
    tensor: Tensor,
    name: str,
    std: float,
    seed: int,
    made: Derived | None = None,
) -> None:
    """Draw this process's part of a tensor from N(0, std^2).

    Args:
        tensor: what is filled.
        name: decides with `seed` what is drawn.
        std: standard deviation.
        seed: likewise.
        made: how what is drawn, of another shape, becomes the tensor; None keeps it as it is.
    """
    box = local_box(tensor)
    if box.numel == 0:
        return
    target, shape = local_tensor(tensor), tuple(tensor.shape) if made is None else made.shape
    each = 1 if made is None else made.rows_each
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    step = max(1, rows // each)
    first, last = box.offsets[0], box.offsets[0] + box.lengths[0]
    for entry in range(first // step * step, last, step):
        stop = min((entry + step) * each, shape[0])
        blocks = [
            _draw_block(name, std, seed, shape, rows, block)
            for block in range(entry * each // rows, (stop - 1) // rows + 1)
        ]
        behind = entry * each % rows
        drawn = (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[behind:]
        drawn = drawn[: stop - entry * each]
        drawn = drawn if made is None else made.turn(drawn)
        low, high = max(entry, first), min(entry + drawn.shape[0], last)
        piece = drawn[(slice(low - entry, high - entry), *box.slices[1:])]
        target[low - first : high - first].copy_(piece)


def _draw_block(
    name: str, std: float, seed: int, shape: tuple[int, ...], rows: int, block: int
) -> Tensor:
    """Return the rows of one block."""
    count = min(rows, shape[0] - block * rows)
    return torch.empty(count, *shape[1:]).normal_(0.0, std, generator=_generator(seed, name, block))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
