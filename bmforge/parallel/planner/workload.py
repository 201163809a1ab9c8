"""What the planner is told of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmforge.parallel.planner.follow import Follower

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """What is to be trained, told in functions, as `parallel` knows no model.

    Args:
        name: for people.
        build: (blocks per stack) -> the model on meta, with blocks that are all the same.
        make_batch: (rows) -> one micro-batch.
        run: (model, micro-batch) -> the loss.
        materialize: gives a model on meta memory, in place.
        depth: blocks per stack of the whole model.
        row_tokens: tokens of a row.
        hidden_size: features between blocks.
        flops_per_token: of forward and backward of the whole model, without recomputing.
        whole: makes the whole model on meta; for cutting it into a pipeline.
        kinds: where blocks differ, for every further kind: what builds the model with blocks of it,
            and how many blocks of every stack are of it.
        around: entered for the tracing, with what follows it; for models that look at what kind of
            tensors they get, and for loops that need not be run to their end.
        order: the kind of every layer, 0 being that of `build`; empty where all are of it.
        key: tells the workload from all others, in text; with "" no trace of it is kept.
    """

    name: str
    build: Callable[[int], nn.Module]
    make_batch: Callable[[int], dict[str, Tensor]]
    run: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    materialize: Callable[[nn.Module], None]
    depth: int
    row_tokens: int
    hidden_size: int
    flops_per_token: float
    whole: Callable[[], nn.Module]
    kinds: tuple[tuple[Callable[[int], nn.Module], int], ...] = ()
    around: Callable[[Follower], AbstractContextManager[Any]] = nullcontext
    order: tuple[int, ...] = ()
    key: str = ""
