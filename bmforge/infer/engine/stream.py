"""The text behind a prompt, piece by piece, of an engine that does nothing else meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bmforge.errors import ConfigError
from bmforge.infer.engine.text_stream import TextStream
from bmforge.infer.generate import stream_tokens
from bmforge.infer.options import GenerationConfig

__all__ = ["stream_text"]


def stream_text(model: Any, tokenizer: Any, prompt: str, **options: Any) -> Iterator[str]:
    """Yield pieces of text as they are chosen; see `Engine.stream`.

    Raises:
        ConfigError: the prompt is empty, or an option does not fit.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give a text.")
    if tokenizer.eos_id is not None:
        options.setdefault("eos_token_id", tokenizer.eos_id)
    rows, text = torch.tensor([ids], device=next(model.parameters()).device), TextStream(tokenizer)
    for token in stream_tokens(model, rows, GenerationConfig(**options)):
        if piece := text.add([int(token[0])]):
            yield piece
    if piece := text.finish():
        yield piece
