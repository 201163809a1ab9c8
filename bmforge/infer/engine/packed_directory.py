"""Temporary directories for quantized weights, removed when their process ends.

A killed process cannot clean up. Each process therefore locks its directory while it runs, and
creating a new directory removes all directories without a lock.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.memory.spill import format_bytes
from bmforge.models import AutoModel
from bmforge.models.pack import PackedReader
from bmforge.models.quantize import quantize_directory
from bmforge.nn.packing import QuantSpec
from bmforge.surgery import persistent_tensors

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: abandoned directories are not removed
    fcntl = None

__all__ = ["make_packed_place", "quantize_source", "reporting_full_disk"]

_PREFIX = "bmforge-packed-"


def make_packed_place(folder: Path | None) -> tuple[Path, Callable[[], None]]:
    """Create a temporary directory; return its path and a function that removes it.

    Args:
        folder: parent directory; None means the system's temporary directory.
    """
    parent = Path(tempfile.gettempdir() if folder is None else folder)
    _remove_abandoned(parent)
    while True:
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise ConfigError(
                f"EngineConfig.spill_directory={str(parent)!r} cannot be used "
                f"({error.strerror}). Choose an existing, writable directory."
            ) from error
        descriptor = None if fcntl is None else os.open(directory, os.O_RDONLY)
        if descriptor is None or _lock(directory, descriptor):
            break
        os.close(descriptor)

    def give_back() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)

    return directory, give_back


def quantize_source(
    source: Path,
    quantize: str | QuantSpec,
    check: Callable[[nn.Module], object],
    folder: Path | None,
    cleanup: ExitStack,
    options: Mapping[str, Any],
) -> Path:
    """Quantize a model directory into a temporary directory; return the temporary directory.

    Args:
        source: model directory.
        quantize: quantization scheme.
        check: function that raises an error if the quantized model (on the meta device) does not
            fit into memory.
        folder: parent of the temporary directory; None means the system's.
        cleanup: exit stack that will remove the temporary directory.
        options: arguments of `Model.from_pretrained`.
    """
    described = PackedReader(*AutoModel.describe_pretrained(source, **options), quantize)
    check(described.model)
    packed, give_back = make_packed_place(folder)
    cleanup.callback(give_back)
    allowed = options.get("allow_unknown", ())
    with reporting_full_disk(packed, persistent_tensors(described.model).values()):
        return quantize_directory(source, packed / "m", quantize, allow_unknown=allowed)


@contextmanager
def reporting_full_disk(folder: Path, weights: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: raise `ConfigError` if the disk has too little space, or becomes full.

    Args:
        folder: directory of the quantized weights.
        weights: the quantized weights, possibly on the meta device.
    """
    needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    try:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise ConfigError(
            f"EngineConfig.spill_directory={str(folder.parent)!r} has "
            f"{format_bytes(free_bytes)} of free space, but {format_bytes(needed_bytes)} are "
            f"needed ({error.strerror}). Free disk space, or choose a directory on another disk."
        ) from error


def _lock(directory: Path, descriptor: int) -> bool:
    """Lock a new directory; return False if another process has already removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # the file system has no locks, so other processes cannot check for one
        return True
    return directory.exists()


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that have ended, recognized by their missing lock."""
    for directory in parent.glob(f"{_PREFIX}*") if fcntl is not None else ():
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or already removed
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                get_logger().info("removed %s, left by a process that has ended", directory)
        except OSError:  # its process is alive
            continue
        finally:
            os.close(descriptor)
