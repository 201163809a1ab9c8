"""Quantising models: in memory (`pack.py`), and from directory to directory."""

from __future__ import annotations

from pathlib import Path

import torch

from bmforge.models.formats.convert import convert_checkpoint
from bmforge.models.pack import load_quantized, quantize_
from bmforge.nn.packing import QuantSpec, find_preset

__all__ = ["load_quantized", "quantize_", "quantize_directory"]


def quantize_directory(
    source: str | Path,
    target: str | Path,
    scheme: str | QuantSpec,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 4 << 30,
    allow_unknown: tuple[str, ...] = (),
) -> Path:
    """Write a model with its weights packed, and its tokenizer's files; return the target.

    Opening the directory gives the quantised model. It is written beside its place and moved there
    when it is whole: what was stopped, or did not fit on the disk, is never taken for a model.

    Args:
        source: directory or hub id of a Hugging Face model.
        target: directory to make.
        scheme: a name in `nn.packing.PRESETS`, or what it stands for.
        dtype: of what stays floats; None keeps the file's.
        max_file_bytes: size above which the weights are divided over several files.
        allow_unknown: config fields to accept unread.

    Raises:
        CheckpointError: the target holds something already, or the source is damaged.
        ConfigError: no such source or scheme, or widths that the scheme does not divide.

    Memory: the quantised model, and of the plain one a tensor at a time.
    """
    return convert_checkpoint(
        source,
        target,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        allow_unknown=allow_unknown,
        quantize=find_preset(scheme),
    )
