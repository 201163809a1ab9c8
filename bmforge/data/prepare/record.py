"""Record of a prepared corpus, ``prepared.toml``: settings, inputs and counts."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from bmforge.config import config_from_dict, config_to_dict
from bmforge.data.prepare.funnel import Funnel
from bmforge.data.prepare.outputs import OutputFile, output_from_record, output_to_record
from bmforge.data.prepare.shards import InputFile
from bmforge.data.prepare.summary import Summary
from bmforge.data.prepare.tokenize import EncodeCount
from bmforge.data.sources.record import show_name
from bmforge.errors import DataError
from bmforge.prepare_settings import PrepareConfig

__all__ = [
    "RECORD_NAME",
    "InputFile",
    "PrepareConfig",
    "PrepareReport",
    "read_record",
    "write_record",
]

RECORD_NAME = "prepared.toml"
_FORMAT = 2
_FORMATS = (1, _FORMAT)  # format 1 has no funnel and no steps
_OF_THE_WORK = ("out_dir", "reused", "config", "steps", "outputs")
_TABLES = ("train", "validation", "funnel", "summary")
_NORMALISE_ONLY = ["normalise 1"]
_RENAMED_KEYS = {"tidy": "text_repairs"}  # names in earlier versions -> current names


@dataclass(frozen=True)
class PrepareReport:
    """Report of a prepared corpus.

    Attributes:
        documents: number of kept documents; a document cut by the split is in both splits.
        duplicates, empty: number of documents dropped as exact duplicates, and as empty.
        skipped: number of bad lines and files that were skipped (`skip_bad`).
        vocab_size: vocabulary size of the trained tokenizer.
        eos_id: id of the token after each document: ``<|endoftext|>``, or else the tokenizer's EOS.
        train, validation: documents, bytes of UTF-8 text, and tokens per split.
        funnel: documents read, kept, and dropped per rule; None for a corpus of an older format.
        steps: name and version of each step that was applied.
        summary: composition of the corpus.
        outputs: the files that were written.
        reused: True if the finished corpus existed already.
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
    funnel: Funnel | None = None
    steps: tuple[str, ...] = ()
    summary: Summary | None = None
    outputs: tuple[OutputFile, ...] = ()
    reused: bool = False

    @property
    def held_out_ratio(self) -> float:
        """Fraction of the text, in bytes, that is held out for validation."""
        return self.validation.text_bytes / (self.train.text_bytes + self.validation.text_bytes)

    @property
    def train_prefix(self) -> Path:
        """Path prefix of the training store."""
        return self.out_dir / "train" / "tokens"

    @property
    def validation_prefix(self) -> Path | None:
        """Path prefix of the validation store; None if no document was held out."""
        held_out = self.validation.documents > 0
        return self.out_dir / "validation" / "tokens" if held_out else None

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer."""
        return self.out_dir / "tokenizer"


def write_record(path: Path, report: PrepareReport, inputs: Sequence[InputFile]) -> None:
    """Write a report and the list of input files as TOML."""
    counts = {f.name: getattr(report, f.name) for f in fields(report)}
    for name in (*_OF_THE_WORK, *_TABLES):
        del counts[name]
    assert report.funnel is not None
    assert report.summary is not None
    record = {
        "format": _FORMAT,
        "steps": list(report.steps),
        "counts": counts,
        "settings": config_to_dict(report.config),
        "train": asdict(report.train),
        "validation": asdict(report.validation),
        "funnel": report.funnel.to_record(),
        "summary": report.summary.to_record(),
        "outputs": [output_to_record(output) for output in report.outputs],
        "inputs": [asdict(entry) for entry in inputs],
    }
    path.write_bytes(tomli_w.dumps(_printable(record)).encode())


def _printable(value: Any) -> Any:
    """Return a nested dict or list in which undecodable bytes of file names are escaped."""
    if isinstance(value, str):
        return show_name(value)
    if isinstance(value, dict):
        return {show_name(name): _printable(inner) for name, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_record(out_dir: Path) -> tuple[PrepareReport, list[InputFile]]:
    """Read the record of a prepared corpus.

    Raises:
        DataError: the record does not parse, or lacks an entry.
    """
    path = out_dir / RECORD_NAME
    try:
        record = _rename_old_keys(tomllib.loads(path.read_text("utf-8")))
        if record["format"] not in _FORMATS:
            raise ValueError(f"format {record['format']} is not one of the formats {_FORMATS}")
        report = PrepareReport(
            out_dir=out_dir,
            config=config_from_dict(PrepareConfig, record["settings"], "settings."),
            train=EncodeCount(**record["train"]),
            validation=EncodeCount(**record["validation"]),
            funnel=Funnel.from_record(record["funnel"]) if "funnel" in record else None,
            steps=tuple(map(_rename_old_step, record.get("steps", _NORMALISE_ONLY))),
            summary=Summary.from_record(record["summary"]) if "summary" in record else None,
            outputs=tuple(map(output_from_record, record.get("outputs", ()))),
            reused=True,
            **record["counts"],
        )
        return report, [InputFile(**entry) for entry in record["inputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} is not a valid record of a prepared corpus ({error}). Prepare the "
            "corpus again with overwrite=True (--overwrite), or into another directory."
        ) from error


def _rename_old_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of an earlier version with the current names of its keys."""
    return {
        _RENAMED_KEYS.get(key, key.replace("licence", "license")): _rename_old_keys(value)
        if key in ("settings", "clean", "filter", "summary")
        else value
        for key, value in record.items()
    }


def _rename_old_step(step: str) -> str:
    """Return the name and version of a step under the current name of the text repairs."""
    if "tidy=" not in step or "TidyText(" not in step:
        return step
    return step.replace("tidy", "text_repairs").replace("TidyText", "RepairText")
