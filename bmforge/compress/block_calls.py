"""Records the arguments of each block of a stack, so that blocks can be run one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError

__all__ = ["BlockCall", "record_calls"]


@dataclass
class BlockCall:
    """Recorded arguments of a block for one batch, except the hidden states.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        slot: index or name of the argument that contains the hidden states.
        take: index of the output that is passed to the next block; None if the block returns a
            single tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str
    take: int | None = None

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run the block on hidden states; return the hidden states for the next block."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.slot, int):
            args[self.slot] = x
        else:
            kwargs[self.slot] = x
        out = block(*args, **kwargs)
        return out if self.take is None else out[self.take]

    def widened(self) -> BlockCall:
        """Return a copy of the call with its 16-bit arguments in fp32."""
        args = tuple(_widen(value) for value in self.args)
        kwargs = {name: _widen(value) for name, value in self.kwargs.items()}
        return BlockCall(args, kwargs, self.slot, self.take)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(accumulation_dtype(value.dtype))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_widen(item) for item in value)
    if type(value) is dict:
        return {name: _widen(item) for name, item in value.items()}
    return value


class _EnoughError(Exception):
    """Raised to stop the forward pass once the last block of a stack has run."""


def record_calls(
    model: nn.Module, stack: Sequence[nn.Module], batch: Mapping[str, Any]
) -> tuple[Tensor, list[BlockCall]]:
    """Return the input hidden states of the first block, and the recorded call of each block."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    calls: list[BlockCall] = []
    last: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen:
            slot, take = _find_slot(last[0], args, kwargs, type(module).__name__)
            calls[-1].take = take
            calls.append(BlockCall(*_without(args, kwargs, slot), slot))
        else:
            calls.append(BlockCall(args, kwargs, 0))
            seen.append((args, kwargs))

    def after(module: nn.Module, args: Any, out: Any) -> None:
        last[:] = [out]
        if module is stack[-1]:
            raise _EnoughError

    handles = [b.register_forward_pre_hook(before, with_kwargs=True) for b in stack]
    handles += [b.register_forward_hook(after) for b in stack]
    try:
        model(**batch)
    except _EnoughError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    slot = calls[1].slot
    args, kwargs = seen[0]
    first = args[slot] if isinstance(slot, int) else kwargs[slot]
    calls[0] = BlockCall(*_without(args, kwargs, slot), slot, calls[0].take)
    calls[-1].take = calls[0].take
    return first, calls


def _find_slot(
    out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str
) -> tuple[int | str, int | None]:
    """Find the argument of a block that is an output of the previous block.

    Args:
        out: output of the previous block.
        args, kwargs: arguments of the block.
        kind: class name of the block, for messages.

    Returns:
        index or name of the argument, and index of the output (None if the previous block returns
        a single tensor)

    Raises:
        ConfigError: no argument is an output of the previous block.
    """
    outs = list(enumerate(out)) if isinstance(out, (tuple, list)) else [(None, out)]
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for take, value in outs:
        for slot, argument in places:
            if isinstance(value, Tensor) and argument is value:
                return slot, take
    raise ConfigError(
        f"a {kind} cannot be calibrated block by block, because a block does not read the output "
        "of the block before it. Use a method without calibration (absmax, magnitude)."
    )


def _without(
    args: tuple[Any, ...], kwargs: dict[str, Any], slot: int | str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None in place of the hidden states."""
    remaining = tuple(None if position == slot else value for position, value in enumerate(args))
    return remaining, {name: None if name == slot else value for name, value in kwargs.items()}
