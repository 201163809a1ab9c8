"""Quantising models: in memory (`pack.py`), and from directory to directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.gguf_header import is_gguf
from bmforge.logging import track
from bmforge.models.config import read_config_file
from bmforge.models.formats.convert import find_dtype, write_directory
from bmforge.models.formats.hf_format import (
    WeightFiles,
    has_weights,
    plan_files,
    write_file,
    write_index,
)
from bmforge.models.hub import AutoModel
from bmforge.models.keep import KEEP
from bmforge.models.pack import PackedReader, load_quantized, quantize_
from bmforge.models.save import write_config
from bmforge.models.weights import assemble_source, group_by_source
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.surgery import persistent_tensors

__all__ = ["load_quantized", "quantize_", "quantize_directory", "write_packed"]


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
        source: directory or hub id of a Hugging Face model, or a GGUF file.
        target: directory to make.
        scheme: a name in `nn.packing.PRESETS`, or what it stands for; "keep" keeps the integers of
            a GGUF file, of GPTQ or of AWQ as they are.
        dtype: of what stays floats; None keeps the file's.
        max_file_bytes: size above which the weights are divided over several files.
        allow_unknown: config fields to accept unread.

    Raises:
        CheckpointError: the target holds something already, or the source is damaged.
        ConfigError: no such source or scheme, or widths that the scheme does not divide.

    Memory: one tensor of the plain model and what it is packed into, whatever the model's size.
    """
    spec = scheme if scheme == KEEP else find_preset(scheme)

    def write(directory: Path, partial: Path) -> str:
        is_whole = (directory / "config.json").is_file() and has_weights(directory)
        if not is_whole and not is_gguf(directory):
            raise ConfigError(
                f"{str(directory)!r} is not in Hugging Face's form: convert it first (bmforge "
                "convert), then quantise what came of it."
            )
        family = AutoModel.family_of(read_config_file(directory))
        kind = dtype or find_dtype(WeightFiles(directory))
        plain, files = family.describe_pretrained(
            directory, dtype=kind, allow_unknown=allow_unknown
        )
        read = PackedReader(plain, files, spec)
        total = write_packed(read.model, read, partial, max_file_bytes)
        rest = str(kind).removeprefix("torch.")
        return f"{family.__name__}, quantised to {total / 1e6:,.1f} MB, the rest in {rest}"

    return write_directory(source, target, write)


def write_packed(
    model: Any, read: Callable[[str], Tensor], out: Path, max_file_bytes: int = 4 << 30
) -> int:
    """Write a model's weights, asked for one by one, and its config; return the weights' bytes.

    Args:
        model: quantised, on meta.
        read: returns the tensor of a name.
        out: directory to make.
        max_file_bytes: size above which the weights are divided over several files.
    """
    tensors = persistent_tensors(model)
    groups = group_by_source(model.active_rules())
    described = {n: assemble_source(rules, tensors.__getitem__) for n, rules in groups.items()}
    sizes = {name: t.numel() * t.element_size() for name, t in described.items()}
    out.mkdir(parents=True)
    plan = plan_files(sizes, max_file_bytes)
    for file, names in track(list(plan.items()), "quantise"):
        write_file(
            out / file,
            {name: described[name] for name in names},
            lambda name: assemble_source(groups[name], read),
        )
    write_config(model, out, tensors)
    write_index(out, plan, sum(sizes.values()))
    return sum(sizes.values())
