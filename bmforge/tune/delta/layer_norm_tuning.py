"""LayerNorm tuning: trains only the norms of a model, in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.shards import local_tensor
from bmforge.tune.delta.attached import deltas_of
from bmforge.tune.delta.delta import Delta

__all__ = ["LayerNormTuning"]


class LayerNormTuning(Delta):
    """Adapter that trains the weights and biases of the norms; `detach` restores the originals.

    It has no options. Adapters of this type on the same model must train different norms.

    Source: Zhao et al., "Tuning LayerNorm in attention" (2023); PEFT's LN_TUNING.
    """

    default_targets = ("norm",)
    peft_type = "LN_TUNING"

    def _complete_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if options:
            raise ConfigError(
                f"LayerNormTuning does not support the option {next(iter(options))!r} (supported: "
                "none). Leave the option out."
            )
        return options

    def _put_(self, names: Sequence[str]) -> None:
        named = dict(self.model.named_parameters())
        owners = tuple(f"{name}." for name in names)
        own = {name for name in named if name.startswith(owners)}
        for delta in deltas_of(self.model).values():
            if shared := sorted(own & set(delta.fully_trained_parameters())):
                raise ConfigError(
                    f"{shared[0]} is already trained by adapter {delta.name!r}. Exclude its module "
                    "with exclude=[...]."
                )
        self.norm_names = list(names)
        self._fully_trained_names = self._fully_trained_names | own
        self._other = {name: named[name].detach().clone() for name in own}
        self._is_trained = dict.fromkeys(own, False)
        self._attached = True

    def places(self) -> list[str]:
        """Return the names of the trained norms."""
        return list(self.norm_names)

    def is_attached(self) -> bool:
        """Return True if the norms currently have their trained values."""
        return self._attached

    def detach(self) -> LayerNormTuning:
        """Restore the base's values in the norms; `attach` sets the trained values again."""
        if not self._attached:
            raise ConfigError(
                f"adapter {self.name!r} is already detached. Call detach() only once."
            )
        self._swap_()
        return self

    def attach(self) -> LayerNormTuning:
        """Set the norms to their trained values."""
        if self._attached:
            raise ConfigError(
                f"adapter {self.name!r} is already attached. Call detach() before attaching it "
                "again."
            )
        self._swap_()
        return self

    @torch.no_grad()
    def _swap_(self) -> None:
        """Swap the norms' base values and trained values; base values in the model are frozen."""
        named = dict(self.model.named_parameters())
        for name, other in self._other.items():
            was_trained = named[name].requires_grad
            named[name].requires_grad_(not self._attached and self._is_trained[name])
            self._is_trained[name] = was_trained
            local = local_tensor(named[name].detach())
            now = local.clone()
            local.copy_(other)
            self._other[name] = now
        self._attached = not self._attached

    def check_weight(self, weight: float) -> None:
        """Raise `ConfigError` for a weight other than 0 or 1."""
        if weight not in (0, 1):
            raise ConfigError(
                f"weight={weight} is not supported by the LayerNormTuning {self.name!r} "
                "(allowed: 0 or 1)."
            )

    def weigh_(self, weight: float) -> LayerNormTuning:
        """Enable (weight 1) or disable (weight 0) the adapter."""
        self.check_weight(weight)
        if bool(weight) != self._attached:
            self._swap_()
        self.weight = weight
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return a dict from name to trained norm parameter."""
        return dict(self.fully_trained_parameters())

    def describe(self) -> dict[str, Any]:
        """Return the type, kind and options, as written to the adapter's config file."""
        return {"type": type(self).__name__, "kind": self.kind, "options": {}}

    def merge(self, dequantize: bool = False) -> LayerNormTuning:
        """Raise `ConfigError`, because the model already contains the trained values."""
        raise ConfigError(
            f"adapter {self.name!r} cannot be merged, because it trains the model's own norms. "
            "Save the model instead, which contains the trained norms."
        )
