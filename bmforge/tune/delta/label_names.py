"""Label names of a classifier, which its adapter stores because the base model lacks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["read_labels", "set_labels_"]

_KEY = "labels"
_FIELDS = ("id2label", "label2id")


def read_labels(model: Any) -> dict[str, Any]:
    """Return the label names in a model's config, as metadata of an adapter file."""
    raw = getattr(getattr(model, "config", None), "raw", {})
    fields = {name: raw[name] for name in _FIELDS if raw.get(name)}
    return {_KEY: fields} if fields else {}


def set_labels_(model: Any, metadata: Mapping[str, Any]) -> None:
    """Write the label names in an adapter's metadata into the config of its model.

    A model of another library keeps its own names.
    """
    raw = getattr(getattr(model, "config", None), "raw", None)
    if raw is not None and metadata.get(_KEY):
        model.config = model.config.replace(raw={**raw, **metadata[_KEY]})
