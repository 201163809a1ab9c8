"""Description of a model for the planner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmforge.parallel.planner.storage_tracker import StorageTracker

__all__ = ["Resident", "Workload"]


@dataclass(frozen=True)
class Resident:
    """A frozen model or a buffer that is in memory in addition to the trained model.

    Args:
        name: name of its category in memory tables, such as "reference".
        nbytes: size in bytes before sharding.
        is_sharded: whether it is sharded like the trained model; otherwise every process has a
            full copy.
        is_offloaded: whether it is on the device only between steps, when no activations and
            gradients are there, and in host memory during steps.
    """

    name: str
    nbytes: int
    is_sharded: bool
    is_offloaded: bool = False

    def bytes_per_process(self, shards: int) -> float:
        """Return the bytes on each of the `shards` processes that share one copy of the model."""
        return self.nbytes / shards if self.is_sharded else float(self.nbytes)


@dataclass(frozen=True)
class Workload:
    """Model to be trained, described by functions, because `parallel` does not import `models`.

    Args:
        name: display name.
        build: function (blocks per stack) -> model on the meta device, with equal blocks.
        make_batch: function (number of sequences) -> one micro-batch.
        run: function (model, micro-batch) -> loss.
        materialize: function that allocates a model on the meta device, in place.
        depth: blocks per stack of the whole model.
        row_tokens: tokens per sequence.
        hidden_size: width of the hidden states between blocks.
        flops_per_token: FLOPs of forward and backward of the whole model, without recomputation.
        whole: function that builds the whole model on the meta device; used for the pipeline
            partition.
        kinds: pair for every further kind of block: function that builds the model with such
            blocks, and the number of these blocks in every stack.
        around: function (memory tracker) -> context manager that is active during tracing, for
            example to trace fewer iterations of loops.
        order: index of every layer's kind, 0 for that of `build`; empty if all layers are of
            this kind.
        key: unique text of the workload for the trace cache; "" disables caching.
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
    around: Callable[[StorageTracker], AbstractContextManager[Any]] = nullcontext
    order: tuple[int, ...] = ()
    key: str = ""
