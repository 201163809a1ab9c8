"""MLPs split into experts: initialization from an MLP, and file format.

In memory a split MLP is an MoE layer (`nn.MoE`) that sums the selected experts' outputs. In a file
it is the original MLP and the router, so that other programs can load the dense model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bmforge.models.weights import WeightRule
from bmforge.nn.moe import MoE
from bmforge.nn.part import tensor_notes

__all__ = ["fill_split_", "split_modules", "split_rules"]


def split_modules(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Yield the name and module of every MLP that is split into experts."""
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.is_split:
            yield name, module


@torch.no_grad()
def fill_split_(new: MoE, old: Any) -> None:
    """Copy an MLP's weights to the experts; leading features go to the shared expert."""
    experts, shared = new.experts, new.shared_expert
    count, size, _ = experts.up_proj.shape
    first = 0 if shared is None else shared.up_proj.weight.shape[0]
    for key in ("gate_proj", "up_proj"):
        linear = getattr(old, key)
        if linear is None:
            continue
        stack, bias = getattr(experts, key), getattr(experts, key.replace("proj", "bias"))
        stack.copy_(linear.weight[first:].unflatten(0, (count, size)))
        if bias is not None:
            bias.copy_(linear.bias[first:].view(count, size))
        if shared is not None:
            part = getattr(shared, key)
            part.weight.copy_(linear.weight[:first])
            if part.bias is not None:
                part.bias.copy_(linear.bias[:first])
    down = old.down_proj
    columns = down.weight[:, first:].unflatten(1, (count, size))
    experts.down_proj.copy_(columns.permute(1, 0, 2))
    if shared is not None:
        shared.down_proj.weight.copy_(down.weight[:, :first])
    if new.down_bias is not None:
        new.down_bias.copy_(down.bias)


def split_rules(model: nn.Module, rules: Sequence[WeightRule]) -> list[WeightRule]:
    """Return `WeightRule`s that map the experts of split MLPs to a dense MLP in the file.

    There are no rules for quantized experts, which are saved under bmforge's names.

    Args:
        model: model with split MLPs.
        rules: `WeightRule`s of the family, with `{i}` for the layer index.
    """
    split = []
    for name, module in split_modules(model):
        if any(tensor_notes(part) for part in module.modules()):
            continue
        shared = module.shared_expert
        count, size, _ = module.experts.up_proj.shape
        first = 0 if shared is None else shared.up_proj.weight.shape[0]
        total = first + count * size
        for key in ("gate_proj", "up_proj", "down_proj"):
            if getattr(module.experts, key) is None:
                continue
            dim = 1 if key == "down_proj" else 0
            for kind in ("weight", "bias"):
                dense = _rule_of(rules, f"{name}.{key}.{kind}")
                own, down_bias = f"{name}.shared_expert.{key}.{kind}", f"{name}.down_bias"
                if dense is None or (kind == "bias" and module.down_bias is None):
                    continue
                if kind == "bias" and key == "down_proj":
                    split.append(WeightRule(down_bias, dense.source, dense.transpose))
                    continue
                base, rows = dense.part or (0, total)
                stack = key if kind == "weight" else key.replace("proj", "bias")
                if shared is not None:
                    part = (base, rows)
                    split.append(WeightRule(own, dense.source, dense.transpose, part, None, dim))
                for number in range(count):
                    part = (base + first + number * size, rows)
                    expert = f"{name}.experts.{stack}"
                    split.append(
                        WeightRule(expert, dense.source, dense.transpose, part, number, dim)
                    )
    return split


def _rule_of(rules: Sequence[WeightRule], name: str) -> WeightRule | None:
    """Return the `WeightRule` for a parameter, with its layer index inserted, or None."""
    for rule in rules:
        match = re.fullmatch(re.escape(rule.parameter).replace(r"\{i\}", r"(\d+)"), name)
        if match:
            published = rule.source
            for number in match.groups():
                published = published.replace("{i}", number)
            return WeightRule(name, published, rule.transpose, rule.part)
    return None
