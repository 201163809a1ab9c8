"""Encodes one or more texts for BERT-like models: [CLS] first [SEP] second [SEP]."""

from __future__ import annotations

from collections.abc import Sequence

from bmforge.errors import ConfigError
from bmforge.tokenizers.base import Tokenizer

__all__ = ["encode_segments", "outer_marks"]


def encode_segments(
    texts: Sequence[str], tokenizer: Tokenizer, longest: int, marks_between: int = 1
) -> tuple[list[int], list[int]]:
    """Encode one or more texts for a BERT-like model: [CLS] first [SEP] second [SEP].

    The longest text is truncated from the right until the sequence has at most `longest` tokens.
    Returns (token ids, segment ids).

    Args:
        texts: one or more texts.
        tokenizer: tokenizer of a BERT-like model.
        longest: maximum sequence length in tokens.
        marks_between: number of [SEP] tokens between two texts; 2 for RoBERTa.

    Raises:
        ConfigError: the tokenizer has no [CLS] or [SEP] token.
    """
    begin, end = outer_marks(tokenizer)
    parts = tokenizer.encode_batch(list(texts))
    marks = [end] * marks_between
    over = sum(map(len, parts)) + marks_between * (len(parts) - 1) + 2 - longest
    while over > 0:
        longer = max(range(len(parts)), key=lambda n: len(parts[n]))
        others = [len(p) for n, p in enumerate(parts) if n != longer]
        cut = min(over, max(1, len(parts[longer]) - max(others, default=0)))
        if len(parts[longer]) < cut:
            raise ConfigError(
                f"data.seq_len={longest} is too small for the special tokens. Increase "
                "data.seq_len."
            )
        parts[longer] = parts[longer][: len(parts[longer]) - cut]
        over -= cut
    ids, segments = [begin], [0]
    for number, part in enumerate(parts):
        ends = marks if number + 1 < len(parts) else [end]
        ids += [*part, *ends]
        segments += [number] * (len(part) + len(ends))
    return ids, segments


def outer_marks(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of [CLS] and [SEP]; raise `ConfigError` if the tokenizer lacks one."""
    begin, end = tokenizer.role_id("cls"), tokenizer.role_id("sep")
    if begin is None or end is None:
        raise ConfigError(
            "the tokenizer has no cls token or no sep token. Use the tokenizer of a BERT model, "
            "or set cls_token and sep_token in tokenizer_config.json."
        )
    return begin, end
