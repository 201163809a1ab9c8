"""Selects weights to prune, with the same result on any parallel layout.

Scopes within a matrix all-gather one parameter at a time. The global scope counts scores on the
local shards and sums the counts over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.masks import keep_2_of_4, keep_2_of_4_both_ways, keep_largest
from bmforge.device import device_at
from bmforge.shards import is_first_replica, local_box, shard_like, whole_tensor

__all__ = ["ScoredParameter", "choose_masks", "mask_matrix", "matrices_in"]

_HALF_BITS = 16


@dataclass(frozen=True)
class ScoredParameter:
    """Parameter with pruning scores of its local shard.

    Args:
        module: module that owns the parameter.
        parameter: parameter to prune.
        scores: scores of the local weights; the weights with the smallest scores are pruned.
    """

    module: nn.Module
    parameter: nn.Parameter
    scores: Tensor


def matrices_in(module: nn.Module, tensor: Tensor) -> list[Tensor]:
    """Return views of the matrices, (rows, columns), in a tensor of a parameter's full shape."""
    if tensor.dim() == 3:
        return list(tensor.unbind())
    return [tensor.t() if hasattr(module, "nf") else tensor]


def mask_matrix(scores: Tensor, config: PruneConfig, share: float) -> Tensor:
    """Return the mask of one matrix, True for kept weights.

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
    scored: Mapping[str, ScoredParameter], names: Sequence[str], config: PruneConfig, share: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter and the mask of its local shard.

    Args:
        scored: dict from name to parameter and scores, for parameters on this process.
        names: names of the parameters of all processes, in the same order on every process.
        config: pattern and scope.
        share: fraction of zeros.

    Comm: one all-gather per sharded parameter; with scope="global", four all-reduces of counts.
    """
    if config.scope == "global" and config.pattern == "free":
        yield from _choose_globally(scored, names, share)
        return
    for name, entry in scored.items():
        scores = whole_tensor(shard_like(entry.scores, entry.parameter))
        mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
        parts = zip(matrices_in(entry.module, mask), matrices_in(entry.module, scores), strict=True)
        for target, part in parts:
            target.copy_(mask_matrix(part, config, share))
        yield name, mask[local_box(entry.parameter).slices].contiguous()


def _choose_globally(
    scored: Mapping[str, ScoredParameter], names: Sequence[str], share: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield masks by a global score threshold; ties are broken to prune exactly `share`."""
    counts = _Counts(scored, names)
    high = counts.histogram(lambda keys: keys >> _HALF_BITS)
    zeros = round(share * int(high[-1]))
    if not zeros:
        yield from (
            (n, torch.ones_like(entry.scores, dtype=torch.bool)) for n, entry in scored.items()
        )
        return
    top = _first_at_least(high, zeros)
    before = int(high[top - 1]) if top else 0

    def lower(keys: Tensor) -> Tensor:
        return keys[keys >> _HALF_BITS == top] & (1 << _HALF_BITS) - 1

    low = counts.histogram(lower)
    bottom = _first_at_least(low, zeros - before)
    border = (top << _HALF_BITS) + bottom
    left = zeros - before - (int(low[bottom - 1]) if bottom else 0)
    yield from _cut_at(scored, names, border, left, counts.ties(border))


def _first_at_least(sums: Tensor, count: int) -> int:
    return int(torch.searchsorted(sums, torch.tensor(count, device=sums.device)))


class _Counts:
    """Counts weights over all processes; replicated weights count once.

    Comm: an all-reduce per count, and in the constructor one all-reduce of a number per parameter.
    """

    def __init__(self, scored: Mapping[str, ScoredParameter], names: Sequence[str]) -> None:
        self._names = names
        self._here = {
            n: entry for n, entry in scored.items() if is_first_replica(entry.parameter, True)
        }
        self._device = next((entry.scores.device for entry in scored.values()), device_at())
        counted = self._new(len(names))
        for number, name in enumerate(names):
            if name in self._here:
                counted[number] = self._here[name].scores.numel()
        # Plain tensors, and tensors that pipeline stages share, would otherwise be counted several
        # times.
        times = dict(zip(names, _sum(counted).tolist(), strict=True))
        self._share = {n: entry.parameter.numel() / times[n] for n, entry in self._here.items()}

    def _new(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self._device)

    def histogram(self, keys_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a cumulative histogram: entry k is the number of weights with a key up to k."""
        total = self._new(1 << _HALF_BITS)
        for name, entry in self._here.items():
            keys = keys_of(_ordered(entry.scores))
            total += self._share[name] * torch.bincount(keys, minlength=1 << _HALF_BITS)
        return _sum(total).round().to(torch.int64).cumsum(0)

    def ties(self, border: int) -> list[int]:
        """Return, for every parameter, the number of weights whose score equals the threshold."""
        tied = self._new(len(self._names))
        for number, name in enumerate(self._names):
            if name in self._here:
                equal = (_ordered(self._here[name].scores) == border).sum()
                tied[number] = self._share[name] * equal
        return _sum(tied).round().to(torch.int64).tolist()


def _cut_at(
    scored: Mapping[str, ScoredParameter],
    names: Sequence[str],
    border: int,
    left: int,
    ties: Sequence[int],
) -> Iterator[tuple[str, Tensor]]:
    """Prune all weights below the threshold, and the first `left` weights equal to it."""
    for name, count in zip(names, ties, strict=True):
        going, left = min(count, left), left - min(count, left)
        if name not in scored:
            continue
        entry = scored[name]
        keys = _ordered(entry.scores).view(entry.scores.shape)
        if 0 < going < count:
            full_keys = whole_tensor(shard_like(keys, entry.parameter))
            on = (full_keys == border).flatten()
            mask = (full_keys > border) | (on & (on.cumsum(0) > going)).view(full_keys.shape)
            yield name, mask[local_box(entry.parameter).slices].contiguous()
        else:
            yield name, keys > border if going else keys >= border


def _ordered(scores: Tensor) -> Tensor:
    """Return the flattened scores as 32-bit integers with the same order."""
    bits = scores.detach().float().contiguous().view(torch.int32).flatten().to(torch.int64)
    # Negative floats sort in reverse order of their bits; -0.0 and 0.0 map to the same key.
    flipped = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return flipped + (1 << 31)


def _sum(counts: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts)
    return counts
