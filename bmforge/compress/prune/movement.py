"""Movement pruning scores: how far training has moved weights away from zero.

Source: Sanh et al., "Movement pruning" (2020): the sum over steps of -weight * gradient. This
implementation uses the weight's change in each step instead of the gradient: with SGD the change is
the gradient times the learning rate, with other optimizers it is their update. It needs only the
local shard after the step, so it works on any layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bmforge.shards import local_tensor, source_of

__all__ = ["Movement"]


class Movement:
    """Accumulates weight times weight change, for the local shards of parameters.

    Memory: a copy of the weights, and their scores.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._scores: dict[str, Tensor] = {}

    @torch.no_grad()
    def note(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the movement scores of the last optimizer step to the accumulated scores."""
        for name, parameter in parameters.items():
            now = _read(parameter)
            before = self._before.get(name)
            if before is not None and before.shape == now.shape:
                self._scores[name] += before * (now - before)
                before.copy_(now)
            else:
                self._before[name] = now.clone()
                self._scores[name] = torch.zeros_like(now)

    def scores(self, name: str, values: Tensor) -> Tensor:
        """Return a parameter's accumulated movement scores; zeros before the first step."""
        return self._scores.get(name, torch.zeros_like(values))

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Store the current weights as the starting point of the next step."""
        for name, parameter in parameters.items():
            self._before[name] = _read(parameter).clone()
            self._scores.setdefault(name, torch.zeros_like(self._before[name]))


def _read(parameter: nn.Parameter) -> Tensor:
    source = source_of(parameter)
    return local_tensor(parameter.detach()) if source.keeper is None else source.read()
