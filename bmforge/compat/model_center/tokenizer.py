"""Tokenizers under the old names: of transformers, and the house's of OpenBMB's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bmforge.errors import MissingDependencyError
from bmforge.models.hub import find_model
from bmforge.tokenizers import CPM1Tokenizer, GLMTokenizer
from bmforge.tokenizers import CPM2Tokenizer as _CPM2Tokenizer

__all__ = [
    "BaseTokenizer",
    "BertTokenizer",
    "CPM1Tokenizer",
    "CPM2Tokenizer",
    "GLMTokenizer",
    "GPT2Tokenizer",
    "GPTjTokenizer",
    "LlamaTokenizer",
    "OPTTokenizer",
    "RobertaTokenizer",
    "T5Tokenizer",
]


class BaseTokenizer:
    """Opens a tokenizer of transformers, which is imported only then.

    Args:
        tokenizer_type: name of its class there, or the class itself.
    """

    def __init__(self, tokenizer_type: Any) -> None:
        self.tokenizer_type = tokenizer_type

    def from_pretrained(self, name: str | Path, *args: Any, **options: Any) -> Any:
        """Return the tokenizer of a directory, of a cached model, or of one on the hub.

        Raises:
            ConfigError: no such model.
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


class CPM2Tokenizer(_CPM2Tokenizer):
    """CPM-2's tokenizer with its old method."""

    def get_sentinel_id(self, number: int) -> int:
        """Return the id of the n-th blank."""
        return self.sentinel_id(number)
