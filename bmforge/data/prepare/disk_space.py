"""Estimates the disk space that data preparation will need, before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bmforge.data.sources.packed import PACKED
from bmforge.errors import ConfigError

__all__ = ["check_disk_space"]

_PACKED_RATIO = 4  # typical compression ratio of text
# Disk bytes per byte of text: clean documents, and half a byte of tokens, stored twice (per shard
# and joined).
_NEED_RATIO = 1.5


def check_disk_space(files: Sequence[Path] | None, out: Path, work: Path) -> None:
    """Raise `ConfigError` if the disk has too little free space to prepare `files`.

    The files of an interrupted run in `work` count as free space.
    """
    sizes = {path: path.stat().st_size for path in files or ()}
    text_bytes = sum(
        size * (_PACKED_RATIO if path.suffix.lower() in PACKED else 1)
        for path, size in sizes.items()
    )
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    if usage.total == 0:  # not a disk; the first write raises the error
        return
    free = usage.free
    work_bytes = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    need = int(_NEED_RATIO * text_bytes)
    if need > free + work_bytes:
        raise ConfigError(
            f"preparing {text_bytes / 1000000000.0:.2f} GB of text needs about "
            f"{need / 1000000000.0:.2f} GB of disk space, but only {free / 1000000000.0:.2f} GB "
            f"are free on the disk of out_dir={str(out)!r}. Free disk space, or choose a directory "
            "on another disk."
        )
