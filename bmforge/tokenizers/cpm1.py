"""CPM-1's tokenizer: jieba splits text into words, and sentencepiece encodes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from bmforge.errors import DataError
from bmforge.files import read_bytes, read_json
from bmforge.tokenizers.base import (
    VocabularyTokenizer,
    check_tokens,
    open_directory,
    unreadable_text,
)
from bmforge.tokenizers.sentence_piece import load_sentence_piece
from bmforge.tokenizers.word_encoder import ids_to_tokens
from bmforge.tokenizers.words import WordSegmenter

__all__ = ["CPM1Tokenizer"]

MODEL_FILE, VOCABULARY_FILE = "chinese_vocab.model", "vocab.json"
SPACE, NEWLINE, END = "\u2582", "\u2583", "\u2584"
_UNREADABLE = (RuntimeError, TypeError, UnicodeError)
_WRITTEN = str.maketrans(" \n", SPACE + NEWLINE)


class CPM1Tokenizer(VocabularyTokenizer):
    """Tokenizer of CPM-1: jieba splits text into words, and sentencepiece encodes them.

    Decoding restores the text exactly if it is in NFKC form and the vocabulary can represent it.
    The name of a special token in the text, such as ``<eod>``, is encoded as characters, as in the
    original; append `eos_id` explicitly.

    Args:
        model: contents of a sentencepiece model.
        path: path of the file, for error messages.

    Raises:
        DataError: the model is damaged or lacks a token of CPM-1.
        MissingDependencyError: a package of the extra ``zh`` is not installed.

    Source: ``data_utils/tokenization_gpt2.py`` of TsinghuaAI/CPM-1-Generate.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
        "sep": "<sep>",
        "bos": "<s>",
        "eos": "<eod>",
        "eod": "<eod>",
        "space": SPACE,
        "newline": NEWLINE,
    }

    def __init__(self, model: bytes, path: Path = Path(MODEL_FILE)) -> None:
        self._model = model
        self._processor = load_sentence_piece(model, path)
        size = self._processor.get_piece_size()
        tokens = [self._processor.id_to_piece(id) for id in range(size)]
        self._vocabulary = {token: id for id, token in enumerate(tokens)}
        check_tokens((SPACE, NEWLINE, "<eod>"), self._vocabulary, path, "CPM-1")
        # Tokens for decoding, with <eod> as one character so that it keeps its brackets.
        self._shown = [END if token == "<eod>" else token for token in tokens]
        self._cutter = WordSegmenter()

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load ``chinese_vocab.model`` in `directory`; an existing ``vocab.json`` must match."""
        folder = open_directory(directory)
        path = folder / MODEL_FILE
        tokenizer = cls(read_bytes(path, "CPM-1's sentencepiece model"), path)
        if (folder / VOCABULARY_FILE).exists():
            tokenizer._check(read_json(folder / VOCABULARY_FILE), folder)
        return tokenizer

    def _check(self, vocabulary: dict[str, Any], folder: Path) -> None:
        differ = {*vocabulary.items()} ^ {*self._vocabulary.items()}
        if differ:
            raise DataError(
                f"{VOCABULARY_FILE} and {MODEL_FILE} in {str(folder)!r} have different ids for "
                f"{len(differ)} tokens, such as {min(differ, key=str)!r}. Use two files of the "
                f"same model, or remove {VOCABULARY_FILE}."
            )

    def _files(self) -> dict[str, bytes]:
        return {MODEL_FILE: self._model}

    def _spread(self, text: str) -> str:
        """Join the words of a text with spaces, and replace its whitespace with placeholders."""
        words = self._cutter.cut(text)
        return " ".join([w.translate(_WRITTEN) if w.isspace() else w for w in words])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens.

        Raises:
            DataError: the text contains an unpaired surrogate.
        """
        try:
            return self._processor.encode(self._spread(text))
        except _UNREADABLE as error:
            raise unreadable_text([text], error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            DataError: a text contains an unpaired surrogate.
        """
        try:
            return self._processor.encode([self._spread(text) for text in texts])
        except _UNREADABLE as error:
            raise unreadable_text(texts, error) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        text = self._processor.decode(ids_to_tokens(ids, self._shown))
        for mark, shown in ((" ", ""), (SPACE, " "), (NEWLINE, "\n"), (END, "<eod>")):
            text = text.replace(mark, shown)
        return text
