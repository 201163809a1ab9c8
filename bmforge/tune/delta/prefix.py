"""Prefix tuning: trained keys and values that are prepended to those of every sample."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tune.delta.delta import Delta

__all__ = ["Prefix"]


class Prefix(Delta):
    """Prefix tuning: trained keys and values to which every query attends.

    Options: `length`; `std`; `inner`, the hidden size of the two-layer MLP that computes the prefix
    in training (only the computed prefix is saved); and `shift_positions`: True if the text's
    positions start at `length`, as in PEFT (default for decoders with position ids), False if they
    start at 0.

    Source: Li and Liang, "Prefix-Tuning" (2021).
    """

    kind = "prefix"
    default_targets = ("attn",)
    defaults = MappingProxyType({"length": 6})
    peft_type = "PREFIX_TUNING"

    def _complete_options(self, options: dict[str, Any]) -> dict[str, Any]:
        options = super()._complete_options(options)
        counts = hasattr(self.model, "positions_behind_prefix")
        can_shift = counts or bool(getattr(self.model, "biases_prefix", False))
        if options.setdefault("shift_positions", counts) and not can_shift:
            raise ConfigError(
                f"shift_positions=True is not supported by a {type(self.model).__name__} "
                "(allowed: False), because its positions do not count tokens one by one. Leave "
                "shift_positions out."
            )
        return options
