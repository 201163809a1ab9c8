"""Trained keys and values in front of those of every row, per layer."""

from __future__ import annotations

from types import MappingProxyType

from bmforge.tune.delta.delta import Delta

__all__ = ["Prefix"]


class Prefix(Delta):
    """Keys and values that every query sees; the text's positions do not move.

    Options: `length`, `std`, and `inner`, the width of two layers that make them in training and
    are folded in when the delta is saved. PEFT begins the text at position `length`: give
    `position_ids` from there on to a model that was trained so.

    Source: Li and Liang, "Prefix-Tuning" (2021).
    """

    kind = "prefix"
    default_targets = ("attn",)
    defaults = MappingProxyType({"length": 6})
    peft_type = "PREFIX_TUNING"
