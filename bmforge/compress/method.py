"""What every way of making a model small has in common: it is put in, it goes along, it ends."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["METHOD_NAMES", "Method", "MethodBase"]

# In the order in which they are put into a model and taken out of it.
METHOD_NAMES = ("structure", "experts", "zeros", "quantize")


@runtime_checkable
class Method(Protocol):
    """One way to make a model small, used inside a run or by hand.

    Attributes:
        name: "structure", "experts", "zeros" or "quantize".
    """

    name: str

    def attach_(self, model: nn.Module) -> None:
        """Put what the method needs into a model that is not laid out yet: parts, hooks, changes.

        Raises:
            ConfigError: it does not fit the model, or what was done to it before.
        """

    def extra_loss(self, model: nn.Module, step: int) -> Tensor | None:
        """Return a scalar that is added to the loss once a step (a Lagrangian, a balance)."""

    def after_step_(self, model: nn.Module, step: int) -> None:
        """Go on after the optimizer's step; `step` are done."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is not in the model's tensors: plain numbers, the same on every process."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Leave the small model; return facts for the report as plain values."""


class MethodBase:
    """A method that does nothing; one of ours overrides what it needs."""

    name = ""

    def attach_(self, model: nn.Module) -> None:
        """Need nothing in the model."""

    def extra_loss(self, model: nn.Module, step: int) -> Tensor | None:
        """Add nothing to the loss."""
        return None

    def after_step_(self, model: nn.Module, step: int) -> None:
        """Do nothing after a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return that there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have nothing to go on from."""

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Leave the model as it is."""
        return {}
