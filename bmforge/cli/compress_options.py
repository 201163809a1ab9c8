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
        model: directory or hub id of the model, or an adapter directory, whose adapter is first
            merged into its base model.
        recipe: TOML file that lists the compression methods (see docs/guides/compression.md), or a
            BMCook config in JSON.
        out: output directory of the compressed model; repeating an interrupted command resumes it.
        format: file format of the compressed model: bmforge, or compressed-tensors, which vLLM and
            transformers can load (if None: the format in the recipe).
        answers: instead of compressing, store this number of the teacher's most probable tokens per
            position in `out`; a recipe reads them with `[distill] answers` (if None: compress the
            model).
        dry_run: list the compression phases with the model size after each, and exit.
    """

    model: Annotated[str, tyro.conf.Positional]
    recipe: Path
    out: Path
    format: Literal["bmforge", "compressed-tensors"] | None = None
    answers: int | None = None
    dry_run: bool = False
