"""Checks of calls against the limits of the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import EngineConfig
from bmforge.models.base import Model
from bmforge.records import laid_out

__all__ = ["check_asked", "check_module", "check_size", "check_tokenizer", "total_tokens"]

# Default capacity of batched requests without a budget, in rows of maximum length.
_ROWS = 16

_ROWS_OF_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def check_size(
    limit: tuple[int, int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook that raises an error for more rows or tokens than planned.

    Raises:
        ConfigError: the call exceeds the limits; the message names sizes and limits.
    """
    inputs = {"input_ids": args[0]} if args and isinstance(args[0], Tensor) else {}
    inputs |= {name: kwargs[name] for name in _ROWS_OF_TOKENS if kwargs.get(name) is not None}
    for name, tensor in inputs.items():
        past = getattr(kwargs.get("cache"), "length", 0)
        if name.startswith("input") and "decoder_input_ids" in inputs:
            past = 0  # the source is not in the target's cache
        rows, tokens = tensor.shape[0], past + (tensor.shape[1] if tensor.dim() > 1 else 1)
        if tensor.dim() == 4:  # images
            tokens = 0
        if rows > limit[0] or tokens > limit[1]:
            raise ConfigError(
                f"{name} brings {rows} rows of {tokens} tokens, and the engine's memory was "
                f"planned for max_rows={limit[0]} and max_tokens={limit[1]}. Ask for less, or "
                "open it with a larger EngineConfig."
            )


def check_module(model: nn.Module, config: EngineConfig, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an engine cannot place this module in memory."""
    record = laid_out(model)
    mesh = None if record is None else record.mesh
    # A layout of one process leaves plain parameters, unless it changes their precision.
    is_cut = any(type(p.data) is not Tensor for p in model.parameters())
    if record is not None and (
        is_cut or (mesh is not None and mesh.size() > 1) or record.streamers
    ):
        raise ConfigError(
            f"the {type(model).__name__} is parallelized or streamed already. Give the "
            "engine a plain model, or the directory it was saved in."
        )
    if options:
        raise ConfigError(f"{', '.join(options)}: for models that are opened, not for modules.")
    if config.stream_experts:
        raise ConfigError(
            "EngineConfig(stream_experts=True) reads experts from files: save the model, and "
            "give the engine the directory."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"the {type(model).__name__} is on meta and has no weights. Give the engine the "
            "directory they are in, or load them."
        )


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Raise `ConfigError` if the tokenizer has more tokens than the model."""
    size, vocab_size = len(tokenizer), getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None and size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {size} tokens, the model vocab_size={vocab_size}: it is of another "
            "model. Open both from the same directory."
        )


def total_tokens(model: nn.Module, config: EngineConfig, limit: tuple[int, int] | None) -> int:
    """Return the KV cache capacity for batched requests, in tokens.

    Raises:
        ConfigError: the configured capacity exceeds the planned memory.
    """
    requested = config.requests.total_tokens
    if limit is None:
        return requested or _ROWS * config.tokens_of(model)
    planned = limit[0] * limit[1]
    if requested is not None and requested > planned:
        raise ConfigError(
            f"RequestsConfig: total_tokens={requested} is more than the {planned} that memory was "
            f"planned for, max_rows={limit[0]} of max_tokens={limit[1]}. Give less, or raise these."
        )
    return requested or planned


def check_asked(model: nn.Module, what: str, writes: bool) -> None:
    """Raise `ConfigError` if the model does not support a method of the engine."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"{what} is for models of bmforge, and this is a {type(model).__name__}: call "
            "engine.model itself, or what its library has for it."
        )
    if writes and not model.traits.writes:
        raise ConfigError(
            f"{what} needs a model that writes text; a {type(model).__name__} with the "
            f"head {model.config.head!r} does not."
        )
