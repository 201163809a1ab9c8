"""Bottleneck adapters: sequential, low-rank, and parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from bmforge.errors import ConfigError
from bmforge.tune.delta.address import find_places
from bmforge.tune.delta.delta import Delta

__all__ = ["Adapter", "LowRankAdapter", "ParallelAdapter"]


class Adapter(Delta):
    """Bottleneck adapter ``h + up(act(down(h)))`` on the output of a module.

    The options are those of `nn.bottleneck.BottleneckOptions`.

    Source: Houlsby et al., "Parameter-efficient transfer learning for NLP" (2019).
    """

    kind = "bottleneck"
    default_targets = ("attn.o", "mlp.down")
    defaults = MappingProxyType({"width": 24})
    stands_behind = True
    peft_type = "BMFORGE_ADAPTER"


class LowRankAdapter(Adapter):
    """Bottleneck adapter whose two matrices are low-rank products, of any rank.

    The options are those of `Adapter`.
    """

    defaults = MappingProxyType({"form": "low_rank", "reduction": 32, "rank": 1})
    peft_type = "BMFORGE_LOW_RANK_ADAPTER"


class ParallelAdapter(Delta):
    """Bottleneck adapter that reads a module's input and adds its result to a module's output.

    Args:
        model: any model.
        pairs: (read, write) targets, which must match the same number of modules; by default, the
            adapter reads the input of every attention and every MLP and writes to the output of the
            same module.
        options: options of `Adapter` and of every `Delta`.

    Source: He et al., "Towards a unified view of parameter-efficient transfer learning" (2022).
    """

    kind = "bottleneck"
    default_targets = ("attn", "mlp")
    defaults = MappingProxyType({"width": 24, "reads": "in"})
    peft_type = "BMFORGE_PARALLEL_ADAPTER"

    def __init__(
        self, model: nn.Module, pairs: Sequence[tuple[str, str]] | None = None, **options: Any
    ) -> None:
        self.pairs = pairs
        targets = None if pairs is None else [second for _, second in pairs]
        super().__init__(model, targets, **options)

    @classmethod
    def from_places(cls, model: nn.Module, name: str, options: Mapping[str, Any]) -> Self:
        """Attach a saved adapter, whose options contain pairs of module names.

        The adapter reads the input of the first module and adds to the output of the second.
        """
        arguments = dict(options)
        reads_at = arguments.pop("reads_at", {})
        pairs = [(reads_at.get(n, n), n) for n in arguments.pop("targets")]
        return cls(model, pairs, name=name, **arguments)

    def _find_target_names(self) -> list[str]:
        if self.pairs is None and not _has_mlps(self.model):
            self.pairs = [("attn", "attn"), ("mlp.up", "mlp.down")]
        if self.pairs is None:
            return super()._find_target_names()
        reads_at: dict[str, str] = {}
        for first, second in self.pairs:
            reads, writes = (
                find_places(self.model, (target,), self.exclude) for target in (first, second)
            )
            if len(reads) != len(writes):
                raise ConfigError(
                    f"in the pair ({first!r}, {second!r}), the first pattern matches "
                    f"{len(reads)} modules and the second {len(writes)}. Use two patterns that "
                    "match the same number of modules."
                )
            reads_at |= dict(zip(writes, reads, strict=True))
        self.options["reads_at"] = reads_at
        return list(reads_at)


def _has_mlps(model: nn.Module) -> bool:
    """Return True if MLPs are separate modules, unlike in transformers' BERT-like models."""
    try:
        return bool(find_places(model, ("mlp",)))
    except ConfigError:
        return False
