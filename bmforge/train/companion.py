"""Second model that a run trains and saves with its main model, such as PPO's value model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from bmforge.parallel import reshard_
from bmforge.records import find_parallel_record, parallel_record_of

__all__ = ["Companion", "join_for_checkpoint"]


class Companion(Protocol):
    """Interface of a second model with its own optimizers, which an objective trains.

    Attributes:
        name: prefix of its tensors in checkpoints.
        model: second model, parallelized like the trained model.
        optimizers: optimizers of the second model.
    """

    name: str
    model: nn.Module
    optimizers: Sequence[Optimizer]

    def state_dict(self) -> dict[str, Any]:
        """Return the state other than that of model and optimizers, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state returned by `state_dict`."""


def join_for_checkpoint(
    model: nn.Module, optimizers: Sequence[Optimizer], companion: Companion | None
) -> tuple[nn.Module, list[Optimizer]]:
    """Return a module with the tensors of both models, and all optimizers, for a checkpoint.

    The tensors of `model` keep their names, so a checkpoint has one consistent state of both.

    Args:
        model: trained model, not pipelined if there is a companion.
        optimizers: optimizers of the trained model.
        companion: second model; if None, `model` itself is returned.
    """
    if companion is None:
        return model, list(optimizers)
    reshard_(model)  # the joined module does not contain the FSDP2 root, so it cannot do this
    joined = nn.Module()
    for name, parameter in model.named_parameters(recurse=False):
        joined.register_parameter(name, parameter)
    for name, buffer in model.named_buffers(recurse=False):
        joined.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
    for name, child in model.named_children():
        joined.add_module(name, child)
    joined.add_module(companion.name, companion.model)
    record = find_parallel_record(model)
    if record is not None:
        parallel_record_of(joined).mesh = record.mesh
    return joined, [*optimizers, *companion.optimizers]
