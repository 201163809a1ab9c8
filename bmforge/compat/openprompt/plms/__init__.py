"""`load_plm`, and the tokenizer wrappers of each kind of model."""

from __future__ import annotations

from typing import Any

from bmforge.compat.names import missing_names
from bmforge.compat.openprompt.names import NAMES
from bmforge.compat.openprompt.wrappers import (
    CPM2TokenizerWrapper,
    LMTokenizerWrapper,
    MLMTokenizerWrapper,
    T5LMTokenizerWrapper,
    T5TokenizerWrapper,
    TokenizerWrapper,
)
from bmforge.errors import ConfigError, suggest
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = [
    "CPM2TokenizerWrapper",
    "LMTokenizerWrapper",
    "MLMTokenizerWrapper",
    "T5LMTokenizerWrapper",
    "T5TokenizerWrapper",
    "TokenizerWrapper",
    "load_plm",
]

_WRAPPERS: dict[str, tuple[type[TokenizerWrapper], str]] = {
    "bert": (MLMTokenizerWrapper, "masked_lm"),
    "roberta": (MLMTokenizerWrapper, "masked_lm"),
    "longformer": (MLMTokenizerWrapper, "masked_lm"),
    "gpt2": (LMTokenizerWrapper, "language_model"),
    "opt": (LMTokenizerWrapper, "language_model"),
    "gptj": (LMTokenizerWrapper, "language_model"),
    "llama": (LMTokenizerWrapper, "language_model"),
    "qwen": (LMTokenizerWrapper, "language_model"),
    "cpm1": (LMTokenizerWrapper, "language_model"),
    "t5": (T5TokenizerWrapper, "sequence_to_sequence"),
    "t5-lm": (T5LMTokenizerWrapper, "sequence_to_sequence"),
    "cpm2": (CPM2TokenizerWrapper, "sequence_to_sequence"),
}


def load_plm(
    model_name: str, model_path: str, specials_to_add: Any = None
) -> tuple[Any, Any, Any, type[TokenizerWrapper]]:
    """Load a model and its tokenizer.

    Args:
        model_name: kind of model: bert, gpt2, t5, t5-lm, ...
        model_path: directory or hub id.
        specials_to_add: accepted and ignored; nothing is added to the vocabulary.

    Returns:
        Model, tokenizer, config and tokenizer wrapper class.

    Raises:
        ConfigError: an unknown kind.
    """
    if model_name not in _WRAPPERS:
        raise ConfigError(
            f"model_name={model_name!r} is unknown.{suggest(model_name, _WRAPPERS)} Known: "
            f"{', '.join(_WRAPPERS)}."
        )
    wrapper, head = _WRAPPERS[model_name]
    directory = find_model(model_path)
    model = AutoModel.from_pretrained(directory, head=head)
    return model, AutoTokenizer.from_pretrained(directory), model.config, wrapper


__getattr__ = missing_names("openprompt", NAMES, __all__, "plms")
