"""Replacement for ModelCenter's `utils`: inspects parameters, and finds or downloads
checkpoints.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.models.hub import find_model

__all__ = ["check_web_and_convert_path", "print_inspect"]


def print_inspect(model: nn.Module, name: str) -> None:
    """Print a table of the parameters whose names match the glob `name`."""
    bmt.print_rank(bmt.inspect.format_summary(bmt.inspect.inspect_model(model, name)))


def check_web_and_convert_path(path: str | Path, load_type: str = "model") -> str:
    """Return the directory of a model, given its directory, hub id or short name.

    Args:
        path: directory, hub id or short name.
        load_type: accepted and ignored; a directory has config, weights and vocabulary.
    """
    return str(find_model(path))
