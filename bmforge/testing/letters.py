"""A tokenizer of letters with every mark that a family asks for: tiny models can be asked by it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from bmforge.errors import DataError
from bmforge.tokenizers import CPMBeeTokenizer
from bmforge.tokenizers.base import Tokenizer

__all__ = ["BEE_MARKS", "LetterTokenizer", "letters_for"]

# What vocabularies of CPM-Ant and CPM-Bee begin with.
BEE_MARKS = (
    *("<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>"),
    *("<root>", "<ans>", "<option>"),
)

_MARKS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>", "<eop>")
_LETTERS = " abcdefghijklmnopqrstuvwxyz.,!?"
_BLANKS = 4


class LetterTokenizer(Tokenizer):
    """Small letters, each a token; what is no letter is unknown. It has 43 tokens."""

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
        """Return it: it needs no files."""
        return cls()

    def _files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of letters."""
        return [self._ids.get(letter, self._ids["<unk>"]) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Return letters, and marks by their names."""
        found = list(ids)
        if any(not 0 <= id < len(self._tokens) for id in found):
            raise DataError(f"{found} has ids beyond the {len(self._tokens)} letters and marks.")
        return "".join(self._tokens[id] for id in found)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a letter or mark."""
        return self._ids.get(token)

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return {token: id for id, token in enumerate(self._tokens)}

    @property
    def vocab_size(self) -> int:
        """43."""
        return len(self._tokens)


def letters_for(model: Any) -> Tokenizer:
    """Return a tokenizer of letters that a model's prompts can be made with."""
    if model.traits.objective != "documents":
        return LetterTokenizer()
    marks = "<pad> <unk> <mask> </n> </_> <s> </s> <root> <ans> <option> _ 0"
    return CPMBeeTokenizer([*marks.split(), *_LETTERS[1:]])
