"""Reads adapter directories: the base model that they name, and the classification head.

`AutoModel.from_pretrained` and the commands share these functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models.formats.hf_format import has_weights

__all__ = ["ADAPTER_CONFIG", "find_base", "head_of_adapter", "is_adapter"]

ADAPTER_CONFIG = "adapter_config.json"
# PEFT task types of classifiers, whose heads are saved with the adapter.
_HEADS = {
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "QUESTION_ANS": "question_answering",
}
_HEAD_WORDS = ("classifier", "score", "qa_outputs")


def is_adapter(name: str | Path) -> bool:
    """Return True for a directory that contains an adapter but no model weights."""
    return (Path(name) / ADAPTER_CONFIG).exists() and not has_weights(Path(name))


def find_base(adapter: Path, find_model: Callable[[str], Path]) -> Path:
    """Return the directory of an adapter's base model, which the adapter's config names.

    Args:
        adapter: adapter directory.
        find_model: function (model name) that returns the model's directory.

    Raises:
        CheckpointError: the config is damaged.
        ConfigError: the config names no base model, or the base model is not found.
    """
    base = _read_config(adapter).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"{str(adapter / ADAPTER_CONFIG)!r} has no base_model_name_or_path. Pass the base "
            f"model together with --adapter {adapter}, or add base_model_name_or_path to the file."
        )
    try:
        return find_model(base)
    except ConfigError as error:
        raise ConfigError(
            f"the base model {base!r} of the adapter in {str(adapter)!r} was not found: "
            f"{error} Pass the base model and --adapter {adapter}."
        ) from error


def head_of_adapter(adapter: Path) -> tuple[str, int | None] | None:
    """Return the name of the head stored in an adapter directory, and its number of classes.

    Args:
        adapter: adapter directory.

    Returns:
        None for an adapter without a head; the number of classes is None if it is not known.

    Raises:
        CheckpointError: the config is damaged.
    """
    head = _HEADS.get(str(_read_config(adapter).get("task_type")))
    file = adapter / "adapter_model.safetensors"
    if head is None or not file.is_file():
        return None
    with safe_open(file, "pt") as tensors:
        names = [n for n in tensors.keys() if any(word in n for word in _HEAD_WORDS)]  # noqa: SIM118
        shapes = [tensors.get_slice(n).get_shape() for n in names if "lora_" not in n]
    rows = [shape[0] for shape in shapes if len(shape) == 2]
    if not names:
        return None
    # The output layer of a head has fewer rows than its hidden layers.
    return head, min(rows) if rows and head != _HEADS["QUESTION_ANS"] else None


def _read_config(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config.get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{str(adapter / ADAPTER_CONFIG)!r} does not contain a JSON object: {error}. Copy the "
            "file again from its source."
        ) from error
    values: dict[str, Any] = config
    return values
