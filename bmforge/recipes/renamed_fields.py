"""Table of renamed run.toml fields, so that runs of earlier versions can be resumed.

One row per renamed field or table; `rename_fields` applies the table whenever a run.toml is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["RENAMED", "rename_fields"]

# Dotted name of a field or table in old files -> its current name. Later rows are applied to the
# result of earlier rows.
RENAMED: Mapping[str, str] = {
    "licence": "license",
    "delta": "adapter",
    "adapter.targets": "adapter.target_modules",
    "adapter.exclude": "adapter.exclude_modules",
    "adapter.train_also": "adapter.modules_to_save",
    "adapter.root_scale": "adapter.use_rslora",
    "adapter.magnitude": "adapter.use_dora",
}
# Default targets of a LoRA in files with a `delta` table; now the default is all linear layers.
_FORMER_LORA_TARGETS = ("attn.q", "attn.v")


def rename_fields(
    table: dict[str, Any], renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the table of a run.toml with renamed fields under their current names.

    Args:
        table: nested tables as read from the file; they are not changed.
        renamed: dict from old to new dotted names (default: `RENAMED`).
    """
    out = {key: rename_fields(v, {}) if isinstance(v, dict) else v for key, v in table.items()}
    delta = out.get("delta")
    if renamed is None and isinstance(delta, dict) and delta.get("kind") == "lora":
        delta["targets"] = delta.get("targets") or list(_FORMER_LORA_TARGETS)
    for old, new in (RENAMED if renamed is None else renamed).items():
        holder, name = _find_holder(out, old, create=False)
        if holder is None or name not in holder:
            continue
        value = holder.pop(name)
        target, key = _find_holder(out, new, create=True)
        assert target is not None
        target.setdefault(key, value)
    return out


def _find_holder(
    table: dict[str, Any], name: str, *, create: bool
) -> tuple[dict[str, Any] | None, str]:
    """Return the table that contains a dotted name (None if missing), and the name's last part."""
    *path, last = name.split(".")
    for part in path:
        inner = table.setdefault(part, {}) if create else table.get(part)
        if not isinstance(inner, dict):
            return None, last
        table = inner
    return table, last
