"""Scores of hierarchical classes: "person-actor" also counts as "person"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["score_levels"]


def score_levels(
    scores: Tensor, classes: Sequence[str], sep: str = "-"
) -> list[tuple[list[str], Tensor]]:
    """Return a pair (class names, log-probabilities) for every level; full names come last.

    Args:
        scores: class scores.
        classes: class names.
        sep: separator of the levels in a name.

    Shape:
        scores: (B, C); log-probabilities of a level with K names: (B, K)

    Raises:
        ConfigError: the number of names differs from the number of scores.
    """
    if len(classes) != scores.shape[-1]:
        raise ConfigError(
            f"classes has {len(classes)} names for {scores.shape[-1]} classes. Pass one name per "
            "class."
        )
    parts = [name.split(sep) for name in classes]
    chances, levels = scores.log_softmax(-1), []
    for depth in range(1, max(map(len, parts)) + 1):
        own = [sep.join(part[:depth]) for part in parts]
        names = list(dict.fromkeys(own))
        columns = [
            chances[:, [n for n, level in enumerate(own) if level == name]].logsumexp(-1)
            for name in names
        ]
        levels.append((names, torch.stack(columns, -1)))
    return levels
