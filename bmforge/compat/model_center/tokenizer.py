"""Tokenizers under ModelCenter's names, from transformers or, for OpenBMB's models, bmforge."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bmforge.errors import MissingDependencyError
from bmforge.models.hub import find_model
from bmforge.tokenizers import CPM1Tokenizer as _CPM1Tokenizer
from bmforge.tokenizers import CPM2Tokenizer as _CPM2Tokenizer
from bmforge.tokenizers import GLMTokenizer
from bmforge.tokenizers.cpm1 import MODEL_FILE
from bmforge.tokenizers.cpm2 import CPM1WordTokenizer

__all__ = [
    "BaseTokenizer", "BertTokenizer", "CPM1Tokenizer", "CPM2Tokenizer", "GLMTokenizer",
    "GPT2Tokenizer", "GPTjTokenizer", "LlamaTokenizer", "OPTTokenizer", "RobertaTokenizer",
    "T5Tokenizer",
]  # fmt: skip


class BaseTokenizer:
    """Loads a transformers tokenizer; transformers is imported only when it is needed.

    Args:
        tokenizer_type: tokenizer class, or its name in transformers.
    """

    def __init__(self, tokenizer_type: Any) -> None:
        self.tokenizer_type = tokenizer_type

    def from_pretrained(self, name: str | Path, *args: Any, **options: Any) -> Any:
        """Load the tokenizer of a directory, a cached model, or a model on the hub.

        Raises:
            ConfigError: the model is not found.
            MissingDependencyError: transformers is not installed.
        """
        kind = self.tokenizer_type
        if isinstance(kind, str):
            try:
                import transformers
            except ImportError as error:
                raise MissingDependencyError("transformers", "tasks", f"The {kind}") from error
            kind = getattr(transformers, kind)
        return kind.from_pretrained(str(find_model(name)), *args, **options)


BertTokenizer = BaseTokenizer("BertTokenizer")
RobertaTokenizer = BaseTokenizer("RobertaTokenizer")
T5Tokenizer = BaseTokenizer("T5Tokenizer")
GPT2Tokenizer = BaseTokenizer("GPT2Tokenizer")
GPTjTokenizer = BaseTokenizer("GPT2Tokenizer")
OPTTokenizer = BaseTokenizer("AutoTokenizer")
LlamaTokenizer = BaseTokenizer("LlamaTokenizer")


class _OldMethods:
    """Additional methods of ModelCenter's tokenizers for CPM-1 and CPM-2."""

    @property
    def eod_id(self: Any) -> int | None:
        """Id of the end-of-document token."""
        token_id: int | None = self.role_id("eod")
        return token_id

    def tokenize(self: Any, text: str) -> list[str]:
        """Return the tokens of a text."""
        return list(self.convert_ids_to_tokens(self.encode(text)))

    def check(self: Any, token: str) -> bool:
        """Return True if a token is in the vocabulary."""
        return self.token_to_id(token) is not None


class _CPM1Words(_OldMethods, CPM1WordTokenizer):
    """CPM-1 tokenizer that reads ``vocab.txt``, with ModelCenter's methods."""

    @property
    def space_id(self) -> int:
        """Id of the token for a space."""
        return self._vocabulary[self.roles["space"]]

    @property
    def line_id(self) -> int:
        """Id of the token for a line end."""
        return self._vocabulary[self.roles["newline"]]


class CPM1Tokenizer(_OldMethods, _CPM1Tokenizer):
    """CPM-1's tokenizer with ModelCenter's methods."""

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Any:
        """Load ``chinese_vocab.model`` of a directory or hub id; if missing, its ``vocab.txt``."""
        folder = find_model(str(directory))
        has_pieces = (folder / MODEL_FILE).exists()
        return super().from_pretrained(folder) if has_pieces else _CPM1Words.from_pretrained(folder)


class CPM2Tokenizer(_OldMethods, _CPM2Tokenizer):
    """CPM-2's tokenizer with ModelCenter's methods."""

    @property
    def sod_id(self) -> int | None:
        """Id of the start-of-document token."""
        return self.bos_id

    def get_sentinel_num(self) -> int:
        """Return the number of sentinel tokens."""
        return len(self.sentinel_ids)

    def get_sentinel_id(self, number: int) -> int:
        """Return the id of the n-th sentinel token."""
        return self.sentinel_id(number)
