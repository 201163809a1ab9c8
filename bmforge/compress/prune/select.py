"""Choosing zeros on any layout: the same ones, however the parameters are divided.

What is compared within a matrix is looked at whole, one parameter after the other. What is compared
over all of them is counted where it lies, and the counts are summed over the processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.masks import keep_2_of_4, keep_2_of_4_both_ways, keep_largest
from bmforge.device import device_at
from bmforge.shards import is_first_replica, laid_out_like, local_box, whole_tensor

__all__ = ["Scored", "choose_masks", "mask_matrix", "matrices_in"]

_HALF_BITS = 16


@dataclass(frozen=True)
class Scored:
    """A parameter of which some weights are to go, as far as it is here.

    Args:
        module: that has it.
        parameter: it.
        scores: of the weights that are here; the smallest go.
    """

    module: nn.Module
    parameter: nn.Parameter
    scores: Tensor


def matrices_in(module: nn.Module, tensor: Tensor) -> list[Tensor]:
    """Return views of the matrices in a tensor shaped like a whole parameter: (rows, columns)."""
    if tensor.dim() == 3:
        return list(tensor.unbind())
    return [tensor.t() if hasattr(module, "nf") else tensor]


def mask_matrix(scores: Tensor, config: PruneConfig, share: float) -> Tensor:
    """Return which weights of one matrix stay.

    Shape:
        scores: (rows, columns); returns the same
    """
    if config.pattern == "2:4":
        return keep_2_of_4(scores)
    if config.pattern != "free":
        return keep_2_of_4_both_ways(scores, exact=config.pattern == "2:4-both")
    by_row = config.scope == "row"
    count = scores.shape[1] if by_row else scores.numel()
    return keep_largest(scores, round(share * count), by_row=by_row)


def choose_masks(
    found: Mapping[str, Scored], names: Sequence[str], config: PruneConfig, share: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the mask of every parameter that is here, of what is here of it.

    Args:
        found: name -> what is here.
        names: of all parameters on all processes, the same everywhere.
        config: what is compared.
        share: of zeros.

    Comm: a whole parameter at a time is gathered where it is sharded; with scope="global" three
        all-reduces of counts instead.
    """
    if config.scope == "global" and config.pattern == "free":
        yield from _choose_globally(found, names, share)
        return
    for name, one in found.items():
        scores = whole_tensor(laid_out_like(one.scores, one.parameter))
        mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
        parts = zip(matrices_in(one.module, mask), matrices_in(one.module, scores), strict=True)
        for target, part in parts:
            target.copy_(mask_matrix(part, config, share))
        yield name, mask[local_box(one.parameter).slices].contiguous()


def _choose_globally(
    found: Mapping[str, Scored], names: Sequence[str], share: float
) -> Iterator[tuple[str, Tensor]]:
    """Find the score below which all go, then how many of those that have just this one."""
    device = next((one.scores.device for one in found.values()), device_at())
    here = {n: one for n, one in found.items() if is_first_replica(one.parameter, _leads())}
    high = torch.zeros(1 << _HALF_BITS, dtype=torch.int64, device=device)
    for one in here.values():
        high += torch.bincount(_ordered(one.scores) >> _HALF_BITS, minlength=1 << _HALF_BITS)
    high = _sum(high).cumsum(0)
    zeros = round(share * int(high[-1]))
    if not zeros:
        yield from ((n, torch.ones_like(one.scores, dtype=torch.bool)) for n, one in found.items())
        return
    top = int(torch.searchsorted(high, torch.tensor(zeros, device=device)))
    before = int(high[top - 1]) if top else 0
    low = torch.zeros(1 << _HALF_BITS, dtype=torch.int64, device=device)
    for one in here.values():
        keys = _ordered(one.scores)
        keys = keys[keys >> _HALF_BITS == top] & (1 << _HALF_BITS) - 1
        low += torch.bincount(keys, minlength=1 << _HALF_BITS)
    low = _sum(low).cumsum(0)
    bottom = int(torch.searchsorted(low, torch.tensor(zeros - before, device=device)))
    border = (top << _HALF_BITS) + bottom
    left = zeros - before - (int(low[bottom - 1]) if bottom else 0)
    ties = torch.zeros(len(names), dtype=torch.int64, device=device)
    for number, name in enumerate(names):
        if name in here:
            ties[number] = (_ordered(here[name].scores) == border).sum()
    yield from _cut_at(found, names, border, left, _sum(ties).tolist())


def _cut_at(
    found: Mapping[str, Scored], names: Sequence[str], border: int, left: int, ties: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Let all below the border go, and of those on it the first `left`, parameter by parameter."""
    for name, count in zip(names, ties, strict=True):
        going, left = min(count, left), left - min(count, left)
        if name not in found:
            continue
        one = found[name]
        keys = _ordered(one.scores).view(one.scores.shape)
        if 0 < going < count:
            whole = whole_tensor(laid_out_like(keys, one.parameter))
            on = (whole == border).flatten()
            kept = (whole > border) | (on & (on.cumsum(0) > going)).view(whole.shape)
            yield name, kept[local_box(one.parameter).slices].contiguous()
        else:
            yield name, keys > border if going else keys >= border


def _ordered(scores: Tensor) -> Tensor:
    """Return 32-bit numbers in the order of the scores, flat: those of their bits."""
    bits = scores.detach().float().contiguous().view(torch.int32).flatten().to(torch.int64)
    # Of two negative floats the one with the larger bits is smaller; both zeros are one.
    flipped = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return flipped + (1 << 31)


def _leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _sum(counts: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts)
    return counts
