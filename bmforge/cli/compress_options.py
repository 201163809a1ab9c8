"""The options of `bmforge compress`; see `options.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["CompressCommand"]


@dataclass(kw_only=True)
class CompressCommand:
    """Make a model small by a recipe: distil, prune, turn into experts, quantise.

    Args:
        model: directory or hub id of the model.
        recipe: TOML file with what is done (docs/compression.md), or a JSON file of BMCook's.
        out: directory of the small model; the same command goes on with what is there.
        format: of the small model's files: our own, or vLLM's, which transformers opens too; None
            takes the recipe's.
        answers: make nothing small: ask the recipe's teacher about the rows of its runs, and keep
            so many of its likeliest tokens at every position in `out`, for `[distill] answers`.
        dry_run: only say which phases there would be, and how large the model after each.
    """

    model: Annotated[str, tyro.conf.Positional]
    recipe: Path
    out: Path
    format: Literal["bmforge", "compressed-tensors"] | None = None
    answers: int | None = None
    dry_run: bool = False
