"""Imports the transformers library on first use, and reads its tables of architectures."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import Any

from bmforge.errors import ConfigError, MissingDependencyError

__all__ = [
    "AUTO_CLASSES",
    "config_from_json",
    "find_auto_class",
    "load_library",
    "strict_error",
    "is_supported_type",
]

# bmforge's head -> (transformers' auto class, its table of class names). A config.json without
# `architectures` is loaded with the first head whose table contains its model_type.
AUTO_CLASSES: dict[str, tuple[str, str]] = {
    "language_model": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "sequence_to_sequence": (
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ),
    "image_text_to_text": (
        "AutoModelForImageTextToText",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    ),
    "speech_to_text": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "ctc": ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    "masked_lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "sequence_classification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "token_classification": (
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    "question_answering": (
        "AutoModelForQuestionAnswering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    ),
    "image_classification": (
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "none": ("AutoModel", "MODEL_MAPPING_NAMES"),
}


def load_library(purpose: str = "A model without a native family") -> ModuleType:
    """Import and return transformers.

    Args:
        purpose: feature that needs transformers, the subject of the error message.

    Raises:
        MissingDependencyError: transformers is not installed; the message names the pip extra.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("transformers", "transformers", purpose) from error


def _table(name: str) -> dict[str, Any]:
    load_library()
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    return getattr(module, name)


def is_supported_type(model_type: str) -> bool:
    """Return True if the installed transformers supports the model_type."""
    load_library(f"model_type={model_type!r}")
    module = importlib.import_module("transformers.models.auto.configuration_auto")
    return model_type in module.CONFIG_MAPPING


def strict_error() -> type[Exception]:
    """Return the error class of transformers' config validation, which is no `ValueError`."""
    error: type[Exception] = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    return error


def config_from_json(raw: dict[str, Any]) -> Any:
    """Build the transformers config from the contents of a config.json.

    Args:
        raw: contents of config.json.

    Raises:
        ConfigError: transformers does not support the model_type, or rejects a field.
    """
    kind = str(raw.get("model_type"))
    if not is_supported_type(kind):
        raise ConfigError(
            f"the installed transformers does not support model_type={kind!r}. Install a newer "
            "transformers."
        )
    module = importlib.import_module("transformers.models.auto.configuration_auto")
    chosen = module.CONFIG_MAPPING[kind]
    try:
        # JSON has no infinity; transformers encodes it as an object.
        return chosen.from_dict(chosen._decode_special_floats(copy.deepcopy(raw)))
    except (TypeError, ValueError, KeyError, AttributeError, strict_error()) as error:
        raise ConfigError(
            f"transformers rejects the config of model_type={kind!r} ({error}). Correct "
            "config.json."
        ) from error


def find_auto_class(raw: dict[str, Any]) -> str:
    """Return the head (a key of `AUTO_CLASSES`) with which to load the model of a config.json.

    Args:
        raw: contents of config.json; `architectures` has priority over `model_type`.

    Raises:
        ConfigError: no auto class of transformers supports the architecture.
    """
    kind, classes = str(raw.get("model_type")), raw.get("architectures") or ()
    tables = {head: _table(names) for head, (_, names) in AUTO_CLASSES.items()}
    for name in classes:
        for head, table in tables.items():
            own = table.get(kind)
            if name in (own if isinstance(own, (tuple, list)) else (own,)):
                return head
    library = load_library()
    if any(name.endswith("ForCausalLM") and hasattr(library, name) for name in classes):
        return "language_model"  # text model of a multimodal model, saved separately
    for head, table in tables.items():
        if kind in table:
            return head
    raise ConfigError(
        f"model_type={kind!r} has no language model, encoder or classifier in transformers, "
        f"only {', '.join(classes) or 'a config'} (supported auto classes: "
        f"{', '.join((auto for auto, _ in AUTO_CLASSES.values()))})."
    )
