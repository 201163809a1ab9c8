"""Reading and writing Hugging Face weight files, one tensor (or one slice of it) at a time.

Only safetensors is written. `pytorch_model.bin` is read with `weights_only=True`, so nothing in a
file can run code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bmforge.errors import CheckpointError

__all__ = ["WeightFiles", "has_weights", "plan_files", "write_file", "write_index"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BROKEN = (RuntimeError, EOFError, ValueError, AttributeError)
_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")


def has_weights(directory: Path) -> bool:
    """Tell whether a directory already holds model weights."""
    return any((directory / name).exists() for name in (_INDEX, _SINGLE, *_PICKLED))


class WeightFiles:
    """The tensors of a checkpoint directory by name, read lazily.

    Args:
        directory: holds `model.safetensors`, a sharded one with its index, or `pytorch_model.bin`.

    Raises:
        CheckpointError: no weights, a file named in the index is missing, or a file is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._readers: dict[str, Any] = {}
        for path in self._find_files():
            self._open(path)

    def _find_files(self) -> list[Path]:
        for name in (_INDEX, _PICKLED[0]):
            index = self.directory / name
            if index.exists():
                files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
                paths = [self.directory / Path(f).name for f in files]
                missing = [p.name for p in paths if not p.exists()]
                if missing:
                    raise CheckpointError(
                        f"{str(self.directory)!r} lacks {missing}, which {name} names. "
                        "Copy the missing files there, or download the model anew."
                    )
                return paths
            single = self.directory / (_SINGLE if name == _INDEX else _PICKLED[1])
            if single.exists():
                return [single]
        raise CheckpointError(
            f"{str(self.directory)!r} holds no weights: "
            f"needed {_SINGLE}, {_INDEX} or {_PICKLED[1]}."
        )

    def _open(self, path: Path) -> None:
        try:
            if path.suffix == ".safetensors":
                reader = safe_open(path, framework="pt")
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    self.shapes[name] = tuple(reader.get_slice(name).get_shape())
                    self._readers[name] = reader
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self.shapes.update({name: tuple(t.shape) for name, t in tensors.items()})
                self._readers.update(dict.fromkeys(tensors, tensors))
        except (SafetensorError, UnpicklingError, *_BROKEN) as error:
            raise CheckpointError(
                f"{str(path)!r} is damaged or not a weight file: {error}. Download it anew."
            ) from error

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or only a slice of it, read from the file now."""
        reader = self._readers[name]
        if isinstance(reader, dict):
            tensor = reader[name]
            return tensor if slices is None else tensor[slices]
        if slices is None or not slices:
            return reader.get_tensor(name)
        return reader.get_slice(name)[slices]


def plan_files(sizes: dict[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Divide tensors over files.

    Args:
        sizes: tensor name -> bytes, in the order of writing.
        max_file_bytes: a file holds at most this much, or one tensor.

    Returns:
        file name -> tensor names, in transformers' naming.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups)}


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file beside its place and move it there when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def write_index(directory: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    """Write the index of several files; a single one needs none.

    What an earlier save left beside them is removed: a reader might take it for the model.
    """
    for stale in set(directory.glob("model*.safetensors")) - {directory / name for name in files}:
        stale.unlink()
    if len(files) == 1:
        (directory / _INDEX).unlink(missing_ok=True)
    else:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
