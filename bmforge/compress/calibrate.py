"""Block by block over real batches: what goes into each, with the blocks before it changed already.

A model is run once up to the end of a stack, and what its blocks are called with is kept. Then one
block after the other is shown its inputs, changed, and run again for the inputs of the next. So the
statistics of one block are in memory at a time, and each block sees the errors of those before.
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
from bmforge.device import wide_dtype
from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.surgery import evaluating, find_repeated_blocks

__all__ = [
    "BlockRun",
    "Statistic",
    "by_block",
    "calibrate_blocks",
]


class Statistic(Protocol):
    """What is gathered of the inputs of one matrix."""

    def add(self, x: Tensor) -> None:
        """Count inputs, (tokens, columns)."""


@dataclass
class BlockRun:
    """A block and what goes into it, batch by batch.

    Args:
        name: of the block in the model.
        block: it.
        matrices: those in it that are asked for.
        statistics: name of a matrix -> what was gathered of its inputs; those that no
            text has reached have none.
        calls: how it is called.
        inputs: hidden states that go in.
        is_last: no other part of this block is shown after this one.
    """

    name: str
    block: nn.Module
    matrices: list[Matrix]
    statistics: dict[str, Any]
    calls: list[BlockCall]
    inputs: list[Tensor]
    is_last: bool = True

    def run(self, count: int | None = None) -> Iterator[Tensor]:
        """Yield what comes out for every batch, or the first so many."""
        pairs = zip(self.calls, self.inputs, strict=True)
        for number, (call, x) in enumerate(pairs):
            if count is not None and number >= count:
                return
            yield call.run(self.block, x)

    def run_wide(self) -> Iterator[Tensor]:
        """Yield the outputs of the block with all its inputs in fp32, batch by batch."""
        for call, x in zip(self.calls, self.inputs, strict=True):
            yield call.widened().run(self.block, x.to(wide_dtype(x.dtype)))


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
    """Show every block what real texts bring, in the order in which they run.

    Works on bmforge's and transformers' models, and on any whose repeated blocks each give their
    hidden states to the next; the stacks of an encoder-decoder come one after the other.

    Args:
        model: whole and in memory; it is put into evaluation mode meanwhile.
        batches: the model's arguments, or token ids alone.
        visit: changes a block; its statistics are forgotten afterwards.
        gather: makes what counts the inputs of a matrix.
        where: name globs of modules; empty takes the blocks' linear layers and experts.
        title: of the progress bar.
        size: bytes of a matrix's statistic. With it a block is visited in parts, those that run
            last first, so that none sees another input than the plain block has, and the
            statistics of a part take half of the block's matrices at most, or are of one input.

    Raises:
        ConfigError: no or empty batches, matrices outside of repeated blocks, or blocks that give
            something else to each other than hidden states.

    Memory: the hidden states of all batches, what one batch makes in a block, and the statistics
        of one block, or with `size` of a part of it.
    """
    prepared = prepare_batches(model, batches)
    blocks = find_repeated_blocks(model)
    matrices = by_block(find_matrices(model, where), blocks)
    show = _Show(visit, gather, size)
    with evaluating(model):
        stacks = _find_stacks(model, blocks, prepared[0])
        names = [name for stack in stacks for name in stack]
        if lost := [name for name in matrices if name not in names]:
            raise ConfigError(f"{lost[0]} did not run with the batches: leave it out of `where`.")
        bar = iter(track(names, title))
        for stack in stacks:
            _calibrate_stack(model, stack, blocks, matrices, prepared, show, bar)
        for _ in bar:
            pass


def by_block(
    matrices: Sequence[Matrix], blocks: Mapping[str, nn.Module]
) -> dict[str, list[Matrix]]:
    """Return block -> the matrices in it."""
    found: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        names = [name for name in blocks if f"{matrix.owner}.".startswith(f"{name}.")]
        if not names:
            raise ConfigError(
                f"{matrix.name} is in no repeated block, and what goes in is gathered block by "
                "block: leave it out of `where`, or use a method that needs no texts."
            )
        if isinstance(matrix.module, nn.Embedding):
            raise ConfigError(f"{matrix.name} is a table: nothing is multiplied with it.")
        found.setdefault(names[0], []).append(matrix)
    return found


def _find_stacks(
    model: nn.Module, blocks: Mapping[str, nn.Module], batch: Mapping[str, Any]
) -> list[list[str]]:
    """Return the names of blocks in the order in which they run, stack by stack."""
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
    for found in stacks.values():
        if twice := [name for name in found if found.count(name) > 1]:
            raise ConfigError(f"{twice[0]} runs more than once in a call: it cannot be calibrated.")
    return list(stacks.values())


@dataclass(frozen=True)
class _Show:
    """What is done with each block; see `calibrate_blocks`."""

    visit: Callable[[BlockRun], None]
    gather: Callable[[Matrix], Statistic]
    size: Callable[[Matrix], int] | None

    def __call__(self, run: BlockRun) -> None:
        parts = [run.matrices] if self.size is None else _split(run, self.size)
        while parts:
            run.matrices = parts.pop(0)
            run.statistics, run.is_last = _gather_in(run, self.gather), not parts
            self.visit(run)
            run.statistics = {}


def _calibrate_stack(
    model: nn.Module,
    stack: Sequence[str],
    blocks: dict[str, nn.Module],
    matrices: dict[str, list[Matrix]],
    batches: Sequence[Mapping[str, Any]],
    show: _Show,
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
        calls = [found[number] for found in recorded]
        # What is replaced in a block is kept by nobody here: the model becomes smaller as it goes.
        if inside := matrices.pop(name, None):
            show(BlockRun(name, blocks[name], inside, {}, calls, hidden))
            del inside
        if number < last:
            run = BlockRun(name, model.get_submodule(name), [], {}, calls, hidden)
            for place, out in enumerate(run.run()):
                hidden[place] = out


class _Inputs:
    """Knows matrices that get the same tensor, without keeping it alive."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], str]] = []

    def find(self, x: Tensor) -> str | None:
        """Return the first matrix that has got this tensor."""
        return next((name for other, name in self._seen if other() is x), None)

    def add(self, x: Tensor, name: str) -> None:
        """Note who has got a tensor."""
        self._seen.append((weakref.ref(x), name))

    def clear(self) -> None:
        """Forget a batch."""
        self._seen.clear()


def _split(run: BlockRun, size: Callable[[Matrix], int]) -> list[list[Matrix]]:
    """Return a block's matrices in parts whose statistics fit together, the last to run first."""
    groups: dict[str, list[Matrix]] = {}
    known: set[str] = set()
    inputs = _Inputs()

    def note(matrix: Matrix, x: Tensor) -> None:
        name = inputs.find(x) or matrix.name
        if matrix.name not in known:
            known.add(matrix.name)
            groups.setdefault(name if name in groups else matrix.name, []).append(matrix)
        inputs.add(x, name)

    with watch_inputs(run.matrices, note):
        for _ in run.run():
            inputs.clear()
            if len(known) == len(run.matrices):
                break
    whole = sum(m.read().numel() * m.parameter.element_size() for m in run.matrices)
    parts: list[list[Matrix]] = [[m for m in run.matrices if m.name not in known]]
    limit = max(whole // 2, *(size(group[0]) for group in groups.values()), 0)
    left = limit
    for group in reversed(groups.values()):
        if size(group[0]) > left:
            parts.append([])
            left = limit
        left -= size(group[0])
        parts[-1].extend(group)
    return parts


def _gather_in(run: BlockRun, gather: Callable[[Matrix], Statistic]) -> dict[str, Any]:
    """Return what was gathered of a block's inputs; what gets the same tensor has one statistic."""
    found: dict[str, Statistic] = {}
    shared: dict[str, str] = {}
    inputs = _Inputs()

    def note(matrix: Matrix, x: Tensor) -> None:
        if matrix.name in shared:
            return
        if matrix.name not in found:
            alike = inputs.find(x)
            if alike is not None:
                shared[matrix.name] = alike
                return
            found[matrix.name] = gather(matrix)
        inputs.add(x, matrix.name)
        found[matrix.name].add(x.detach().reshape(-1, x.shape[-1]))

    with watch_inputs(run.matrices, note):
        for _ in run.run():
            inputs.clear()
    given = {m.name: found[at] for m in run.matrices if (at := shared.get(m.name, m.name)) in found}
    if not given:
        raise ConfigError(f"no text came to {run.name}: leave it out of `where`.")
    return given
