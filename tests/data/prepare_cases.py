"""What tests of `prepare` compare: the files it has written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare.record import PrepareReport


def written(out: Path) -> dict[str, bytes]:
    """Return what was written but the record, whose settings tell how it was done."""
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "prepared.toml"]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


def prepare_plainly(
    corpus: Path, out: Path, config: PrepareConfig
) -> tuple[PrepareReport, dict[str, bytes]]:
    """Return what one shard in one process makes, and its report."""
    report = prepare(corpus, out, replace(config, shard_bytes=1 << 30, workers=0))
    return report, written(out)
