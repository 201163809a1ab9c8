"""Checks of calls against the limits of the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import EngineConfig
from bmforge.models.base import Model
from bmforge.records import find_parallel_record

__all__ = ["check_method", "check_module", "check_size", "check_tokenizer", "total_tokens"]

# Default KV cache capacity of an engine without a budget, in sequences of maximum length.
_ROWS = 16

_ROWS_OF_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def check_size(
    limit: tuple[int, int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook that raises an error if a batch exceeds the memory plan.

    Without a KV cache, more and shorter sequences are allowed, up to the same number of tokens.

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
        is_cached = kwargs.get("cache") is not None or not tokens
        most = limit[0] if is_cached else limit[0] * limit[1] // tokens
        if rows > most or tokens > limit[1]:
            raise ConfigError(
                f"{name} has {rows} sequences of {tokens} tokens, more than the engine's memory "
                f"plan allows (max_rows={limit[0]}, max_tokens={limit[1]}). Pass a smaller batch, "
                "or create the engine with a larger EngineConfig."
            )


def check_module(model: nn.Module, config: EngineConfig, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an engine cannot place this module in memory."""
    record = find_parallel_record(model)
    mesh = None if record is None else record.mesh
    # A layout of one process leaves plain parameters, unless it changes their precision.
    is_cut = any(type(p.data) is not Tensor for p in model.parameters())
    if record is not None and (
        is_cut or (mesh is not None and mesh.size() > 1) or record.streamers
    ):
        raise ConfigError(
            f"the {type(model).__name__} is already parallelized or streamed. Create the engine "
            "with an unsharded, resident model, or with a directory."
        )
    if options:
        raise ConfigError(
            f"{', '.join(options)} can be set only if the engine loads the model from a "
            "directory. Pass the directory of the model instead of a model object."
        )
    if config.stream_experts:
        raise ConfigError(
            "EngineConfig(stream_experts=True) needs a model directory, but the model was passed "
            "as an object. Save the model, and create the engine with its directory."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"the {type(model).__name__} is on the meta device and has no weights. Load them, "
            "or create the engine with their directory."
        )


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Raise `ConfigError` if the tokenizer has more tokens than the model."""
    size, vocab_size = len(tokenizer), getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None and size > vocab_size:
        raise ConfigError(
            f"tokenizer and model do not match: the tokenizer has {size} tokens, but the model "
            f"has vocab_size={vocab_size}. Load both from the same directory."
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
            f"RequestsConfig: total_tokens={requested} is more than the memory plan allows "
            f"(max_rows={limit[0]} x max_tokens={limit[1]} = {planned}). Use a smaller value, "
            "or raise max_rows or max_tokens of EngineConfig."
        )
    return requested or planned


def check_method(model: nn.Module, what: str, writes: bool) -> None:
    """Raise `ConfigError` if the model does not support the engine method named `what`."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"{what} supports only bmforge models, but the engine's model is a "
            f"{type(model).__name__}. Call engine.model directly, or use the library that defines "
            "the model."
        )
    if writes and not model.traits.can_generate:
        raise ConfigError(
            f"{what} needs a model that generates text, but a {type(model).__name__} with the "
            f"head {model.config.head!r} does not. Load it with a language-model head."
        )
