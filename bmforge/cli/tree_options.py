"""The options of `bmforge tree`: what `--help` shows. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["TreeCommand"]


@dataclass(kw_only=True)
class TreeCommand:
    """Show the modules of a model as a tree: equal layers as one, shapes, what is trained.

    Args:
        model: a preset's name or a model's directory.
        adapter: adapter directories to attach to it, in this order.
        html: write a page instead; a click on its rows writes the line that puts a delta there.
        keep_empty: show modules without parameters, too.
    """

    model: Annotated[str, tyro.conf.Positional]
    adapter: tuple[str, ...] = ()
    html: Path | None = None
    keep_empty: bool = False
