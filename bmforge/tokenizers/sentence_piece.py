"""Loads sentencepiece models from bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bmforge.errors import DataError, MissingDependencyError

__all__ = ["load_sentence_piece"]


def load_sentence_piece(model: bytes, path: Path) -> Any:
    """Create a ``SentencePieceProcessor`` from the contents of a model file.

    Raises:
        DataError: the file is not a sentencepiece model; the message contains `path`.
        MissingDependencyError: ``sentencepiece`` is not installed.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingDependencyError("sentencepiece", "zh", "a SentencePiece tokenizer") from error
    if not model:
        raise DataError(
            f"{str(path)!r} is empty (needed: a SentencePiece model). Download the file again."
        )
    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(
            f"{str(path)!r} is not a SentencePiece model ({error}). Download the file again."
        ) from error
