"""The adapters that take part in one call of a model: a value of the call, never module state.

`run_with_selection` makes a `Selection` active for the calls inside of it, on this thread only.
Adapter modules read it through `choice_of`; without a selection they use their own
`adapter_weight`. The active selection is thread-local rather than a `ContextVar` because
torch.compile traces the former and refuses the latter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = [
    "AdapterChoice",
    "Selection",
    "active_selection",
    "choice_of",
    "run_with_selection",
    "weight_of",
]


class AdapterChoice(NamedTuple):
    """How one adapter module takes part in a call.

    Args:
        weight: factor on its output; 0 disables the module.
        samples: indices of the batch's samples that it applies to; None applies it to all.
        batched: joins this module and others in two products, in calls without gradients.
    """

    weight: float
    samples: Tensor | None = None
    batched: Any = None


@dataclass(frozen=True, eq=False)
class Selection:
    """The adapters of one call.

    Args:
        choices: adapter module -> how it takes part. Other modules keep their own weight.
        batch_size: number of samples that the selection names; None for a selection that is the
            same for every sample.
    """

    choices: Mapping[nn.Module, AdapterChoice]
    batch_size: int | None = None


class _Active(threading.local):
    selection: Selection | None = None


_ACTIVE = _Active()


def active_selection() -> Selection | None:
    """Return the selection that is active on this thread, or None."""
    return _ACTIVE.selection


@contextmanager
def run_with_selection(selection: Selection | None) -> Iterator[None]:
    """Make a selection active for the calls inside; the outer selection returns afterwards.

    Args:
        selection: replaces the active one; None lets every module use its own weight.
    """
    outer = _ACTIVE.selection
    _ACTIVE.selection = selection
    try:
        yield
    finally:
        _ACTIVE.selection = outer


def choice_of(module: Any) -> AdapterChoice:
    """Return how an adapter module takes part in the current call."""
    selection = _ACTIVE.selection
    choice = None if selection is None else selection.choices.get(module)
    return AdapterChoice(getattr(module, "adapter_weight", 1.0)) if choice is None else choice


def weight_of(module: Any) -> float:
    """Return the factor on an adapter module's output in the current call."""
    return choice_of(module).weight
