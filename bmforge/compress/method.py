"""Interface of compression methods: attach to a model, update after each training step, finish."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["METHOD_NAMES", "Method", "MethodBase"]

# Order in which methods are attached and finished.
METHOD_NAMES = ("structure", "experts", "zeros", "quantize")


@runtime_checkable
class Method(Protocol):
    """Compression method, used in a training run or without training.

    Attributes:
        name: "structure", "experts", "zeros" or "quantize".
    """

    name: str

    def attach_(self, model: nn.Module) -> None:
        """Add the method's modules, hooks and changes to a model that is not parallelized yet.

        Raises:
            ConfigError: the method does not fit the model or the methods that are already attached.
        """

    def extra_loss(self, model: nn.Module, step: int) -> Tensor | None:
        """Return a scalar to add to the loss of a step, such as a Lagrangian; None to add none."""

    def after_step_(self, model: nn.Module, step: int) -> None:
        """Update the method after an optimizer step; `step` is the number of completed steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is not in the model, as numbers that are equal on every process."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict`."""

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Finish the compressed model; return results for the report as JSON values."""


class MethodBase:
    """Base class of compression methods, in which all hooks do nothing."""

    name = ""

    def attach_(self, model: nn.Module) -> None:
        """Leave the model unchanged."""

    def extra_loss(self, model: nn.Module, step: int) -> Tensor | None:
        """Return None, because there is no additional loss."""
        return None

    def after_step_(self, model: nn.Module, step: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Leave the model unchanged; return an empty dict of results."""
        return {}
