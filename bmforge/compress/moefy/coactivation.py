"""Groups features that are active on the same tokens, in groups of equal size (METIS)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.nn.balanced_assignment import assign_balanced

__all__ = ["count_together", "group_together"]

# Number of edges per feature in the graph, to its most frequently co-active features.
_NEIGHBOURS = 64
_LARGEST_WEIGHT = 10_000


def count_together(activities: Iterable[Tensor], share: float) -> Tensor:
    """Count, for each pair of features, the tokens on which both are among the most active.

    Args:
        activities: activity of each feature on each token, in chunks.
        share: fraction of the features that count as active on a token; features with activity 0
            never do.

    Shape:
        activities: (M, F) each; returns (F, F), symmetric, zeros on the diagonal
    """
    total: Tensor | None = None
    for part in activities:
        count = max(1, round(share * part.shape[1]))
        values, index = part.topk(count, dim=1)
        active = torch.zeros_like(part).scatter_(1, index, (values > 0).to(part.dtype))
        together = active.T @ active
        total = together if total is None else total + together
    if total is None:
        raise ConfigError("group='coactivation' needs calibration batches. Pass batches.")
    return total.fill_diagonal_(0)


def group_together(together: Tensor, groups: int, seed: int = 0) -> Tensor:
    """Partition the co-activation graph so that few edges are cut, then balance the group sizes.

    Args:
        together: co-activation counts of the features.
        groups: number of groups; must divide the number of features.
        seed: random seed of METIS.

    Shape:
        together: (F, F) -> (F,), the group index of each feature

    Raises:
        ConfigError: the number of groups does not divide the number of features.
        MissingDependencyError: pymetis is not installed.

    Source: Zhang et al., "MoEfication" (2022); Karypis and Kumar, "METIS" (1998). MoEfication
    balances the groups by moving random features; this implementation moves each feature to the
    group with the largest sum of edges.
    """
    if together.shape[0] % groups:
        raise ConfigError(
            f"{together.shape[0]} features cannot be divided into {groups} groups of equal "
            f"size. Use a divisor of {together.shape[0]}."
        )
    try:
        import pymetis
    except ImportError as error:
        raise MissingDependencyError("pymetis", "compress", "group='coactivation'") from error
    starts, neighbours, weights = _edges_of(together)
    _, parts = pymetis.part_graph(
        groups,
        pymetis.CSRAdjacency(starts, neighbours),
        eweights=weights,
        options=pymetis.Options(seed=seed),
    )
    where = torch.tensor(parts, device=together.device)
    members = torch.nn.functional.one_hot(where, groups).to(together)
    affinity = together @ members
    # With the small bonus, a feature stays in its METIS group unless another group is clearly
    # better.
    return assign_balanced(affinity + members * 1e-3 * affinity.mean())


def _edges_of(together: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Return the graph in METIS's CSR format: edge offsets, neighbors and integer weights."""
    count = min(_NEIGHBOURS, together.shape[0] - 1)
    values, index = together.topk(count, dim=1)
    graph = torch.zeros_like(together).scatter_(1, index, values)
    graph = torch.maximum(graph, graph.T)
    largest = graph.max().clamp(min=1)
    heavy = (graph * (_LARGEST_WEIGHT / largest)).round().long()
    heavy = heavy.cpu()
    nodes, neighbours = heavy.nonzero(as_tuple=True)
    starts = torch.searchsorted(nodes, torch.arange(together.shape[0] + 1))
    return starts.tolist(), neighbours.tolist(), heavy[nodes, neighbours].tolist()
