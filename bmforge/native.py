"""Native kernels: C++ with a C interface, compiled on first use into the user's cache.

Nothing is compiled at installation. The cache key is the source, the flags, the compiler and the
processor. The cache directory must belong to the user and be writable by no other user, because
anyone who can write there can run code in this process. Without a compiler, callers use torch's
operations, and one warning is logged.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from bmforge.logging import get_logger

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["load_kernels_of", "load_native", "processor_features", "processor_field", "say_once"]

# -ffp-contract=off: product and sum are rounded separately, so that results are bit-identical on
# every instruction set.
_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -fPIC"
_COMPILE_LIMIT_S = 300


class _RefusedError(Exception):
    """Raised if a library is not loaded; the message states the reason."""


def load_kernels_of(
    title: str, folder: Path, parts: Sequence[str], flags: str
) -> ctypes.CDLL | None:
    """Concatenate source files and load the library compiled from them, as `load_native` does.

    Args:
        title: name of the library.
        folder: directory of the sources.
        parts: file names, in order of concatenation.
        flags: compiler flags.
    """
    return load_native(title, "".join((folder / part).read_text("utf-8") for part in parts), flags)


def load_native(name: str, source: str, flags: str = "-march=native") -> ctypes.CDLL | None:
    """Load the library compiled from a C++ source, compiling it if it is not cached.

    The cache is ``~/.cache/bmforge/native`` (or below ``$XDG_CACHE_HOME``); ``$CXX`` selects a
    compiler other than ``c++`` or ``g++``. Concurrent processes compile it once. OpenMP threads are
    shared with torch if torch uses the same runtime.

    Args:
        name: name of the file, used in messages.
        source: C++17 with ``extern "C"`` functions.
        flags: compiler flags in addition to those of all kernels (no contraction, OpenMP, -O3).

    Returns:
        the library; None, with one warning, if there is no compiler, compilation fails, or the
        cache directory is not safe.
    """
    compiler = _find_compiler()
    if compiler is None:
        say_once(
            "no C++ compiler is installed, so torch's slower operations replace bmforge's "
            "kernels. Install g++, or set $CXX."
        )
        return None
    try:
        return ctypes.CDLL(str(_compile(name, source, f"{_FLAGS} {flags}", compiler)))
    except (OSError, subprocess.SubprocessError, _RefusedError) as error:
        say_once(f"the kernel {name!r} is replaced by torch's operations: {_explain(error)}")
        return None


def processor_features() -> frozenset[str]:
    """Return the processor's feature flags as Linux names them; empty on other systems."""
    return frozenset(processor_field("flags", "Features").split())


def processor_field(*names: str) -> str:
    """Return a field of the first core in /proc/cpuinfo; "" if there is no such field.

    Args:
        names: possible names of the field, which depend on the processor's architecture.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() in names), "")


@cache
def say_once(message: str) -> None:
    """Log a warning, once per process for the same message."""
    get_logger().warning("%s", message)


def _explain(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)  # the compiler's message says more than its status
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    return next((line for line in lines if "error" in line), lines[-1]) if lines else str(error)


def _find_compiler() -> list[str] | None:
    """Return the compiler command, or None."""
    variable = os.environ.get("CXX")
    if variable:
        return shlex.split(variable)
    path = shutil.which("c++") or shutil.which("g++")
    return [path] if path else None


@cache
def _processor() -> str:
    return processor_field("flags", "Features") or platform.processor()


def _identify(compiler: list[str]) -> str:
    """Return a string that changes with the compiler: its path, size and modification time."""
    identity = [shlex.join(compiler)]
    for path in (shutil.which(word) for word in compiler):
        if path is not None:
            status = os.stat(path)
            identity.append(f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}")
    return " ".join(identity)


def _compile(name: str, source: str, flags: str, compiler: list[str]) -> Path:
    """Return the path of the library in the cache directory, compiling it if needed."""
    parts = [source, flags, _identify(compiler), platform.machine(), _processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = _own_folder()
    library = folder / f"{name}-{key[:20]}.so"
    if library.exists():
        _check_owner(library)
        return library
    with _locked(folder), tempfile.TemporaryDirectory(dir=folder) as build:
        if library.exists():  # compiled by another process meanwhile
            _check_owner(library)
            return library
        get_logger().info("compiling the kernels %r, once on this machine (up to a minute)", name)
        text, built = Path(build) / f"{name}.cpp", Path(build) / f"{name}.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler, *flags.split(), "-shared", str(text), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
        built.chmod(0o700)
        os.replace(built, library)
    return library


def _own_folder() -> Path:
    """Return the cache directory of compiled kernels; create it if needed.

    Raises:
        _RefusedError: another user could write to the directory.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache").absolute() / "bmforge" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    for above in folder.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _RefusedError(
                f"{str(above)!r} is writable by all users, who could replace a kernel there. "
                f"Run `chmod o-w {above}`, or set $XDG_CACHE_HOME to another directory."
            )
    return folder


def _check_owner(path: Path) -> None:
    """Raise `_RefusedError` unless a path belongs to the user and no other user can write to it."""
    if not hasattr(os, "getuid"):  # a system without POSIX owners
        return
    status = path.lstat()
    reason = "" if status.st_uid == os.getuid() else f"is owned by user {status.st_uid}, not by you"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "is writable by others"
    if stat.S_ISLNK(status.st_mode):
        reason = "is a symbolic link"
    if reason:
        raise _RefusedError(
            f"{str(path)!r} {reason}, so no kernel is loaded from it. Remove it, or restrict its "
            f"permissions: `chmod go-w {path}`."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context manager that locks a directory against other processes, where locks are supported."""
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            get_logger().debug("no lock in %s: %s", folder, error)
        yield
