"""Tokenizers for GLM's ordinary text: GPT-2's byte-level BPE, or a sentencepiece model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import read_bytes
from bmforge.tokenizers.sentence_piece import load_sentence_piece
from bmforge.tokenizers.tokenizer_json import BYTE_PAIR_FILES, open_byte_pairs

__all__ = ["BytePairs", "SentencePieces", "TextPart", "open_text_part"]

SENTENCEPIECE_FILE = "cog-pretrain.model"


@dataclass
class BytePairs:
    """Byte-level BPE of GPT-2, from ``vocab.json`` and ``merges.txt``.

    Args:
        tokenizer: ``tokenizers.Tokenizer``.
        files: mapping from file name to contents.
    """

    tokenizer: Any
    files: dict[str, bytes]
    # Separator between text and special tokens in decoding; class name of the original tokenizer.
    joint: str = field(default=" ", init=False)
    tokenizer_class: str = field(default="GLMGPT2Tokenizer", init=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.get_vocab_size()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        return self.tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id."""
        return self.tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class SentencePieces:
    """Sentencepiece model of GLM, ``cog-pretrain.model``.

    Args:
        processor: ``sentencepiece.SentencePieceProcessor``.
        files: mapping from file name to contents.
    """

    processor: Any
    files: dict[str, bytes]
    joint: str = field(default="", init=False)
    tokenizer_class: str = field(default="GLMChineseTokenizer", init=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.processor.get_piece_size()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        id = self.processor.piece_to_id(token)
        return id if self.processor.id_to_piece(id) == token else None

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id."""
        return {self.processor.id_to_piece(id): id for id in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.processor.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text."""
        return self.processor.decode(ids)


TextPart = BytePairs | SentencePieces


def open_text_part(folder: Path) -> TextPart:
    """Load the text tokenizer in a directory: a sentencepiece model or byte-level BPE.

    Raises:
        DataError: the tokenizer files are missing or damaged.
    """
    path = folder / SENTENCEPIECE_FILE
    if path.exists():
        model = read_bytes(path, "a sentencepiece model")
        return SentencePieces(load_sentence_piece(model, path), {path.name: model})
    if not all((folder / name).exists() for name in BYTE_PAIR_FILES):
        raise DataError(
            f"{str(folder)!r} has neither {SENTENCEPIECE_FILE} (Chinese) nor "
            f"{' and '.join(BYTE_PAIR_FILES)} (English), which GLM's tokenizer needs. "
            "Copy the files from the original model."
        )
    files = {name: (folder / name).read_bytes() for name in BYTE_PAIR_FILES}
    return BytePairs(open_byte_pairs(folder), files)
