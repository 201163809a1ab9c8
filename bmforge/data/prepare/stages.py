"""Runs the stages of `prepare` in order, and skips parts that the journal lists as finished.

The stages are documents (per shard) -> duplicates -> split -> tokenizer -> encode (per shard).
Optional stages before the split are sketches (per shard) -> near_duplicates, which drop near
duplicates, and spans, which cuts repeated spans. The key of a stage is a hash of its settings and
of the previous key, so a changed setting invalidates the first stage that reads it, and all later
stages.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bmforge.data.dedup.minhash import DedupConfig
from bmforge.data.prepare.amount_checks import check_any_left, check_unread_members
from bmforge.data.prepare.barriers import SORT_BYTES, choose_split, find_copies
from bmforge.data.prepare.corpus_index import CorpusIndex, open_corpus_indexes
from bmforge.data.prepare.documents import DocumentStage, DocumentsTask, make_documents
from bmforge.data.prepare.encode import DocumentSplit, EncodeTask, encode_shard, training_texts
from bmforge.data.prepare.engine import Limits, SkippedEntry, StagePart, Work, run_parts
from bmforge.data.prepare.journal import Journal, digest_files, make_key
from bmforge.data.prepare.masks import open_mask
from bmforge.data.prepare.near import (
    DROPS,
    NearDrops,
    SketchTask,
    choose_survivors,
    dedup_config,
    sketch_shard,
)
from bmforge.data.prepare.shards import TOPICS, ShardPlan
from bmforge.data.prepare.spans import SPANS, LeastRepeats, Repeats, choose_spans
from bmforge.data.prepare.summary import choose_grouping
from bmforge.data.prepare.tokenize import end_of_text_id, load_tokenizer, train_bpe
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError
from bmforge.host_memory import trim_memory
from bmforge.logging import ProgressBar, get_logger
from bmforge.prepare_settings import PrepareConfig
from bmforge.tokenizers import Tokenizer

__all__ = [
    "STAGES",
    "StageKeys",
    "Runner",
    "StageState",
    "Work",
    "make_keys",
    "run_here",
    "run_stages",
    "stage_states",
]

STAGES = (
    "documents",
    "duplicates",
    "sketches",
    "near_duplicates",
    "spans",
    "split",
    "tokenizer",
    "encode",
)
_VERSION = 6  # version of the stages' code; a new version invalidates all results
_ENCODE_VERSION = 3
_SAMPLE_BYTES = 1 << 28  # bytes of text for tokenizer training, the step with the highest memory


@dataclass(frozen=True)
class StageKeys:
    """Journal keys of each stage: a list with a key per shard, or one key; empty if disabled."""

    documents: list[str]
    duplicates: str
    sketches: list[str]
    near_duplicates: list[str]
    spans: list[str]
    split: str
    tokenizer: str
    encode: list[str]

    def of(self, stage: str) -> list[str]:
        """Return the keys of a stage as a list."""
        keys = getattr(self, stage)
        return keys if isinstance(keys, list) else [keys]


Runner = Callable[
    [str, Work, Sequence[StagePart], PrepareConfig, Callable[[int, SkippedEntry], None]],
    Iterator[tuple[int, Any]],
]


def run_here(
    stage: str,
    run: Work,
    parts: Sequence[StagePart],
    config: PrepareConfig,
    on_skip: Callable[[int, SkippedEntry], None],
) -> Iterator[tuple[int, Any]]:
    """Run the parts of a stage in this process, or in worker processes of this machine."""
    limits = Limits(config.execution.document_seconds, config.execution.worker_memory_bytes)
    yield from run_parts(run, parts, config.execution.workers, limits, on_skip)


@dataclass(frozen=True)
class _Work:
    """Context shared by all stages: journal, keys, settings and runner."""

    journal: Journal
    keys: StageKeys
    config: PrepareConfig
    runner: Runner


@dataclass(frozen=True)
class StageState:
    """Progress of a stage: number of finished parts, and total number of parts."""

    stage: str
    done: int
    parts: int


def make_keys(
    plan: ShardPlan,
    config: PrepareConfig,
    steps: Sequence[DocumentStage],
    own_tokenizer: Tokenizer | None,
) -> StageKeys:
    """Return the keys of all stages: hashes of all inputs and settings that affect the results."""
    how, repeats = config.read, config.duplicates
    read = [_VERSION, how.text_field, how.errors, how.skip_bad, config.files.keep_dropped]
    read += [how.html_reader, how.encoding, choose_grouping(plan.inputs)]
    taken = [[step.name, step.version] for step in steps]
    documents = [make_key("documents", shard.key, read, taken) for shard in plan.shards]
    near = dedup_config(repeats)
    earlier = [index.digest for index in open_corpus_indexes(repeats.earlier, near)]
    duplicates = make_key("duplicates", documents, *earlier)
    of_near = ("sketches", duplicates, near.version) if near else ()
    sketches = [make_key(*of_near, shard.number) for shard in plan.shards if near]
    near_duplicates = [make_key("near_duplicates", sketches)] if near else []
    left = near_duplicates[0] if near else duplicates
    least = repeats.repeated_spans, repeats.repeated_paragraphs
    spans = [make_key("spans 2", left, least)] if any(least) else []
    left = spans[0] if spans else left
    split = make_key("split", left, config.validation_fraction, config.seed)
    trained = [config.vocab_size, asdict(config.bpe)]
    used = trained if own_tokenizer is None else _tokenizer_digest(own_tokenizer)
    tokenizer = make_key("tokenizer", split, used, _SAMPLE_BYTES)
    encode = [make_key("encode", _ENCODE_VERSION, tokenizer, shard.number) for shard in plan.shards]
    return StageKeys(
        documents, duplicates, sketches, near_duplicates, spans, split, tokenizer, encode
    )


def _tokenizer_digest(tokenizer: Tokenizer) -> list[list[str]]:
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return [[name, digest] for name, digest in digest_files(Path(folder)).items()]


def stage_states(journal: Journal, keys: StageKeys) -> list[StageState]:
    """Return the progress of each stage, for the given settings and inputs."""
    return [
        StageState(
            stage,
            sum(journal.find(stage, n, key) is not None for n, key in enumerate(keys.of(stage))),
            len(keys.of(stage)),
        )
        for stage in STAGES
        if keys.of(stage)
    ]


def run_stages(
    plan: ShardPlan,
    config: PrepareConfig,
    steps: Sequence[DocumentStage],
    tokenizer: Tokenizer | None,
    journal: Journal,
    runner: Runner = run_here,
) -> dict[str, list[Any]]:
    """Run the unfinished parts of all stages; return the results of every part by stage.

    Args:
        plan: inputs and shards.
        config: settings of the run.
        steps: steps that process one document at a time.
        tokenizer: existing tokenizer; if None, one is trained.
        journal: open journal of the work directory.
        runner: function that runs the parts of a per-shard stage, in any order.
    """
    keys = make_keys(plan, config, steps, tokenizer)
    work = _Work(journal, keys, config, runner)
    results: dict[str, list[Any]] = {}
    results["documents"] = _read_documents(plan, steps, work)
    check_unread_members(results["documents"], config.read.skip_unread)
    check_any_left(results["documents"])
    counts = tuple(result["documents"] for result in results["documents"])
    chosen = _choose(counts, work, results)
    (last,) = results["spans"] or results["near_duplicates"] or results["duplicates"]
    text_bytes = last["text_bytes"]
    if not text_bytes:
        raise DataError(
            "no text is left, because every document occurs in the earlier corpora, or is a "
            "duplicate of a document that does. Use other inputs, or remove earlier."
        )
    folder = journal.folder("tokenizer")

    def make_tokenizer() -> dict[str, Any]:
        trained = tokenizer
        if trained is None:
            texts = training_texts(chosen, text_bytes, _SAMPLE_BYTES)
            trained = train_bpe(texts, config.vocab_size, config.bpe)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trained.save_pretrained(folder)
        trim_memory()  # training leaves some hundred MB, which the workers need
        return {"files": digest_files(folder)}

    results["tokenizer"] = [_once(journal, "tokenizer", keys, make_tokenizer)]
    results["encode"] = _encode(chosen, work, choose_grouping(plan.inputs))
    return results


def _choose(counts: tuple[int, ...], work: _Work, results: dict[str, list[Any]]) -> DocumentSplit:
    """Deduplicate and split the documents; add the stages' results to `results`."""
    journal, keys, config = work.journal, work.keys, work.config
    documents = journal.folder("documents")
    mask_path = journal.folder("duplicates") / "kept"
    held_out = journal.folder("split") / "held_out"
    near = dedup_config(config.duplicates)
    earlier = open_corpus_indexes(config.duplicates.earlier, near)
    copies = _once(
        journal,
        "duplicates",
        keys,
        lambda: find_copies(documents, counts, mask_path.parent, SORT_BYTES, earlier),
    )
    results["duplicates"] = [copies]
    results["near_duplicates"], results["spans"] = [], []
    drops = None
    if near is not None:
        copies = _drop_near(counts, near, work, earlier)
        results["near_duplicates"] = [copies]
        mask_path = journal.folder("near_duplicates") / "kept"
        drops = NearDrops(mask_path.parent / DROPS, near.threshold)
    repeats = None
    least = LeastRepeats(config.duplicates.repeated_spans, config.duplicates.repeated_paragraphs)
    if any(least):
        folder, before = journal.folder("spans"), mask_path
        copies = _once(
            journal, "spans", keys, lambda: choose_spans(documents, counts, before, folder, least)
        )
        results["spans"] = [copies]
        mask_path, repeats = folder / "kept", Repeats(folder / SPANS, least)
    split = _once(
        journal,
        "split",
        keys,
        lambda: choose_split(
            documents,
            counts,
            open_mask(mask_path),
            held_out.parent,
            fraction=config.validation_fraction,
            seed=config.seed,
            bound_bytes=SORT_BYTES,
            repeats=repeats,
        ),
    )
    if config.validation_fraction > 0 and not split["has_any"]:
        get_logger().warning(
            "validation_fraction=%s of %d bytes is less than one document, so there is no "
            "validation data.",
            config.validation_fraction,
            copies["text_bytes"],
        )
    sides = held_out, split["cut"], split["cut_bytes"]
    return DocumentSplit(documents, counts, mask_path, *sides, drops, repeats)


def _drop_near(
    counts: tuple[int, ...], near: DedupConfig, work: _Work, earlier: Sequence[CorpusIndex]
) -> dict[str, Any]:
    """Find near duplicates among the documents that are not exact duplicates; return the result."""
    journal, keys = work.journal, work.keys
    documents, sketches = journal.folder("documents"), journal.folder("sketches")
    copies = journal.folder("duplicates") / "kept"
    firsts = accumulate(counts, initial=0)
    tasks = [
        SketchTask(number, documents, copies, first, sketches, near)
        for number, first in zip(range(len(counts)), firsts, strict=False)
    ]
    _each(work, "sketches", sketch_shard, tasks, "sketch")
    folder = journal.folder("near_duplicates")
    result: dict[str, Any] = _once(
        journal,
        "near_duplicates",
        keys,
        lambda: choose_survivors(
            documents,
            counts,
            copies,
            sketches,
            near,
            folder,
            SORT_BYTES,
            [index.near for index in earlier],
        ),
    )
    return result


def _read_documents(plan: ShardPlan, steps: Sequence[DocumentStage], work: _Work) -> list[Any]:
    journal, config, read = work.journal, work.config, work.config.read
    # Two paths may refer to the same file; the plan has its latest state.
    named = {Path(file.path): (file.size_bytes, file.modified_ns) for file in plan.inputs}
    tasks = []
    for shard in plan.shards:
        paths = {part.path for part in shard.ranges} - {TOPICS}
        tasks.append(
            DocumentsTask(
                shard=shard,
                folder=journal.folder("documents"),
                steps=tuple(steps),
                options=ReadOptions(read.text_field, read.html_reader, read.errors, read.encoding),
                skip_bad=read.skip_bad,
                keep_dropped=config.files.keep_dropped,
                seen={path: named[Path(path).absolute()] for path in paths},
                by=choose_grouping(plan.inputs),
            )
        )
    return _each(work, "documents", make_documents, tasks, "read and clean")


def _encode(chosen: DocumentSplit, work: _Work, by: str) -> list[Any]:
    journal, config = work.journal, work.config
    folder = journal.folder("tokenizer")
    tokenizer = load_tokenizer(folder)
    eos_id = end_of_text_id(tokenizer)
    tasks = [
        EncodeTask(
            number,
            chosen,
            tokenizer if config.execution.workers == 0 else folder,
            eos_id,
            journal.folder("encode"),
            config.files.keep_dropped,
            by,
        )
        for number in range(len(work.keys.encode))
    ]
    return _each(work, "encode", encode_shard, tasks, "tokenise")


def _once(journal: Journal, stage: str, keys: StageKeys, work: Callable[[], Any]) -> Any:
    """Return the result of a whole-corpus stage, from the journal or by calling `work`."""
    (key,) = keys.of(stage)
    licenses = journal.find(stage, 0, key)
    if licenses is None:
        licenses = work()
        journal.add(stage, 0, key, licenses.pop("files"), licenses)
    return licenses


def _each(work: _Work, stage: str, run: Work, tasks: Sequence[Any], title: str) -> list[Any]:
    """Return the results of a per-shard stage, from the journal or by running `run` in workers."""
    journal, keys = work.journal, work.keys
    results = [journal.find(stage, n, key) for n, key in enumerate(keys.of(stage))]
    parts = [
        StagePart(n, tasks[n], _known_skips(journal, stage, n, key))
        for n, key in enumerate(keys.of(stage))
        if results[n] is None
    ]

    def note_skip(number: int, skip: SkippedEntry) -> None:
        key = keys.of(stage)[number]
        skips = [*_known_skips(journal, stage, number, key), skip]
        journal.add(f"{stage} blames", number, key, {}, [list(entry) for entry in skips])

    with ProgressBar(title, len(tasks)) as bar:
        bar.advance(len(tasks) - len(parts))
        for number, result in work.runner(stage, run, parts, work.config, note_skip):
            journal.add(stage, number, keys.of(stage)[number], result.pop("files"), result)
            results[number] = result
            bar.advance()
    return results


def _known_skips(journal: Journal, stage: str, number: int, key: str) -> tuple[SkippedEntry, ...]:
    rows = journal.find(f"{stage} blames", number, key) or ()
    return tuple(SkippedEntry(*row) for row in rows)
