"""Default layout rules for the canonical names: data that `parallel` applies to any model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayoutRules"]


@dataclass(frozen=True)
class LayoutRules:
    """Name globs (see `surgery`) of what a layout does where.

    Args:
        zero_units: modules whose parameters are gathered together; the rest belongs to the root.
        recompute_units: modules whose activations may be recomputed in backward.
    """

    zero_units: tuple[str, ...] = ("layers.*",)
    recompute_units: tuple[str, ...] = ("layers.*",)
