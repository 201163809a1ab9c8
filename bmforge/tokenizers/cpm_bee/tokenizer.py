"""CPM-Bee's tokenizer: greedy longest match, ``<...>`` special tokens, and extension tables.

In texts, ``<<`` is the character ``<``, and ``<name>`` or ``<name_3>`` is a special token. Special
tokens and text that the vocabulary lacks get ids from `vocab_size` on in an extension table, so
that decoding is exact (`encode_extended`). Without a table (`encode`), they become the unknown
token.
Source: ``cpm_live/tokenizers/bee.py`` of OpenBMB/CPM-Bee. Here ``<>`` is an error (there it begins
a special token up to the next ``>``), and an unknown ``<`` is decoded as ``<<``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.base import VOCABULARY_FILE, VocabularyTokenizer
from bmforge.tokenizers.longest_match import LongestMatcher

__all__ = ["CPMBeeTokenizer", "is_special"]

_NEEDED = ("<pad>", "<unk>", "<mask>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>", "<option>")
_MARK = re.compile(r"<<|<[^<>]+>|<")
_WRITTEN_AS = {"</n>": "\n", "</_>": " "}


class CPMBeeTokenizer(VocabularyTokenizer):
    """Tokenizer of CPM-Bee; with `encode_extended`, decoding restores every text exactly.

    Args:
        tokens: tokens of the vocabulary in id order.

    Attributes:
        special_tokens: mapping from special token to id.

    Raises:
        ConfigError: a token is duplicated, or a token that CPM-Bee requires is missing.
        MissingDependencyError: ``ahocorasick_rs`` is not installed.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
    }

    def __init__(self, tokens: Sequence[str]) -> None:
        ids = {_WRITTEN_AS.get(token, token): i for i, token in enumerate(tokens)}
        missing = [token for token in _NEEDED if _WRITTEN_AS.get(token, token) not in ids]
        if missing:
            raise ConfigError(
                f"the vocabulary of {len(tokens)} tokens lacks the tokens {missing}, which CPM-Bee "
                "needs. Use the vocab.txt of a CPM-Bee model."
            )
        if len(ids) != len(tokens):
            raise ConfigError(
                f"the vocabulary has {len(tokens) - len(ids)} duplicate tokens (a line break is "
                "written '</n>', a space '</_>'). Remove the duplicates."
            )
        self._tokens, self._vocabulary = list(tokens), ids
        self._decoder = list(ids)
        self.special_tokens = {token: i for token, i in ids.items() if is_special(token)}
        plain = {token: i for token, i in ids.items() if token not in self.special_tokens}
        self._matcher = LongestMatcher(plain)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load ``vocab.txt`` in a directory, or a vocabulary file; one token per line.

        Raises:
            DataError: the file does not exist, or is not UTF-8 text.
        """
        file = Path(directory)
        file = file / VOCABULARY_FILE if file.is_dir() else file
        try:
            text = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read the vocabulary {str(file)!r} ({error}). Pass a UTF-8 text file with "
                "one token per line, or a directory that contains this file as "
                f"{VOCABULARY_FILE!r}."
            ) from error
        return cls([line for line in text.replace("\r\n", "\n").split("\n") if line])

    def _files(self) -> dict[str, bytes]:
        return {VOCABULARY_FILE: ("\n".join(self._tokens) + "\n").encode()}

    @cached_property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._vocabulary["<pad>"]

    @cached_property
    def bos_id(self) -> int:
        """Id of the token at the beginning of a text."""
        return self._vocabulary["<s>"]

    @cached_property
    def eos_id(self) -> int:
        """Id of the token at the end of a text."""
        return self._vocabulary["</s>"]

    @cached_property
    def unk_id(self) -> int:
        """Id of the unknown token, for text that the vocabulary cannot represent."""
        return self._vocabulary["<unk>"]

    @cached_property
    def mask_id(self) -> int:
        """Id of the token for a blank."""
        return self._vocabulary["<mask>"]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, escaped as in the vocabulary file; None if it is missing."""
        return self._vocabulary.get(_WRITTEN_AS.get(token, token))

    @staticmethod
    def escape(text: str) -> str:
        """Escape every ``<`` in a text, so that `encode` treats it as a character."""
        return text.replace("<", "<<")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; text outside the vocabulary becomes the unknown token.

        Args:
            text: text in which ``<<`` is ``<``, and ``<name>`` a special token.

        Raises:
            DataError: a ``<`` does not begin a special token.
        """
        ids, table = self.encode_extended(text)
        unknown = self._vocabulary["<unk>"]
        return [unknown if id in table else id for id in ids] if table else ids

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts in which every ``<`` is a character."""
        return [self.encode(self.escape(text)) for text in texts]

    def encode_extended(
        self, text: str, ext_table: Mapping[int, str] | None = None
    ) -> tuple[list[int], dict[int, str]]:
        """Encode a text with an extension table, so that decoding is exact.

        Args:
            text: text in which ``<<`` is ``<``, and ``<name>`` a special token.
            ext_table: extension table of earlier texts in the same sample; a copy is extended.

        Returns:
            token ids; extension table, a dict from id to the special token or text that the
            vocabulary lacks.

        Raises:
            DataError: a ``<`` does not begin a special token.
        """
        table = dict(ext_table or {})
        numbers = {token: i for i, token in table.items()}
        ids: list[int] = []
        for part, special in _split(text):
            if special:
                special_id = self.special_tokens.get(part)
                ids.append(
                    _extend(part, table, numbers, len(self)) if special_id is None else special_id
                )
                continue
            for token, id in self._matcher.match(part):
                if id is None:
                    id = _extend(self.escape(token), table, numbers, len(self))
                ids.append(id)
        return ids, table

    def decode(self, ids: Iterable[int], ext_table: Mapping[int, str] | None = None) -> str:
        """Decode ids to text, escaped for `encode`.

        Args:
            ids: token ids and extension ids.
            ext_table: mapping from id to text; it has priority over the vocabulary.

        Raises:
            DataError: an id is neither in the vocabulary nor in the table.
        """
        table = ext_table or {}
        return "".join([table[id] if id in table else self._piece(id) for id in ids])

    def _piece(self, id: int) -> str:
        if not 0 <= id < len(self):
            raise DataError(
                f"id={id} is neither in the vocabulary (0 to {len(self) - 1}) nor in the "
                "extension table. Pass the table that encode_extended returned with these ids."
            )
        token = self._decoder[id]
        return token if token in self.special_tokens else self.escape(token)


def is_special(token: str) -> bool:
    """Return True if a token of the vocabulary or an extension table is a special token."""
    return token.startswith("<") and token.endswith(">") and not token.startswith("<<")


def _extend(token: str, table: dict[int, str], numbers: dict[str, int], vocab_size: int) -> int:
    """Return the extension id of a token; add the token to the table if it is missing."""
    if token not in numbers:
        numbers[token] = vocab_size + len(numbers)
        table[numbers[token]] = token
    return numbers[token]


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """Split a text; yield (unescaped text, False) or (special token, True) for each part."""
    if "<" not in text:
        yield text, False
        return
    plain, at = "", 0
    for mark in _MARK.finditer(text):
        mark_text = mark.group()
        if mark_text == "<":
            raise DataError(
                f"the '<' at character {mark.start()} of {_shorten(text)!r} does not begin a "
                "special token such as <mask_0>. Write << for the character itself."
            )
        plain += text[at : mark.start()]
        at = mark.end()
        if mark_text == "<<":
            plain += "<"
        else:
            yield plain, False
            yield mark_text, True
            plain = ""
    yield plain + text[at:], False


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
