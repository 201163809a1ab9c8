"""Options of `bmforge tree`. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["TreeCommand"]


@dataclass(kw_only=True)
class TreeCommand:
    """Show the modules of a model as a tree, with their shapes.

    Equal layers are folded, and trained modules are marked.

    Args:
        model: name of a preset, or a model directory.
        adapter: adapter directories to attach to the model, in the given order.
        html: HTML page to write instead of printing the tree; in the page, a click on a row shows
            the code that attaches an adapter to these modules (if None: print the tree).
        keep_empty: also show modules that have no parameters.
    """

    model: Annotated[str, tyro.conf.Positional]
    adapter: tuple[str, ...] = ()
    html: Path | None = None
    keep_empty: bool = False
