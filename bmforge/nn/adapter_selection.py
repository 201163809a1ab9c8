"""Selects the adapters of one call of a model, without changing module state.

`run_with_selection` is a context manager that makes a `Selection` active on this thread. Adapter
modules read it through `adapter_choice_of`; without a selection they use their own
`adapter_weight`. The active selection is thread-local rather than a `ContextVar` because
torch.compile supports thread-locals but not context variables.
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
    "adapter_choice_of",
    "run_with_selection",
    "weight_of",
]


class AdapterChoice(NamedTuple):
    """How one adapter module is applied in a call: its weight and the samples of the batch.

    Args:
        weight: factor on the module's output; 0 disables the module.
        samples: indices of the samples to which the module is applied; None means all samples.
        batched: `BatchedLowRank` that computes this module and others in two batched products;
            used in calls without gradients.
    """

    weight: float
    samples: Tensor | None = None
    batched: Any = None


@dataclass(frozen=True, eq=False)
class Selection:
    """Active adapters of one call.

    Args:
        choices: mapping from adapter module to its `AdapterChoice`; adapters that are not listed
            are applied with their own `adapter_weight`.
        batch_size: number of samples in the batch; None if all samples use the same adapters.
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
    """Context manager: make a selection active; restore the previous one afterwards.

    Args:
        selection: new active selection; if None, every module uses its own weight.
    """
    outer = _ACTIVE.selection
    _ACTIVE.selection = selection
    try:
        yield
    finally:
        _ACTIVE.selection = outer


def adapter_choice_of(module: Any) -> AdapterChoice:
    """Return the `AdapterChoice` of an adapter module in the current call."""
    selection = _ACTIVE.selection
    choice = None if selection is None else selection.choices.get(module)
    return AdapterChoice(getattr(module, "adapter_weight", 1.0)) if choice is None else choice


def weight_of(module: Any) -> float:
    """Return the factor on an adapter module's output in the current call."""
    return adapter_choice_of(module).weight
