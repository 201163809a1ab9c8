"""The record of a finished preparation, ``prepared.toml``: settings, inputs and counts."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import file_digest
from pathlib import Path
from typing import Any

import tomli_w

from bmforge.data.clean.normalise import text_digest
from bmforge.data.prepare.tokenise import EncodeCount
from bmforge.data.sources.files import python_topics
from bmforge.errors import DataError
from bmforge.logging import track
from bmforge.settings import PrepareConfig

__all__ = [
    "RECORD_NAME",
    "InputFile",
    "PrepareConfig",
    "PrepareReport",
    "describe_inputs",
    "read_record",
    "write_record",
]

RECORD_NAME = "prepared.toml"
_TOPICS = "pydoc_data.topics"
_FORMAT = 1


@dataclass(frozen=True)
class InputFile:
    """One input as it was: path, size, time of change, BLAKE2b digest of its bytes."""

    path: str
    size_bytes: int
    modified_ns: int
    digest: str


@dataclass(frozen=True)
class PrepareReport:
    """What a preparation made.

    Attributes:
        documents: kept documents; one that was cut is in both splits.
        duplicates, empty: documents dropped as exact copies, or without text.
        skipped: bad lines and files left out (`skip_bad`).
        vocab_size: token ids of the tokenizer as trained.
        eos_id: the token behind each document: ``<|endoftext|>``, or else the tokenizer's end.
        train, validation: documents, bytes of UTF-8 text, and tokens per split.
        reused: the finished work was there already.
    """

    out_dir: Path
    config: PrepareConfig
    documents: int
    duplicates: int
    empty: int
    skipped: int
    vocab_size: int
    eos_id: int
    train: EncodeCount
    validation: EncodeCount
    reused: bool = False

    @property
    def held_out_ratio(self) -> float:
        """Share of the text's bytes that is held out."""
        return self.validation.text_bytes / (self.train.text_bytes + self.validation.text_bytes)

    @property
    def train_prefix(self) -> Path:
        """Prefix of the training store."""
        return self.out_dir / "train" / "tokens"

    @property
    def validation_prefix(self) -> Path | None:
        """Prefix of the validation store, None where no document was held out."""
        held_out = self.validation.documents > 0
        return self.out_dir / "validation" / "tokens" if held_out else None

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer."""
        return self.out_dir / "tokenizer"


def describe_inputs(
    files: Sequence[Path] | None, known: Sequence[InputFile] = ()
) -> list[InputFile]:
    """Return what the inputs are now; None stands for Python's help topics.

    A file whose path, size and time are among `known` is not read again.
    """
    if files is None:
        text = "\0".join(f"{document.source}\0{document.text}" for document in python_topics())
        return [InputFile(_TOPICS, len(text.encode()), 0, text_digest(text).hex())]
    digests = {(f.path, f.size_bytes, f.modified_ns): f.digest for f in known}
    return [_describe(path, digests) for path in track(files, "check inputs")]


def _describe(path: Path, digests: dict[tuple[str, int, int], str]) -> InputFile:
    try:
        status = path.stat()
        key = (str(path.absolute()), status.st_size, status.st_mtime_ns)
        digest = digests.get(key)
        if digest is None:
            with path.open("rb") as file:
                digest = file_digest(file, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise DataError(f"file {str(path)!r} cannot be read ({error}): check it") from error
    return InputFile(*key, digest)


def write_record(path: Path, report: PrepareReport, inputs: Sequence[InputFile]) -> None:
    """Write `report` and `inputs` as TOML."""
    counts = {f.name: getattr(report, f.name) for f in fields(report)}
    for name in ("out_dir", "reused", "config", "train", "validation"):
        del counts[name]
    record = {
        "format": _FORMAT,
        "counts": counts,
        "settings": asdict(report.config),
        "train": asdict(report.train),
        "validation": asdict(report.validation),
        "inputs": [asdict(entry) for entry in inputs],
    }
    path.write_bytes(tomli_w.dumps(record).encode())


def read_record(out_dir: Path) -> tuple[PrepareReport, list[InputFile]]:
    """Read the record of a finished preparation.

    Raises:
        DataError: it does not parse, or lacks an entry.
    """
    path = out_dir / RECORD_NAME
    try:
        record: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}, known is {_FORMAT}")
        report = PrepareReport(
            out_dir=out_dir,
            config=PrepareConfig(**record["settings"]),
            train=EncodeCount(**record["train"]),
            validation=EncodeCount(**record["validation"]),
            reused=True,
            **record["counts"],
        )
        return report, [InputFile(**entry) for entry in record["inputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} cannot be read as the record of a preparation ({error}): prepare again "
            "with overwrite=True (--overwrite), or into another directory"
        ) from error
