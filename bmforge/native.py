"""Kernels of our own: C++ behind a C interface, compiled on first use into a folder of the user's.

Nothing is compiled at install. What was compiled is kept per source, flags, compiler and processor,
in a folder that must be the user's own and writable by nobody else: whoever could write there could
run code in this process. Where there is no compiler, callers go on with torch, and it is said once.
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

# -ffp-contract=off: a product and a sum are two roundings on every instruction set.
_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -fPIC"
_COMPILE_LIMIT_S = 300


class _RefusedError(Exception):
    """Nothing is loaded, for the reason that it states."""


def load_kernels_of(
    title: str, folder: Path, parts: Sequence[str], flags: str
) -> ctypes.CDLL | None:
    """Compile sources that stand one after the other in a folder, as `load_native` does.

    Args:
        title: of the library.
        folder: where the sources lie.
        parts: their names, in order.
        flags: of the compiler.
    """
    return load_native(title, "".join((folder / part).read_text("utf-8") for part in parts), flags)


def load_native(name: str, source: str, flags: str = "-march=native") -> ctypes.CDLL | None:
    """Return what a C++ source is compiled to, compiling it if that has not been done before.

    It is kept in ``~/.cache/bmforge/native`` (or below ``$XDG_CACHE_HOME``); ``$CXX`` names another
    compiler than ``c++`` or ``g++``. Two processes that come at once compile it once. OpenMP's
    threads are torch's own where torch brings the same runtime.

    Args:
        name: of the file, and in messages.
        source: C++17 with ``extern "C"`` functions.
        flags: of the compiler, besides those of every kernel: no contraction, OpenMP, -O3.

    Returns:
        the library; None where there is no compiler, it fails, or the folder is not safe, which is
        said once.
    """
    compiler = _find_compiler()
    if compiler is None:
        say_once(
            "no C++ compiler here: torch's operations take the place of bmforge's kernels, which "
            "is slower. Install g++, or name a compiler in $CXX."
        )
        return None
    try:
        return ctypes.CDLL(str(_compile(name, source, f"{_FLAGS} {flags}", compiler)))
    except (OSError, subprocess.SubprocessError, _RefusedError) as error:
        say_once(f"the kernel {name!r} is not used, torch's operations are: {_explain(error)}")
        return None


def processor_features() -> frozenset[str]:
    """Return what the processor can do, in the words of Linux; nothing where it does not say."""
    return frozenset(processor_field("flags", "Features").split())


def processor_field(*names: str) -> str:
    """Return what Linux says of the first core under one of these names; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() in names), "")


@cache
def say_once(message: str) -> None:
    """Warn of something, the first time in this process only."""
    get_logger().warning("%s", message)


def _explain(error: Exception) -> str:
    written = getattr(error, "stderr", None)  # a failed compiler's words tell more than its status
    lines = written.decode(errors="replace").strip().splitlines() if written else []
    return next((line for line in lines if "error" in line), lines[-1]) if lines else str(error)


def _find_compiler() -> list[str] | None:
    """Return the command that compiles."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    found = shutil.which("c++") or shutil.which("g++")
    return [found] if found else None


@cache
def _processor() -> str:
    return processor_field("flags", "Features") or platform.processor()


def _identify(compiler: list[str]) -> str:
    """Return what changes when another compiler takes this one's place."""
    found = [shlex.join(compiler)]
    for place in (shutil.which(word) for word in compiler):
        if place is not None:
            known = os.stat(place)
            found.append(f"{os.path.realpath(place)} {known.st_size} {known.st_mtime_ns}")
    return " ".join(found)


def _compile(name: str, source: str, flags: str, compiler: list[str]) -> Path:
    """Return the place of the library, in a folder that is safe."""
    parts = [source, flags, _identify(compiler), platform.machine(), _processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = _own_folder()
    library = folder / f"{name}-{key[:20]}.so"
    if library.exists():
        _check_owner(library)
        return library
    with _locked(folder), tempfile.TemporaryDirectory(dir=folder) as place:
        if library.exists():  # another process was first
            _check_owner(library)
            return library
        text, built = Path(place) / f"{name}.cpp", Path(place) / f"{name}.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler, *flags.split(), "-shared", str(text), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
        built.chmod(0o700)
        os.replace(built, library)
    return library


def _own_folder() -> Path:
    """Return the folder of compiled kernels, made if it is not there.

    Raises:
        _RefusedError: somebody else could put something there.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache").absolute() / "bmforge" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    for above in folder.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _RefusedError(
                f"{str(above)!r} is writable by everybody, so that anyone could put another kernel "
                f"there. Run `chmod o-w {above}`, or name another folder in $XDG_CACHE_HOME."
            )
    return folder


def _check_owner(path: Path) -> None:
    """Raise where a file or folder is not the user's own, or others may write to it."""
    if not hasattr(os, "getuid"):  # a system without such owners
        return
    known = path.lstat()
    whose = "" if known.st_uid == os.getuid() else f"belongs to user {known.st_uid}, not to you"
    if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        whose = "is writable by others"
    if stat.S_ISLNK(known.st_mode):
        whose = "is a link to another place"
    if whose:
        raise _RefusedError(
            f"{str(path)!r} {whose}, so nothing is loaded from it. Remove it, or make it yours "
            f"alone: `chmod go-w {path}`."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let other processes of this user wait; where files have no locks, each does its own work."""
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            get_logger().debug("no lock in %s: %s", folder, error)
        yield
