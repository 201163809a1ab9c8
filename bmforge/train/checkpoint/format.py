"""Checkpoint format on disk: names, manifest, hashes, durable writes, verification.

    checkpoints/step-00001000/
      manifest.json                          index of files, tensors, chunks and state
      manifest.sha256                        hash of manifest.json, as `sha256sum` prints it
      shard-00000-of-00004.safetensors ...   one per process
    checkpoints/frozen/                      tensors shared by several checkpoints, see `frozen.py`

The manifest contains size and sha256 of every file, and a separate file contains the sha256 of the
manifest, so any changed byte is detected. No file is a pickle; `sha256sum -c` and safetensors can
read all files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bmforge.errors import CheckpointError
from bmforge.shards import Source

__all__ = [
    "DTYPE_CODES",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "FROZEN_NAME",
    "LATEST_NAME",
    "MANIFEST_HASH_NAME",
    "MANIFEST_NAME",
    "TEMPORARY_PREFIX",
    "DamagedCheckpointError",
    "describe_damage",
    "file_path",
    "find_checkpoints",
    "find_damage",
    "hash_line",
    "read_manifest",
    "shard_name",
    "step_name",
    "step_of",
    "verify_checkpoint",
    "write_durably",
    "write_shard",
]

FORMAT_NAME = "bmforge-checkpoint"
# 1: all tensors in the shards; 2: frozen tensors in shared files; 3: base weights omitted. Each
# checkpoint is written in the oldest format that can represent it.
FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
MANIFEST_HASH_NAME = "manifest.sha256"
LATEST_NAME = "latest"
TEMPORARY_PREFIX = ".tmp-"
FROZEN_NAME = "frozen"

_BLOCK_BYTES = 4 << 20
_STEP_PATTERN = re.compile(r"step-(\d{8,})")
DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedCheckpointError(CheckpointError):
    """Raised if files of a checkpoint are missing or have changed since they were saved."""


def step_name(step: int) -> str:
    """Return the directory name of a step, for example ``"step-00001000"``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint directory's name; None for names of other directories."""
    match = _STEP_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else None


def shard_name(rank: int, world_size: int) -> str:
    """Return the file name of one process's shard."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def find_checkpoints(directory: str | Path) -> list[Path]:
    """Return the step directories in `directory`, newest step first.

    The directories are not verified; half-written ones (``.tmp-*``) are excluded.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    steps = [(step_of(path), path) for path in directory.iterdir() if path.is_dir()]
    return [path for step, path in sorted(steps, key=_newest_first) if step is not None]


def _newest_first(item: tuple[int | None, Path]) -> int:
    return -(item[0] or 0)


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path` and return once it is synced to disk."""
    with open(path, "wb") as file:
        file.write(data)
        # fsync covers only data that the kernel has; `flush` passes Python's buffer to it.
        file.flush()
        os.fsync(file.fileno())


def hash_line(manifest: bytes) -> bytes:
    """Return the content of manifest.sha256 for these manifest bytes."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_NAME}\n".encode()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_shard(
    path: Path, tensors: Mapping[str, Source], fault: Callable[[str], None] = lambda phase: None
) -> dict[str, Any]:
    """Write tensors as a new safetensors file, hash it while writing, and sync it.

    The hash is computed from the bytes in memory, so that loading detects bytes that the disk has
    stored incorrectly.

    Args:
        path: path of the file, which must not exist yet.
        tensors: dict from name to tensor; each tensor is read only when it is written.
        fault: test hook, called with "shard-open", "shard-half", "shard-written" and
            "shard-synced" when these phases end.

    Returns:
        ``{"bytes": size, "sha256": hex digest}``.

    Memory:
        Host tensors are not copied.
    """
    # With wider types first, every tensor is aligned to its element size, as readers expect.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, payload_bytes = _shard_header(names, tensors)
    digest = hashlib.sha256(header)
    with open(path, "xb") as file:
        fault("shard-open")
        file.write(header)
        written, half_done = 0, False
        for name in names:
            payload = memoryview(tensors[name].read().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(payload), _BLOCK_BYTES):
                block = payload[start : start + _BLOCK_BYTES]
                file.write(block)
                digest.update(block)
                written += len(block)
                if not half_done and 2 * written >= payload_bytes:
                    # The flush lets a process that is killed here leave half of a file, not an
                    # empty one.
                    half_done = True
                    file.flush()
                    fault("shard-half")
        file.flush()
        fault("shard-written")
        os.fsync(file.fileno())
    fault("shard-synced")
    return {"bytes": len(header) + written, "sha256": digest.hexdigest()}


def _shard_header(names: list[str], tensors: Mapping[str, Source]) -> tuple[bytes, int]:
    """Return the safetensors header, with its length field, and the payload's size in bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.size_bytes
        entries[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padding aligns the payload, which begins after the header, to 8 bytes for readers that map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read and check the manifest of one checkpoint directory; its shards are not read.

    Raises:
        DamagedCheckpointError: a file is missing, or the manifest does not match its hash.
        CheckpointError: the directory is not a bmforge checkpoint, or its format is newer.
    """
    path = Path(path)
    try:
        content = (path / MANIFEST_NAME).read_bytes()
        expected = (path / MANIFEST_HASH_NAME).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error}.") from error
    # Checked before parsing, so that a truncated manifest is reported as damage, which lets loading
    # fall back to an older checkpoint.
    if hash_line(content) != expected:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST_NAME} does not match its hash in "
            f"{MANIFEST_HASH_NAME}."
        )
    manifest: dict[str, Any] = json.loads(content)
    if manifest.get("format") != FORMAT_NAME:
        raise CheckpointError(
            f"{path} is not a bmforge checkpoint: format={manifest.get('format')!r} (needed: "
            f"{FORMAT_NAME!r})."
        )
    if manifest["version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version={manifest['version']}, but this bmforge "
            f"supports versions up to {FORMAT_VERSION}. Upgrade bmforge: pip install -U bmforge."
        )
    return manifest


def find_damage(
    path: str | Path, manifest: dict[str, Any], part: int = 0, parts: int = 1
) -> list[str]:
    """Compare files with the manifest (size and sha256); return one line per damaged file.

    Args:
        path: checkpoint directory.
        manifest: result of `read_manifest`.
        part: index of the first file to check; every `parts`-th file from there on is checked.
        parts: number of processes that check the files together.
    """
    # Sorted, so that all processes divide the files in the same way and each file is hashed once.
    names = sorted(manifest["files"])[part::parts]
    damage = (describe_damage(Path(path), name, manifest["files"][name]) for name in names)
    return [problem for problem in damage if problem is not None]


def file_path(path: Path, name: str, record: dict[str, Any]) -> Path:
    """Return the path of a file that is named in a checkpoint's manifest."""
    return path.resolve().parent / FROZEN_NAME / name if record.get("shared") else path / name


def describe_damage(path: Path, name: str, record: dict[str, Any]) -> str | None:
    """Describe the damage of a file named in the manifest; None if it is intact."""
    where = file_path(path, name, record)
    if record.get("shared") and not where.exists():
        return (
            f"{where} is missing, which contains the frozen tensors of all checkpoints of the "
            f"run. Copy the directory {FROZEN_NAME!r} next to the checkpoint"
        )
    try:
        # The size is compared first: it finds truncated files without reading them.
        size = os.path.getsize(where)
        if size != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
        if _hash_file(where) != record["sha256"]:
            return f"{name} does not match its SHA-256 in the manifest"
    except OSError as error:
        return str(error)
    return None


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Check every byte of one checkpoint directory and return its manifest.

    Files that the manifest does not name are ignored.

    Raises:
        DamagedCheckpointError: a file is missing or differs from the saved one.
        CheckpointError: the directory is not a bmforge checkpoint, or its format is newer.
    """
    manifest = read_manifest(path)
    problems = find_damage(path, manifest)
    if problems:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: " + "; ".join(problems) + ".")
    return manifest
