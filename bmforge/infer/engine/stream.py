"""Text generation for the engine's synchronous calls: complete texts or a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bmforge.errors import ConfigError
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.engine.text_stream import TextStream
from bmforge.infer.generation import generate, stream_tokens
from bmforge.infer.openbmb.texts import write_texts
from bmforge.infer.options import GenerationConfig

__all__ = ["continue_prompts", "stream_text"]


def continue_prompts(
    model: Any, open_tokenizer: Callable[[], Any], prompts: Any, **options: Any
) -> Any:
    """Continue a text, a list of token ids, or a list of either; see `Engine.generate`.

    Raises:
        ConfigError: there is no prompt, a prompt is empty, or an option does not apply.
    """
    if isinstance(prompts, str):
        texts = write_texts(model, open_tokenizer(), prompts, **options)
        return texts if len(texts) > 1 else texts[0]
    prompts = list(prompts)
    if not prompts:
        raise ConfigError("prompts is empty. Pass at least one prompt.")
    if type(prompts[0]) is not int:
        return [continue_prompts(model, open_tokenizer, prompt, **options) for prompt in prompts]
    if not all(type(id) is int for id in prompts):
        raise ConfigError(
            f"prompts={str(prompts)[:60]!r} must be a string, a list of token ids, a list of "
            "strings or of such lists, or a tensor of shape (B, T)."
        )
    device = next(model.parameters()).device
    rows = generate(model, torch.tensor([prompts], device=device), **options).tolist()
    return rows if len(rows) > 1 else rows[0]


def stream_text(model: Any, tokenizer: Any, prompt: str, **options: Any) -> Iterator[str]:
    """Yield chunks of text as they are generated; see `Engine.stream`.

    Raises:
        ConfigError: the prompt is empty, or an option does not apply.
    """
    ids = tokenizer.encode_prompt(prompt)
    if not ids or not prompt:
        raise ConfigError(f"the prompt is empty: prompt={prompt!r}. Pass a non-empty string.")
    config = GenerationConfig(**options)
    if config.eos_token_id is None:
        config = config.replace(eos_token_id=find_end_tokens(model.config, tokenizer))
    marks = [*config.eos_tokens, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    before = [] if model.traits.is_encoder_decoder else ids
    text = TextStream(tokenizer, config.stop_strings, marks, before)
    rows = torch.tensor([ids], device=next(model.parameters()).device)
    for token in stream_tokens(model, rows, config.replace(stop_strings=())):
        if piece := text.add([int(token[0])]):
            yield piece
        if text.is_stopped:
            return
    if piece := text.finish():
        yield piece
