"""Few-shot sampling that selects the same examples as OpenPrompt for the same seed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from bmforge.errors import ConfigError

__all__ = ["draw_few"]


def draw_few(
    labels: Sequence[Hashable],
    *,
    per_label: int = 0,
    total: int = 0,
    seed: int = 0,
    with_dev: bool = False,
    allow_fewer: bool = False,
) -> tuple[list[int], list[int]]:
    """Sample few-shot training and validation examples; return two lists of indices.

    Args:
        labels: labels of all examples.
        per_label: number of examples per label; set this or `total`.
        total: number of examples of all labels together.
        seed: random seed of the sample.
        with_dev: True to also sample the same number of validation examples; otherwise the second
            list is empty.
        allow_fewer: True to use all examples of a label that has too few.

    Raises:
        ConfigError: neither or both of `per_label` and `total` are given, or a label has too few
            examples.
    """
    if (per_label > 0) == (total > 0):
        raise ConfigError(
            f"per_label={per_label} and total={total} are not allowed together: exactly one of "
            "them must be at least 1. Set one, and leave the other out."
        )
    generator = np.random.RandomState(seed)
    everything = list(range(len(labels)))

    def draw(places: list[int]) -> list[int]:
        if total:
            if total > len(places):
                raise ConfigError(
                    f"total={total} is more than the number of examples, {len(places)}. Use a "
                    "smaller total."
                )
            shuffled = list(places)
            generator.shuffle(shuffled)
            return shuffled[:total]
        groups: dict[Hashable, list[int]] = {}
        for index in places:
            groups.setdefault(labels[index], []).append(index)
        chosen: list[int] = []
        for label, group in groups.items():
            if len(group) < per_label and not allow_fewer:
                raise ConfigError(
                    f"per_label={per_label} is more than the number of examples with the label "
                    f"{label!r}, {len(group)}. Use a smaller per_label, or pass allow_fewer=True."
                )
            own = np.array(group)
            generator.shuffle(own)
            chosen += own[:per_label].tolist()
        mixed = np.array(chosen)
        generator.shuffle(mixed)
        return mixed.tolist()

    train = draw(everything)
    taken = set(train)
    return train, draw([n for n in everything if n not in taken]) if with_dev else []
