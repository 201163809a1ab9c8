"""What a part that changes a model says of itself, and how a part comes to stand beside a module.

A part *beside* a module (a low-rank part, an adapter) is a child of it, found by one forward hook:
the module keeps its name, its class and its weights. A part *in the place of* a module (int8
storage of a linear layer) keeps the name and answers the same calls. Either says how each of its
tensors is drawn and cut, so that initialising, loading, saving and layouts need not know it.
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
    """A tensor that is made of another one, which the unchanged model would have.

    Args:
        base: that one's name within the module.
        shape: its whole shape.
        turn: some of its rows -> what they are in this tensor.
        rows_each: so many of its rows, the last time perhaps fewer, make one entry of this tensor's
            first dim.

    Shape:
        turn: (rows_each * entries, ...) -> (entries, ...)
    """

    base: str
    shape: tuple[int, ...]
    turn: Callable[[Tensor], Tensor]
    rows_each: int = 1


@dataclass(frozen=True)
class TensorNote:
    """What is to be known of one tensor of a part.

    Args:
        draw: "zeros", "ones", "numbers" (0, 1, 2, ...), the standard deviation of N(0, std^2), or
            what it is made of.
        cuts: how the module is cut that the part stands beside or in the place of (a style of
            `models.TensorCut`) -> the dim in which this tensor is cut then. A style that is not
            named leaves it whole on every process.
        trains: whether training may change it.
    """

    draw: str | float | Derived
    cuts: Mapping[str, int] = field(default_factory=dict)
    trains: bool = True


def tensor_notes(module: nn.Module) -> Mapping[str, TensorNote]:
    """Return what a part says of its own tensors, by name; {} for any other module."""
    notes = getattr(module, "tensor_notes", None)
    return notes() if callable(notes) else {}


def find_like(module: nn.Module) -> Tensor:
    """Return a tensor of the dtype and on the device that a part of a module has.

    A storage form without floats says it by its buffer `like`.
    """
    like = getattr(module, "like", None)
    floats = (p for p in module.parameters() if p.is_floating_point())
    return like if isinstance(like, Tensor) else next(floats)


class BesidePart(nn.Module):
    """A part that stands beside a module.

    Attributes:
        cut_styles: how the module may be cut (a style of `models.TensorCut`); "" is not at all.
        saved_alone: whether its tensors make sense in a file without the model's.
        enters: whether it changes what goes into the module, by `enter`.
        is_delta: it came beside a finished model: files of that one need not have its tensors.
        adapter_weight: factor on its output, unless the call selects another; 0 disables it.
    """

    cut_styles: ClassVar[frozenset[str]] = frozenset({""})
    saved_alone: ClassVar[bool] = True
    enters: ClassVar[bool] = False
    is_delta: bool = False
    adapter_weight: float = 1.0

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Say what is to be known of the part's own tensors, by name."""
        raise TypeError(f"{type(self).__name__} defines no tensor_notes")

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Return the module's result with this part in it.

        Args:
            inputs: what the module was given, by position.
            out: what it, and the parts that came before, made of it.
        """
        raise TypeError(f"{type(self).__name__} defines no join")

    def enter(self, x: Tensor) -> Tensor:
        """Return what goes into the module in the place of x; only where it `enters`."""
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
    """Yield name and part of all that stand beside a module, in the order in which they came."""
    for name, child in module.named_children():
        if isinstance(child, BesidePart):
            yield name, child


def join_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """The one hook: let every part beside a module add what it adds.

    Of a result with several values (experts' logits, weights of attention) it is the first.
    """
    inputs = args or tuple(kwargs.values())
    main, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
    for _, part in beside_parts(module):
        main = part.join_to(module, inputs, main)
    return main if rest is None else (main, *rest)


def enter_parts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The hook before a module: let parts that enter it change its input."""
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
    """Put a part beside a module, as its child `name`.

    A module that asks its parts itself (it has `asks_parts`, as a head that makes its loss) gets no
    hook.

    Raises:
        ConfigError: the module has something of that name.
    """
    if hasattr(module, name):
        raise ConfigError(
            f"a {type(module).__name__} already has {name!r}: give the change another name, or "
            "take the other part away first."
        )
    known = list(beside_parts(module))
    module.add_module(name, part)
    if getattr(module, "asks_parts", False):
        return
    if not known:
        module.register_forward_hook(join_parts, with_kwargs=True)
    if part.enters and not any(one.enters for _, one in known):
        module.register_forward_pre_hook(enter_parts)


def detach_part_(module: nn.Module, name: str) -> BesidePart:
    """Take a part away again and return it; the module is what it was."""
    part = module._modules.pop(name)
    assert isinstance(part, BesidePart)
    left = [one for _, one in beside_parts(module)]
    if not left:
        _drop_hook_(module, module._forward_hooks, join_parts)
    if not any(one.enters for one in left):
        _drop_hook_(module, module._forward_pre_hooks, enter_parts)
    return part


def move_parts_(old: nn.Module, new: nn.Module) -> None:
    """Let the parts beside `old` stand beside what takes its place."""
    for name in [name for name, _ in beside_parts(old)]:
        attach_part_(new, name, detach_part_(old, name))


def _drop_hook_(module: nn.Module, hooks: dict[int, Any], hook: Any) -> None:
    for key in [key for key, found in hooks.items() if found is hook]:
        del hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
