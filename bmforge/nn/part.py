"""Base class of adapters, the hooks that run them, and notes on their tensors.

An adapter that is *attached to* a module (such as a LoRA) is a child module that a forward hook
runs: the base module keeps its name, class and weights. A *replacement* of a module (such as a
linear layer with int8 weights) has the same name and interface. Adapters and replacements return a
`TensorNote` for each of their tensors, with its initialization and sharding, so that initialization
and layouts need no special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import adapter_choice_of

__all__ = [
    "AdapterModule",
    "Derived",
    "Joined",
    "TensorNote",
    "attach_part_",
    "adapters_of",
    "detach_part_",
    "find_like",
    "has_other_hooks",
    "move_parts_",
    "tensor_notes",
]


@dataclass(frozen=True)
class Derived:
    """Source of a tensor that is computed from a tensor of the unmodified model.

    Args:
        base: name of the source tensor within the module.
        shape: global shape of the source tensor.
        compute: function (rows of the source tensor) that computes entries of this tensor.
        rows_each: number of source rows per entry of this tensor's first dim; the last entry
            may use fewer.

    Shape:
        compute: (rows_each * entries, ...) -> (entries, ...)
    """

    base: str
    shape: tuple[int, ...]
    compute: Callable[[Tensor], Tensor]
    rows_each: int = 1


@dataclass(frozen=True)
class TensorNote:
    """Describes the initialization and sharding of one tensor of an adapter or replacement.

    Args:
        initial: initial values: "zeros", "ones", "numbers" (0, 1, 2, ...), the standard deviation
            of N(0, std^2), or a `Derived` source.
        shard_dims: mapping from sharding style of the module (see `models.TensorParallelRule`) to
            the sharded dim of this tensor. With other styles the tensor is replicated.
        trains: True if training may change the tensor.
    """

    initial: str | float | Derived
    shard_dims: Mapping[str, int] = field(default_factory=dict)
    trains: bool = True


def tensor_notes(module: nn.Module) -> Mapping[str, TensorNote]:
    """Return an adapter's or replacement's dict from tensor name to note; {} for other modules."""
    notes = getattr(module, "tensor_notes", None)
    return notes() if callable(notes) else {}


def find_like(module: nn.Module) -> Tensor:
    """Return a tensor with the dtype and device that an adapter of this module should have.

    A quantized module has no float parameters and provides the buffer `like` instead.
    """
    like = getattr(module, "like", None)
    floats = (p for p in module.parameters() if p.is_floating_point())
    return like if isinstance(like, Tensor) else next(floats)


class AdapterModule(nn.Module):
    """Base class of adapters: modules attached to a base module.

    Attributes:
        sharding_styles: supported sharding styles of the base module (see
            `models.TensorParallelRule`); "" means replicated.
        saved_alone: True if the adapter's tensors can be saved without the base model.
        on_input: True if the adapter changes the base module's input (by `change_input`).
        is_delta: True if the adapter was attached to an existing model, whose files do not
            contain its tensors.
        adapter_weight: factor on the adapter's output, unless the call selects another; 0
            disables the adapter.
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset({""})
    saved_alone: ClassVar[bool] = True
    on_input: ClassVar[bool] = False
    is_delta: bool = False
    adapter_weight: float = 1.0

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return a dict from the name of each tensor of the adapter to its `TensorNote`."""
        raise TypeError(f"{type(self).__name__} must define `tensor_notes`.")

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Return the base module's output with this adapter applied.

        Args:
            inputs: positional inputs of the base module.
            out: output of the base module, including earlier adapters.
        """
        raise TypeError(f"{type(self).__name__} must define `join`.")

    def change_input(self, x: Tensor) -> Tensor:
        """Return the changed input of the base module; called only if `on_input` is True."""
        raise TypeError(f"{type(self).__name__} must define `change_input`.")

    def join_to(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Apply this adapter to the output of `module`, with the current call's `AdapterChoice`."""
        weight, samples, batched = adapter_choice_of(self)
        if batched is not None and not torch.is_grad_enabled() and inputs[0].dim() == 3:
            grouped: Tensor = batched.join(inputs, out)
            return grouped
        if weight == 0:
            return out
        if samples is None:
            return self._joined(module, inputs, out, weight)
        samples = samples.to(out.device)
        own = self._joined(module, (inputs[0][samples], *inputs[1:]), out[samples], weight)
        return out.index_copy(0, samples, own)

    def _joined(
        self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor, weight: float
    ) -> Tensor:
        joined: Tensor = self.join(inputs, out)
        return joined if weight == 1 else out + weight * (joined - out)


def adapters_of(module: nn.Module) -> Iterator[tuple[str, AdapterModule]]:
    """Yield the name and module of all adapters of a module, in order of attachment."""
    for name, child in module.named_children():
        if isinstance(child, AdapterModule):
            yield name, child


class Joined(NamedTuple):
    """Output of a module's forward that its adapters have already changed; see `join_parts`."""

    out: Tensor


def join_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Forward hook: apply every adapter of a module to its output.

    If the output is a tuple (with router logits or attention weights), its first item is changed. A
    module that applied its adapters itself returns a `Joined` output, which is unwrapped.
    """
    if type(out) is Joined:
        return out.out
    inputs = args or tuple(kwargs.values())
    main, extras = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
    for _, part in adapters_of(module):
        main = part.join_to(module, inputs, main)
    return main if extras is None else (main, *extras)


def enter_parts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: apply the adapters that change the module's input."""
    x, *more = args
    for _, part in adapters_of(module):
        if not part.on_input:
            continue
        weight, samples, _ = adapter_choice_of(part)
        if weight == 0:
            continue
        if samples is None:
            x = _weighted(x, part.change_input(x), weight)
        else:
            own = x[samples]
            x = x.index_copy(0, samples, _weighted(own, part.change_input(own), weight))
    return (x, *more)


def _weighted(x: Tensor, changed: Tensor, weight: float) -> Tensor:
    return changed if weight == 1 else x + weight * (changed - x)


def attach_part_(module: nn.Module, name: str, part: AdapterModule) -> None:
    """Attach an adapter to a module, as its child `name`.

    A module whose attribute `applies_adapters` is True, such as a head that computes its loss, runs
    its adapters itself and gets no hook.

    Raises:
        ConfigError: the module already has an attribute of that name.
    """
    if hasattr(module, name):
        raise ConfigError(
            f"a {type(module).__name__} already has an attribute {name!r}. Rename the "
            "adapter, or detach the existing adapter first."
        )
    attached = list(adapters_of(module))
    module.add_module(name, part)
    if getattr(module, "applies_adapters", False):
        return
    if not attached:
        # Other hooks, also older ones, get the output with all adapters.
        module.register_forward_hook(join_parts, with_kwargs=True, prepend=True)
    if part.on_input and not any(other.on_input for _, other in attached):
        module.register_forward_pre_hook(enter_parts)


def detach_part_(module: nn.Module, name: str) -> AdapterModule:
    """Remove and return an adapter; also remove the hooks that no other adapter needs."""
    part = module._modules.pop(name)
    assert isinstance(part, AdapterModule)
    left = [other for _, other in adapters_of(module)]
    if not left:
        _drop_hook_(module, module._forward_hooks, join_parts)
    if not any(other.on_input for other in left):
        _drop_hook_(module, module._forward_pre_hooks, enter_parts)
    return part


def has_other_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks that do not belong to adapters."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(hook not in (join_parts, enter_parts) for hook in hooks)


def move_parts_(old: nn.Module, new: nn.Module) -> None:
    """Move the adapters of `old` to the module that replaces it."""
    for name in [name for name, _ in adapters_of(old)]:
        attach_part_(new, name, detach_part_(old, name))


def _drop_hook_(module: nn.Module, hooks: dict[int, Any], hook: Any) -> None:
    for key in [key for key, entry in hooks.items() if entry is hook]:
        del hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
