"""Digests of a prepared corpus's files. A token file has one digest per shard, to locate damage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bmforge.data.prepare.shards import Shard

__all__ = [
    "OutputFile",
    "OutputPart",
    "digest_part",
    "output_from_record",
    "output_to_record",
    "read_outputs",
    "name_shard",
]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class OutputPart:
    """Part of an output file that one shard wrote: end offset in bytes, digest, input files."""

    shard: int
    end: int
    digest: str
    inputs: str


@dataclass(frozen=True)
class OutputFile:
    """One output file: relative path, size, and BLAKE2b digest.

    Attributes:
        parts: byte range that each shard wrote to a token file; empty for other files.
    """

    path: str
    size_bytes: int
    digest: str
    parts: tuple[OutputPart, ...] = ()


def output_to_record(output: OutputFile) -> dict[str, Any]:
    """Convert an output file to a dict for TOML."""
    record = asdict(output)
    record["parts"] = list(record["parts"])
    if not output.parts:
        del record["parts"]
    return record


def output_from_record(record: Mapping[str, Any]) -> OutputFile:
    """Build an output file from a dict that `output_to_record` returned."""
    parts = tuple(OutputPart(**part) for part in record.get("parts", ()))
    return OutputFile(record["path"], record["size_bytes"], record["digest"], parts)


def read_outputs(
    folder: Path, cuts: Mapping[str, Sequence[tuple[int, int, str]]]
) -> list[OutputFile]:
    """Return size and digests of all files below `folder`, sorted by path.

    Args:
        cuts: dict from the path of a merged file to its parts: (shard index, end offset in bytes,
            names of the shard's inputs).
    """
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size_bytes = path.relative_to(folder).as_posix(), path.stat().st_size
        digest, begin, parts = blake2b(digest_size=16), 0, []
        for shard, end, inputs in cuts.get(name, ()):
            part = blake2b(digest_size=16)
            for chunk in _chunks(path, begin, end):
                digest.update(chunk)
                part.update(chunk)
            parts.append(OutputPart(shard, end, part.hexdigest(), inputs))
            begin = end
        for chunk in _chunks(path, begin, size_bytes):
            digest.update(chunk)
        files.append(OutputFile(name, size_bytes, digest.hexdigest(), tuple(parts)))
    return files


def digest_part(path: Path, begin: int, end: int) -> str:
    """Return the digest of a file's bytes from `begin` to `end`."""
    digest = blake2b(digest_size=16)
    for chunk in _chunks(path, begin, end):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (chunk := file.read(min(_CHUNK_BYTES, end - begin))):
            begin += len(chunk)
            yield chunk


def name_shard(shard: Shard) -> str:
    """Describe the input files of a shard for messages."""
    first = shard.ranges[0]
    part = "" if first.end < 0 else f" from line {first.line}"
    more = f" and {len(shard.ranges) - 1} more" if len(shard.ranges) > 1 else ""
    return f"{first.path}{part}{more}"
