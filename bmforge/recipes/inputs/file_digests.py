"""Digests of a run's training files, with which a resumed run detects changed files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["describe_change", "digest_files"]

Digests = list[list[str]]


def digest_files(paths: Sequence[str | Path]) -> Digests:
    """Return the name and the digest of each regular file; other paths are skipped."""
    files = [path for path in map(Path, paths) if path.is_file()]
    return [[file.name, _digest(file)] for file in files]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_change(before: Digests | None, now: Digests) -> str:
    """Return the reason, without a full stop, why the training examples of a run changed.

    Args:
        before: digests of the files when the run began; None if they were not recorded.
        now: digests of the current files.
    """
    recorded = {digest for _, digest in before or []}
    present = {digest for _, digest in now}
    changed = dict.fromkeys(name for name, digest in now if digest not in recorded)
    missing = [name for name, digest in before or [] if digest not in present]
    removed = [name for name in dict.fromkeys(missing) if name not in changed]
    if before is None or not (before or now):
        return "the training examples changed since the run began (data.paths)"
    if changed:
        return f"{', '.join(changed)} changed since the run began (data.paths)"
    if removed:
        return f"data.paths no longer contains {', '.join(removed)}, with which the run began"
    return (
        "the training examples changed since the run began, but their files did not (the "
        "tokenizer, its chat template, the order of data.paths or an option of data changed)"
    )
