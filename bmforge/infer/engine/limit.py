"""Keeping a model to what its memory was planned for, whoever calls it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError

__all__ = ["check_size"]

_ROWS_OF_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def check_size(
    limit: tuple[int, int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for more rows or longer ones than were planned for; a hook before a model's forward.

    Raises:
        ConfigError: with what was planned and what was given.
    """
    given = {"input_ids": args[0]} if args and isinstance(args[0], Tensor) else {}
    given |= {name: kwargs[name] for name in _ROWS_OF_TOKENS if kwargs.get(name) is not None}
    for name, tensor in given.items():
        past = getattr(kwargs.get("cache"), "length", 0)
        if name.startswith("input") and "decoder_input_ids" in given:
            past = 0  # the source, beside a target that goes on
        rows, tokens = tensor.shape[0], past + (tensor.shape[1] if tensor.dim() > 1 else 1)
        if tensor.dim() == 4:  # images
            tokens = 0
        if rows > limit[0] or tokens > limit[1]:
            raise ConfigError(
                f"{name} brings {rows} rows of {tokens} tokens, and the engine's memory was "
                f"planned for max_rows={limit[0]} and max_tokens={limit[1]}. Ask for less, or "
                "open it with a larger EngineConfig."
            )
