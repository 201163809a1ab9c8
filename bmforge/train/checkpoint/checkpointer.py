"""Saves and loads the resumable state of a run; start reading here.

A checkpoint is written to a temporary directory, synced, hashed and renamed; `latest` is updated
only after the checkpoint is durable. A damaged checkpoint is rejected before any state is changed,
and the newest valid one is used instead. A checkpoint contains parameters, buffers, optimizer
state, the caller's state and every random generator, and loads on any number of processes in any
layout.

Modules: `format` (files, hashes), `state` (tensors to save), `rng`, `write` (publishing), `frozen`
(shared frozen tensors), `retention` (deletion), `read` (validation and loading), `peers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.parallel import run_on_first
from bmforge.train.checkpoint.base import Base, describe_base
from bmforge.train.checkpoint.format import (
    MANIFEST_NAME,
    DamagedCheckpointError,
    find_checkpoints,
    find_damage,
    read_manifest,
    step_name,
    step_of,
    verify_checkpoint,
)
from bmforge.train.checkpoint.peers import Peers
from bmforge.train.checkpoint.read import apply_checkpoint, check_fit, restore_generators
from bmforge.train.checkpoint.retention import (
    Retention,
    clean_leftovers,
    make_room,
    remove_old,
)
from bmforge.train.checkpoint.state import Optimizers, Snapshot, list_optimizers, take_snapshot
from bmforge.train.checkpoint.write import (
    FAULT_POINTS,
    DiskFullError,
    Fault,
    no_fault,
    write_checkpoint,
)

__all__ = [
    "FAULT_POINTS",
    "Base",
    "Checkpointer",
    "DamagedCheckpointError",
    "find_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    state: dict[str, Any] | None = None,
    blocking: bool = True,
    base: Base | None = None,
) -> Path:
    """Save a checkpoint as ``directory/step-XXXXXXXX``, unless an identical one exists.

    Collective: every process of the run calls it. No file is ever overwritten in place.

    Args:
        directory: parent of the step directories; created if missing.
        model: model whose parameters and persistent buffers are saved, under their names.
        optimizer: optimizer, or sequence of optimizers; if None, no optimizer state is saved.
        step: number of completed optimizer steps.
        state: JSON-serializable state; the same on every process (rank 0's is saved). An integer
            ``state["seed"]`` seeds the generators if the world size changes.
        blocking: if False, return once the tensors are copied, and write in a thread; a failure is
            then only logged (`Checkpointer` reports failures).
        base: weights to omit from the checkpoint; loading compares them with those of the model.

    Returns:
        The step directory.

    Raises:
        CheckpointError: the checkpoint could not be written, or a valid checkpoint of this step
            with other content exists; older checkpoints are unchanged.
    """
    peers = Peers()
    folder = Path(directory)
    base_record = None if base is None else describe_base(model, base, peers)
    snapshot = take_snapshot(
        model, optimizer, step=step, state=state, rank=peers.rank, base=base_record
    )
    if blocking or snapshot.is_late:
        try:
            write_checkpoint(folder, snapshot, peers)
        finally:
            peers.close()
    else:
        arguments = (folder, snapshot, peers)
        threading.Thread(target=_publish_or_warn, args=arguments, name="save checkpoint").start()
    return folder / step_name(step)


def _publish_or_warn(directory: Path, snapshot: Snapshot, peers: Peers) -> None:
    try:
        write_checkpoint(directory, snapshot, peers)
    except Exception as error:
        get_logger().warning("%s", error)
    finally:
        peers.close()


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizers = None, *, strict: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into the model, the optimizer and the random generators. Collective.

    Everything is verified before anything is changed. Generators are restored last: code that uses
    random numbers (creating a loader's iterator, for example) belongs before this call.

    Args:
        path: step directory, or a run directory or parent of step directories, of which the newest
            valid checkpoint is loaded.
        model: model with the same parameters, on any layout and any number of processes.
        optimizer: optimizer, or sequence of optimizers; if None, the saved optimizer state is
            ignored.
        strict: if False, missing and unexpected tensors and other dtypes only cause a warning.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: there is no valid checkpoint, its format is newer, or it belongs to
            another model (all differences are listed). Nothing is changed in this case.
    """
    peers = Peers()
    try:
        single, candidates = peers.broadcast(run_on_first(lambda: _candidates(Path(path))))
        if not candidates:
            raise CheckpointError(
                f"there is no checkpoint in {path} (needed: a checkpoint such as "
                f"{step_name(1000)}, or a directory that contains checkpoints). Check the path."
            )
        if single:
            return _load_one(candidates[0], model, optimizer, peers, strict)[1]
        return _load_newest_valid(candidates, model, optimizer, peers, strict)[1]
    finally:
        peers.close()


def _candidates(path: Path) -> tuple[bool, list[Path]]:
    """Return a flag (True if `path` is a single checkpoint) and the checkpoints to try in order."""
    if path.is_dir() and (step_of(path) is not None or (path / MANIFEST_NAME).exists()):
        return True, [path]
    return False, find_checkpoints(path) or find_checkpoints(path / "checkpoints")


def _load_newest_valid(
    candidates: list[Path], model: nn.Module, optimizers: Optimizers, peers: Peers, strict: bool
) -> tuple[int, dict[str, Any]]:
    """Load the first valid checkpoint; damaged ones are skipped, and a mismatch raises an error."""
    for path in candidates:
        try:
            return _load_one(path, model, optimizers, peers, strict)
        except DamagedCheckpointError as error:
            if peers.rank == 0:
                get_logger().warning("%s The next older checkpoint is tried.", error)
    raise CheckpointError(
        f"all {len(candidates)} checkpoints in {candidates[0].parent} are damaged (see the "
        "warnings). Restore one from a copy, or start a new run in another directory."
    )


def _load_one(
    path: Path, model: nn.Module, optimizers: Optimizers, peers: Peers, strict: bool
) -> tuple[int, dict[str, Any]]:
    listed = list_optimizers(optimizers)
    manifest = _verify_together(path, peers)
    check_fit(path, manifest, model, listed, peers, strict)
    apply_checkpoint(path, manifest, model, listed)
    restore_generators(path, manifest, peers)
    return int(manifest["step"]), manifest["state"]


def _verify_together(path: Path, peers: Peers) -> dict[str, Any]:
    """Verify a checkpoint; each process hashes some of its files.

    Returns the manifest on every process, or raises the same error on every process.
    """
    manifest: dict[str, Any] = peers.broadcast(run_on_first(lambda: read_manifest(path)))
    damage = peers.gather(find_damage(path, manifest, peers.rank, peers.world_size))
    problems = [problem for part in damage for problem in part]
    if problems:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: " + "; ".join(problems) + ".")
    return manifest


class Checkpointer:
    """Saves the checkpoints of a run in the background and deletes old ones.

    Creating, saving, loading and closing are collective. A save that fails (full disk, ...) is
    logged and stored in `last_error`; the run continues, and the last valid checkpoint is kept. If
    the disk has no space for an additional checkpoint, the oldest is deleted before the new one is
    written; the last checkpoint is never deleted. Use it as a context manager, or call `close`.

    Args:
        directory: parent of the step directories.
        keep_last: number of newest checkpoints to keep, at least 1.
        keep_every: also keep checkpoints whose step is a multiple of this number; None to disable.
        asynchronous: write in a background thread; if False, `save` returns after writing. If
            optimizer states are on disk, writing is always synchronous.
        base: weights to omit, as in `save_checkpoint`.
        check: function called before a save; if it raises an error (on all processes), the save
            is aborted.
        fault: test hook, called with each name in `FAULT_POINTS` to kill a process there.

    Memory:
        Until writing has ended, one host copy of this process's shards.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        base: Base | None = None,
        check: Callable[[], None] | None = None,
        fault: Fault = no_fault,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(
                f"keep_last={keep_last} must be at least 1, because a run needs its newest "
                "checkpoint to resume."
            )
        if keep_every is not None and keep_every < 1:
            raise ConfigError(f"keep_every={keep_every} must be at least 1, or None.")
        self.directory = Path(directory)
        self.last_error: Exception | None = None
        self._keep_last, self._keep_every = keep_last, keep_every
        self._keep_step: int | None = None
        self._asynchronous = asynchronous
        self._base = base
        self._told: dict[str, Any] | None = None
        self._check = check
        self._fault = fault
        self._verified: set[str] = set()
        self._thread: threading.Thread | None = None
        run_on_first(lambda: clean_leftovers(self.directory))
        self._peers = Peers()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers = None,
        state: dict[str, Any] | None = None,
        keep_step: int | None = None,
    ) -> None:
        """Wait for an earlier save, copy this process's state to the host, and start writing.

        Args:
            step: number of completed optimizer steps.
            model: model to save; its tensors may be changed as soon as this method returns.
            optimizers: optimizer, or sequence of optimizers; None to save no optimizer state.
            state: JSON-serializable state, the same on every process.
            keep_step: step of an earlier checkpoint that must not be deleted, if any.
        """
        self.wait()
        self._keep_step = keep_step
        if self._check is not None:
            self._check()
        if self._base is not None and self._told is None:
            self._told = describe_base(model, self._base, self._peers)
        rank, base_record = self._peers.rank, self._told
        snapshot = take_snapshot(
            model, optimizers, step=step, state=state, rank=rank, base=base_record
        )
        self._fault("snapshot")
        if not self._asynchronous or snapshot.is_late:
            self._write(snapshot)
            return
        # Not a daemon thread: the interpreter waits for it at exit, so the last save is completed.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="bmforge-checkpoint"
        )
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._publish(snapshot)
            self.last_error = None
            if self._peers.rank == 0:
                remove_old(self.directory, snapshot.step, self._retention, self._fault)
        except Exception as error:
            self.last_error = error
            if self._peers.rank == 0:
                get_logger().warning(
                    "%s. The run continues with the older checkpoints.", str(error).rstrip(".")
                )

    @property
    def _retention(self) -> Retention:
        return Retention(self._keep_last, self._keep_every, self._keep_step)

    def _publish(self, snapshot: Snapshot) -> None:
        """Write a checkpoint; if the disk is full, delete the oldest checkpoint and retry."""
        arguments = self.directory, snapshot, self._peers, self._fault, self._verified
        try:
            write_checkpoint(*arguments)
        except DiskFullError:
            if not self._peers.broadcast(self._peers.rank == 0 and self._make_room(snapshot.step)):
                raise
            write_checkpoint(*arguments)

    def _make_room(self, step: int) -> bool:
        try:
            return make_room(self.directory, step, self._retention)
        except (OSError, CheckpointError) as error:
            get_logger().warning(
                "the disk has no space for another checkpoint, and no older one can be removed: %s",
                error,
            )
            return False

    def load_newest(
        self, model: nn.Module, optimizers: Optimizers = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Load the newest valid checkpoint; return (step, state), or None if there is none.

        Raises:
            CheckpointError: see `load_checkpoint`; also raised if all existing checkpoints are
                damaged.
        """
        self.wait()
        peers = self._peers
        paths = peers.broadcast(run_on_first(lambda: find_checkpoints(self.directory)))
        if not paths:
            return None
        return _load_newest_valid(paths, model, optimizers, peers, strict=True)

    def wait(self) -> None:
        """Wait for the running save; afterwards `last_error` is its result."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last save and destroy the process group."""
        self.wait()
        self._peers.close()

    def report(self, step: int, stopped: bool) -> Exception | None:
        """Wait for the last save and log the newest checkpoint; return the error of the last save.

        Args:
            step: number of completed optimizer steps.
            stopped: True if a signal ended the run before its last step.
        """
        self.wait()
        paths = find_checkpoints(self.directory)
        newest = f"step {step_of(paths[0])}" if paths else "none"
        if self.last_error is not None:
            get_logger().error(
                "the checkpoint of step %d was not saved: %s. The newest checkpoint on disk: %s.",
                step,
                str(self.last_error).rstrip("."),
                newest,
            )
        if stopped:
            get_logger().info(
                (
                    "training was stopped by a signal at step %d. The newest checkpoint: %s. Run "
                    "the same command again to continue."
                ),
                step,
                newest,
            )
        return self.last_error
