"""Chooses a server's maximum sequence length: the model's, or less to fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bmforge.errors import ConfigError
from bmforge.infer.engine.packed_step import can_pack
from bmforge.infer.engine.request import RequestsConfig
from bmforge.infer.engine.workspace import find_workspace
from bmforge.memory.packed import packed_bytes
from bmforge.memory.spill import format_bytes

__all__ = ["Context", "choose_context", "key_value_bytes"]

_ELEMENT_BYTES = 4  # fp32; caches of other dtypes are smaller
_LEAST = 1024  # minimum within a budget, even if the KV cache exceeds its fraction
_SHARE = 4  # the KV cache gets 1/4 of a budget; the rest is for weights, to avoid streaming blocks
_STEP_SHARE = 3  # the KV cache and the activations of the largest step get 1/3 of a budget


@dataclass(frozen=True)
class Context:
    """The maximum sequence length of a server.

    Args:
        tokens: maximum length of prompt and answer together; None for models without a limit.
        total_tokens: capacity of the KV cache in tokens; None for the engine's default.
        reason: reason for this length, for the log.
    """

    tokens: int | None
    total_tokens: int | None
    reason: str


def key_value_bytes(config: Any) -> int:
    """Return the size of a decoder's KV cache per token, in bytes."""
    return int(2 * config.num_layers * config.num_kv_heads * config.head_dim * _ELEMENT_BYTES)


def choose_context(
    model: Any, requested: int | None, memory_bytes: int, rows: int, is_planned: bool
) -> Context:
    """Choose the maximum sequence length.

    Args:
        model: the model, possibly on the meta device.
        requested: length that the user requests; None for the maximum that fits.
        memory_bytes: memory budget, or the free memory if there is no budget.
        rows: maximum number of concurrent sequences.
        is_planned: whether the budget covers the maximum number of sequences at full length.

    Raises:
        ConfigError: the requested length is below 2, or above the model's limit.
    """
    limit = model.position_limit
    if model.traits.attention == "causal" and limit is None:
        limit = getattr(model.config, "max_seq_len", None) or None
    if requested is not None and requested < 2:
        raise ConfigError(
            f"context={requested} is too small (allowed: at least 2 tokens, one for the prompt "
            "and one for the answer)."
        )
    if requested is not None and limit is not None and requested > limit:
        raise ConfigError(
            f"context={requested} is more than the model's maximum sequence length, {limit} "
            f"(from its config.json). Use at most {limit}."
        )
    if limit is None or model.traits.attention != "causal":
        return Context(requested, None, "as given" if requested else "the engine's default")
    per_token = key_value_bytes(model.config)
    if is_planned:
        budget = format_bytes(memory_bytes)
        room, what = (
            memory_bytes // _SHARE // (per_token * rows),
            f"a quarter of {budget} for the cache of",
        )
        if requested is None and min(room, limit) > _LEAST:
            of_steps = _fitting_tokens(model, memory_bytes // _STEP_SHARE, rows)
            if of_steps < room:
                room, what = (
                    of_steps,
                    f"a third of {budget} for a step of",
                )
        room, what = max(room, min(_LEAST, limit)), f"{what} {rows} sequences"
    else:
        weights = sum(packed_bytes(tensor) for tensor in model.parameters())
        room = max((memory_bytes - weights) // 2 // per_token, 2)
        what = f"half of the free memory, {format_bytes(memory_bytes)}"
    tokens = requested or min(limit, room)
    reason = "as given" if requested else "the model's maximum sequence length"
    if not requested and room < limit:
        reason = f"{what}; the model's maximum sequence length is {limit}"
    return Context(tokens, None if is_planned else max(min(room, rows * tokens), tokens), reason)


def _fitting_tokens(model: Any, memory_bytes: int, rows: int) -> int:
    """Return the sequence length at which the largest step and the KV cache fill `memory_bytes`.

    The memory is measured at two lengths and grows linearly with the length.
    """
    chunk = RequestsConfig().max_num_batched_tokens if can_pack(model) else None
    shorter, longer = (
        work.cache_bytes + work.step_bytes
        for work in (find_workspace(model, rows, count * _LEAST, chunk) for count in (1, 2))
    )
    return _LEAST + (memory_bytes - shorter) * _LEAST // max(1, longer - shorter)
