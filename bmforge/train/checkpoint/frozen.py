"""Stores frozen tensors once for all checkpoints of a run.

    checkpoints/
      frozen/5d41...c592.safetensors     one file per process that first wrote frozen tensors
      step-00001000/manifest.json        refers to it with size and hash, as to its own files

A save compares frozen tensors with those of the newest checkpoint: by chunk hashes if the layout is
the same, otherwise bit for bit. Equal tensors are referenced, others are written again. A frozen
file is complete and synced before a checkpoint that refers to it is published, and is deleted after
the last checkpoint that refers to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bmforge.errors import CheckpointError
from bmforge.files import sync_directory
from bmforge.logging import get_logger
from bmforge.shards import Box, Source
from bmforge.train.checkpoint.format import (
    FROZEN_NAME,
    describe_damage,
    file_path,
    find_checkpoints,
    read_manifest,
    write_shard,
)
from bmforge.train.checkpoint.read import ChunkReader
from bmforge.train.checkpoint.state import Snapshot

__all__ = [
    "Known",
    "describe_part",
    "find_changed",
    "hash_values",
    "known_frozen",
    "publish_frozen",
    "sweep_frozen",
    "write_frozen",
]

Known = dict[str, dict[str, Any]]
"""Entries `tensors` and `files` of a manifest, only for frozen tensors."""


def known_frozen(directory: Path, verified: set[str]) -> Known:
    """Return the manifest of the newest checkpoint's frozen tensors.

    Args:
        directory: parent of the step directories.
        verified: names of files that were verified earlier; other files are verified now, and
            valid ones are added.
    """
    if not (directory / FROZEN_NAME).is_dir():
        return {"tensors": {}, "files": {}}
    for path in find_checkpoints(directory):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            get_logger().debug("%s", error)
            continue
        files = _shared(manifest)
        if not files:
            continue
        files = {name: r for name, r in files.items() if _is_valid(path, name, r, verified)}
        tensors = {
            name: record
            for name, record in manifest["tensors"].items()
            if all(chunk["file"] in files for chunk in record["chunks"])
        }
        return {"tensors": tensors, "files": files}
    return {"tensors": {}, "files": {}}


def _is_valid(path: Path, name: str, record: dict[str, Any], verified: set[str]) -> bool:
    where = file_path(path, name, record)
    if name in verified and where.exists() and where.stat().st_size == record["bytes"]:
        return True
    verified.discard(name)
    problem = describe_damage(path, name, record)
    if problem is not None:
        get_logger().warning("%s. The frozen tensors are therefore written again.", problem)
        return False
    verified.add(name)
    return True


def _shared(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: record for name, record in manifest["files"].items() if record.get("shared")}


def find_changed(final: Path, snapshot: Snapshot, recorded: Known) -> frozenset[str]:
    """Return the names of this process's model tensors that must be written.

    These are the tensors that are not frozen on this process, and frozen ones of which a chunk
    differs from the stored frozen tensors.
    """
    changed = {name for name in snapshot.records if name.startswith("model/")} - snapshot.frozen
    with ChunkReader(final, recorded) as reader:
        for name, box in snapshot.boxes.items():
            if name in snapshot.frozen and not _is_known(name, box, snapshot, recorded, reader):
                changed.add(name)
    return frozenset(changed)


def _is_known(
    name: str, box: Box, snapshot: Snapshot, recorded: Known, reader: ChunkReader
) -> bool:
    record, source = recorded["tensors"].get(name), snapshot.tensors[name]
    if record is None or any(record[k] != v for k, v in snapshot.records[name].items()):
        return False
    part = describe_part(box)
    for chunk in record["chunks"]:
        if {key: chunk[key] for key in part} == part:
            return bool(chunk["sha256"] == hash_values(source))
    stored, current = reader.read(name, box), source.read()
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (stored, current)))


def describe_part(box: Box) -> dict[str, Any]:
    """Return the manifest entry of a chunk: its offsets and lengths in the whole tensor."""
    return {"offsets": list(box.offsets), "lengths": list(box.lengths)}


def hash_values(source: Source) -> str:
    """Return the SHA-256 of a chunk's bytes."""
    payload = source.read().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(payload)).hexdigest()


def write_frozen(
    folder: Path, rank: int, sources: Mapping[str, Source]
) -> tuple[str, dict[str, Any]]:
    """Write this process's frozen tensors into the temporary directory of a checkpoint.

    Returns:
        name of the file, which is the hash of its content, and the file's manifest entry
    """
    path = folder / f"frozen-{rank:05d}"
    record = write_shard(path, sources)
    name = f"{record['sha256']}.safetensors"
    path.rename(folder / name)
    return name, {**record, "shared": True}


def publish_frozen(temporary: Path, directory: Path, names: list[str]) -> None:
    """Move files of frozen tensors from a temporary checkpoint directory to the shared one."""
    if not names:
        return
    folder = directory / FROZEN_NAME
    folder.mkdir(exist_ok=True)
    for name in names:
        # An existing file with that name has the same content or is damaged.
        (temporary / name).replace(folder / name)
    sync_directory(folder)
    sync_directory(directory)


def sweep_frozen(directory: Path, newest: Path) -> None:
    """Remove the frozen-tensor files to which no checkpoint refers any more.

    If a checkpoint cannot be read, all files are kept, since it may be repaired.
    """
    folder = directory / FROZEN_NAME
    if not folder.is_dir():
        return
    left = {path.name for path in folder.iterdir()}
    for path in (newest, *find_checkpoints(directory)):
        if not left:  # the usual case: the newest checkpoint refers to all files
            return
        try:
            left -= set(_shared(read_manifest(path)))
        except CheckpointError as error:
            get_logger().debug("%s; the files of frozen tensors are kept", error)
            return
    for name in left:
        (folder / name).unlink()
    sync_directory(folder)
