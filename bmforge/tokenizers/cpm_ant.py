"""Tokenizers of CPM-Ant (word segmentation, then longest match) and CPM-Ant+ (longest match
only).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Self

from bmforge.files import read_bytes
from bmforge.tokenizers.base import (
    VOCABULARY_FILE,
    VocabularyTokenizer,
    check_tokens,
    open_directory,
    parse_vocabulary,
)
from bmforge.tokenizers.longest_match import LongestMatcher
from bmforge.tokenizers.word_encoder import WordEncoder, ids_to_tokens
from bmforge.tokenizers.words import WordSegmenter

__all__ = ["CPMAntPlusTokenizer", "CPMAntTokenizer"]

_WRITTEN_AS = {"</_>": " ", "</n>": "\n"}


class CPMAntTokenizer(VocabularyTokenizer):
    """Tokenizer of CPM-Ant: jieba splits text into words, which are split by longest match.

    Decoding restores the text exactly if the vocabulary can represent it. The name of a special
    token in the text, such as ``<s>``, is encoded as characters, as in the original.

    Args:
        content: contents of a vocab.txt, one token per line; ``</_>`` becomes the token for a
            space, ``</n>`` that for a newline.
        path: path of the file, for error messages.
        new_words: True to detect words that jieba's dictionary lacks, as in the original; False to
            get the ids of transformers' CpmAntTokenizer, which does not.

    Raises:
        DataError: the vocabulary is damaged or lacks a token of CPM-Ant.
        MissingDependencyError: a package of the extra ``zh`` is not installed.

    Source: ``cpm_live/tokenizers/ant.py`` of OpenBMB/CPM-Live.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
        "sep": "<sep>",
        "bos": "<s>",
        "eos": "</s>",
        "bod": "<d>",
        "eod": "</d>",
        "space": " ",
        "newline": "\n",
    }

    _strips: ClassVar[bool] = True

    def __init__(
        self, content: bytes, path: Path = Path(VOCABULARY_FILE), new_words: bool = True
    ) -> None:
        written = parse_vocabulary(content, path, skip_empty=True, strip=self._strips)
        required = ("<pad>", "<unk>", "<s>", "</s>", *_WRITTEN_AS)
        check_tokens(required, written, path, type(self).__name__)
        self._content = content
        self._vocabulary = {_WRITTEN_AS.get(token, token): id for token, id in written.items()}
        self._tokens = list(self._vocabulary)
        self._cutter = WordSegmenter(new_words)
        self._encoder = WordEncoder(self._vocabulary, written["<unk>"])

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], *, new_words: bool = True) -> Self:
        """Load ``vocab.txt`` in `directory`; see the class for `new_words`."""
        path = open_directory(directory) / VOCABULARY_FILE
        return cls(read_bytes(path, "a vocabulary with one token per line"), path, new_words)

    def _files(self) -> dict[str, bytes]:
        return {VOCABULARY_FILE: self._content}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        encoder = self._encoder
        ids: list[int] = []
        for word in self._cutter.cut(text):
            ids += encoder[word]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text; negative ids are skipped, as in the original.

        Raises:
            DataError: an id exceeds the vocabulary.
        """
        return "".join(ids_to_tokens((id for id in ids if id >= 0), self._tokens))


class CPMAntPlusTokenizer(CPMAntTokenizer):
    """Tokenizer of CPM-Ant+: splits text by longest match, without word segmentation.

    Text that the vocabulary cannot represent is dropped, as in the original.

    Source: ``cpm_live/tokenizers/ant_plus.py`` of OpenBMB/CPM-Live, branch cpm-ant-plus. The
    original decodes ``<`` as ``<<``; this class restores text exactly.
    """

    _strips: ClassVar[bool] = False  # tokens may begin with a space

    def __init__(
        self, content: bytes, path: Path = Path(VOCABULARY_FILE), new_words: bool = True
    ) -> None:
        super().__init__(content, path, new_words)
        plain = {t: i for t, i in self._vocabulary.items() if t[:1] + t[-1:] != "<>"}
        self._matcher = LongestMatcher(plain)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        return [match.id for match in self._matcher.match(text) if match.id is not None]
