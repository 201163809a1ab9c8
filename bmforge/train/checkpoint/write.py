"""Publishes a checkpoint atomically: written to a temporary directory, synced, renamed.

A directory with its final name is always complete. If saving fails on any process, all processes
report the same reason, and the older checkpoints are unchanged.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bmforge.errors import CheckpointError
from bmforge.files import sync_directory
from bmforge.logging import get_logger
from bmforge.shards import Source
from bmforge.train.checkpoint.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    LATEST_NAME,
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    TEMPORARY_PREFIX,
    DamagedCheckpointError,
    hash_line,
    read_manifest,
    shard_name,
    step_name,
    verify_checkpoint,
    write_durably,
    write_shard,
)
from bmforge.train.checkpoint.frozen import (
    Known,
    describe_part,
    find_changed,
    hash_values,
    known_frozen,
    publish_frozen,
    write_frozen,
)
from bmforge.train.checkpoint.peers import Peers
from bmforge.train.checkpoint.read import ChunkReader
from bmforge.train.checkpoint.state import Snapshot

__all__ = ["FAULT_POINTS", "Fault", "DiskFullError", "no_fault", "write_checkpoint"]

# Disk full, and quota exceeded.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Bytes that are reserved for headers and the manifest.
_MARGIN_BYTES = 1 << 20

Fault = Callable[[str], None]

FAULT_POINTS = (
    "snapshot",
    "shard-open",
    "shard-half",
    "shard-written",
    "shard-synced",
    "exchanged",
    "frozen-kept",
    "manifest-written",
    "manifest-hash-written",
    "directory-synced",
    "renamed",
    "parent-synced",
    "latest-tmp",
    "latest-renamed",
    "retention-renamed",
    "retention-deleted",
)
"""Every phase of a save, in order; a `fault` hook is called with each name (for kill tests)."""


def no_fault(phase: str) -> None:
    """Do nothing; the default of `fault`, which tests replace to kill a process while it saves."""


class DiskFullError(CheckpointError):
    """Raised if the disk has no space for another checkpoint."""


@dataclass(frozen=True)
class _Outcome:
    """Result or error of one phase of saving on one process, which the processes exchange."""

    value: Any = None
    error: str | None = None
    no_room: bool = False


def _attempt(function: Callable[..., Any], *args: Any) -> _Outcome:
    """Call a function; return its exception as text, since other processes wait for a result."""
    try:
        return _Outcome(function(*args))
    except Exception as error:
        get_logger().debug("checkpoint step failed", exc_info=True)
        no_room = isinstance(error, DiskFullError) or getattr(error, "errno", None) in _NO_ROOM
        text = str(error).rstrip(".")
        if not isinstance(error, CheckpointError):
            text = f"{type(error).__name__}: {text}"
        return _Outcome(error=text, no_room=no_room)


def write_checkpoint(
    directory: Path,
    snapshot: Snapshot,
    peers: Peers,
    fault: Fault = no_fault,
    verified: set[str] | None = None,
) -> None:
    """Write one checkpoint, unless an identical one exists. Collective.

    Args:
        directory: parent of the step directories; created if missing.
        snapshot: this process's part of the state.
        peers: all processes that save; they call this function together.
        fault: test hook, called with the name of each phase, to kill a process there.
        verified: names of the shared files of frozen tensors that were verified earlier and are
            not verified again; new files are added in place.

    Raises:
        DiskFullError: the disk has no space (checked before writing if the file system reports it).
        CheckpointError: the checkpoint could not be written, or a valid checkpoint of this step
            with other content exists; the same on every process.

    Comm:
        Two small broadcasts and two gathers of the tensor index.
    """
    first = peers.rank == 0
    final, verified = directory / step_name(snapshot.step), set() if verified is None else verified
    # Rank 0 decides for all: the two branches below use different collectives, so processes that
    # disagreed about an existing checkpoint would wait for each other forever.
    opened = peers.broadcast(_attempt(_open_temporary, final, verified) if first else None)
    _raise_failure(final, opened)
    if opened.value is None:
        _check_same_content(final, snapshot, peers)
        return
    folder, recorded = opened.value
    temporary = directory / folder
    # A failed process still takes part in every collective. The gathered outcomes are the same on
    # all ranks, so all of them skip the same phases.
    outcomes = peers.gather(_attempt(_measure_write, final, snapshot, recorded))
    if all(outcome.error is None for outcome in outcomes):
        shares = [outcome.value for outcome in outcomes]
        outcomes = [_attempt(_check_room, shares)]
    if all(outcome.error is None for outcome in outcomes):
        # A frozen tensor is changed on all ranks if its values changed on one: its chunks must not
        # be divided between the shards and an older shared file.
        changed = frozenset().union(*(share.changed for share in shares))
        arguments = temporary, snapshot, recorded, changed, peers, fault
        outcomes = peers.gather(_attempt(_write_own_share, *arguments))
    verdict = _Outcome()
    if first:
        verdict = _attempt(_finish, temporary, final, outcomes, snapshot, recorded, fault)
        verified.update(verdict.value or ())
        shutil.rmtree(temporary, ignore_errors=True)
    _raise_failure(final, peers.broadcast(verdict))


@dataclass(frozen=True)
class _WriteSize:
    """Tensors and bytes that a process will write, and its free disk space."""

    changed: frozenset[str]
    needed_bytes: int
    free_bytes: int


def _measure_write(final: Path, snapshot: Snapshot, recorded: Known) -> _WriteSize:
    changed = find_changed(final, snapshot, recorded)
    unchanged = snapshot.frozen - changed
    needed = sum(s.size_bytes for name, s in snapshot.tensors.items() if name not in unchanged)
    return _WriteSize(changed, needed, shutil.disk_usage(final.parent).free)


def _check_room(shares: list[_WriteSize]) -> None:
    """Raise an error on all processes if their data together do not fit on the disk."""
    needed = sum(share.needed_bytes for share in shares) + _MARGIN_BYTES
    free = shares[0].free_bytes
    if needed > free:
        raise DiskFullError(
            f"the checkpoint needs {needed / 1000000000.0:.3f} GB, but only "
            f"{free / 1000000000.0:.3f} GB are free. Free disk space, or save to another disk."
        )


def _raise_failure(final: Path, outcome: _Outcome) -> None:
    if outcome.error is not None:
        kind = DiskFullError if outcome.no_room else CheckpointError
        raise kind(f"checkpoint {final} could not be saved: {outcome.error}.")


def _open_temporary(final: Path, verified: set[str]) -> tuple[str, Known] | None:
    """Create a temporary directory; return None if `final` is already a valid checkpoint.

    Returns:
        name of the directory, and the manifest of the existing frozen tensors
    """
    if final.exists():
        try:
            verify_checkpoint(final)
            return None
        except DamagedCheckpointError as error:
            get_logger().warning("%s The directory is renamed and saved again.", error)
    recorded = known_frozen(final.parent, verified)
    temporary = final.parent / f"{TEMPORARY_PREFIX}{final.name}-{os.urandom(4).hex()}"
    temporary.mkdir(parents=True)
    return temporary.name, recorded


def _check_same_content(final: Path, snapshot: Snapshot, peers: Peers) -> None:
    """Raise an error on all processes unless the existing checkpoint has the same content."""
    compared = peers.gather(_attempt(_find_difference, final, snapshot))
    differences = [o.error or o.value for o in compared if o.error or o.value]
    if differences:
        raise CheckpointError(
            f"checkpoint {final} was not saved, because a checkpoint of this step already "
            f"exists and differs in {differences[0]}. Save to another directory, or remove the "
            "existing one."
        )
    get_logger().debug("checkpoint %s already exists with the same content", final)
    verdict = _attempt(_move_latest, final, no_fault) if peers.rank == 0 else None
    _raise_failure(final, peers.broadcast(verdict))


def _find_difference(path: Path, snapshot: Snapshot) -> str | None:
    """Describe how this process's state differs from a valid checkpoint; None if both are equal.

    Random generators are not compared, because they depend on the number of processes.
    """
    manifest = read_manifest(path)
    if json.dumps(manifest["state"]) != snapshot.state:
        return "the training state"
    saved = manifest["optimizer"] or {}
    for name, entry in json.loads(json.dumps(snapshot.optimizer or {})).items():
        if saved.get(name) != entry:
            return f"the optimizer settings of {name}"
    for name, record in snapshot.records.items():
        saved_record = manifest["tensors"].get(name, {})
        if any(saved_record.get(key) != value for key, value in record.items()):
            return f"the dtype or shape of {name}"
    with ChunkReader(path, manifest) as reader:
        for name, box in snapshot.boxes.items():
            own = snapshot.tensors[name].read()
            # Compare bytes, not numbers: NaN differs from itself, and 0.0 equals -0.0.
            bits = [t.reshape(-1).view(torch.uint8) for t in (own, reader.read(name, box))]
            if not torch.equal(*bits):
                return f"the values of {name}"
    return None


def _write_own_share(
    temporary: Path,
    snapshot: Snapshot,
    recorded: Known,
    changed: frozenset[str],
    peers: Peers,
    fault: Fault,
) -> dict[str, Any]:
    """Write this process's shard and new frozen tensors; return their entries for the manifest.

    Frozen tensors that have changed are written to the shard, since they may change again.
    """
    name = shard_name(peers.rank, peers.world_size)
    unchanged = snapshot.frozen - changed
    added = (snapshot.frozen & changed) - recorded["tensors"].keys()
    new = {n: s for n, s in snapshot.tensors.items() if n in added}
    to_write = {n: s for n, s in snapshot.tensors.items() if n not in unchanged and n not in new}
    files: dict[str, Any] = {}
    parts = {n: {"file": name, "key": n, **describe_part(snapshot.boxes[n])} for n in to_write}
    if new:
        frozen, files[frozen] = write_frozen(temporary, peers.rank, new)
        for key, source in new.items():
            where = {"file": frozen, "key": key, **describe_part(snapshot.boxes[key])}
            parts[key] = {**where, "sha256": hash_values(source)}
    generators = {key: Source(tensor) for key, tensor in snapshot.rng.items()}
    files[name] = write_shard(temporary / name, {**to_write, **generators}, fault)
    return {
        "files": files,
        "parts": parts,
        "kept": sorted(unchanged & snapshot.tensors.keys()),
        "records": snapshot.records,
        "optimizer": snapshot.optimizer,
    }


def _finish(
    temporary: Path,
    final: Path,
    outcomes: list[_Outcome],
    snapshot: Snapshot,
    recorded: Known,
    fault: Fault,
) -> list[str]:
    """Write the manifest on rank 0, publish the directory, then update `latest`.

    Returns:
        names of the new frozen-tensor files
    """
    failures = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    if failures:
        kind = DiskFullError if any(o.no_room for o in outcomes) else CheckpointError
        raise kind("; ".join(failures) + ".")
    fault("exchanged")
    manifest = _build_manifest([outcome.value for outcome in outcomes], snapshot, recorded)
    shared = [name for name, record in manifest["files"].items() if record.get("shared")]
    added = [name for name in shared if name not in recorded["files"]]
    # The manifest refers to the shared files, so they need their final names before the step
    # directory gets its own. A crash in between leaves only unused files.
    publish_frozen(temporary, final.parent, added)
    fault("frozen-kept")
    content = json.dumps(manifest, separators=(",", ":")).encode()
    write_durably(temporary / MANIFEST_NAME, content)
    fault("manifest-written")
    write_durably(temporary / MANIFEST_HASH_NAME, hash_line(content))
    fault("manifest-hash-written")
    # The files were synced one by one, but their names belong to the directory. Without this, a
    # power failure after the rename could leave a step directory that lacks files.
    sync_directory(temporary)
    fault("directory-synced")
    if final.exists():
        final.rename(final.parent / f"damaged-{final.name}-{os.urandom(4).hex()}")
    temporary.rename(final)
    fault("renamed")
    # Only a durable checkpoint may be named by `latest`, so this comes before `_move_latest`.
    sync_directory(final.parent)
    fault("parent-synced")
    _move_latest(final, fault)
    return added


def _move_latest(final: Path, fault: Fault) -> None:
    pointer = final.parent / f"{TEMPORARY_PREFIX}{LATEST_NAME}"
    # Written under another name: truncating `latest` in place would leave an empty file if the
    # process is killed before the write.
    write_durably(pointer, f"{final.name}\n".encode())
    fault("latest-tmp")
    pointer.replace(final.parent / LATEST_NAME)
    fault("latest-renamed")
    sync_directory(final.parent)


def _build_manifest(
    entries: list[dict[str, Any]], snapshot: Snapshot, recorded: Known
) -> dict[str, Any]:
    """Merge the entries of all processes into a manifest; raise an error for incomplete tensors."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    optimizer: dict[str, Any] | None = None
    for entry in entries:
        files |= entry["files"]
        for name, record in entry["records"].items():
            tensors.setdefault(name, {**record, "chunks": []})
        for name, part in entry["parts"].items():
            tensors[name]["chunks"].append(part)
        for name in entry["kept"]:
            tensors[name] = recorded["tensors"][name]
            named = {chunk["file"] for chunk in tensors[name]["chunks"]}
            files |= {file: recorded["files"][file] for file in named}
        if entry["optimizer"] is not None:
            optimizer = {**(optimizer or {}), **entry["optimizer"]}
    for name, record in tensors.items():
        covered = sum(_product(chunk["lengths"]) for chunk in record["chunks"])
        if covered != _product(record["shape"]):
            raise CheckpointError(
                f"the checkpoint was not saved, because the processes together wrote {covered} of "
                f"the {_product(record['shape'])} elements of {name}. Build the same model "
                "with the same layout on all processes."
            )
    version = 2 if any("shared" in record for record in files.values()) else 1
    return {
        "format": FORMAT_NAME,
        "version": version if snapshot.base is None else FORMAT_VERSION,
        "step": snapshot.step,
        "world_size": len(entries),
        "byte_order": sys.byteorder,
        "seed": snapshot.seed,
        "files": files,
        "tensors": tensors,
        "optimizer": optimizer,
        "state": json.loads(snapshot.state),
        **({} if snapshot.base is None else {"base": snapshot.base}),
    }


def _product(lengths: list[int]) -> int:
    count = 1
    for length in lengths:
        count *= length
    return count
