"""Prefix tuning: trained keys and values prepended to those of every sample, per layer."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tune.delta.delta import Delta

__all__ = ["Prefix"]


class Prefix(Delta):
    """Trained keys and values that every query attends to.

    Options: `length`, `std`; `inner`, the width of two layers that compute the prefix in training
    and are folded into it when it is saved; and `shift_positions`: whether the text's positions
    start at `length`, as in PEFT (default for decoders that count positions), or at 0.

    Source: Li and Liang, "Prefix-Tuning" (2021).
    """

    kind = "prefix"
    default_targets = ("attn",)
    defaults = MappingProxyType({"length": 6})
    peft_type = "PREFIX_TUNING"

    def _settle_options(self, options: dict[str, Any]) -> dict[str, Any]:
        options = super()._settle_options(options)
        can_shift = hasattr(self.model, "positions_behind_prefix")
        if options.setdefault("shift_positions", can_shift) and not can_shift:
            raise ConfigError(
                f"shift_positions=True is not possible for a {type(self.model).__name__} (False). "
                "Its positions do not come from one count of tokens."
            )
        return options
