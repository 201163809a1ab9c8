"""Classes in levels: "person-actor" is a "person" too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["score_levels"]


def score_levels(
    scores: Tensor, classes: Sequence[str], sep: str = "-"
) -> list[tuple[list[str], Tensor]]:
    """Return for every level its names and their log-probabilities, the whole names last.

    Args:
        scores: of classes.
        classes: their names.
        sep: what stands between a name's levels.

    Shape:
        scores: (B, C); each level (B, number of its names)

    Raises:
        ConfigError: not one name for every class.
    """
    if len(classes) != scores.shape[-1]:
        raise ConfigError(f"{len(classes)} names are given for {scores.shape[-1]} classes.")
    parts = [name.split(sep) for name in classes]
    chances, found = scores.log_softmax(-1), []
    for depth in range(1, max(map(len, parts)) + 1):
        own = [sep.join(part[:depth]) for part in parts]
        names = list(dict.fromkeys(own))
        columns = [
            chances[:, [n for n, one in enumerate(own) if one == name]].logsumexp(-1)
            for name in names
        ]
        found.append((names, torch.stack(columns, -1)))
    return found
