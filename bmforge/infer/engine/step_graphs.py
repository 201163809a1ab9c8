"""Records decoding steps as device graphs (CUDA graphs) and replays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bmforge.device import DeviceGraph, has_graphs
from bmforge.infer.engine.pages import PAGE_TOKENS
from bmforge.infer.engine.step_tables import FixedTables, StepRow
from bmforge.logging import get_logger
from bmforge.nn.block import Block
from bmforge.nn.mlp import MLP
from bmforge.nn.part import AdapterModule
from bmforge.nn.shard_hooks import identity

__all__ = ["Recorded", "StepGraphs", "can_record"]

# Steps with more rows are limited by computation and not by kernel launches.
_MOST_ROWS = 256
# A page table is at least this wide; wider ones double.
_FEWEST_PAGES = 16
_KNOWN_PACKAGES = ("bmforge", "torch")


class Recorded(Protocol):
    """Interface of a recorded function, such as `DeviceGraph`."""

    output: Any

    def replay(self) -> None:
        """Compute the output again from the current values of the inputs."""


class StepGraphs:
    """Runs decoding steps with one token per sequence, with a graph per batch size and width.

    The width is that of the page table. The batch size is rounded up, to record few graphs. The
    first step of a size runs without a graph, so that its kernels are compiled; the second one is
    recorded.

    Args:
        run: function from the tensors of a step (`FixedTables`) to the logits, (T, V).
        device: device of the model and the cache.
        record: function (function, earlier recording) -> recording; the new recording may reuse the
            memory of the earlier one.
    """

    def __init__(
        self,
        run: Callable[[FixedTables], Tensor],
        device: torch.device,
        record: Callable[[Callable[[], Tensor], Any], Recorded] = DeviceGraph,
    ) -> None:
        self._run, self._device, self._record = run, device, record
        self._tables: dict[tuple[int, int], FixedTables] = {}
        self._recorded: dict[tuple[int, int], Recorded] = {}
        # All graphs write their logits to one buffer, so that they can share all other memory.
        self._logits = torch.empty(0, 0, device=device)
        self._has_failed = False

    def run(self, rows: Sequence[StepRow], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the logits of sequences with one token each; None if the caller must run the step.

        Shape:
            returns (rows, V)
        """
        if self._has_failed or not 0 < len(rows) <= _MOST_ROWS:
            return None
        if any(row.length != 1 for row in rows):
            return None
        pages = -(-max(row.end for row in rows) // PAGE_TOKENS)
        size = _round_rows(len(rows)), max(_FEWEST_PAGES, 1 << (pages - 1).bit_length())
        is_first = size not in self._tables
        tables = self._tables.setdefault(size, FixedTables(*size, self._device))
        tables.fill(rows, [token for (token,) in tokens])
        if is_first:
            logits = self._run(tables)
            if size[0] > len(self._logits):
                self._logits = torch.empty_like(logits)
            return logits[: len(rows)]
        if size not in self._recorded and not self._try_to_record(size, tables):
            return None
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.output[: len(rows)].clone()  # the next replay overwrites it

    def _try_to_record(self, size: tuple[int, int], tables: FixedTables) -> bool:
        logits = self._logits[: size[0]]

        def run() -> Tensor:
            tables.forget()
            return logits.copy_(self._run(tables))

        try:
            recorded = self._record(run, next(iter(self._recorded.values()), None))
        except RuntimeError as error:
            self._has_failed = True
            reason = str(error).splitlines()[0]
            get_logger().warning(
                "decoding steps cannot be recorded as a graph, so they are slower: %s", reason
            )
            return False
        finally:
            tables.forget()
        self._recorded[size] = recorded
        return True


def _round_rows(count: int) -> int:
    """Round a batch size up to 1, 2, 4 or a multiple of 16, the rows of a tensor-core tile."""
    return 1 << (count - 1).bit_length() if count <= 4 else -(-count // 16) * 16


def can_record(model: Any, device: torch.device) -> bool:
    """Return True if all decoding steps of a model launch the same kernels.

    A graph repeats kernels and not Python code, so hooks, wrappers, adapters and modules of other
    packages are excluded. So are experts, whose kernels depend on the tokens.
    """
    if not has_graphs(device) or _has_global_hooks() or not _is_known(model):
        return False
    if {"embed_tokens", "project_last"} & vars(model).keys():  # replaced on this model
        return False
    tensors = chain(model.parameters(), model.buffers())
    if any(type(t) not in (Tensor, nn.Parameter) or t.device != device for t in tensors):
        return False
    blocks = [(layer, layer.attn, layer.mlp) for layer in model.layers.values()]
    if any(type(block) is not Block or block.training for block, *_ in blocks):
        return False
    if any(attn and not (attn.is_plain() and attn.input_fn is identity) for _, attn, _ in blocks):
        return False
    if any(mlp is not None and type(mlp) is not MLP for *_, mlp in blocks):
        return False
    return all(_is_repeatable(module) for module in model.modules() if module is not model)


def _is_repeatable(module: nn.Module) -> bool:
    has_hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return _is_known(module) and not has_hooks and not isinstance(module, AdapterModule)


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _KNOWN_PACKAGES


def _has_global_hooks() -> bool:
    hooks: Any = nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
