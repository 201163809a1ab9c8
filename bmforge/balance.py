"""Load-balancing loss of a mixture of experts over all tokens of an optimizer step.

The loss is a product of means over all tokens, so its gradient needs the number of tokens that each
expert receives in the whole step, before the backward pass of the first micro-batch. A step with
several micro-batches therefore runs an additional forward pass without gradients to count these
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import keep_random
from bmforge.records import fill_slot_

__all__ = ["balance_whole_step", "leave_out_balance"]

_SLOT = "sum_statistics"


@contextmanager
def balance_whole_step(
    model: nn.Module, run_all: Callable[[], Any], num_micro_batches: int
) -> Iterator[None]:
    """Context manager that computes the load-balancing loss over all micro-batches and ranks.

    It does nothing for models without a load-balancing loss. A single micro-batch needs no
    additional forward pass, because its own forward pass sums the statistics over the processes.

    Args:
        model: model; its load is balanced if its attribute `balances` is True.
        run_all: function that runs the forward pass of all micro-batches.
        num_micro_batches: number of micro-batches; the same on every process.

    Comm: collectives of one more forward pass, then one all-reduce of 2 E + 3 numbers for E
    experts.
    """
    if num_micro_batches == 1 or not getattr(model, "balances", False):
        yield
        return
    parts: list[Tensor] = []

    def note(statistics: Tensor) -> Tensor:
        parts.append(statistics)
        return statistics

    with _filled(model, note) as sum_up, torch.no_grad(), keep_random():
        run_all()
    # In a pipeline the last stage, which computes the loss, has the statistics.
    total = sum_up(torch.stack(parts).sum(0)) if parts else None
    with _filled(model, lambda statistics: total):
        yield


@contextmanager
def leave_out_balance(model: nn.Module) -> Iterator[None]:
    """Context manager that excludes the load-balancing loss from the model's loss."""
    if not getattr(model, "balances", False):
        yield
        return
    with _filled(model, None):
        yield


@contextmanager
def _filled(model: nn.Module, value: Any) -> Iterator[Any]:
    """Context manager that temporarily replaces the model's load-statistics attribute."""
    before = getattr(model, _SLOT)
    fill_slot_(model, _SLOT, value)
    try:
        yield before
    finally:
        fill_slot_(model, _SLOT, before)
