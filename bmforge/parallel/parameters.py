"""Checks whether parameters can be sharded: dtypes within a unit, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bmforge.parallel.master_weights import is_half
from bmforge.records import Unit

__all__ = ["make_contiguous_", "parameter_problems", "scalars_of"]


def parameter_problems(
    model: nn.Module, units: Sequence[Unit], master_weights: bool = False
) -> list[str]:
    """Return the reasons why a model's parameters cannot be sharded.

    Args:
        model: model, not yet sharded.
        units: modules whose parameters are gathered together.
        master_weights: upcast trained 16-bit parameters to fp32 before they are sharded.
    """
    named = dict(model.named_parameters())
    return [*_mixed_units(named, units, master_weights), *_shared_memory(named)]


def scalars_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the zero-dimensional parameters; they are replicated, not sharded."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 0]


def make_contiguous_(model: nn.Module) -> None:
    """Make all parameters contiguous, in place."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _mixed_units(
    named: dict[str, nn.Parameter], units: Sequence[Unit], master_weights: bool
) -> Iterator[str]:
    """Yield a message for each unit whose trained parameters have several dtypes.

    Parameters outside of all units belong to the unit of the root module.
    """
    inside = [unit.name for unit in units if unit.is_gathered]
    examples: dict[str, dict[str, str]] = {}
    for name, parameter in named.items():
        around = (unit for unit in inside if name.startswith(f"{unit}."))
        if parameter.requires_grad and parameter.dim():
            seen = examples.setdefault(max(around, key=len, default=""), {})
            upcast = master_weights and is_half(parameter)
            dtype = torch.float32 if upcast else parameter.dtype
            seen.setdefault(str(dtype).removeprefix("torch."), name)
    for unit, seen in examples.items():
        if len(seen) > 1:
            which = ", ".join(f"{dtype} ({name})" for dtype, name in seen.items())
            yield (
                f"{f'unit {unit}' if unit else 'the root unit'} has trained parameters of "
                f"several dtypes: {which}; convert all to one dtype, for example with "
                "model.float(), and choose the compute dtype with precision"
            )


def _shared_memory(named: dict[str, nn.Parameter]) -> Iterator[str]:
    """Yield a message for each non-contiguous parameter that shares memory with another one."""
    for name, parameter in named.items():
        if parameter.is_contiguous():
            continue
        for other, its in named.items():
            if other != name and _overlap(parameter, its):
                yield (
                    f"parameter {name} is a view of the memory of {other}, and views cannot be "
                    f"sharded; do not register {name} as a parameter, and transpose {other} in "
                    "the forward pass"
                )
                break


def _overlap(parameter: nn.Parameter, other: nn.Parameter) -> bool:
    if parameter.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (first, last), (start, end) = _extent(parameter), _extent(other)
    return first <= end and start <= last


def _extent(tensor: nn.Parameter) -> tuple[int, int]:
    """Return the byte offsets of a tensor's start and end in its storage."""
    first = tensor.storage_offset()
    steps = (n - 1 for n in tensor.shape)
    last = first + sum(n * stride for n, stride in zip(steps, tensor.stride(), strict=True))
    return first * tensor.element_size(), last * tensor.element_size()
