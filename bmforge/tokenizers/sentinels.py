"""Encodes and decodes answers of encoder-decoders as masked spans between sentinel tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bmforge.errors import ConfigError
from bmforge.tokenizers.base import Tokenizer

__all__ = ["T5_SENTINEL", "decode_answer", "encode_answers", "fill_prompt"]

T5_SENTINEL = "<extra_id_{}>"


def encode_answers(
    options: Sequence[str], tokenizer: Tokenizer, sentinel: str = T5_SENTINEL
) -> list[list[int]]:
    """Encode each answer as target ids of an encoder-decoder: the first masked span.

    If the tokenizer has no sentinel tokens, an answer is followed by EOS instead.

    Args:
        options: texts of the answers.
        tokenizer: tokenizer of the model.
        sentinel: format of the sentinel tokens, with {} for the index; "" for none.
    """
    names = [sentinel.format(number) for number in (0, 1)] if sentinel else ["", ""]
    first, second = map(tokenizer.token_to_id, names)
    ids = tokenizer.encode_batch(list(options))
    if first is not None and second is not None:
        return [[first, *option_ids, second] for option_ids in ids]
    return [[*option_ids, *_end_of(tokenizer)] for option_ids in ids]


def decode_answer(ids: Sequence[int], tokenizer: Tokenizer, sentinel: str = T5_SENTINEL) -> str:
    """Decode the answer after the first sentinel token; the inverse of `encode_answers`."""
    names = [sentinel.format(number) for number in (0, 1)] if sentinel else ["", ""]
    first, second = map(tokenizer.token_to_id, names)
    ends = {id for id in (second, tokenizer.eos_id, tokenizer.pad_id) if id is not None}
    answer_ids = list(ids[1:] if first is not None and ids[:1] == [first] else ids)
    stop = next((index for index, id in enumerate(answer_ids) if id in ends), len(answer_ids))
    return tokenizer.decode_written(answer_ids[:stop]).strip()


def fill_prompt(
    before: str, behind: str, tokenizer: Tokenizer, longest: int, sentinel: str = T5_SENTINEL
) -> list[int]:
    """Return the input ids of an encoder-decoder: `before`, a sentinel, `behind`, and EOS.

    Inputs above `longest` tokens are truncated at the end or, if `behind` is empty, at the start.
    """
    blank = tokenizer.token_to_id(sentinel.format(0))
    head = [*tokenizer.encode(before), *([] if blank is None else [blank])]
    end = _end_of(tokenizer)
    room = longest - len(end)
    if not behind:
        return [*head[-room:], *end]
    return [*[*head, *tokenizer.encode(behind)][:room], *end]


def _end_of(tokenizer: Tokenizer) -> list[int]:
    if tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token. Set eos_token in tokenizer_config.json."
        )
    return [tokenizer.eos_id]
