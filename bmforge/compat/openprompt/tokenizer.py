"""Adapter that gives transformers' tokenizers bmforge's interface."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from bmforge.errors import ConfigError
from bmforge.tokenizers.base import Tokenizer

__all__ = ["TheirTokenizer", "as_ours"]

_ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


class TheirTokenizer(Tokenizer):
    """Transformers tokenizer with bmforge's interface.

    Args:
        theirs: the transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.theirs = tokenizer

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Raise an error, since transformers must load the tokenizer."""
        raise ConfigError(
            "TheirTokenizer cannot load a tokenizer. Load it with transformers, or use "
            "bmforge.tokenizers.AutoTokenizer."
        )

    def _files(self) -> dict[str, bytes]:
        raise ConfigError(
            f"{type(self).__name__} cannot save the transformers tokenizer that it wraps. Call "
            "that tokenizer's save_pretrained."
        )

    def _role_tokens(self) -> Mapping[str, str]:
        tokens = {role: getattr(self.theirs, f"{role}_token", None) for role in _ROLES}
        return {role: token for role, token in tokens.items() if token is not None}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self.theirs.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text."""
        return str(self.theirs.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        return self.get_vocab().get(token)

    def get_vocab(self) -> dict[str, int]:
        """Return the whole vocabulary as a dict from token to id."""
        return dict(self.theirs.get_vocab())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.theirs)


def as_ours(tokenizer: Any) -> Any:
    """Wrap a tokenizer in bmforge's interface, unless it already has this interface."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else TheirTokenizer(tokenizer)
