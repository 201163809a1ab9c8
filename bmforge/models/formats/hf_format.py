"""Reads and writes Hugging Face weight files, one tensor or slice at a time.

Files are written as safetensors only. `pytorch_model.bin` is read with `weights_only=True`, so that
it cannot run code.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.gguf_header import is_gguf
from bmforge.models.formats.compressed_tensors import CompressedLinears, find_compression
from bmforge.models.formats.gguf import GgufFile
from bmforge.models.formats.gguf_blocks import QuantizedGroups
from bmforge.models.formats.gptq import PackedLinears, find_packing
from bmforge.models.formats.megatron import MegatronShards, holds_shards
from bmforge.models.formats.mxfp4 import Mxfp4Stacks, find_mxfp4
from bmforge.models.formats.safe_file import (
    FileReads,
    Read,
    SafeFile,
    TensorFile,
    run_reads,
    write_file,
)
from bmforge.models.weights import WeightRule
from bmforge.nn.packing import QuantSpec

__all__ = [
    "WeightFiles",
    "has_all_weights",
    "has_weights",
    "plan_files",
    "read_pickle",
    "remove_stale_weights",
    "write_file",
    "write_index",
]

_STEM = "model"
# transformers and vLLM open `model*.safetensors` even if the tensors are of another model, and
# initialize the missing ones randomly. They find no weights under this name and stop.
_CHANGED_STEM = "bmforge_model"
_BROKEN = (RuntimeError, EOFError, ValueError, AttributeError)
_PICKLED = "pytorch_model.bin"
_SINGLE_FILES = (f"{_STEM}.safetensors", f"{_CHANGED_STEM}.safetensors", _PICKLED)
_MODEL_CENTER = "pytorch_model.pt"  # with other tensor names; see `model_center.py`
# File classes whose integers can be loaded without dequantizing them.
_HOLDS_INTEGERS = (GgufFile, PackedLinears, CompressedLinears)


def has_weights(directory: Path) -> bool:
    """Return True if a directory contains model weights."""
    names = (name for single in _SINGLE_FILES for name in (single, _index_of(single)))
    return any((directory / name).exists() for name in names)


def has_all_weights(directory: Path) -> bool:
    """Return True if a directory contains weights, including all files listed in the index."""
    try:
        return bool(_find_files(directory))
    except CheckpointError:
        return False


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a pickled dict; zip archives are memory-mapped.

    Raises:
        CheckpointError: the file is damaged, or is not a dictionary of tensors.
    """
    try:
        # Files written before torch 1.6 are not zip archives and cannot be mapped.
        mmap = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (UnpicklingError, *_BROKEN) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged or not a weight file: {error}. Download the file again."
        ) from error
    is_flat = isinstance(loaded, dict) and all(isinstance(t, Tensor) for t in loaded.values())
    if not is_flat or not loaded:
        raise CheckpointError(
            f"{str(path)!r} is not a dictionary of tensors. Use a state dict that was saved with "
            "torch.save."
        )
    return loaded


class _PickledFile:
    """Tensors of one `pytorch_model.bin`; implements `TensorFile`."""

    def __init__(self, path: Path) -> None:
        self._tensors = read_pickle(path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        target.copy_(self._tensors[name][slices])


def _read_index(index: Path) -> list[str]:
    """Return the names of the weight files listed in an index file."""
    try:
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        files = set()
    if files and all(isinstance(file, str) for file in files):
        return sorted(files)
    raise CheckpointError(
        f"{str(index)!r} is damaged (expected: JSON with a 'weight_map' from tensor names to file "
        "names). Download the file again."
    )


def _index_of(single: str) -> str:
    return f"{single}.index.json"


def _find_files(directory: Path) -> list[Path]:
    """Return the weight files of a directory; see `WeightFiles`."""
    for single in _SINGLE_FILES:
        index = directory / _index_of(single)
        if index.exists():
            paths = [directory / Path(file).name for file in _read_index(index)]
            missing = [p.name for p in paths if not p.exists()]
            if missing:
                raise CheckpointError(
                    f"{str(directory)!r} does not contain {', '.join(missing)}, which {index.name} "
                    "lists. Copy the missing files to the directory, or download the model again."
                )
            return paths
        if (directory / single).exists():
            return [directory / single]
    live = [path for path in directory.glob("*.pt") if path.name != _MODEL_CENTER]
    if len(live) == 1:
        return live
    raise CheckpointError(
        f"{str(directory)!r} contains no weights (expected: {', '.join(_SINGLE_FILES)}, several "
        "weight files with an index, or a single .pt file of CPM-Live)."
    )


class WeightFiles:
    """Tensors of a checkpoint, looked up by name and read lazily.

    Args:
        directory: GGUF file, or a directory with `model.safetensors` or `bmforge_model.safetensors`
            (or several files and an index), `pytorch_model.bin`, a single `.pt` file of any name
            (CPM-Live), or Megatron shards.
        reads: reader of safetensors files; if None, the default reader.

    Raises:
        CheckpointError: there are no weights, a file of the index is missing, or a file is damaged.
    """

    def __init__(self, directory: str | Path, reads: FileReads | None = None) -> None:
        self.directory, self._reads = Path(directory), reads
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, TensorFile] = {}
        self._gguf = GgufFile(self.directory) if is_gguf(directory) else None
        for file in [self._gguf] if self._gguf else self._open_files():
            self.shapes.update(file.shapes)
            self._files.update(dict.fromkeys(file.shapes, file))
        packed = None if self._gguf else self._packed_linears()
        if packed is not None:
            for name in packed.parts & self.shapes.keys():
                del self.shapes[name]
            self.shapes.update(packed.shapes)
            self._files.update(dict.fromkeys(packed.shapes, packed))

    def _open_files(self) -> list[TensorFile]:
        if holds_shards(self.directory) and not has_weights(self.directory):
            return [MegatronShards(self.directory)]
        return [
            SafeFile(path, self._reads) if path.suffix == ".safetensors" else _PickledFile(path)
            for path in _find_files(self.directory)
        ]

    def _packed_linears(self) -> PackedLinears | CompressedLinears | Mxfp4Stacks | None:
        """Return the reader of packed layers; None if there are none."""
        files = dict(self._files)
        if packing := find_packing(self.directory):
            return PackedLinears(files, packing)
        if find_mxfp4(self.directory):
            return Mxfp4Stacks(files)
        how = find_compression(self.directory)
        return None if how is None else CompressedLinears(files, how)

    def rules_for(self, model: Any, names: Collection[str]) -> list[WeightRule]:
        """Return the `WeightRule`s of `model` for a checkpoint with these tensor names."""
        return self._gguf.rules_for(model) if self._gguf else model.rules_for(names)

    def head_names(self, model: Any) -> set[str]:
        """Return the checkpoint names of tensors that belong to heads other than the model's."""
        if self._gguf:
            return self._gguf.head_names()
        config = model.config
        others = {published for head in config.heads.values() for published in head.names.values()}
        return others - set(config.heads[config.head].names.values())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return self._files[name].dtype(name)

    def stored_spec(self, name: str) -> QuantSpec | None:
        """Return the QuantSpec of a tensor stored as integers; None for other tensors."""
        file = self._files[name]
        return file.stored_spec(name) if isinstance(file, _HOLDS_INTEGERS) else None

    def read_groups(self, name: str, slices: tuple[slice, ...]) -> QuantizedGroups:
        """Read complete rows of a quantized tensor (with a `stored_spec`) without dequantizing."""
        file = self._files[name]
        assert isinstance(file, _HOLDS_INTEGERS)
        return file.read_groups(name, slices)

    def plan_read(self, name: str, slices: tuple[slice, ...], target: Tensor) -> Read:
        """Create a `Read` of a slice of a tensor into `target`, for `run_reads`."""
        return Read(self._files[name], name, slices, target)

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return a copy of a tensor, or of a slice along its first dims."""
        remaining = (slice(0, n) for n in self.shapes[name][len(slices) :])
        box = (*slices, *remaining)
        out = torch.empty([s.stop - s.start for s in box], dtype=self.dtype(name))
        run_reads([self.plan_read(name, box, out)])
        return out


def plan_files(
    sizes: dict[str, int],
    max_file_bytes: int,
    homes: dict[str, int] | None = None,
    changed: bool = False,
) -> dict[str, list[str]]:
    """Assign tensors to weight files.

    Args:
        sizes: mapping from tensor name to size in bytes, in the order of writing.
        max_file_bytes: maximum size of a file, except for a single larger tensor.
        homes: mapping from tensor name to pipeline stage; a file has tensors of one stage only.
        changed: whether only bmforge can load these tensors; the files then get names that
            transformers does not look for.

    Returns:
        mapping from file name to tensor names
    """
    homes = homes or {}
    groups: list[list[str]] = [[]]
    used = 0
    for name in sorted(sizes, key=lambda name: homes.get(name, 0)):
        size = sizes[name]
        starts_file = bool(groups[-1]) and homes.get(name, 0) != homes.get(groups[-1][-1], 0)
        if starts_file or (groups[-1] and used + size > max_file_bytes):
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    stem, count = _CHANGED_STEM if changed else _STEM, len(groups)
    if count == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups)}


def write_index(directory: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    """Write the index if there are several weight files, and remove stale weight files.

    Weight files of an earlier save are removed, because readers might use them.
    """
    remove_stale_weights(directory, files)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        stem = next(iter(files)).partition("-")[0]
        (directory / _index_of(f"{stem}.safetensors")).write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )


def remove_stale_weights(directory: Path, keep: Collection[str]) -> None:
    """Delete safetensors files of weights, and their index, except those with the names `keep`."""
    for stem in (_STEM, _CHANGED_STEM):
        for pattern in (f"{stem}.safetensors*", f"{stem}-*.safetensors"):
            for file in directory.glob(pattern):
                if file.name not in keep:
                    file.unlink()
