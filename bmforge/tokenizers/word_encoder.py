"""Encodes words as token ids, with a cache, for CPM-2, EVA and CPM-Ant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bmforge.errors import DataError
from bmforge.tokenizers.longest_match import LongestMatcher

__all__ = ["CONTINUES", "WordEncoder", "has_chinese", "ids_to_tokens"]

CONTINUES = "##"
_MAX_WORD_CHARS = 200  # longer words are one unknown token, as in the originals
_CACHED_WORDS = 1 << 18


class WordEncoder(dict[str, tuple[int, ...]]):
    """Bounded cache from word to token ids; ``encoder[word]`` encodes a word that is not cached.

    Args:
        vocabulary: mapping from token to id.
        unknown_id: id for a character at which no token begins.
        marked: True if the vocabulary marks tokens inside of words with the prefix ``##``, unless
            they contain Chinese characters.

    Memory: at most 2**18 words, about 65 MB.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], unknown_id: int, marked: bool = False
    ) -> None:
        super().__init__()
        self._vocabulary = {token: id for token, id in vocabulary.items() if token}
        self._unknown_id = unknown_id
        self._marked = marked
        self._longest = max(map(len, vocabulary), default=0)
        inside = _inner_tokens(self._vocabulary) if self._marked else self._vocabulary
        self._matcher = LongestMatcher(inside)

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        ids = self[word] = tuple(self._match(word))
        return ids

    def _match(self, word: str) -> list[int]:
        if len(word) > _MAX_WORD_CHARS:
            return [self._unknown_id]
        if word in self._vocabulary:
            return [self._vocabulary[word]]
        if not self._marked:
            return self._matcher.encode(word, self._unknown_id)
        for end in range(min(len(word), self._longest), 0, -1):
            if word[:end] in self._vocabulary:
                first = self._vocabulary[word[:end]]
                return [first, *self._matcher.encode(word[end:], self._unknown_id)]
        return [self._unknown_id, *self._matcher.encode(word[1:], self._unknown_id)]


def _inner_tokens(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return a dict from token, without ``##``, to id, for tokens that may be inside of a word."""
    inside = {token: id for token, id in vocabulary.items() if has_chinese(token)}
    for token, id in vocabulary.items():
        suffix = token.removeprefix(CONTINUES)
        if suffix != token and suffix and not has_chinese(suffix):
            inside[suffix] = id
    return inside


def has_chinese(text: str) -> bool:
    """Return True if a text contains a character from U+4E00 to U+9FFF."""
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def ids_to_tokens(ids: Iterable[int], tokens: list[str]) -> list[str]:
    """Return the token of each id.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    sequence = list(ids)
    invalid = [id for id in sequence if not 0 <= id < len(tokens)]
    if invalid:
        raise DataError(
            f"id={invalid[0]} is not in the vocabulary (0 to {len(tokens) - 1}). Use the "
            "tokenizer of the model that generated the id."
        )
    return [tokens[id] for id in sequence]
