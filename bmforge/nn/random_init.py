"""Random initialization of tensors, seeded by their names: the same values on every layout.

A weight is sampled in blocks of rows, each from a generator seeded by (seed, parameter name, block
index). A rank samples only the blocks that overlap its shard, on the CPU, and copies its shard from
them.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bmforge.nn.part import Derived, TensorNote
from bmforge.shards import local_box, local_tensor

__all__ = ["copy_part_", "sample_normal_", "init_from_note_", "fill_"]

# Do not change this: with another block size the same seed gives other weights.
_BLOCK_ELEMENTS = 1 << 16


def init_from_note_(tensor: Tensor, name: str, note: TensorNote, std: float, seed: int) -> None:
    """Initialize this rank's shard of a parameter of an adapter or a replaced layer.

    Args:
        tensor: tensor to fill.
        name: full parameter name, which seeds the generator.
        note: initialization method and sharding of the parameter.
        std: standard deviation of the base parameter, for a parameter that is derived from one.
        seed: random seed of the initialization.
    """
    initial = note.initial
    if isinstance(initial, Derived):
        owner = name.rpartition(".")[0]
        sample_normal_(tensor, f"{owner}.{initial.base}", std, seed, initial)
    elif isinstance(initial, float):
        sample_normal_(tensor, name, initial, seed)
    elif initial == "numbers":
        first = local_box(tensor).offsets[0]
        local = local_tensor(tensor.detach())
        local.copy_(torch.arange(first, first + local.shape[0]))
    else:
        fill_(tensor, {"zeros": 0.0, "ones": 1.0}[initial])


@torch.no_grad()
def fill_(tensor: Tensor, value: float) -> None:
    """Fill this rank's shard of a tensor with one number."""
    local_tensor(tensor).fill_(value)


@torch.no_grad()
def copy_part_(tensor: Tensor, source: Tensor) -> None:
    """Copy this rank's shard from a whole tensor."""
    box = local_box(tensor)
    if box.numel:
        local_tensor(tensor).copy_(source[box.slices] if source.dim() else source)


@torch.no_grad()
def sample_normal_(
    tensor: Tensor,
    name: str,
    std: float,
    seed: int,
    derived: Derived | None = None,
) -> None:
    """Sample this rank's shard of a tensor from N(0, std^2).

    Args:
        tensor: tensor to fill.
        name: parameter name, which seeds the generator together with `seed`.
        std: standard deviation.
        seed: random seed of the initialization.
        derived: source of a tensor that is computed from samples of a different shape; if None, the
            tensor consists of the samples.
    """
    box = local_box(tensor)
    if box.numel == 0:
        return
    target, shape = local_tensor(tensor), tuple(tensor.shape) if derived is None else derived.shape
    rows_each = 1 if derived is None else derived.rows_each
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    step = max(1, rows // rows_each)
    first, last = box.offsets[0], box.offsets[0] + box.lengths[0]
    for entry in range(first // step * step, last, step):
        stop = min((entry + step) * rows_each, shape[0])
        blocks = [
            _sample_block(name, std, seed, shape, rows, block)
            for block in range(entry * rows_each // rows, (stop - 1) // rows + 1)
        ]
        offset = entry * rows_each % rows
        sample = (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[offset:]
        sample = sample[: stop - entry * rows_each]
        sample = sample if derived is None else derived.compute(sample)
        low, high = max(entry, first), min(entry + sample.shape[0], last)
        part = sample[(slice(low - entry, high - entry), *box.slices[1:])]
        target[low - first : high - first].copy_(part)


def _sample_block(
    name: str, std: float, seed: int, shape: tuple[int, ...], rows: int, block: int
) -> Tensor:
    """Sample one block of rows."""
    count = min(rows, shape[0] - block * rows)
    return torch.empty(count, *shape[1:]).normal_(0.0, std, generator=_generator(seed, name, block))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
