"""`load_plm`, and the tokenizer wrappers for each kind of model."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    "CPM2TokenizerWrapper", "LMTokenizerWrapper", "MLMTokenizerWrapper", "ModelClass",
    "T5LMTokenizerWrapper", "T5TokenizerWrapper", "TokenizerWrapper", "load_plm",
]  # fmt: skip


class ModelClass(NamedTuple):
    """Classes for a kind of model that a program registers in `_MODEL_CLASSES`.

    Attributes:
        config: configuration class; ignored, since the model class reads its own config.
        tokenizer, model: classes with `from_pretrained`.
        wrapper: tokenizer wrapper class.
    """

    config: Any
    tokenizer: Any
    model: Any
    wrapper: type[TokenizerWrapper]


# Model kinds that programs add, as OpenPrompt's tutorial for UltraChat does.
_MODEL_CLASSES: dict[str, ModelClass] = {}
_WRAPPERS: dict[str, tuple[type[TokenizerWrapper], str]] = {
    **dict.fromkeys(("bert", "roberta", "longformer"), (MLMTokenizerWrapper, "masked_lm")),
    **dict.fromkeys(
        ("gpt2", "opt", "gptj", "llama", "qwen", "cpm1"), (LMTokenizerWrapper, "language_model")
    ),
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
        ConfigError: the kind of model is unknown.
    """
    if model_name in _MODEL_CLASSES:
        classes = _MODEL_CLASSES[model_name]
        registered = classes.model.from_pretrained(model_path)
        tokenizer = classes.tokenizer.from_pretrained(model_path)
        return registered, tokenizer, registered.config, classes.wrapper
    if model_name not in _WRAPPERS:
        raise ConfigError(
            f"unknown model: model_name={model_name!r} (supported: "
            f"{', '.join(_WRAPPERS)}).{suggest(model_name, _WRAPPERS)}"
        )
    wrapper, head = _WRAPPERS[model_name]
    directory = find_model(model_path)
    model = AutoModel.from_pretrained(directory, head=head)
    return model, AutoTokenizer.from_pretrained(directory), model.config, wrapper
