"""Reads and writes Megatron's model-parallel shards, for any number of shards.

A shard contains a slice of every large matrix: rows if the output is split, columns if the input is
split; of fused q, k and v, it contains a slice of each. Small tensors are in all shards. CPM-1,
CPM-2 and EVA were published in this format, as ``ITERATION/mp_rank_00_model_states.pt`` and so on.

Source: `change_mp.py` of TsinghuaAI/CPM-1-Generate and of thu-coai/EVA.
"""

from __future__ import annotations

import argparse
import itertools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.files import partial_name

__all__ = ["MegatronShards", "find_shards", "holds_shards", "split_tensor", "write_shards"]

_TRACKER = "latest_checkpointed_iteration.txt"
_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT_FILE = re.compile(r"mp_rank_(\d+)_(\d+)_model_states\.pt")
# Substring of a name -> number of matrices that are fused in the tensor's rows. These tensors are
# split by rows, all other 2-D tensors by columns.
_ROWS = {
    "query_key_value.": 3,
    ".project.": 3,
    ".project_kv.": 2,
    ".project_q.": 1,
    "word_embed": 1,
    "lm_head.": 1,
    "dense_h_to_4h.": 1,
    ".wi_0.": 1,
    ".wi_1.": 1,
}
_WHOLE = ("position_embeddings.", "role_embeds.")
# Entries that DeepSpeed expects in a file in addition to the weights.
_BOOKKEEPING: dict[str, Any] = {
    "optimizer": None,
    "lr_scheduler": None,
    "csr_tensor_module_names": set(),
    "skipped_steps": 0,
    "global_steps": 0,
    "global_samples": 0,
    "dp_world_size": 1,
}


def _find_cut(name: str, num_dims: int) -> tuple[int, int] | None:
    """Return the split dim and the number of fused matrices; None if a tensor is not split."""
    if any(part in name for part in _WHOLE):
        return None
    for part, fused in _ROWS.items():
        if part in name:
            return 0, fused
    return (1, 1) if num_dims == 2 else None


def find_shards(directory: Path) -> list[Path]:
    """Return the shard files, by rank, of a directory or of the iteration in its tracker file.

    Raises:
        CheckpointError: shards are missing, or they belong to CPM-2's model with experts.
    """
    tracker = directory / _TRACKER
    if tracker.is_file():
        name = tracker.read_text("utf-8").strip()
        inner = directory / (name if re.fullmatch(r"\d+|release", name) else "")
        directory = inner if inner.is_dir() else directory
    names = sorted(p.name for p in directory.glob("mp_rank_*"))
    experts = [n for n in names if _EXPERT_FILE.fullmatch(n)]
    if experts:
        raise CheckpointError(
            f"{str(directory)!r} contains {experts[0]}, a file with one expert per rank. The "
            "experts of CPM-2 have norms, which are not supported. Use dense shards "
            "(mp_rank_00_model_states.pt)."
        )
    shards = {int(m[1]): directory / n for n in names if (m := _FILE.fullmatch(n))}
    missing = sorted(set(range(max(shards, default=-1) + 1)) - set(shards))
    if missing:
        raise CheckpointError(
            f"{str(directory)!r} has the shards {sorted(shards)}, but not the shards {missing}. "
            f"Copy {', '.join(f'mp_rank_{n:02d}_model_states.pt' for n in missing)} to the "
            "directory."
        )
    return [shards[rank] for rank in sorted(shards)]


def holds_shards(directory: Path) -> bool:
    """Return True if a directory contains Megatron shards or a tracker file."""
    return (directory / _TRACKER).is_file() or any(directory.glob("mp_rank_*_model_states.pt"))


class MegatronShards:
    """Shards of a checkpoint, read as one file of unsplit tensors; implements `TensorFile`.

    Slices are copied directly from the shards, without joining them. Shards are memory-mapped,
    except those written before torch 1.6.

    Args:
        directory: directory with the shards or with a tracker file.

    Raises:
        CheckpointError: shards are missing, damaged, or of different parallel degrees.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = find_shards(directory)
        if not self.paths:
            raise CheckpointError(
                f"{str(directory)!r} contains no mp_rank_00_model_states.pt. Pass the directory "
                "with the Megatron shards."
            )
        self._shards = [_read_shard(path, len(self.paths)) for path in self.paths]
        self._check_alike()
        self.shapes = {n: self._whole_shape(n, t.shape) for n, t in self._shards[0].items()}

    @property
    def degree(self) -> int:
        """Number of shards."""
        return len(self.paths)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return self._shards[0][name].dtype

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Copy a slice of the unsplit tensor into `target`, from all overlapping shards."""
        for shard, source, region in self._pieces(name):
            parts = [_overlap(want, have) for want, have in zip(slices, region, strict=True)]
            if any(stop <= start for start, stop in parts):
                continue
            spans = list(zip(parts, slices, region, source, strict=True))
            into = tuple(slice(a - w.start, b - w.start) for (a, b), w, _, _ in spans)
            out_of = tuple(slice(a - h.start + s, b - h.start + s) for (a, b), _, h, s in spans)
            target[into].copy_(self._shards[shard][name][out_of])

    def _pieces(self, name: str) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...]]]:
        """Yield a tensor's slices: shard index, offset in the shard, region in the full tensor."""
        shape = tuple(self._shards[0][name].shape)
        cut = _find_cut(name, len(shape))
        if cut is None or self.degree == 1:
            yield 0, (0,) * len(shape), tuple(slice(0, n) for n in shape)
            return
        dim, fused = cut
        size = shape[dim] // fused
        for shard, part in itertools.product(range(self.degree), range(fused)):
            first = (part * self.degree + shard) * size
            source = tuple(part * size if d == dim else 0 for d in range(len(shape)))
            region = [slice(0, n) for n in shape]
            region[dim] = slice(first, first + size)
            yield shard, source, tuple(region)

    def _whole_shape(self, name: str, shape: torch.Size) -> tuple[int, ...]:
        cut = _find_cut(name, len(shape))
        times = [self.degree if cut and cut[0] == dim else 1 for dim in range(len(shape))]
        return tuple(size * n for size, n in zip(shape, times, strict=True))

    def _check_alike(self) -> None:
        """Raise `CheckpointError` if the shards belong to different models."""
        first = self._shards[0]
        for path, shard in zip(self.paths, self._shards, strict=True):
            wrong = sorted(set(first) ^ set(shard))
            wrong += [n for n in first if n in shard and not _are_parts(first[n], shard[n])]
            if wrong:
                raise CheckpointError(
                    f"{path.name} and {self.paths[0].name} in {str(path.parent)!r} come from "
                    f"different models or parallel degrees: {len(wrong)} tensors differ, such as "
                    f"{', '.join(wrong[:5])}. Copy all shards from one model."
                )


def _are_parts(first: Tensor, other: Tensor) -> bool:
    return first.shape == other.shape and first.dtype == other.dtype


def _overlap(want: slice, have: slice) -> tuple[int, int]:
    return max(want.start, have.start), min(want.stop, have.stop)


def _safe_types() -> list[Any]:
    """Return the types in training states that are safe to unpickle: arrays and namespaces."""
    array, scalar = (value.__reduce__()[0] for value in (np.zeros(1), np.float64(0)))
    return [
        *((array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in ("uint32", "int64", "float64")),
        argparse.Namespace,
    ]


def _read_shard(path: Path, degree: int) -> dict[str, Tensor]:
    """Return the tensors of one shard; no pickled code is executed."""
    try:
        mmap = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals(_safe_types()):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged or not a shard: {error}. Download the file again."
        ) from error
    tensors = loaded.get("module") if isinstance(loaded, dict) else None
    if not isinstance(tensors, Mapping) or not all(map(torch.is_tensor, tensors.values())):
        raise CheckpointError(
            f"{str(path)!r} has no dictionary of tensors under the key 'module'. Pass a checkpoint "
            "that Megatron-LM or CPM-Pretrain saved."
        )
    expected = loaded.get("mp_world_size")
    if expected not in (None, degree):
        raise CheckpointError(
            f"{str(path)!r} is one of {expected} shards, but {degree} are present. Copy all "
            f"{expected} shards, and no others, to one directory."
        )
    wrong = [n for n, t in tensors.items() if t.dim() > 2]
    if wrong:
        raise CheckpointError(
            f"{str(path)!r} has tensors with more than two dims, which are not supported: "
            f"{', '.join(wrong[:5])}. Use shards of CPM-1, CPM-2 or EVA."
        )
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def split_tensor(name: str, tensor: Tensor, rank: int, degree: int) -> Tensor:
    """Return a copy of a tensor's slice for shard `rank`.

    Raises:
        CheckpointError: the tensor is not divisible by `degree`.
    """
    cut = _find_cut(name, tensor.dim())
    if cut is None or degree == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    dim, fused = cut
    if tensor.shape[dim] % (fused * degree):
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} cannot be split into {degree} shards along "
            f"dim {dim}. Use a degree that divides {tensor.shape[dim] // fused}."
        )
    parts = tensor.chunk(fused * degree, dim)[rank::degree]
    return torch.cat(parts, dim)


def write_shards(
    shapes: Mapping[str, tuple[int, ...]],
    read: Any,
    directory: Path,
    degree: int,
    copies: Mapping[str, str],
) -> None:
    """Write tensors as shards in ``directory/1``, and the tracker file in `directory`.

    Peak memory is that of one shard and one tensor.

    Args:
        shapes: mapping from a tensor's name in the shards to its shape.
        read: function (tensor name) that returns the tensor.
        directory: output directory, created if needed.
        degree: number of shards.
        copies: mapping from an additional name in the shards to the name of the copied tensor.

    Raises:
        CheckpointError: shards already exist, or the tensors are not divisible by `degree`.
    """
    if degree < 1:
        raise CheckpointError(f"degree={degree} must be at least 1.")
    if holds_shards(directory):
        raise CheckpointError(
            f"{str(directory)!r} already contains Megatron shards, which are not overwritten. "
            "Choose another directory."
        )
    for name, shape in shapes.items():
        split_tensor(name, torch.empty(shape, device="meta"), 0, degree)
    inner = directory / "1"
    inner.mkdir(parents=True, exist_ok=True)
    for rank in range(degree):
        module = {name: split_tensor(name, read(name), rank, degree) for name in shapes}
        module |= {copy: module[name] for copy, name in copies.items() if name in module}
        path = inner / f"mp_rank_{rank:02d}_model_states.pt"
        partial = path.with_name(partial_name(path.name))
        content = {"module": module, **_BOOKKEEPING, "mp_world_size": degree, "iteration": 1}
        torch.save(content, partial)
        partial.replace(path)
    (directory / _TRACKER).write_text("1\n", encoding="utf-8")
