"""Fills masked spans of a text with an encoder-decoder.

Source: CPM-2's and T5's span filling; each span is forced to begin with its own sentinel, as in
BMInf's ``CPM2.fill_blank``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.decoder import Seq2SeqDecoder
from bmforge.infer.generation import check_prompt, complete_config, run_decoder
from bmforge.infer.options import GenerationConfig
from bmforge.nn.prompt import with_prompt
from bmforge.surgery import eval_mode

__all__ = ["fill_blanks"]

_BLANK = "<span>"
_MOST = 16


def fill_blanks(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    blank: str = _BLANK,
    make_decoder: Callable[..., Seq2SeqDecoder] = Seq2SeqDecoder,
    **options: Any,
) -> list[str]:
    """Return the generated text for every masked span (blank), in order.

    Args:
        model: encoder-decoder with a sentinel token for each blank (CPM-2, T5, EVA).
        tokenizer: the model's tokenizer.
        text: text with 1 to 16 blanks.
        blank: marker of a masked span in the text.
        make_decoder: function that creates the decoder; see `Seq2SeqDecoder`.
        options: fields of `GenerationConfig`; `max_new_tokens` is the limit per blank.

    Raises:
        ConfigError: there are no blanks or too many, the model has no sentinels, or beam search is
            requested.
    """
    pieces = text.split(blank)
    count = len(pieces) - 1
    if not 1 <= count <= _MOST:
        raise ConfigError(
            f"the text has {count} blanks (allowed: 1 to {_MOST}). Mark blanks with {blank!r}."
        )
    marks = [_sentinel(model, tokenizer, number) for number in range(count + 1)]
    ends = [mark for mark in marks if mark is not None]
    if len(ends) < count:
        raise ConfigError(
            f"a {type(model).__name__} with a {type(tokenizer).__name__} has sentinel tokens "
            f"for {len(ends)} blanks, but the text has {count}. Use fewer blanks, or an "
            "encoder-decoder that was trained on span corruption."
        )
    completed = complete_config(model, GenerationConfig(**options))
    if completed.num_beams > 1 or completed.num_return_sequences > 1:
        raise ConfigError(
            f"num_beams={completed.num_beams} and num_return_sequences="
            f"{completed.num_return_sequences} must be 1, because blanks are filled one after the "
            "other. Leave them out."
        )
    config = completed.replace(eos_token_id=tuple(dict.fromkeys((*completed.eos_tokens, *ends))))
    source = _read(model, tokenizer, pieces, ends)
    check_prompt(model, source, torch.ones_like(source), config)
    with eval_mode(model), torch.no_grad():
        source, _, _ = with_prompt(model.whole().embed, source)
        longest = 1 + count * (1 + config.max_new_tokens)
        decoder = make_decoder(model, source, None, longest)
        return _write(model, decoder, tokenizer, ends[:count], config)


def _sentinel(model: Any, tokenizer: Any, number: int) -> int | None:
    """Return the sentinel id of masked span `number`; None if the model has no such sentinel."""
    if not model.traits.is_encoder_decoder or not model.traits.sentinel:
        return None
    id: int | None = tokenizer.token_to_id(model.traits.sentinel.format(number))
    return id


def _read(model: Any, tokenizer: Any, pieces: list[str], marks: list[int]) -> Tensor:
    """Return the encoder's input ids, (1, S), with the masked spans replaced by sentinel tokens."""
    ids = tokenizer.encode(pieces[0])
    for mark, piece in zip(marks, pieces[1:], strict=False):
        ids = [*ids, mark, *(tokenizer.encode(piece) if piece else ())]
    if model.traits.ends_inside is False and model.traits.objective == "spans":
        end = tokenizer.eos_id
        ids = ids if end is None else [*ids, end]
    return torch.tensor([ids], device=next(model.parameters()).device)


def _write(
    model: Any,
    decoder: Seq2SeqDecoder,
    tokenizer: Any,
    marks: list[int],
    config: GenerationConfig,
) -> list[str]:
    """Generate the text of each span, from its sentinel to the next sentinel or the token limit."""
    device = next(model.parameters()).device
    unfed, texts = [model.config.decoder_start_token_id], []
    for mark in marks:
        for token in unfed:
            decoder.run(torch.tensor([[token]], device=device))
        begin = torch.tensor([[mark]], device=device)
        nothing = torch.ones_like(begin[:, 0])
        out = run_decoder(decoder, begin, nothing, config)[0, 1:].tolist()
        has_ended = out[-1] in config.eos_tokens
        texts.append(tokenizer.decode_written(out[:-1] if has_ended else out))
        unfed = [] if has_ended else out[-1:]  # the next sentinel implies the end
    return texts
