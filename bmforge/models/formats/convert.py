"""Converts checkpoints to Hugging Face's format: safetensors and config.json.

Models that were published as Megatron shards can also be written as such shards.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from bmforge.errors import CheckpointError, ConfigError
from bmforge.files import check_place, partial_name
from bmforge.gguf_header import is_gguf, read_gguf_header
from bmforge.logging import get_logger
from bmforge.models.base import Model
from bmforge.models.formats.hf_format import WeightFiles, has_weights
from bmforge.models.formats.megatron_model import (
    is_megatron,
    load_megatron,
    reshard_megatron,
    save_megatron,
)
from bmforge.models.formats.model_center import is_model_center, load_model_center
from bmforge.models.hub import AutoModel, find_model
from bmforge.provenance import read_provenance, write_provenance
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.tokenizer_json import find_named_templates

__all__ = [
    "convert_checkpoint",
    "copy_companion",
    "find_companions",
    "find_dtype",
    "write_directory",
]

# Glob patterns for a model's files other than weights and config.
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*token*.json",
    "special_tokens_map.json",
    "*.model",
    "generation_config.json",
    "*processor_config.json",
    "normalizer.json",
    "chat_template*",
    "process_reward.json",
)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 4 << 30,
    family: str | None = None,
    allow_unknown: tuple[str, ...] = (),
    preset: str | None = None,
    megatron_degree: int | None = None,
) -> Path:
    """Convert a checkpoint of any format to Hugging Face's, with its tokenizer files.

    The result is written to a temporary directory and moved to `target` when complete.

    Args:
        source: directory, hub id or preset name of a model in Hugging Face's format
            (safetensors or pickled), ModelCenter's (`pytorch_model.pt`) or Megatron's (CPM-1,
            CPM-2, EVA); or a GGUF file, whose quantized values become fp32 by default.
        target: directory to create.
        dtype: dtype of the weights (default: the most common dtype in the source).
        max_file_bytes: maximum size of one file of weights.
        family: family of a ModelCenter checkpoint, such as "GPT2", if its tensors are ambiguous.
        allow_unknown: names of unknown config fields to ignore.
        preset: preset of Megatron shards, if their sizes and config.json are ambiguous.
        megatron_degree: number of Megatron shards to write instead of Hugging Face's format.

    Returns:
        path of the target

    Raises:
        CheckpointError: the target is not empty, or the source is damaged.
        ConfigError: the source does not exist, or its config is not supported.
    """

    def write(directory: Path, partial: Path) -> str:
        if megatron_degree is not None and preset is dtype is None and is_megatron(directory):
            reshard_megatron(directory, partial, megatron_degree)
            return f"{megatron_degree} shards"
        model = _open(directory, family, dtype, allow_unknown, preset)
        if megatron_degree is not None:
            save_megatron(model, partial, megatron_degree)
        else:
            model.save_pretrained(partial, max_file_bytes=max_file_bytes)
        count = sum(p.numel() for p in model.parameters())
        floats = (p.dtype for p in model.parameters() if p.is_floating_point())
        kind = str(next(floats)).removeprefix("torch.")
        return f"{type(model).__name__}, {count:,} parameters in {kind}"

    return write_directory(source, target, write)


def write_directory(
    source: str | Path, target: str | Path, write: Callable[[Path, Path], str]
) -> Path:
    """Create a model directory from another one; it is renamed to `target` when complete.

    Other files of the model, such as tokenizer and provenance, are copied.

    Args:
        source: directory, hub id or preset name of the source model.
        target: directory to create.
        write: function (source directory, directory to create) that writes the model and
            returns a summary for the log.

    Raises:
        CheckpointError: the target is not empty.
    """
    out = Path(target)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reason = (
            "contains a model" if out.is_dir() and has_weights(out) else "is not an empty directory"
        )
        raise CheckpointError(f"{str(out)!r} {reason}. Choose a directory that does not exist yet.")
    check_place(out, "target")
    directory = find_model(source)
    partial = out.with_name(partial_name(out.name))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        summary = write(directory, partial)
        if is_gguf(directory):
            _save_tokenizer(directory, partial)
        for name in find_companions(directory):
            copy_companion(directory, partial, name, replaces=True)
        provenance = read_provenance(directory)
        write_provenance(partial, provenance, name=out.name)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    get_logger().info("%s: %s", out, summary)
    return out


def _open(
    directory: Path,
    family: str | None,
    dtype: torch.dtype | None,
    allow_unknown: tuple[str, ...],
    preset: str | None,
) -> Model:
    if is_model_center(directory):
        return load_model_center(directory, family=family, dtype=dtype, allow_unknown=allow_unknown)
    if is_megatron(directory):
        return load_megatron(directory, preset=preset, dtype=dtype, allow_unknown=allow_unknown)
    if preset is not None:
        raise ConfigError(
            f"preset={preset!r} applies to Megatron shards only, but {str(directory)!r} has a "
            "config.json. Leave preset out."
        )
    dtype = dtype or find_dtype(WeightFiles(directory))
    return AutoModel.from_pretrained(directory, dtype=dtype, allow_unknown=allow_unknown)


def find_dtype(files: WeightFiles) -> torch.dtype:
    """Return the most common floating-point dtype of the stored weights."""
    sizes: Counter[torch.dtype] = Counter()
    for name, shape in files.shapes.items():
        if files.dtype(name).is_floating_point:  # packed integers stay unchanged
            sizes[files.dtype(name)] += torch.Size(shape).numel()
    return sizes.most_common(1)[0][0]


def _save_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer of a GGUF file, if it has one."""
    if read_gguf_header(source).metadata.get("tokenizer.ggml.model", "none") == "none":
        get_logger().warning(
            "%s has no tokenizer, so the converted model has no tokenizer either. Copy the "
            "tokenizer files of the original model to its directory.",
            source,
        )
        return
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def find_companions(directory: Path) -> list[str]:
    """Return a model's files other than its weights and config, as paths relative to it."""
    names = {p.name for glob in _COMPANIONS for p in directory.glob(glob) if p.is_file()}
    return sorted({*names, *find_named_templates(directory)})


def copy_companion(source: Path, target: Path, name: str, replaces: bool = False) -> None:
    """Copy a file that `find_companions` lists, such as a tokenizer file, to another directory.

    Args:
        source: directory of the model.
        target: directory to copy to.
        name: path of the file, relative to both directories.
        replaces: overwrite an existing file, which is otherwise kept.
    """
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    if replaces or not (target / name).exists():
        shutil.copyfile(source / name, target / name)
