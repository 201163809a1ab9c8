"""Disk cache of step traces.

A trace depends on the model, the setting, and the traced code. A hash of all three is the file
name; the file also contains this key and a hash of its contents. A file that does not match is
ignored, and the trace is computed and written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

import bmforge
from bmforge.files import replace_file
from bmforge.logging import get_logger
from bmforge.parallel.planner.trace import Mark, Setting, StepTrace
from bmforge.parallel.planner.workload import Workload

__all__ = ["TraceStore", "default_directory"]

# Version of the file format.
_VERSION = 1
# Subpackages whose code a trace runs.
_TRACED = ("nn", "memory", "models", "parallel")
# Maximum number of cached traces, of some 20 KB each; the oldest are deleted first.
_MOST_FILES = 2000


def default_directory() -> Path:
    """Return the default trace cache directory: `bmforge/plan` in the user's cache directory.

    The user's cache directory is `$XDG_CACHE_HOME`, or ``~/.cache``.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bmforge" / "plan"


class TraceStore:
    """Directory of cached traces; created by the first write if missing.

    Args:
        directory: directory that contains only traces.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.is_writable = directory, True

    def read(self, workload: Workload, setting: Setting) -> StepTrace | None:
        """Return the cached trace of a setting; None if no valid trace is cached."""
        if not workload.key:
            return None
        key = _key(workload, setting)
        try:
            content = json.loads(self._path(key).read_bytes())
            if content["key"] != key or content["hash"] != _hash(content["trace"]):
                return None
            return _to_trace(content["trace"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, workload: Workload, setting: Setting, trace: StepTrace) -> None:
        """Write a trace to the cache; the first failure to write is logged and disables writing."""
        if not workload.key or not self.is_writable:
            return
        key, plain = _key(workload, setting), _to_plain(trace)
        content = json.dumps({"key": key, "hash": _hash(plain), "trace": plain})
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            replace_file(self._path(key), content)
            self._drop_oldest()
        except OSError as error:
            self.is_writable = False
            get_logger().warning("the planner cannot write its trace cache: %s", error)

    def _path(self, key: dict[str, Any]) -> Path:
        return self.directory / f"{_hash(key)}.json"

    def _drop_oldest(self) -> None:
        files = list(self.directory.glob("*.json"))
        if len(files) > _MOST_FILES:
            files.sort(key=lambda file: file.stat().st_mtime)
            for file in files[: len(files) - _MOST_FILES]:
                file.unlink(missing_ok=True)


def _key(workload: Workload, setting: Setting) -> dict[str, Any]:
    key = {
        "version": _VERSION,
        "torch": torch.__version__,
        "code": _code(),
        "threads": torch.get_num_threads() if setting.copies else 0,
        "workload": workload.key,
        "setting": asdict(setting),
    }
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def _code() -> str:
    """Return a hash of the source code on which traces depend."""
    root = Path(bmforge.__file__).parent
    digest = hashlib.sha256()
    for room in _TRACED:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _to_plain(trace: StepTrace) -> dict[str, Any]:
    """Convert a trace to JSON data; `asdict` would copy each of about ten thousand numbers."""
    others = [(count, _to_plain(other)) for count, other in trace.others]
    return {**vars(trace), "marks": [vars(mark) for mark in trace.marks], "others": others}


def _to_trace(plain: dict[str, Any]) -> StepTrace:
    """Build a trace from its JSON data.

    Raises:
        ValueError, TypeError, KeyError: the data are not a trace.
    """
    return StepTrace(
        events=tuple((int(size), int(part), int(end)) for size, part, end in plain["events"]),
        marks=tuple(Mark(**mark) for mark in plain["marks"]),
        static=int(plain["static"]),
        block_static=_numbers(plain["block_static"]),
        ends_static=_pair(plain["ends_static"]),
        trained=int(plain["trained"]),
        block_trained=_numbers(plain["block_trained"]),
        ends_trained=_pair(plain["ends_trained"]),
        micro_batches=int(plain["micro_batches"]),
        has_gradients=bool(plain["has_gradients"]),
        flops=float(plain["flops"]),
        traffic_bytes=float(plain["traffic_bytes"]),
        parameters=_numbers(plain["parameters"]),
        carry_bytes=int(plain["carry_bytes"]),
        others=tuple((int(count), _to_trace(other)) for count, other in plain["others"]),
    )


def _pair(values: Any) -> tuple[int, int]:
    first, last = values
    return int(first), int(last)


def _numbers(values: dict[str, Any]) -> dict[str, int]:
    return {str(key): int(value) for key, value in values.items()}
