"""Turning checkpoints into our form, which is Hugging Face's: safetensors and a config.json.

Or into Megatron's shards, for the models that were published so.
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
from bmforge.provenance import read_provenance, warn_of_licences, write_provenance
from bmforge.tokenizers import AutoTokenizer

__all__ = ["convert_checkpoint", "find_companions", "find_dtype", "write_directory"]

# What belongs to a model besides its weights and config.
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*token*.json",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece*.model",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template*",
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
    """Read a checkpoint of any kind and write it in our form, with its tokenizer's files.

    Written is beside `target` first and moved there when it is whole.

    Args:
        source: a directory, hub id or short name: Hugging Face's form, safetensors or pickled, or
            ModelCenter's (`pytorch_model.pt`), or Megatron's shards of CPM-1, CPM-2 or EVA; or a
            GGUF file, whose quantised values become fp32 where no dtype is named.
        target: directory to make.
        dtype: of the weights; None keeps the file's.
        max_file_bytes: size above which the weights are divided over several files.
        family: of a ModelCenter checkpoint, such as "GPT2", where its tensors do not tell.
        allow_unknown: config fields to accept unread.
        preset: which model Megatron's shards are, where neither their sizes nor a config.json tell.
        megatron_degree: write so many of Megatron's shards instead of our form.

    Returns:
        the target.

    Raises:
        CheckpointError: the target holds something already, or the source is damaged.
        ConfigError: no such source, or its config is not understood.
    """

    def write(directory: Path, partial: Path) -> str:
        if megatron_degree is not None and preset is dtype is None and is_megatron(directory):
            reshard_megatron(directory, partial, megatron_degree)
            return f"{megatron_degree} shards, as they were divided before"
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
    """Make a model's directory of another's: beside its place, moved there when it is whole.

    Args:
        source: a directory, hub id or short name.
        target: directory to make.
        write: given the source's directory and one to make; returns what is said of it. What
            belongs to a model besides its weights and config is copied, with what is known of its
            licence and parts.

    Raises:
        CheckpointError: the target holds something already.
    """
    out = Path(target)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds a model" if out.is_dir() and has_weights(out) else "is not an empty directory"
        raise CheckpointError(f"{str(out)!r} {what}; name a directory that does not exist yet.")
    check_place(out, "target")
    directory = find_model(source)
    partial = out.with_name(partial_name(out.name))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        said = write(directory, partial)
        if is_gguf(directory):
            _save_tokenizer(directory, partial)
        for name in find_companions(directory):
            shutil.copyfile(directory / name, partial / name)
        known = read_provenance(directory)
        write_provenance(partial, known, name=out.name)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    get_logger().info("%s: %s", out, said)
    warn_of_licences(out, known)
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
            f"preset={preset!r} names the model in Megatron's shards, but {str(directory)!r} holds "
            "a model with a config.json. Leave it out."
        )
    dtype = dtype or find_dtype(WeightFiles(directory))
    return AutoModel.from_pretrained(directory, dtype=dtype, allow_unknown=allow_unknown)


def find_dtype(files: WeightFiles) -> torch.dtype:
    """Return the dtype that most of the stored values have; packed ones are of none."""
    sizes: Counter[torch.dtype] = Counter()
    for name, shape in files.shapes.items():
        if files.dtype(name).is_floating_point:  # packed ones stay what they are
            sizes[files.dtype(name)] += torch.Size(shape).numel()
    return sizes.most_common(1)[0][0]


def _save_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer of a GGUF file, where it has one."""
    if read_gguf_header(source).metadata.get("tokenizer.ggml.model", "none") == "none":
        get_logger().warning("%s holds no tokenizer, so none is written", source)
        return
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def find_companions(directory: Path) -> list[str]:
    """Return the names of the files that belong to a model besides its weights and config."""
    return sorted({p.name for glob in _COMPANIONS for p in directory.glob(glob) if p.is_file()})
