"""Experts of transformers models: detection, grouped computation and packed integer storage.

transformers 5 keeps the experts of a layer as 3-D parameters of one module whose forward takes
tokens, expert indices and weights. A decorator in transformers sets flags on the module
(`is_transposed`, `has_gate`, `has_bias`); with these flags one implementation computes every
variant. A class without the decorator that has `_apply_gate` (Step3p7) computes the variant with
the default flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.nn.grouped import grouped_linear
from bmforge.nn.moe import dispatch_locally
from bmforge.nn.packed_experts import StackStore
from bmforge.nn.packing import QuantSpec

__all__ = [
    "PackedForeignExperts",
    "foreign_stacks",
    "is_foreign_experts",
    "run_foreign",
    "run_foreign_grouped",
]

_SWITCHES = {"has_gate": True, "has_bias": False, "is_transposed": False}  # flag -> default


def is_foreign_experts(module: nn.Module) -> bool:
    """Return True for a transformers module with stacked experts."""
    stacks = foreign_stacks(module)
    if hasattr(module, "_apply_gate") and set(stacks) == {"gate_up_proj", "down_proj"}:
        return True
    return all(hasattr(module, name) for name in _SWITCHES) and bool(stacks)


def _flag(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, name, _SWITCHES[name]))


def foreign_stacks(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict from parameter name to stacked matrix of a transformers module."""
    return {
        key: parameter
        for key in ("gate_up_proj", "up_proj", "down_proj")
        if isinstance(parameter := module._parameters.get(key), Tensor) and parameter.dim() == 3
    }


def run_foreign_grouped(module: Any, x: Tensor, ends: Tensor) -> Tensor:
    """Run unquantized experts on rows sorted by expert, with one grouped product per matrix.

    Args:
        module: module for which `is_foreign_experts` is true; its stacks may contain only some of
            the experts.
        x: rows sorted by expert.
        ends: index after the last row of each expert.

    Shape:
        x: (S, D); ends: (E,); returns (S, D)
    """

    def multiply(key: str, rows: Tensor) -> Tensor:
        stack = module._parameters[key]
        stack = stack.transpose(1, 2) if _flag(module, "is_transposed") else stack
        return _add_bias(module, key, grouped_linear(rows, stack, ends), ends)

    return run_foreign(module, multiply, x)


def run_foreign(module: Any, multiply: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
    """Run experts on rows sorted by expert.

    Args:
        module: experts with transformers' flags.
        multiply: function (stack name, rows) that returns their product, biases included.
        x: rows sorted by expert.

    Shape:
        x: (S, D); returns (S, D)
    """
    if _flag(module, "has_gate"):
        gate = getattr(module, "plain_class", type(module))._apply_gate
        inner = gate(module, multiply("gate_up_proj", x))
    else:
        inner = module.act_fn(multiply("up_proj", x))
    out = multiply("down_proj", inner)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _add_bias(module: Any, key: str, out: Tensor, ends: Tensor) -> Tensor:
    """Add each expert's bias to its rows, if the experts have biases."""
    bias = getattr(module, f"{key}_bias", None) if _flag(module, "has_bias") else None
    if bias is None:
        return out
    rows = torch.arange(len(out), device=out.device, dtype=ends.dtype)
    return out + bias.index_select(0, torch.searchsorted(ends, rows, right=True))


class PackedForeignExperts(StackStore):
    """Experts of transformers with packed integer weights; replaces the unquantized module.

    Args:
        plain: module to replace; its weights are quantized by `fill_`.
        spec: quantization scheme.

    Shape:
        hidden_states: (M, D); top_k_index, top_k_weights: (M, k); returns (M, D)
    """

    def __init__(self, plain: Any, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        own = set(self.__dict__)
        # Flags, activation constants and the config, which `_apply_gate` of the class reads.
        self.__dict__.update({k: v for k, v in vars(plain).items() if k not in own})
        for name, child in plain.named_children():
            self.add_module(name, child)
        stacks = foreign_stacks(plain)
        self.plain_class = type(plain)
        for key, parameter in plain._parameters.items():
            self.register_parameter(key, None if key in stacks else parameter)
        sizes = {key: self._shape_of(stack) for key, stack in stacks.items()}
        self._make_stacks(sizes, spec, next(iter(stacks.values())))

    def _shape_of(self, stack: Tensor) -> tuple[int, int, int]:
        experts, rows, columns = stack.shape
        is_transposed = _flag(self, "is_transposed")
        return (experts, columns, rows) if is_transposed else (experts, rows, columns)

    def fill_(self, key: str, stack: Tensor) -> None:
        """Quantize `stack`, ordered as in the unquantized module, into the parameters of `key`."""
        super().fill_(key, stack.transpose(1, 2) if _flag(self, "is_transposed") else stack)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for every token."""
        count = next(iter(self._sizes.values()))[0]
        parts = dispatch_locally(hidden_states, top_k_index, count, self._run)
        return (parts * top_k_weights[..., None].to(parts.dtype)).sum(1).to(hidden_states.dtype)

    def _run(self, x: Tensor, ends: Tensor) -> Tensor:
        def multiply(key: str, rows: Tensor) -> Tensor:
            return _add_bias(self, key, self.multiply(key, rows, ends), ends)

        return run_foreign(self, multiply, x)
