"""OpenPrompt's examples and batches, as Python objects with its field names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["InputExample", "InputFeatures"]


class InputExample:
    """One or two texts with a label or a target text.

    Args:
        guid: name of the example.
        text_a: first text.
        text_b: second text.
        label: class index.
        meta: dict from name to further text.
        tgt_text: text to generate.
    """

    def __init__(
        self,
        guid: Any = None,
        text_a: str = "",
        text_b: str = "",
        label: Any = None,
        meta: Mapping[str, Any] | None = None,
        tgt_text: str | None = None,
    ) -> None:
        self.guid, self.text_a, self.text_b, self.label = guid, text_a, text_b, label
        self.meta, self.tgt_text = dict(meta or {}), tgt_text

    def __repr__(self) -> str:
        return self.to_json_string()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return dict(vars(self))

    def to_json_string(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def load_examples(path: str) -> list[InputExample]:
        """Raise an error: the original unpickles the file, which can execute code."""
        raise ImportError(
            "InputExample.load_examples was removed. Use JSON with one example per line."
        )

    def keys(self, keep_none: bool = False) -> list[str]:
        """Return the field names; fields with value None only with `keep_none`."""
        return [name for name, value in vars(self).items() if keep_none or value is not None]


class InputFeatures(dict[str, Any]):
    """A batch of tensors and other values, which can be read as items or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the batch has no {name!r} (available: {', '.join(self)})."
            ) from None

    def to(self, device: Any = "cpu", **options: Any) -> InputFeatures:
        """Move the tensors in place; return the batch."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, **options)
        return self

    def cuda(self, device: Any = None) -> InputFeatures:
        """Move the tensors to the accelerator in place; return the batch."""
        kind = torch.accelerator.current_accelerator()
        return self.to(kind if device is None else device)

    def to_tensor(self) -> InputFeatures:
        """Return the batch unchanged, since its numbers are tensors already."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the batch as a dict."""
        return dict(self)
