"""Resolves model arguments: model directories, run directories and adapter directories.

`find_source` resolves a name to a base model and an adapter; `merge_adapter` and `merged_model`
merge the two into a model without adapters.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bmforge.errors import CheckpointError, ConfigError
from bmforge.files import check_place, find_export, partial_name
from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.adapter_dirs import ADAPTER_CONFIG, is_adapter
from bmforge.models.config import read_config_file
from bmforge.models.formats.convert import copy_companion, find_companions, find_dtype
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import find_base_model, find_model, head_options
from bmforge.provenance import write_provenance
from bmforge.recipes.export import copy_side_files, read_dtypes, swapped_directory
from bmforge.tune.delta import load_delta
from bmforge.tune.delta.merge import merge_

__all__ = [
    "ModelSource",
    "find_source",
    "merge_adapter",
    "merged_model",
    "plain_model",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class ModelSource:
    """Directories to which a model argument resolves.

    Args:
        model: directory of the model, or of the base model of an adapter; or a GGUF file.
        tokenizer: directory of the tokenizer and chat template (the adapter directory, if it has
            them).
        adapter: adapter directory that the name resolves to; None if the name is that of a model.
    """

    model: Path
    tokenizer: Path
    adapter: Path | None = None


def find_source(name: str | Path) -> ModelSource:
    """Find the model, and the adapter if any, that a command's argument names.

    Args:
        name: directory or hub id of a model, a run directory (its export is used), or an adapter
            directory, whose config names the base model.

    Raises:
        ConfigError: the model is not found, or an adapter has no usable base model.
    """
    directory = find_export(name)
    if not is_adapter(directory):
        model = find_model(directory)
        if not is_gguf(model):
            read_config_file(model)  # raises for a directory that is not a model
        return ModelSource(model, model)
    adapter = Path(directory)
    has_tokenizer = any((adapter / file).is_file() for file in _TOKENIZER_FILES)
    base = find_base_model(adapter)
    return ModelSource(base, adapter if has_tokenizer else base, adapter)


def merge_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    allow_other_base: bool = False,
) -> Path:
    """Merge an adapter into its base model's weights and write the result as a model directory.

    The result has all files of the base, and the adapter's tokenizer and chat template. It is
    written next to `out` and renamed when it is complete.

    Args:
        adapter: adapter directory, or the directory of a run that trained one.
        out: directory to create.
        base: base model (default: the model that the adapter's config names). An adapter that was
            trained on a quantized base can be merged into the 16-bit model.
        dtype: dtype of the written weights (default: the base's).
        allow_other_base: accept a base whose weights differ from those that the adapter was trained
            on, such as a later version of it.

    Returns:
        `out`.

    Raises:
        CheckpointError: `out` is not empty, or the adapter does not fit the base or was trained on
            a different base.
        ConfigError: the name is not an adapter, or its base is not found or quantized.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"out={str(out)!r} is not an empty directory. Choose a new directory."
        )
    check_place(target, "out")
    directory = Path(find_export(adapter))
    if not is_adapter(directory):
        raise ConfigError(
            f"{str(adapter)!r} is not an adapter directory (needed: {ADAPTER_CONFIG} and "
            "weights). Check its path."
        )
    source = find_model(base) if base is not None else find_base_model(directory)
    with swapped_directory(target) as partial:
        model = _open_base(source, directory)
        merge_(model, [load_delta(model, directory, allow_other_base=allow_other_base)])
        model.save_pretrained(partial, dtype=dtype or read_dtypes(source))
        write_provenance(partial, model.provenance, name=target.resolve().name)
        _copy_companions(source, directory, partial)
    get_logger().info("merged the adapter %s into a copy of %s", directory, source)
    return target


def _open_base(source: Path, adapter: Path) -> Any:
    """Load an adapter's base model in its stored dtype, or in fp32 for a GGUF file."""
    if is_gguf(source):
        return AutoModel.from_pretrained(source)
    dtype = find_dtype(WeightFiles(source))
    return AutoModel.from_pretrained(source, dtype=dtype, **head_options(adapter, source))


def _copy_companions(base: Path, adapter: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation config, from the adapter if it has them."""
    for directory in (adapter, base):
        for name in find_companions(directory) if directory.is_dir() else ():
            copy_companion(directory, target, name)
    if base.is_dir():
        copy_side_files(base, target)


@contextmanager
def merged_model(name: str | Path, near: Path) -> Iterator[str | Path]:
    """Context manager that yields the directory or hub id of a model without a separate adapter.

    Args:
        name: model argument of a command. An adapter is merged into its base model, in a temporary
            directory that is deleted at the end.
        near: output path of the command; the temporary directory is created next to it.

    Raises:
        CheckpointError: `name` is an adapter, and `near` already exists.
    """
    directory = find_export(name)
    if not is_adapter(directory):
        yield directory
        return
    if near.exists() and (not near.is_dir() or near.suffix == ".gguf" or any(near.iterdir())):
        raise CheckpointError(f"{str(near)!r} already exists. Choose another target.")
    check_place(near, "target", is_file=near.suffix == ".gguf")
    near.parent.mkdir(parents=True, exist_ok=True)
    # The name is fixed, so that a repeated command removes what a killed one left.
    folder = near.with_name(partial_name(f"{near.name}.merged"))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield merge_adapter(directory, folder / near.stem)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_model(name: str | Path, target: Path) -> Path:
    """Return the directory of a model; an adapter is first merged into `target`.

    An existing `target` is used unchanged.

    Args:
        name: model argument of a command; see `find_source`.
        target: directory of the merged model, which is not deleted afterwards.
    """
    directory = find_export(name)
    if not is_adapter(directory):
        return find_model(directory)
    # `merge_adapter` renames a complete directory into place, so an existing one is complete.
    return target if target.exists() else merge_adapter(directory, target)
