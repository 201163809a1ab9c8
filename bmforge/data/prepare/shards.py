"""Divides the input files into shards by size; the same files always give the same shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from bmforge.data.clean.normalize import text_digest
from bmforge.data.prepare.journal import make_key
from bmforge.data.sources.file_ranges import LineSplitter, Parts, find_parts, split_kind
from bmforge.data.sources.files import advise_skipping, python_topics
from bmforge.errors import ConfigError, DataError
from bmforge.files import replace_file
from bmforge.logging import track

__all__ = ["TOPICS", "InputFile", "FileRange", "ShardPlan", "Shard", "plan_shards"]

TOPICS = "pydoc_data.topics"
_PLAN_NAME = "plan.json"
_CHUNK_BYTES = 1 << 20
_PACKED_RATIO = 8  # assumed compression ratio, to decide whether a file may need splitting


@dataclass(frozen=True)
class InputFile:
    """One input file: path, size, modification time, and BLAKE2b digest ("" if unreadable)."""

    path: str
    size_bytes: int
    modified_ns: int
    digest: str


@dataclass(frozen=True)
class FileRange:
    """Range of a file in bytes or rows, `begin` to `end` (-1: end of file).

    `line` is the number of its first line.
    """

    path: str
    begin: int = 0
    end: int = -1
    line: int = 1


@dataclass(frozen=True)
class Shard:
    """File ranges that one worker processes; `key` is the hash of their content."""

    number: int
    key: str
    size_bytes: int
    ranges: tuple[FileRange, ...]


@dataclass(frozen=True)
class ShardPlan:
    """Input files of a `prepare` run, and the shards into which they are divided."""

    inputs: list[InputFile]
    shards: list[Shard]


@dataclass(frozen=True)
class _Cut:
    """An input file, and the offsets at which it can be split (see `Parts`)."""

    file: InputFile
    at: tuple[tuple[int, int], ...] = ()
    units: int = 0
    size_bytes: int = 0


def plan_shards(
    files: Sequence[Path] | None,
    shard_bytes: int,
    work: Path | None = None,
    *,
    recorded: Sequence[InputFile] = (),
    skip_bad: bool = False,
) -> ShardPlan:
    """Divide the input files into shards.

    A large file of lines, compressed or not, is split at line ends, Parquet between row groups,
    archives between members; small files are grouped. A file whose size and modification time match
    an earlier plan in `work` is not read again.

    Args:
        files: input files; None for the demo corpus (`python_topics`).
        shard_bytes: approximate input bytes per shard.
        work: folder in which the plan is saved; None to not save it.
        recorded: inputs with known digests, which are not read again.
        skip_bad: True to plan a file that cannot be opened as one damaged entry.

    Raises:
        ConfigError: `shard_bytes` is below 1.
        DataError: an input cannot be read, and `skip_bad` is False.
    """
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes} must be at least 1.")
    if files is None:
        text = "\0".join(f"{document.source}\0{document.text}" for document in python_topics())
        topics = InputFile(TOPICS, len(text.encode()), 0, text_digest(text).hex())
        return ShardPlan([topics], _group([(_Cut(topics), TOPICS)], shard_bytes))
    earlier = [*_read_plan(work, shard_bytes), *map(_Cut, recorded)]
    # Changed permissions do not change the modification time.
    seen = {_identity(cut.file): cut for cut in earlier if cut.file.digest}
    looked = (_look_at(path, shard_bytes, seen, skip_bad) for path in track(files, "check inputs"))
    cuts = list(looked)
    if work is not None:
        content = {"shard_bytes": shard_bytes, "cuts": [asdict(cut) for cut in cuts]}
        work.mkdir(parents=True, exist_ok=True)
        replace_file(work / _PLAN_NAME, json.dumps(content))
    named = list(zip(cuts, map(str, files), strict=True))
    return ShardPlan([cut.file for cut in cuts], _group(named, shard_bytes))


def _identity(file: InputFile) -> tuple[str, int, int]:
    return file.path, file.size_bytes, file.modified_ns


def _read_plan(work: Path | None, shard_bytes: int) -> list[_Cut]:
    """Load the input files of an earlier plan; empty if it is damaged or has another shard size."""
    if work is None or not (work / _PLAN_NAME).exists():
        return []
    try:
        content = json.loads((work / _PLAN_NAME).read_bytes())
        if content["shard_bytes"] != shard_bytes:
            return []
        return [
            _Cut(
                InputFile(**entry["file"]),
                tuple((at, line) for at, line in entry["at"]),
                entry["units"],
                entry["size_bytes"],
            )
            for entry in content["cuts"]
        ]
    except (ValueError, KeyError, TypeError):
        return []


def _look_at(
    path: Path, shard_bytes: int, seen: dict[tuple[str, int, int], _Cut], skip_bad: bool
) -> _Cut:
    status = path.stat()
    identity = (str(path.absolute()), status.st_size, status.st_mtime_ns)
    if identity in seen:
        return seen[identity]
    try:
        how, cutter = split_kind(path), LineSplitter(shard_bytes)
        digest = _digest(path, cutter.feed if how == "lines" else None)
        parts = Parts(cutter.split_offsets(), status.st_size, status.st_size)
        if how in ("packed", "rows", "members") and status.st_size > shard_bytes // _PACKED_RATIO:
            parts = find_parts(path, how, shard_bytes)
    except OSError as error:
        if skip_bad:  # the reader of the shard counts and names the file
            return _Cut(InputFile(*identity, ""))
        raise advise_skipping(
            DataError(f"file {str(path)!r} cannot be read ({error}). Check its permissions.")
        ) from error
    return _Cut(InputFile(*identity, digest), *parts)


def _digest(path: Path, feed: Callable[[bytes], None] | None) -> str:
    digest = blake2b()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if feed:
                feed(chunk)
    return digest.hexdigest()[:32]


def _group(cuts: Sequence[tuple[_Cut, str]], shard_bytes: int) -> list[Shard]:
    """Group file ranges, in order, into shards of about `shard_bytes`."""
    shards: list[Shard] = []
    ranges: list[FileRange] = []
    key_parts: list[object] = []
    size_bytes = 0

    def close() -> None:
        nonlocal ranges, key_parts, size_bytes
        if ranges:
            shards.append(Shard(len(shards), make_key(key_parts), size_bytes, tuple(ranges)))
        ranges, key_parts, size_bytes = [], [], 0

    for cut, name in cuts:
        totals = (cut.units, cut.size_bytes) if cut.at else (cut.file.size_bytes,) * 2
        for (begin, line), (end, _) in pairwise([(0, 1), *cut.at, (totals[0], 0)]):
            part_bytes = (end - begin) * totals[1] // max(totals[0], 1)
            if size_bytes + part_bytes > shard_bytes:
                close()
            ranges.append(FileRange(name, begin, end, line) if cut.at else FileRange(name))
            key_parts.append([name, cut.file.digest, begin, end])
            size_bytes += part_bytes
    close()
    return shards
