"""The balance of a mixture's experts over all tokens of a step.

It is a product of means over all tokens, so how often an expert is chosen in the whole step must be
known before the first micro-batch's backward. Where a step has several, they run forward once
before, without gradients, and only count.
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
    """Let the micro-batches inside know what the experts of all of them, everywhere, have to do.

    Does nothing for a model without a balance in its loss, and for a single micro-batch, which its
    own forward sums up over the processes.

    Args:
        model: one whose `balances` says so has the slot `sum_statistics`.
        run_all: runs all micro-batches forward.
        num_micro_batches: how many; the same on every process.

    Comm: one more forward's, then one all-reduce of 2 E + 3 numbers.
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
    # Of a pipeline the last stage has them, which has the loss.
    total = sum_up(torch.stack(parts).sum(0)) if parts else None
    with _filled(model, lambda statistics: total):
        yield


@contextmanager
def leave_out_balance(model: nn.Module) -> Iterator[None]:
    """Let a model's loss be that of its predictions alone."""
    if not getattr(model, "balances", False):
        yield
        return
    with _filled(model, None):
        yield


@contextmanager
def _filled(model: nn.Module, value: Any) -> Iterator[Any]:
    """Put something else into the slot; gives what is there otherwise."""
    before = getattr(model, _SLOT)
    fill_slot_(model, _SLOT, value)
    try:
        yield before
    finally:
        fill_slot_(model, _SLOT, before)
