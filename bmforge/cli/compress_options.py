"""Options of `bmforge compress`; see `options.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["CompressCommand"]


@dataclass(kw_only=True)
class CompressCommand:
    """Compress a model with a recipe: distillation, pruning, mixture of experts, quantization.

    Args:
        model: directory or hub id of the model; an adapter is merged into its base model first.
        recipe: TOML file with the methods (docs/guides/compression.md), or a BMCook config in JSON.
        out: directory of the compressed model; repeating the command resumes it.
        format: file format of the compressed model: bmforge's, or compressed-tensors, which vLLM
            and transformers can load (if None: the format in the recipe).
        answers: instead of compressing, store this many of the teacher's most probable tokens per
            position in `out`, for `[distill] answers`.
        dry_run: only show the phases and the model size after each.
    """

    model: Annotated[str, tyro.conf.Positional]
    recipe: Path
    out: Path
    format: Literal["bmforge", "compressed-tensors"] | None = None
    answers: int | None = None
    dry_run: bool = False
