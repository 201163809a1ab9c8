"""Base class of attached parts (adapters), the hooks that run them, and notes about their tensors.

A part *attached to* a module (a LoRA, an adapter) is a child of it that one forward hook runs: the
module keeps its name, its class and its weights. A *replacement* of a module (int8 storage of a
linear layer) keeps the name and supports the same calls. Both declare how each of their tensors is
initialized and sharded, so that the code for that needs no special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import choice_of

__all__ = [
    "BesidePart",
    "Derived",
    "TensorNote",
    "attach_part_",
    "beside_parts",
    "detach_part_",
    "find_like",
    "move_parts_",
    "tensor_notes",
]


@dataclass(frozen=True)
class Derived:
    """A tensor computed from another one, which the unchanged model would have.

    Args:
        base: name of the source tensor within the module.
        shape: global shape of the source tensor.
        turn: function from rows of the source tensor to entries of this one.
        rows_each: number of source rows per entry of this tensor's first dim; the last entry may
            have fewer.

    Shape:
        turn: (rows_each * entries, ...) -> (entries, ...)
    """

    base: str
    shape: tuple[int, ...]
    turn: Callable[[Tensor], Tensor]
    rows_each: int = 1


@dataclass(frozen=True)
class TensorNote:
    """Initialization and sharding of one tensor of a part.

    Args:
        draw: "zeros", "ones", "numbers" (0, 1, 2, ...), the standard deviation of N(0, std^2), or
            the `Derived` source that it is computed from.
        cuts: sharding style of the module (a style of `models.TensorCut`) -> dim in which this
            tensor is sharded then. With other styles it is replicated.
        trains: True if training may change it.
    """

    draw: str | float | Derived
    cuts: Mapping[str, int] = field(default_factory=dict)
    trains: bool = True


def tensor_notes(module: nn.Module) -> Mapping[str, TensorNote]:
    """Return the notes about a part's own tensors, by name; {} for any other module."""
    notes = getattr(module, "tensor_notes", None)
    return notes() if callable(notes) else {}


def find_like(module: nn.Module) -> Tensor:
    """Return a tensor of the dtype and on the device that a part attached to a module should have.

    A quantized module without float parameters has the buffer `like` for this purpose.
    """
    like = getattr(module, "like", None)
    floats = (p for p in module.parameters() if p.is_floating_point())
    return like if isinstance(like, Tensor) else next(floats)


class BesidePart(nn.Module):
    """A part attached to a module.

    Attributes:
        cut_styles: supported sharding styles of the module (see `models.TensorCut`); "" is
            replicated.
        saved_alone: True if its tensors can be saved without the model's.
        enters: True if it changes the module's input, by `enter`.
        is_delta: True if it was attached to a finished model, whose files lack its tensors.
        adapter_weight: factor on its output, unless the call selects another; 0 disables it.
    """

    cut_styles: ClassVar[frozenset[str]] = frozenset({""})
    saved_alone: ClassVar[bool] = True
    enters: ClassVar[bool] = False
    is_delta: bool = False
    adapter_weight: float = 1.0

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the notes about the part's own tensors, by name."""
        raise TypeError(f"{type(self).__name__} defines no tensor_notes")

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Return the module's output with this part applied.

        Args:
            inputs: positional inputs of the module.
            out: output of the module and of the parts before this one.
        """
        raise TypeError(f"{type(self).__name__} defines no join")

    def enter(self, x: Tensor) -> Tensor:
        """Return the changed input of the module; called only if `enters`."""
        raise TypeError(f"{type(self).__name__} defines no enter")

    def join_to(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Return the output of `module` with this part applied as the current call selects it."""
        weight, samples, batched = choice_of(self)
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


def beside_parts(module: nn.Module) -> Iterator[tuple[str, BesidePart]]:
    """Yield name and part of all parts attached to a module, in the order of attachment."""
    for name, child in module.named_children():
        if isinstance(child, BesidePart):
            yield name, child


def join_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Forward hook: apply every part attached to a module to its output.

    If the output is a tuple (experts' logits, attention weights), its first item is changed.
    """
    inputs = args or tuple(kwargs.values())
    main, extras = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
    for _, part in beside_parts(module):
        main = part.join_to(module, inputs, main)
    return main if extras is None else (main, *extras)


def enter_parts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: apply the parts that change the module's input."""
    x, *more = args
    for _, part in beside_parts(module):
        if not part.enters:
            continue
        weight, samples, _ = choice_of(part)
        if weight == 0:
            continue
        if samples is None:
            x = _weighted(x, part.enter(x), weight)
        else:
            own = x[samples]
            x = x.index_copy(0, samples, _weighted(own, part.enter(own), weight))
    return (x, *more)


def _weighted(x: Tensor, changed: Tensor, weight: float) -> Tensor:
    return changed if weight == 1 else x + weight * (changed - x)


def attach_part_(module: nn.Module, name: str, part: BesidePart) -> None:
    """Attach a part to a module, as its child `name`.

    A module that applies its parts itself (it has `asks_parts`, such as a head that computes its
    loss)
    gets no hook.

    Raises:
        ConfigError: the module already has an attribute of that name.
    """
    if hasattr(module, name):
        raise ConfigError(
            f"a {type(module).__name__} already has {name!r}: give the change another name, or "
            "take the other part away first."
        )
    attached = list(beside_parts(module))
    module.add_module(name, part)
    if getattr(module, "asks_parts", False):
        return
    if not attached:
        module.register_forward_hook(join_parts, with_kwargs=True)
    if part.enters and not any(other.enters for _, other in attached):
        module.register_forward_pre_hook(enter_parts)


def detach_part_(module: nn.Module, name: str) -> BesidePart:
    """Remove a part and return it; the module is as before the attachment."""
    part = module._modules.pop(name)
    assert isinstance(part, BesidePart)
    left = [other for _, other in beside_parts(module)]
    if not left:
        _drop_hook_(module, module._forward_hooks, join_parts)
    if not any(other.enters for other in left):
        _drop_hook_(module, module._forward_pre_hooks, enter_parts)
    return part


def move_parts_(old: nn.Module, new: nn.Module) -> None:
    """Move the parts attached to `old` to the module that replaces it."""
    for name in [name for name, _ in beside_parts(old)]:
        attach_part_(new, name, detach_part_(old, name))


def _drop_hook_(module: nn.Module, hooks: dict[int, Any], hook: Any) -> None:
    for key in [key for key, entry in hooks.items() if entry is hook]:
        del hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
