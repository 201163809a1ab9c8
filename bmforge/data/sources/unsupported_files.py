"""Reports input files of unsupported formats; too many of them are an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bmforge.data.sources.record import show_name
from bmforge.errors import DataError
from bmforge.logging import get_logger

__all__ = ["check_unread"]

_NAMED = 5


def check_unread(files: Sequence[Path], unread: Sequence[Path], allowed: bool) -> None:
    """Log the input files of unsupported formats, by format and size.

    Args:
        files: files to be read.
        unread: files of unsupported formats among the inputs.
        allowed: True to allow more than half of the bytes to be unsupported.

    Raises:
        DataError: more than half of the bytes are unsupported, and `allowed` is False.
    """
    if not unread:
        return
    lost, read_bytes = (sum(map(_bytes_of, group)) for group in (unread, files))
    message = (
        f"{_size(lost)} of {_size(lost + read_bytes)} of the input are in unsupported formats: "
    )
    message += _describe(unread)
    if lost > read_bytes and not allowed:
        raise DataError(
            f"{message}. Convert them to .txt or .jsonl, or leave them out with skip_unread=True "
            "(--skip-unread)."
        )
    get_logger().warning(f"{message}.")


def _describe(paths: Sequence[Path]) -> str:
    """Describe the most common formats of some files, each with its size and an example."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        kinds[path.suffix.lower()].append(path)
    sizes = {kind: sum(map(_bytes_of, group)) for kind, group in kinds.items()}
    order = sorted(kinds, key=lambda kind: (-sizes[kind], kind))
    parts = []
    for kind in order[:_NAMED]:
        first, count = show_name(kinds[kind][0].name), len(kinds[kind])
        more = "" if count == 1 else f" and {count - 1} more {kind or 'without a suffix'}"
        parts.append(f"{first}{more} ({_size(sizes[kind])})")
    if order[_NAMED:]:
        parts.append(f"and {len(order) - _NAMED} more formats")
    return ", ".join(parts)


def _bytes_of(path: Path) -> int:
    """Return the size of a file, or of the link itself if its target is missing."""
    return (path.stat() if path.exists() else path.lstat()).st_size


def _size(count_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count_bytes >= unit:
            return f"{count_bytes / unit:.2f} {name}"
    return f"{count_bytes} bytes"
