"""Reads and removes `quantization_config` in config.json, for all quantized formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["leave_out_packing", "read_raw_config"]


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json; {} if it is missing or invalid.

    Errors in the file are reported later, when the model is loaded.
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
    """Return `raw`, without `quantization_config` if `find` recognizes its format."""
    if find(raw) is None:
        return raw
    return {name: value for name, value in raw.items() if name != "quantization_config"}
