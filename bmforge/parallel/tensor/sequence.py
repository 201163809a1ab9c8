"""Sequence parallelism: tokens are sharded between the tensor-parallel sublayers of blocks.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bmforge.parallel.tensor.parts import TensorGroup, use_separate_random_numbers_
from bmforge.records import as_stack_
from bmforge.surgery import wrap_forward_

__all__ = ["divide_tokens_"]


def divide_tokens_(stack: nn.Module, tensor: TensorGroup) -> None:
    """Shard the tokens before the first block, and all-gather them after the last one.

    Without a backward pass, as in generation, no activations are kept, so sharding would save no
    memory and the tokens stay replicated.
    """
    blocks = list(stack.children())
    # The length before sharding: padded shards do not tell how many tokens there are.
    now: dict[str, int | None] = {}

    def span() -> tuple[nn.Module, nn.Module]:
        """Return the first and the last block that run; a pipeline stage runs only some blocks."""
        stack_span = as_stack_(stack).span
        if stack_span is None:
            return blocks[0], blocks[-1]
        return stack.get_submodule(str(stack_span.first)), stack.get_submodule(
            str(stack_span.last - 1)
        )

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is span()[0]:
            now["tokens"] = args[0].shape[1] if torch.is_grad_enabled() else None
            if now["tokens"] is not None:
                args = (tensor.take(args[0]), *args[1:])
        # An argument, because recomputation in backward repeats the call with the same arguments
        # while `now` may belong to a later call.
        return args, {**kwargs, "tokens": now["tokens"]}

    def end(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if now["tokens"] is None or module is not span()[1]:
            return out
        return (tensor.restore(out[0]), *out[1:]) if isinstance(out, tuple) else tensor.restore(out)

    for block in blocks:
        # A randomly dropped block is dropped by all processes.
        if getattr(block, "dropout", 0.0) and not getattr(block, "layer_drop", 0.0):
            use_separate_random_numbers_(block, tensor)
        _note_tokens_(block, tensor)
        block.register_forward_pre_hook(begin, with_kwargs=True)
        block.register_forward_hook(end)


def _note_tokens_(block: nn.Module, tensor: TensorGroup) -> None:
    """Pass the sequence length to a block's sublayers, also in recomputation."""
    wrap_forward_(block, partial(_note_tokens, tensor), "tokens")


def _note_tokens(
    tensor: TensorGroup,
    inner: Callable[..., Any],
    /,
    *args: Any,
    tokens: int | None = None,
    **kwargs: Any,
) -> Any:
    tensor.tokens = tokens
    return inner(*args, **kwargs)
