"""What a config.json says of how its weights are packed, whichever format it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["leave_out_packing", "read_raw_config"]


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Return a config.json's contents; nothing where there is none, or no object.

    Who opens the model says what is wrong with its config.
    """
    file = directory / "config.json"
    try:
        raw = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}


def leave_out_packing(
    raw: dict[str, Any], find: Callable[[Mapping[str, Any]], object | None]
) -> dict[str, Any]:
    """Return a config's contents as those of the plain model, where `find` knows its packing."""
    if find(raw) is None:
        return raw
    return {name: value for name, value in raw.items() if name != "quantization_config"}
