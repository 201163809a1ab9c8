"""Finds a model's EOS tokens and hidden tokens; used by all functions that generate text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bmforge.models.config import ModelConfig

__all__ = ["find_end_tokens", "find_hidden_tokens"]


def find_end_tokens(config: ModelConfig, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids of the model's EOS tokens, in order and without duplicates.

    They are ``eos_token_id`` of generation_config.json and of config.json, and the tokenizer's end
    token. Llama 3 Instruct, for example, has three in its config and one in its tokenizer.

    Args:
        config: the model's config.
        tokenizer: the model's tokenizer; None to use the configs only.
    """
    sources = [config.generation_defaults, config.raw, vars(config)]
    ids = [id for source in sources for id in _as_ids(source.get("eos_token_id"))]
    if tokenizer is not None:
        ids += _as_ids(tokenizer.eos_id)
    return tuple(dict.fromkeys(ids))


def find_hidden_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens whose text is omitted from answers: begin, end and padding."""
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def _as_ids(value: Any) -> Iterator[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return (id for id in values if isinstance(id, int) and id >= 0)
