"""Checks of the output directory of `prepare` before any work, and the names of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bmforge.config import ungrouped_values
from bmforge.data.prepare.corpus_index import INDEX
from bmforge.data.prepare.disk_space import check_disk_space
from bmforge.data.prepare.documents import DocumentStage
from bmforge.data.prepare.encode import SIDES
from bmforge.data.prepare.join import STORE_NAME
from bmforge.data.prepare.record import RECORD_NAME, PrepareConfig, PrepareReport, read_record
from bmforge.data.prepare.shards import InputFile, plan_shards
from bmforge.data.store.sharded import open_store
from bmforge.errors import ConfigError, DataError
from bmforge.files import check_place

__all__ = [
    "DROPPED",
    "PATTERNS",
    "TOKENIZER",
    "WORK_NAME",
    "check_free",
    "check_output",
    "step_names",
]

WORK_NAME = "preparing.tmp"
DROPPED = "dropped.jsonl"
TOKENIZER = "tokenizer"  # folder of the stores, which depend on the tokenizer
_STORES = tuple(f"{side}/{STORE_NAME}.*" for side in SIDES)
PATTERNS = (f"{TOKENIZER}/*", f"{INDEX}/*.*", f"{INDEX}/*/*", *_STORES)


def check_output(
    files: list[Path] | None,
    out: Path,
    config: PrepareConfig,
    steps: Sequence[DocumentStage],
    overwrite: bool,
) -> PrepareReport | None:
    """Check the output directory; return the report if it already contains the corpus."""
    if overwrite or not (out / RECORD_NAME).exists():
        check_place(out, "out_dir")
        check_disk_space(files, out, out / WORK_NAME)
        return None
    report, recorded = read_record(out)
    shard_bytes, skip_bad = config.execution.shard_bytes, config.read.skip_bad
    now = plan_shards(files, shard_bytes, recorded=recorded, skip_bad=skip_bad).inputs
    _check_same(report, recorded, config, now, steps)
    return report


def _check_same(
    report: PrepareReport,
    recorded: list[InputFile],
    config: PrepareConfig,
    now: list[InputFile],
    steps: Sequence[DocumentStage],
) -> None:
    """Check that a finished corpus is the one that was requested, and that its stores are intact.

    Raises:
        ConfigError: the corpus was prepared with settings, steps or inputs that differ from the
            requested ones.
        DataError: a token store does not have the recorded number of tokens.
    """
    was, requested = (
        ungrouped_values(replace(c, execution=config.execution)) for c in (report.config, config)
    )
    changes = [
        f"{k}={was[k]!r} in that corpus, {v!r} now" for k, v in requested.items() if was[k] != v
    ]
    if report.steps != step_names(steps):
        changes.append(f"the steps are {report.steps} in that corpus, {step_names(steps)} now")
    if [f.digest for f in recorded] != [f.digest for f in now]:
        recorded_names, current_names = (
            [Path(f.path).name for f in files][:4] for files in (recorded, now)
        )
        changes.append(
            f"other input text ({len(recorded)} files {recorded_names}, now {len(now)} "
            f"{current_names})"
        )
    if changes:
        raise ConfigError(
            f"out_dir={str(report.out_dir)!r} contains a corpus that was prepared with "
            f"other options: {'; '.join(changes)}. Choose another directory, or start "
            "over with overwrite=True (--overwrite)."
        )
    splits = ((report.train_prefix, report.train), (report.validation_prefix, report.validation))
    for prefix, count in splits:
        if prefix is not None and open_store(prefix).num_tokens != count.tokens:
            raise DataError(
                f"token store {str(prefix)!r} has {open_store(prefix).num_tokens} tokens, but "
                f"{RECORD_NAME} lists {count.tokens}. Prepare the corpus again with "
                "overwrite=True (--overwrite)."
            )


def check_free(out: Path) -> None:
    """Raise `ConfigError` if the directory has files other than those of an interrupted run."""
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    own_names = {WORK_NAME, TOKENIZER, DROPPED, INDEX, *SIDES}
    if WORK_NAME in names and own_names.issuperset(names):
        return  # an interrupted run
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ConfigError(
            f"out_dir={str(out)!r} contains {', '.join(names[:4])}{more} but no {RECORD_NAME}. "
            "Choose a new or empty directory, or set overwrite=True "
            f"(--overwrite), which replaces {', '.join(PATTERNS)} and keeps other files."
        )


def step_names(steps: Sequence[DocumentStage]) -> tuple[str, ...]:
    """Return the name and version of each step, as recorded in ``prepared.toml``."""
    return tuple(f"{step.name} {step.version}" for step in steps)
