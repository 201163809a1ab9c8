"""A character tokenizer with the special tokens of all families, for tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from bmforge.errors import DataError
from bmforge.tokenizers import CPMBeeTokenizer
from bmforge.tokenizers.base import Tokenizer

__all__ = ["BEE_MARKS", "CharacterTokenizer", "character_tokenizer_for"]

# The first tokens in the vocabularies of CPM-Ant and CPM-Bee.
BEE_MARKS = (
    *("<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>"),
    *("<root>", "<ans>", "<option>"),
)

_MARKS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>", "<eop>")
_LETTERS = " abcdefghijklmnopqrstuvwxyz.,!?"
_BLANKS = 4


class CharacterTokenizer(Tokenizer):
    """Tokenizer with one token per lower-case letter, and 43 tokens in total.

    Other characters are unknown.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "unk": "<unk>",
        "cls": "<cls>",
        "sep": "<sep>",
        "mask": "<mask>",
        "bos": "<s>",
        "sop": "<s>",
        "eos": "</s>",
        "eop": "<eop>",
    }

    def __init__(self) -> None:
        blanks = [f"<s_{n}>" for n in range(_BLANKS)]
        self._tokens = [*_MARKS, *blanks, *_LETTERS]
        self._ids = {token: id for id, token in enumerate(self._tokens)}
        self._ids |= {f"<extra_id_{n}>": self._ids[name] for n, name in enumerate(blanks)}

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Return a tokenizer; the directory is ignored."""
        return cls()

    def _files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the characters."""
        return [self._ids.get(letter, self._ids["<unk>"]) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the characters; special tokens appear as their names."""
        listed = list(ids)
        if any(not 0 <= id < len(self._tokens) for id in listed):
            raise DataError(f"{listed} contains ids outside of 0 to {len(self._tokens) - 1}.")
        return "".join(self._tokens[id] for id in listed)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a character or special token."""
        return self._ids.get(token)

    def get_vocab(self) -> dict[str, int]:
        """Return a dictionary from token to id."""
        return {token: id for id, token in enumerate(self._tokens)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 43."""
        return len(self._tokens)


def character_tokenizer_for(model: Any) -> Tokenizer:
    """Return a character tokenizer that fits a model's prompts."""
    if model.traits.objective != "documents":
        return CharacterTokenizer()
    marks = "<pad> <unk> <mask> </n> </_> <s> </s> <root> <ans> <option> _ 0"
    return CPMBeeTokenizer([*marks.split(), *_LETTERS[1:]])
