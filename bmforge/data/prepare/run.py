"""Prepares a corpus: read, normalize, deduplicate, split, train BPE, encode, and record.

All work happens in ``OUT/preparing.tmp``, in shards and stages recorded in a journal. The complete
corpus is moved to its final location, with ``prepared.toml`` last, so a directory with that file is
finished. After a kill or an error, the next run resumes from the last complete shard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bmforge.data.clean.license import check_places
from bmforge.data.prepare.barriers import SORT_BYTES
from bmforge.data.prepare.corpus_index import open_corpus_indexes, write_corpus_index
from bmforge.data.prepare.disk_space import check_disk_space
from bmforge.data.prepare.documents import UNREADABLE, DocumentStage
from bmforge.data.prepare.encode import DUPLICATE
from bmforge.data.prepare.funnel import Amount, Dropped, Funnel
from bmforge.data.prepare.join import join_stores
from bmforge.data.prepare.journal import Journal
from bmforge.data.prepare.near import NEAR_DUPLICATE, dedup_config
from bmforge.data.prepare.output_checks import (
    DROPPED,
    PATTERNS,
    TOKENIZER,
    WORK_NAME,
    check_free,
    check_output,
    step_names,
)
from bmforge.data.prepare.outputs import read_outputs
from bmforge.data.prepare.record import (
    RECORD_NAME,
    PrepareConfig,
    PrepareReport,
    write_record,
)
from bmforge.data.prepare.shards import ShardPlan, plan_shards
from bmforge.data.prepare.spans import REPEATED, check_spans
from bmforge.data.prepare.split import check_fraction
from bmforge.data.prepare.stages import StageState, make_keys, run_stages, stage_states
from bmforge.data.prepare.steps import choose_steps
from bmforge.data.prepare.summary import Summary
from bmforge.data.prepare.tokenize import check_bpe, end_of_text_id, load_tokenizer
from bmforge.data.sources.encoding import check_encoding
from bmforge.data.sources.files import list_files
from bmforge.data.sources.standard_input import keep_standard_input
from bmforge.data.sources.unsupported_files import check_unread
from bmforge.errors import ConfigError
from bmforge.prepare_settings import BpeConfig
from bmforge.tokenizers import Tokenizer

__all__ = ["Paths", "plan_work", "prepare", "show_preparation", "work_dir"]

_FINISHED = "finished"  # subfolder of the work directory until the corpus is moved
_OLD_REPORT = "report.html"  # report of an earlier corpus
_LEAST_MEMORY_BYTES = 1 << 29
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def prepare(
    inputs: Paths | None,
    out_dir: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    steps: Sequence[DocumentStage] = (),
) -> PrepareReport:
    """Prepare a corpus in `out_dir`; if it already contains this corpus, return the report.

    Writes ``tokenizer/``, ``train/tokens.*``, ``validation/tokens.*``, ``prepared.toml``, and
    ``dropped.jsonl`` with samples of dropped documents. An interrupted run is resumed.

    Args:
        inputs: files or directories (`read_documents`), or ``-`` for standard input; None for the
            demo corpus (`python_topics`).
        out_dir: output directory.
        config: settings (default: `PrepareConfig()`).
        overwrite: True to replace the output of an earlier run.
        steps: additional steps, run after those of `config`.

    Raises:
        ConfigError: `out_dir` contains unrelated files, or a corpus that was prepared with
            different settings or inputs.
        DataError: an input is damaged, most input bytes are not read, or no text is left.
    """
    config = config or PrepareConfig()
    all_steps = choose_steps(config, steps)
    _check_settings(out_dir, config, overwrite)
    out = Path(out_dir)
    is_new = not out.exists()
    with keep_standard_input(inputs, out / WORK_NAME) as named:
        return _prepare(named, out, config, all_steps, overwrite, is_new)


def _prepare(
    inputs: Paths | None,
    out: Path,
    config: PrepareConfig,
    all_steps: tuple[DocumentStage, ...],
    overwrite: bool,
    is_new: bool,
) -> PrepareReport:
    files, work = _list_inputs(inputs, config), out / WORK_NAME
    finished = check_output(files, out, config, all_steps, overwrite)
    if finished is not None:
        _remove_finished_work(work, finished.config.execution.keep_stages)
        return finished
    tokenizer = _open_tokenizer(config)
    with Journal(work) as journal:
        try:
            plan = plan_shards(
                files, config.execution.shard_bytes, work, skip_bad=config.read.skip_bad
            )
            results = run_stages(plan, config, all_steps, tokenizer, journal)
            report = _finish(plan, results, config, all_steps, journal)
            write_record(work / _FINISHED / RECORD_NAME, report, plan.inputs)
        except BaseException:
            if journal.is_empty():  # nothing to resume
                shutil.rmtree(out if is_new else work, ignore_errors=True)
            raise
        _move_into_place(work / _FINISHED, out)
    if not config.execution.keep_stages:
        shutil.rmtree(work)
    return replace(report, out_dir=out)


def _remove_finished_work(work: Path, is_kept: bool) -> None:
    """Remove the work directory of a run that was killed after its corpus was complete."""
    if is_kept or not work.exists():
        return
    try:
        with Journal(work):
            pass
    except ConfigError:  # another process works in the directory
        return
    shutil.rmtree(work)


def show_preparation(
    inputs: Paths | None,
    out_dir: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    steps: Sequence[DocumentStage] = (),
    overwrite: bool = True,
) -> list[StageState]:
    """Return the progress of each stage that `prepare` would run; nothing is written.

    Raises:
        BmforgeError: as `prepare` with the same `overwrite`, before it begins.
    """
    config = config or PrepareConfig()
    all_steps = choose_steps(config, steps)
    _check_settings(out_dir, config, overwrite)
    files, work = _list_inputs(inputs, config), Path(out_dir) / WORK_NAME
    check_output(files, Path(out_dir), config, all_steps, overwrite)
    plan = plan_shards(files, config.execution.shard_bytes, skip_bad=config.read.skip_bad)
    keys = make_keys(plan, config, all_steps, _open_tokenizer(config))
    with Journal(work, for_reading=True) as journal:
        return stage_states(journal, keys)


def work_dir(out_dir: str | os.PathLike[str]) -> Path:
    """Return the work directory of a `prepare` run, which is removed when the run is finished."""
    return Path(out_dir) / WORK_NAME


def plan_work(
    inputs: Paths | None,
    out_dir: str | os.PathLike[str],
    config: PrepareConfig,
    steps: Sequence[DocumentStage] = (),
) -> tuple[ShardPlan, tuple[DocumentStage, ...], Tokenizer | None]:
    """Plan a `prepare` run; return the shard plan, all steps, and the configured tokenizer.

    The plan is also saved in the work directory.

    Raises:
        ConfigError: a setting is invalid.
        DataError: an input is bad.
    """
    all_steps = choose_steps(config, steps)
    _check_settings(out_dir, config)
    files = _list_inputs(inputs, config)
    work = work_dir(out_dir)
    check_disk_space(files, Path(out_dir), work)
    return (
        plan_shards(files, config.execution.shard_bytes, work, skip_bad=config.read.skip_bad),
        all_steps,
        _open_tokenizer(config),
    )


def _check_settings(
    out_dir: str | os.PathLike[str], config: PrepareConfig, overwrite: bool = True
) -> None:
    """Raise `ConfigError` for invalid settings before any input is read."""
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out_dir={str(out_dir)!r} is a file. Choose a directory.")
    if not overwrite and not (out / RECORD_NAME).exists():
        check_free(out)
    workers, memory_bytes = config.execution.workers, config.execution.worker_memory_bytes
    if workers < 0:
        raise ConfigError(f"workers={workers} must be at least 0.")
    if workers and memory_bytes < _LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"worker_memory_bytes={memory_bytes} must be at least {_LEAST_MEMORY_BYTES}, which a "
            "worker needs to start."
        )
    check_fraction(config.validation_fraction)
    check_encoding(config.read.encoding)
    open_corpus_indexes(config.duplicates.earlier, dedup_config(config.duplicates))
    check_spans(config.duplicates)
    if config.tokenizer and config.bpe != BpeConfig():
        raise ConfigError("bpe has no effect if tokenizer is set. Remove bpe or tokenizer.")
    if not config.tokenizer:
        check_bpe(config.vocab_size, config.bpe)


def _list_inputs(inputs: Paths | None, config: PrepareConfig) -> list[Path] | None:
    """Return the input files; check for unsupported formats and for wrong license paths."""
    unread: list[Path] = []
    files = None if inputs is None else list_files(inputs, unread)
    check_unread(files or (), unread, config.read.skip_unread)
    check_places(config.filter.license, files or ())
    return files


def _open_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    """Load the configured tokenizer, so that an unsuitable one fails before work begins."""
    if not config.tokenizer:
        return None
    tokenizer = load_tokenizer(config.tokenizer)
    end_of_text_id(tokenizer)
    return tokenizer


def _finish(
    plan: ShardPlan,
    results: dict[str, list[Any]],
    config: PrepareConfig,
    steps: Sequence[DocumentStage],
    journal: Journal,
) -> PrepareReport:
    """Combine the shards' results in a temporary directory, and return the report."""
    finished = journal.work / _FINISHED
    shutil.rmtree(finished, ignore_errors=True)
    shutil.copytree(journal.folder("tokenizer"), finished / TOKENIZER)
    tokenizer = load_tokenizer(finished / TOKENIZER)
    funnel, summary = _sum_up(results)
    counts, cuts = join_stores(
        plan, results["encode"], journal.folder("encode"), finished, config.files.join_stores
    )
    _join_dropped(results, config, journal, finished)
    if config.files.keep_index:
        _keep_index(results, config, journal, finished)
    by_rule = {rule: amount.documents for rule, amount in funnel.dropped.items()}
    return PrepareReport(
        out_dir=finished,
        config=config,
        documents=funnel.kept.documents,
        duplicates=by_rule.get(DUPLICATE, 0),
        empty=by_rule.get("empty", 0),
        skipped=by_rule.get(UNREADABLE, 0),
        vocab_size=tokenizer.vocab_size,
        eos_id=end_of_text_id(tokenizer),
        train=counts["train"],
        validation=counts["validation"],
        funnel=funnel,
        steps=step_names(steps),
        summary=summary.shortened(),
        outputs=tuple(read_outputs(finished, cuts)),
    )


def _sum_up(results: dict[str, list[Any]]) -> tuple[Funnel, Summary]:
    """Add up the per-step document counts and the summaries of all shards and stages."""
    funnel, summary = Funnel(), Summary()
    for result in results["documents"]:
        funnel.merge(Funnel.from_record(result["funnel"]))
        summary.merge(Summary(sources=result["sources"]))
    stages = {"duplicates": DUPLICATE, "near_duplicates": NEAR_DUPLICATE, "spans": REPEATED}
    for stage, rule in stages.items():
        for gone in results[stage]:
            summary.merge(Summary(clusters=gone.get("clusters", {})))
            if gone["documents"]:
                funnel.kept.add(-gone["documents"], -gone["read_bytes"])
                funnel.drop(rule, gone["documents"], gone["read_bytes"])
            if any(gone.get("changed", ())):
                funnel.change(rule, *gone["changed"])
    for result in results["encode"]:
        summary.merge(Summary.from_record(result["summary"]))
    assert funnel.missing() == Amount(), funnel
    return funnel, summary


def _join_dropped(
    results: dict[str, list[Any]], config: PrepareConfig, journal: Journal, finished: Path
) -> None:
    dropped = Dropped(config.files.keep_dropped)
    for stage in ("documents", "encode"):
        for path in sorted(journal.folder(stage).glob("*.dropped.jsonl")):
            if int(path.name.partition(".")[0]) < len(results[stage]):
                dropped.add_lines(path.read_text("utf-8"))
    if lines := dropped.lines():
        (finished / DROPPED).write_text(lines, "utf-8", newline="\n")


def _keep_index(
    results: dict[str, list[Any]], config: PrepareConfig, journal: Journal, finished: Path
) -> None:
    last = next(stage for stage in ("near_duplicates", "duplicates") if results[stage])
    counts = [result["documents"] for result in results["documents"]]
    mask = journal.folder(last) / "kept"
    near = dedup_config(config.duplicates)
    write_corpus_index(finished, journal.folder("documents"), counts, mask, near, SORT_BYTES)


def _move_into_place(work: Path, out: Path) -> None:
    """Move the finished files from `work` to their final location, the record last."""
    for name in (RECORD_NAME, *_files(out), DROPPED, _OLD_REPORT):
        (out / name).unlink(missing_ok=True)
    for name in (*_files(work), DROPPED, RECORD_NAME):
        if (work / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).replace(out / name)


def _files(folder: Path) -> list[str]:
    """Return the relative names of the files in `folder` that belong to a prepared corpus."""
    paths = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern)))
    return [path.relative_to(folder).as_posix() for path in paths]
