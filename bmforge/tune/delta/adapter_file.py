"""Reads and writes the tensor files and bmforge's own config fields of adapter directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bmforge.nn.part_kinds import PART_KINDS, rename_options

__all__ = [
    "MARK",
    "copies_apart",
    "read_labels",
    "read_options",
    "read_pickle",
    "read_weights",
    "set_labels_",
]

# Key of bmforge's own metadata in the tensor file and in adapter_config.json.
MARK = "bmforge"
_LABELS, _LABEL_FIELDS = "labels", ("id2label", "label2id")


def copies_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, with copies of those that share memory.

    safetensors refuses to write tensors that share memory.
    """
    separate: dict[str, Tensor] = {}
    starts: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        plain = plain.clone() if plain.data_ptr() in starts else plain
        starts.add(plain.data_ptr())
        separate[name] = plain
    return separate


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a safetensors file and bmforge's metadata in it."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {}).get(MARK, "{}"))


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Read PEFT's older pickle file without executing code from it."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path.name} is not a dictionary of tensors")
    return tensors


def read_labels(model: Any) -> dict[str, Any]:
    """Return the label names in a model's config, as metadata of an adapter file."""
    raw = getattr(getattr(model, "config", None), "raw", {})
    fields = {name: raw[name] for name in _LABEL_FIELDS if raw.get(name)}
    return {_LABELS: fields} if fields else {}


def set_labels_(model: Any, metadata: Mapping[str, Any]) -> None:
    """Write the label names in an adapter's metadata into the config of its model.

    A model of another library keeps its own names.
    """
    raw = getattr(getattr(model, "config", None), "raw", None)
    if raw is not None and metadata.get(_LABELS):
        model.config = model.config.replace(raw={**raw, **metadata[_LABELS]})


def read_options(own_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments of an adapter from bmforge's own fields of its config."""
    saved = rename_options(own_config)
    kind = PART_KINDS.get(saved["kind"])
    names = set() if kind is None else {field.name for field in fields(kind.options)}
    options = rename_options(saved["options"])
    return {
        **{name: value for name, value in options.items() if name in names},
        "targets": list(saved["places"]),
        "modules_to_save": tuple(saved.get("modules_to_save", ())),
    }
