"""Partitioning of a model into pipeline stages.

A model is a list of blocks (of one stack, or of several that run in sequence) with modules around
them. Blocks are partitioned so that the cost of the most expensive stage is minimal. The rules name
the modules that belong to the first or last block of a stack; all other modules are on every stage
that runs the stack.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from bmforge.records import Span
from bmforge.surgery import match_glob

__all__ = ["StageAssignment", "PipelineRules", "cut_blocks", "drop_the_rest_", "plan_cutting"]


class PipelineRules(Protocol):
    """Interface of the rules for splitting a model into stages; see `models.LayoutRules`."""

    @property
    def stacks(self) -> tuple[str, ...]:
        """Containers of blocks, in the order in which they run."""

    @property
    def pipeline_first(self) -> tuple[str, ...]:
        """Name globs of the modules on the stage of a stack's first block."""

    @property
    def pipeline_last(self) -> tuple[str, ...]:
        """Name globs of the modules on the stage of a stack's last block."""


@dataclass(frozen=True)
class StageAssignment:
    """Assignment of blocks and modules to stages.

    Args:
        spans: ranges of the blocks of each stack, one dict per stage.
        homes: dict from the name of a module or parameter to the stages that have it.
    """

    spans: tuple[dict[str, Span], ...]
    homes: dict[str, frozenset[int]]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.spans)


def cut_blocks(costs: Sequence[float], ends: tuple[float, float], stages: int) -> list[int]:
    """Return the number of blocks per stage that minimizes the cost of the most expensive stage.

    Among several such partitions the result has the least sum of squared costs, so that the other
    stages are balanced too.

    Args:
        costs: cost of every block, in order.
        ends: additional costs of the first and the last stage.
        stages: number of stages, at most the number of blocks; every stage gets at least one block.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(first: int, last: int) -> float:
        extra = (ends[0] if first == 0 else 0.0) + (ends[1] if last == count else 0.0)
        return sums[last] - sums[first] + extra

    costliest, _ = _best_cut(count, stages, cost_of, max)
    # The prefix sums round, so stages of equal cost can differ in the last bits.
    bound = costliest * (1 + 1e-9)

    def squared(first: int, last: int) -> float:
        cost = cost_of(first, last)
        return cost * cost if cost <= bound else math.inf

    return _best_cut(count, stages, squared, operator.add)[1]


def _best_cut(
    count: int,
    stages: int,
    cost_of: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Find the partition of lowest cost by dynamic programming; return cost and stage sizes.

    Args:
        count: number of blocks.
        stages: number of stages.
        cost_of: function (first block, end) -> cost of a stage with these blocks.
        join: function (cost of the earlier stages, cost of a stage) -> total cost.
    """
    # best[s][n]: cost of s stages over the first n blocks, and the first block of the last stage.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        # Every earlier and every later stage has at least one block.
        for last in range(stage, count - (stages - stage) + 1):
            row[last] = min(
                (join(before, cost_of(first, last)), first)
                for first, (before, _) in best[stage - 1].items()
                if first < last
            )
        best.append(row)
    sizes, last = [], count
    for stage in range(stages, 0, -1):
        first = best[stage][last][1]
        sizes.append(last - first)
        last = first
    return best[stages][count][0], sizes[::-1]


def plan_cutting(
    model: nn.Module, rules: PipelineRules, stages: int, sizes: Sequence[int], balance: str
) -> StageAssignment:
    """Assign the modules of a model to `stages` stages; the model is not changed.

    Args:
        model: whole model.
        rules: rules for cutting the model.
        stages: number of stages.
        sizes: requested number of blocks of every stage; if empty, the stages are balanced.
        balance: "flops" balances the parameters used per token, without embeddings;
            "parameters" balances all parameters.
    """
    stacks = {name: list(model.get_submodule(name).children()) for name in rules.stacks}
    blocks = [block for stack in stacks.values() for block in stack]
    if not sizes:
        costs = [_cost(block, balance) for block in blocks]
        sizes = cut_blocks(costs, _end_costs(model, rules, balance), stages)
    spans, begin = [], 0
    for size in sizes:
        spans.append(dict(_spans(stacks, begin, begin + size)))
        begin += size
    homes = dict(_stages_of_modules(model, rules, spans))
    _join_ties(model, homes)
    return StageAssignment(tuple(spans), homes)


def _spans(stacks: dict[str, list[nn.Module]], begin: int, end: int) -> Iterator[tuple[str, Span]]:
    """Yield, per stack, the range of its blocks within blocks `begin` to `end` of all stacks."""
    offset = 0
    for name, stack in stacks.items():
        total = len(stack)
        first, last = (min(max(bound - offset, 0), total) for bound in (begin, end))
        yield name, Span(first, last, total)
        offset += total


def _cost(module: nn.Module, balance: str) -> float:
    """Return the number of parameters of a module; for "flops", of those used per token."""
    cost = 0.0
    for part in module.modules():
        share = 1.0
        per_token = getattr(part, "active_share", None)
        if balance == "flops":
            share = 0.0 if isinstance(part, nn.Embedding) else (per_token or 1.0)
        cost += share * sum(p.numel() for p in part.parameters(recurse=False))
    return cost


def _end_costs(model: nn.Module, rules: PipelineRules, balance: str) -> tuple[float, float]:
    """Return the costs of the modules before the first block and after the last block."""
    first, last = (
        sum(_cost(m, balance) for n, m in model.named_children() if _fits(n, globs))
        for globs in (rules.pipeline_first, rules.pipeline_last)
    )
    return first, last


def _fits(name: str, globs: Sequence[str]) -> bool:
    return any(match_glob(name, glob) for glob in globs)


def _stages_of_modules(
    model: nn.Module, rules: PipelineRules, spans: Sequence[dict[str, Span]]
) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield the name and the stages of each module or parameter that is not split further."""
    everywhere = range(len(spans))
    parents = {parent for name in rules.stacks for parent in _parents(name)}
    for stack in rules.stacks:
        for number, key in enumerate(dict(model.get_submodule(stack).named_children())):
            stages = (
                s for s in everywhere if spans[s][stack].first <= number < spans[s][stack].last
            )
            yield f"{stack}.{key}", frozenset(stages)
    for parent in sorted(parents):
        runs = [s for s in everywhere if not parent or _runs(spans[s], parent)]
        owner = model.get_submodule(parent)
        leaves = [*owner._modules, *owner._parameters]
        for leaf in leaves:
            name = f"{parent}.{leaf}" if parent else leaf
            if name in parents or name in rules.stacks:
                continue
            if _fits(leaf, rules.pipeline_first):
                yield name, frozenset(runs[:1])
            elif _fits(leaf, rules.pipeline_last):
                yield name, frozenset(runs[-1:])
            else:
                yield name, frozenset(runs)


def _parents(name: str) -> list[str]:
    """Return the names of all modules that contain a module, beginning with the root ("")."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _runs(spans: dict[str, Span], parent: str) -> bool:
    own = [span for name, span in spans.items() if name.startswith(f"{parent}.")]
    return any(span.first < span.last for span in own)


def _join_ties(model: nn.Module, homes: dict[str, frozenset[int]]) -> None:
    """Assign modules with tied parameters to the union of their stages, so that the ties remain."""
    owners: dict[int, set[str]] = {}
    for name in homes:
        for parameter in _parameters(model, name):
            owners.setdefault(id(parameter), set()).add(name)
    for names in owners.values():
        if len(names) > 1:
            joined = frozenset().union(*(homes[name] for name in names))
            homes.update(dict.fromkeys(names, joined))


def _parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    parent, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(parent)
    module = owner._modules.get(leaf)
    if module is not None:
        return list(module.parameters())
    parameter = owner._parameters.get(leaf)
    return [] if parameter is None else [parameter]


def drop_the_rest_(
    model: nn.Module, cutting: StageAssignment, stages: Sequence[int]
) -> dict[str, list[int]]:
    """Remove the modules that belong to none of `stages`; return the shared parameters.

    Returns:
        dict from parameter name to stages, for each parameter that other stages also have
    """
    shared = {}
    for name, homes in cutting.homes.items():
        if not homes & set(stages):
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            # The other blocks keep their keys, and so their names in checkpoints.
            if isinstance(owner, nn.ModuleDict):
                del owner[leaf]
            else:
                setattr(owner, leaf, None)
    parameters = dict(model.named_parameters())
    for name, homes in cutting.homes.items():
        if len(homes) > 1:
            inside = (n for n in parameters if n == name or n.startswith(f"{name}."))
            shared.update({n: sorted(homes) for n in inside})
    return shared
