"""Blocklists of words and of hosts that the user supplies in text files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unicodedata import category
from urllib.parse import urlsplit

from bmforge.data.clean.characters import HAN_RUN, replace_surrogates
from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, MissingDependencyError

__all__ = ["HostBlocklist", "WordBlocklist", "read_list"]


def read_list(path: str | os.PathLike[str], name: str) -> tuple[str, ...]:
    """Read the entries of a list file; empty lines and lines that begin with ``#`` are skipped.

    Args:
        path: path of the file.
        name: name of the setting that contains the path, for error messages.

    Raises:
        ConfigError: the file cannot be read as UTF-8, or has no entries.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name}={str(path)!r} cannot be read ({error}). Pass a UTF-8 text file."
        ) from error
    entries = tuple(
        entry for line in lines if (entry := line.strip()) and not entry.startswith("#")
    )
    if not entries:
        raise ConfigError(f"{name}={str(path)!r} has no entries. Write one entry per line.")
    return entries


@dataclass(frozen=True)
class WordBlocklist:
    """A step that drops documents that contain too many words of a blocklist.

    Entries with Chinese characters match anywhere, other entries match whole words. Case is
    ignored.

    Attributes:
        words: blocklist; all words are searched in a single pass (Aho-Corasick).
        most_per_line: largest mean number of occurrences per line (default: 0.5, as in
            ChineseWebText, arXiv:2311.01149); 0 to drop documents with any occurrence.

    Raises:
        ConfigError: the list is empty or has an empty word.
    """

    words: tuple[str, ...]
    most_per_line: float = 0.5

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty list or an empty word."""
        if not self.words or not all(word.strip() for word in self.words):
            raise ConfigError("words must contain at least one word, and no empty words.")

    @cached_property
    def _automaton(self) -> Any:
        try:
            from ahocorasick_rs import AhoCorasick
        except ImportError as error:
            raise MissingDependencyError("ahocorasick-rs", "data", "a word blocklist") from error
        return AhoCorasick([word.lower() for word in self.words])

    def find(self, text: str) -> list[tuple[str, int]]:
        """Return each listed word found in a text, with its offset in the lowercased text."""
        lower = replace_surrogates(text.lower())
        matches = []
        for number, start, end in self._automaton.find_matches_as_indexes(lower, overlapping=True):
            inside = any(map(_is_in_word, (lower[start - 1 : start], lower[end : end + 1])))
            if not inside or HAN_RUN.search(self.words[number]):
                matches.append((self.words[number], start))
        return matches

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"list=1 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, or a `Drop` with an excerpt that begins at the first listed word."""
        matches = self.find(document.text)
        lines = max(sum(bool(line.strip()) for line in document.text.split("\n")), 1)
        value = len(matches) / lines
        if value <= self.most_per_line:
            return document
        excerpt = cut_excerpt(document.text.lower(), matches[0][1])
        return Drop("listed_words", value, self.most_per_line, excerpt)


def _is_in_word(character: str) -> bool:
    """Return True if a character can be part of a word.

    These are letters, digits and combining marks, such as the vowel signs of Hindi.
    """
    return character.isalnum() or (character > "\x7f" and category(character).startswith("M"))


@dataclass(frozen=True)
class HostBlocklist:
    """A step that drops documents from the hosts of a blocklist and their subdomains."""

    hosts: tuple[str, ...]

    @cached_property
    def _hosts(self) -> frozenset[str]:
        return frozenset(host.lower().strip(".") for host in self.hosts)

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"list=1 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, or a `Drop` if the host of its URL is listed."""
        try:
            host = (urlsplit(document.url).hostname or "").strip(".")
        except ValueError:
            host = ""
        parts = host.split(".")
        for first_part in range(len(parts)):
            if ".".join(parts[first_part:]) in self._hosts:
                return Drop("listed_host", host, None, cut_excerpt(document.text))
        return document
