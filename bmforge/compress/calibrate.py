"""Block-by-block calibration: a block's inputs are the outputs of the already changed blocks.

The model runs once up to the end of a stack while the arguments of its blocks are recorded. Then
each block in turn receives its inputs, is changed, and runs again to produce the inputs of the next
block. Only the statistics of one block are in memory at a time, and each block is calibrated on
inputs that include the errors of the blocks before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.compress.block_calls import BlockCall, record_calls
from bmforge.compress.matrices import Matrix, find_matrices, watch_inputs
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.surgery import eval_mode, find_repeated_blocks

__all__ = [
    "BlockRun",
    "Statistic",
    "by_block",
    "calibrate_blocks",
    "gather_statistics",
]


class Statistic(Protocol):
    """Interface of a statistic accumulated over the inputs of one matrix."""

    def add(self, x: Tensor) -> None:
        """Add inputs, (tokens, columns), to the statistic."""


@dataclass
class BlockRun:
    """Block with its calibration inputs.

    Args:
        name: module name of the block.
        block: block module.
        matrices: selected matrices of the block.
        statistics: dict from the name of a matrix to its input statistics; a matrix whose layer
            processed no token is missing.
        calls: recorded call of the block for each batch.
        inputs: input hidden states of each batch.
        is_last: True in the last call for this block; `calibrate_blocks` may visit a block several
            times.
    """

    name: str
    block: nn.Module
    matrices: list[Matrix]
    statistics: dict[str, Any]
    calls: list[BlockCall]
    inputs: list[Tensor]
    is_last: bool = True

    def run(self, count: int | None = None) -> Iterator[Tensor]:
        """Yield the output of the block for every batch, or for the first `count` batches."""
        pairs = zip(self.calls, self.inputs, strict=True)
        for number, (call, x) in enumerate(pairs):
            if count is not None and number >= count:
                return
            yield call.run(self.block, x)

    def run_wide(self) -> Iterator[Tensor]:
        """Yield the output of the block for every batch, with all inputs in fp32."""
        for call, x in zip(self.calls, self.inputs, strict=True):
            yield call.widened().run(self.block, x.to(accumulation_dtype(x.dtype)))


@torch.no_grad()
def calibrate_blocks(
    model: nn.Module,
    batches: Sequence[Any],
    visit: Callable[[BlockRun], None],
    gather: Callable[[Matrix], Statistic],
    *,
    where: Sequence[str] = (),
    title: str = "calibrate",
    size: Callable[[Matrix], int] | None = None,
) -> None:
    """Visit every block in execution order, with statistics of its calibration inputs.

    Supports models of bmforge and transformers, and any other model whose repeated blocks pass
    hidden states to each other. The stacks of an encoder-decoder are visited one after the other.

    Args:
        model: complete model in memory; in evaluation mode during calibration.
        batches: keyword arguments of the model's forward, or only token ids.
        visit: callback that changes a block; its statistics are freed afterwards.
        gather: factory of the statistic for the inputs of a matrix.
        where: name globs of modules; if empty, the blocks' linear layers and experts.
        title: title of the progress bar.
        size: function that returns the bytes of a matrix's statistic. If set, a block is visited
            several times, each time with some of its matrices. The matrices that run last are
            visited first, so that all inputs equal those of the unchanged block. A visit covers at
            most half of the block's matrices, or the matrices of a single input.

    Raises:
        ConfigError: batches are missing or empty, a matrix is not in a repeated block, or blocks do
            not pass hidden states to each other.

    Memory: the hidden states of all batches, the activations of one batch in a block, and the
    statistics of one block, or of one visit if `size` is set.
    """
    prepared = prepare_batches(model, batches)
    blocks = find_repeated_blocks(model)
    matrices = by_block(find_matrices(model, where), blocks)
    show = _BlockVisitor(visit, gather, size)
    with eval_mode(model):
        stacks = _find_stacks(model, blocks, prepared[0])
        names = [name for stack in stacks for name in stack]
        if lost := [name for name in matrices if name not in names]:
            raise ConfigError(
                f"{lost[0]} did not run on the calibration batches. Exclude it from `where`."
            )
        bar = iter(track(names, title))
        for stack in stacks:
            _calibrate_stack(model, stack, blocks, matrices, prepared, show, bar)
        for _ in bar:
            pass


def by_block(
    matrices: Sequence[Matrix], blocks: Mapping[str, nn.Module]
) -> dict[str, list[Matrix]]:
    """Group matrices by the name of their block."""
    by_name: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        names = [name for name in blocks if f"{matrix.owner}.".startswith(f"{name}.")]
        if not names:
            raise ConfigError(
                f"{matrix.name} is not in a repeated block of layers, so a method with "
                "calibration cannot collect its inputs. Exclude it from `where`, or use a "
                "method without calibration."
            )
        if isinstance(matrix.module, nn.Embedding):
            raise ConfigError(
                f"{matrix.name} is an embedding, which has no input activations for calibration. "
                "Exclude it from `where`."
            )
        by_name.setdefault(names[0], []).append(matrix)
    return by_name


def _find_stacks(
    model: nn.Module, blocks: Mapping[str, nn.Module], batch: Mapping[str, Any]
) -> list[list[str]]:
    """Return the block names in execution order, one list per stack."""
    order: list[str] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, name=name: order.append(name))
        for name, block in blocks.items()
    ]
    try:
        model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    stacks: dict[str, list[str]] = {}
    for name in order:
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    for names in stacks.values():
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"{twice[0]} runs more than once per forward pass, so it cannot be calibrated. "
                "Exclude it from `where`."
            )
    return list(stacks.values())


@dataclass(frozen=True)
class _BlockVisitor:
    """Gathers input statistics of a block and calls `visit`, one group of matrices at a time."""

    visit: Callable[[BlockRun], None]
    gather: Callable[[Matrix], Statistic]
    size: Callable[[Matrix], int] | None

    def __call__(self, run: BlockRun) -> None:
        parts = [run.matrices] if self.size is None else _split(run, self.size)
        while parts:
            run.matrices = parts.pop(0)
            run.statistics, run.is_last = gather_statistics(run, self.gather), not parts
            self.visit(run)
            run.statistics = {}


def _calibrate_stack(
    model: nn.Module,
    stack: Sequence[str],
    blocks: dict[str, nn.Module],
    matrices: dict[str, list[Matrix]],
    batches: Sequence[Mapping[str, Any]],
    show: _BlockVisitor,
    bar: Iterator[str],
) -> None:
    hidden: list[Tensor] = []
    recorded: list[list[BlockCall]] = []
    for batch in batches:
        first, calls = record_calls(model, [blocks[name] for name in stack], batch)
        hidden.append(first)
        recorded.append(calls)
    last = max((n for n, name in enumerate(stack) if name in matrices), default=-1)
    for number, name in enumerate(stack):
        next(bar)
        if number > last:
            continue
        calls = [recorded_calls[number] for recorded_calls in recorded]
        # Keep no reference to replaced layers, so that their memory is freed block by block.
        if inside := matrices.pop(name, None):
            show(BlockRun(name, blocks[name], inside, {}, calls, hidden))
            del inside
        if number < last:
            run = BlockRun(name, model.get_submodule(name), [], {}, calls, hidden)
            for index, out in enumerate(run.run()):
                hidden[index] = out


class _Inputs:
    """Finds the first matrix whose layer was called with a given input tensor."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], str]] = []

    def find(self, x: Tensor) -> str | None:
        """Return the name of the first matrix whose input was this tensor, if any."""
        return next((name for other, name in self._seen if other() is x), None)

    def add(self, x: Tensor, name: str) -> None:
        """Record that `x` was the input of the matrix `name`."""
        self._seen.append((weakref.ref(x), name))

    def clear(self) -> None:
        """Discard all tensors, at the end of a batch."""
        self._seen.clear()


def _split(run: BlockRun, size: Callable[[Matrix], int]) -> list[list[Matrix]]:
    """Split a block's matrices into groups that fit in the memory limit, last layers first."""
    groups: dict[str, list[Matrix]] = {}
    assigned: set[str] = set()
    inputs = _Inputs()

    def note(matrix: Matrix, x: Tensor) -> None:
        name = inputs.find(x) or matrix.name
        if matrix.name not in assigned:
            assigned.add(matrix.name)
            groups.setdefault(name if name in groups else matrix.name, []).append(matrix)
        inputs.add(x, name)

    with watch_inputs(run.matrices, note):
        for _ in run.run():
            inputs.clear()
            if len(assigned) == len(run.matrices):
                break
    total_bytes = sum(m.read().numel() * m.parameter.element_size() for m in run.matrices)
    parts: list[list[Matrix]] = [[m for m in run.matrices if m.name not in assigned]]
    limit = max(total_bytes // 2, *(size(group[0]) for group in groups.values()), 0)
    left = limit
    for group in reversed(groups.values()):
        if size(group[0]) > left:
            parts.append([])
            left = limit
        left -= size(group[0])
        parts[-1].extend(group)
    return parts


def gather_statistics(run: BlockRun, gather: Callable[[Matrix], Statistic]) -> dict[str, Any]:
    """Return a dict from matrix name to input statistic; matrices with the same input share one."""
    statistics: dict[str, Statistic] = {}
    shared: dict[str, str] = {}
    inputs = _Inputs()

    def note(matrix: Matrix, x: Tensor) -> None:
        if matrix.name in shared:
            return
        if matrix.name not in statistics:
            alike = inputs.find(x)
            if alike is not None:
                shared[matrix.name] = alike
                return
            statistics[matrix.name] = gather(matrix)
        inputs.add(x, matrix.name)
        statistics[matrix.name].add(x.detach().reshape(-1, x.shape[-1]))

    with watch_inputs(run.matrices, note):
        for _ in run.run():
            inputs.clear()
    by_matrix = {
        m.name: statistics[at]
        for m in run.matrices
        if (at := shared.get(m.name, m.name)) in statistics
    }
    if not by_matrix:
        raise ConfigError(f"{run.name} received no calibration tokens. Exclude it from `where`.")
    return by_matrix
