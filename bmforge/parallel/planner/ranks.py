"""Partitions blocks and other modules over pipeline ranks, in the same way as `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from bmforge.errors import ConfigError
from bmforge.parallel.check import plan_pipeline
from bmforge.parallel.layout import Layout

__all__ = ["Rank", "cut_ranks"]


@dataclass(frozen=True)
class Rank:
    """Part of the model on one pipeline rank.

    Args:
        counts: dict from stack name to the number of blocks of every kind.
        first: whether the modules before the blocks are on this rank.
        last: whether the modules after the blocks are on this rank.
    """

    counts: Mapping[str, Sequence[int]]
    first: bool = True
    last: bool = True

    @property
    def blocks(self) -> int:
        """Number of blocks of all stacks."""
        return sum(map(sum, self.counts.values()))


def cut_ranks(model: nn.Module, layout: Layout, order: Sequence[int]) -> tuple[Rank, ...]:
    """Partition a model over pipeline ranks as `parallelize` does.

    Args:
        model: whole model on the meta device.
        layout: degrees of parallelism; without a pipeline one rank has everything.
        order: kind of every layer, the same in all stacks; empty if there is one kind.

    Raises:
        ConfigError: the pipeline does not fit the model.
    """
    rules = model.layout_rules()  # type: ignore[operator]
    stacks = {name: len(list(model.get_submodule(name).children())) for name in rules.stacks}
    order = list(order) or [0] * max(stacks.values())
    kinds = range(max(order) + 1)
    if layout.pp == 1:
        everything = {
            k: [list(order[:size]).count(kind) for kind in kinds] for k, size in stacks.items()
        }
        return (Rank(everything),)
    problems: list[str] = []
    cutting, owners = plan_pipeline(model, layout, rules, problems)
    if cutting is None or problems:
        raise ConfigError(f"{'; '.join(problems)}.")
    ranks = []
    for rank in range(layout.pp):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        counts = {stack: [0 for _ in kinds] for stack in stacks}
        for stage in stages:
            for stack, span in cutting.spans[stage].items():
                for layer in range(span.first, span.last):
                    counts[stack][order[layer]] += 1
        ranks.append(Rank(counts, 0 in stages, cutting.num_stages - 1 in stages))
    return tuple(ranks)
