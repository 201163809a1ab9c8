"""Quantizes model directories; `pack.py` quantizes models in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.gguf_header import is_gguf
from bmforge.logging import ProgressBar
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
from bmforge.models.integer_weights import KEEP
from bmforge.models.pack import PackedReader, load_quantized, quantize_
from bmforge.models.save import needs_bmforge, write_config
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
    """Quantize a model directory, and copy its tokenizer files; return the target.

    The result is written to a temporary directory and renamed when complete, so a failed run never
    leaves a partial model.

    Args:
        source: directory or hub id of a Hugging Face model, or a GGUF file.
        target: directory to create.
        scheme: a name in `nn.packing.PRESETS`, or a `QuantSpec`; "keep" loads the integer weights
            of a GGUF, GPTQ or AWQ checkpoint unchanged.
        dtype: dtype of the weights that remain floats (default: the file's).
        max_file_bytes: size above which the weights are split over several files.
        allow_unknown: names of unknown config fields to ignore.

    Raises:
        CheckpointError: the target is not empty, or the source is damaged.
        ConfigError: the source or scheme is unknown, or the scheme does not support a layer's
            width.

    Peak memory: one unquantized tensor and its quantized form, for any model size.
    """
    spec = scheme if scheme == KEEP else find_preset(scheme)

    def write(directory: Path, partial: Path) -> str:
        is_whole = (directory / "config.json").is_file() and has_weights(directory)
        if not is_whole and not is_gguf(directory):
            raise ConfigError(
                f"{str(directory)!r} is not in the Hugging Face format. Convert the model with "
                "`bmforge convert` first, and quantize the result."
            )
        family = AutoModel.family_of(read_config_file(directory))
        kind = dtype or find_dtype(WeightFiles(directory))
        plain, files = family.describe_pretrained(
            directory, dtype=kind, allow_unknown=allow_unknown
        )
        read = PackedReader(plain, files, spec)
        total = write_packed(read.model, read, partial, max_file_bytes)
        other_dtype = str(kind).removeprefix("torch.")
        return f"{family.__name__}, quantized to {total / 1e6:,.1f} MB, the rest in {other_dtype}"

    return write_directory(source, target, write)


def write_packed(
    model: Any, read: Callable[[str], Tensor], out: Path, max_file_bytes: int = 4 << 30
) -> int:
    """Write a quantized model's config and, one by one, its weights; return their size in bytes.

    Args:
        model: quantized model on the meta device.
        read: function (tensor name) that returns the tensor.
        out: directory to create.
        max_file_bytes: size above which the weights are split over several files.
    """
    tensors = persistent_tensors(model)
    groups = group_by_source(model.active_rules())
    described = {n: assemble_source(rules, tensors.__getitem__) for n, rules in groups.items()}
    sizes = {name: t.numel() * t.element_size() for name, t in described.items()}
    out.mkdir(parents=True)
    plan = plan_files(sizes, max_file_bytes, changed=needs_bmforge(model))
    with ProgressBar("quantize", len(groups)) as bar:

        def assemble(name: str) -> Tensor:
            values = assemble_source(groups[name], read)
            bar.advance()
            return values

        for file, names in plan.items():
            write_file(out / file, {name: described[name] for name in names}, assemble)
    write_config(model, out, tensors)
    write_index(out, plan, sum(sizes.values()))
    return sum(sizes.values())
