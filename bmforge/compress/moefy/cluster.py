"""Groups rows of similar direction into clusters of equal size (balanced k-means)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.nn.balanced_assignment import assign_balanced

__all__ = ["group_at_random", "group_rows", "order_of"]

_MAX_ROUNDS = 20


def group_rows(rows: Tensor, groups: int, seed: int = 0) -> Tensor:
    """Group rows by direction into clusters of equal size (balanced k-means on unit rows).

    Args:
        rows: vectors to group.
        groups: number of groups; must divide the number of rows.
        seed: random seed of the initial centers.

    Shape:
        rows: (n, D) -> (n,), the group index of each row

    Raises:
        ConfigError: the number of groups does not divide the number of rows.

    Source: Zhang et al., "MoEfication" (2022), which assigns rows greedily and swaps pairs; this
    implementation computes optimal balanced assignments (`nn.balanced_assignment`). The initial
    centers are those of k-means++ (Arthur and Vassilvitskii, 2007).
    """
    _check(rows.shape[0], groups)
    unit = F.normalize(rows.detach().float(), dim=-1)
    centers = _first_centers(unit, groups, seed)
    clusters = torch.full((rows.shape[0],), -1, device=unit.device)
    for _ in range(_MAX_ROUNDS):
        before, clusters = clusters, assign_balanced(unit @ centers.T)
        if torch.equal(clusters, before):
            break
        sums = torch.zeros_like(centers).index_add_(0, clusters, unit)
        centers = F.normalize(sums, dim=-1)
    return clusters


def group_at_random(count: int, groups: int, seed: int = 0) -> Tensor:
    """Assign items to groups of equal size at random, as a control in comparisons.

    Shape:
        returns (count,)
    """
    _check(count, groups)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator) % groups


def order_of(groups: Tensor) -> Tensor:
    """Return the permutation that sorts items by group and keeps their order within a group.

    Shape:
        groups: (n,) -> (n,)
    """
    return groups.argsort(stable=True)


def _check(count: int, groups: int) -> None:
    if count % groups:
        raise ConfigError(
            f"{count} features cannot be divided into {groups} groups of equal size. Use a divisor "
            f"of {count}."
        )


def _first_centers(unit: Tensor, groups: int, seed: int) -> Tensor:
    """Sample initial centers that are far from each other (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(unit.shape[0], (1,), generator=generator))]
    far = (1 - unit @ unit[chosen[0]]).clamp(min=0)
    for _ in range(groups - 1):
        weights = far.cpu().double().square() + 1e-12
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        far = torch.minimum(far, (1 - unit @ unit[chosen[-1]]).clamp(min=0))
    return unit[chosen]
