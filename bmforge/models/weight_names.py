"""Mixin with the names of a model's tensors in checkpoints, as `WeightRule`s."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import nn

from bmforge.models.changes import changed_modules
from bmforge.models.split import split_modules, split_rules
from bmforge.models.stack import expert_names
from bmforge.models.weights import WeightRule, expand_rules
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.quantized import PackedStore
from bmforge.surgery import persistent_tensors

__all__ = ["WeightNames"]


class WeightNames:
    """Mixin of `Model` for its `WeightRule`s, which map parameters to checkpoint tensors."""

    config: Any
    hf_prefix: ClassVar[str]

    def weight_rules(self) -> list[WeightRule]:
        """Return the `WeightRule`s without the head's; `{i}` is the layer index."""
        raise TypeError(f"{type(self).__name__} must define `weight_rules`.")

    @property
    def _module(self) -> Any:
        return cast(nn.Module, self)

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of each checkpoint tensor that is a copy to its original."""
        return {}

    def all_rules(self) -> list[WeightRule]:
        """Return the `WeightRule`s, including the head's; `{i}` is the layer index."""
        head = self.config.heads[self.config.head]
        rules = self.weight_rules()
        if head.prefix is not None:
            rules = [
                replace(rule, source=head.prefix + rule.source.removeprefix(self.hf_prefix))
                if rule.source.startswith(self.hf_prefix)
                else rule
                for rule in rules
            ]
        return rules + [WeightRule(name, published) for name, published in head.names.items()]

    def active_rules(self) -> list[WeightRule]:
        """Return the `WeightRule`s of each tensor of this model; tied tensors appear once."""
        return self.expand(self.all_rules())

    def published_rules(self) -> list[WeightRule]:
        """Return the `WeightRule`s that this model would have without quantization.

        Published checkpoints contain unquantized weights, even if this model is quantized.
        """
        changed = changed_modules(self._module)
        stored = {n: s for n, m in changed.items() if (s := linear_sizes(m)) is not None}
        if not stored:
            return self.active_rules()
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in persistent_tensors(self._module).items()
            if (owner := name.rpartition(".")[0]) not in changed
            or (owner in stored and name.endswith(".bias"))
        }
        shapes |= {f"{name}.weight": sizes[::-1] for name, sizes in stored.items()}
        rules = self.all_rules()
        return expand_rules(rules, shapes, (), split_rules(self._module, rules))

    def expand(self, rules: Sequence[WeightRule]) -> list[WeightRule]:
        """Expand `{i}` for all layers; adapters and quantized layers keep bmforge's names."""
        shapes = {
            name: tuple(tensor.shape) for name, tensor in persistent_tensors(self._module).items()
        }
        own = self._own_names()
        if not any(".mlp.experts." in rule.parameter for rule in rules):
            own |= expert_names(self._module)
        for name, module in split_modules(self._module):
            own |= {f"{name}.{key}" for key, _ in module.named_parameters()}
        return expand_rules(rules, shapes, own, split_rules(self._module, rules))

    def _own_names(self) -> set[str]:
        """Return the names of tensors that published checkpoints do not contain."""
        changed = changed_modules(self._module)
        names = set()
        for name in persistent_tensors(self._module):
            owner, _, key = name.rpartition(".")
            # A quantized layer's bias keeps its published name; that of int8 rows does not.
            is_published = key == "bias" and isinstance(changed.get(owner), PackedStore)
            if owner in changed and not is_published:
                names.add(name)
        return names

    def rules_for(self, names: Collection[str]) -> list[WeightRule]:
        """Return the `WeightRule`s for a checkpoint with these tensor names.

        These are the `active_rules`, except in families that were published in several formats.
        """
        return self.active_rules()
