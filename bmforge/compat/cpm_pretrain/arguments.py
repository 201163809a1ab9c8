"""Table of the arguments of CPM-Pretrain's two programs, with their replacements.

The table is `arguments.toml`, which `docs/migrating/cpm_pretrain.md` shows. Arguments that
Megatron's parser has for other programs (REALM's retrieval, an autoresume service) are listed
without a replacement.
Source: ``megatron/arguments.py``, ``run_gpt2.sh`` and ``run_t5.sh`` of TsinghuaAI/CPM-1-Pretrain.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ARGUMENTS", "DEFAULTS", "SWITCHES", "Argument"]


@dataclass(frozen=True)
class Argument:
    """Replacement of one argument of CPM-Pretrain.

    Args:
        fields: paths of the recipe's config fields; a name that begins with ``--`` is an option of
            `bmforge train`, or of torchrun if `note` says so. Empty if the argument has no
            replacement.
        note: how the value changes, or why there is no field.
        only: "gpt2" or "t5" if only that recipe has the fields.
    """

    fields: tuple[str, ...] = ()
    note: str = ""
    only: str = ""


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# Arguments without values.
SWITCHES = frozenset(_FILE["switches"].split())
# Default values of CPM-Pretrain that differ from those of bmforge.
DEFAULTS: Mapping[str, Any] = _FILE["defaults"]
ARGUMENTS: Mapping[str, Mapping[str, Argument]] = {
    title: {
        name: Argument(tuple(entry.get("fields", ())), entry.get("note", ""), entry.get("only", ""))
        for name, entry in group.items()
    }
    for title, group in _FILE["arguments"].items()
}
