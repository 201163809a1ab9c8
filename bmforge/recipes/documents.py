"""Training of CPM-Bee on documents: pretraining, or fine-tuning with `init_from`.

Documents are read from .jsonl files, or from mixture files (.json) that specify a weight, a task
and declarative transforms for each file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bmforge.batch import IGNORE_INDEX
from bmforge.data import Batch
from bmforge.errors import ConfigError, DataError
from bmforge.models.cpm_bee import CPMBeeConfig
from bmforge.models.hub import find_model
from bmforge.parallel import World
from bmforge.recipes.inputs.skipped_data import is_much, log_skipped
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.tokenizers.cpm_bee.batch import build_instance
from bmforge.tokenizers.cpm_bee.document import TooLongError
from bmforge.tokenizers.cpm_bee.loader import DocumentLoader, iter_documents
from bmforge.tokenizers.cpm_bee.mixture import (
    DocumentFile,
    TaskMixture,
    TaskSource,
    load_mixture,
    reason_of,
)
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer
from bmforge.train.objective import rename_inputs

__all__ = ["CPMBeeTrainConfig", "DocumentConfig", "DocumentsConfig", "train_documents"]

# Number of samples to encode before a run, to estimate the fraction that is skipped.
_SURVEYED = 500


@dataclass(kw_only=True)
class DocumentConfig:
    """Data options of a run on documents.

    Args:
        paths: .jsonl files with one document per line, where each file is a separate task, or .json
            files that describe a mixture of tasks.
        validation: held-out files in the same formats as `paths`; each task is evaluated
            separately.
        tokenizer: directory with CPM-Bee's vocab.txt (if None: the tokenizer of `init_from`).
        seq_len: sequence length in tokens; documents are packed into sequences, and documents that
            do not fit into one are skipped.
        global_batch_size: number of sequences per optimizer step, over all processes.
        micro_batch_size: number of sequences per forward pass of one process.
        grad_accum_steps: number of gradient accumulation steps; sets global_batch_size to
            micro_batch_size x grad_accum_steps x processes / (tp x pp x cp) (if None: derived from
            global_batch_size).
        validation_batches: maximum number of evaluation batches per task (if None: all).
        skip_bad: skip documents that cannot be encoded instead of stopping with an error.
        seed: random seed of the order of documents and answers, of the transforms and of the
            few-shot examples.
    """

    paths: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    tokenizer: str | None = None
    seq_len: int = 2048
    global_batch_size: int = 32
    micro_batch_size: int = 8
    grad_accum_steps: int | None = None
    validation_batches: int | None = None
    skip_bad: bool = False
    seed: int = 0


@dataclass(kw_only=True)
class DocumentsConfig(RunConfig):
    """Config for training on documents; the other fields are those of `RunConfig`.

    Args:
        data: files of documents, their encoding, and batch sizes.
    """

    data: DocumentConfig = field(default_factory=DocumentConfig)


@dataclass(kw_only=True)
class CPMBeeTrainConfig(DocumentsConfig):
    """Config for training a CPM-Bee.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/cpm-bee-train")
    model: CPMBeeConfig = field(default_factory=lambda: CPMBeeConfig.preset("cpm-bee-10b"))


def train_documents(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on documents.

    The export includes the tokenizer, so that `bmforge generate` can complete documents.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head="language_model")


def _open_data(config: Any, rows: World) -> TrainingData:
    data, tokenizer = config.data, _open_tokenizer(config)
    mixture = TaskMixture(
        _open_sources(data.paths), tokenizer, data.seq_len, seed=data.seed, skip_bad=data.skip_bad
    )
    loader = DocumentLoader(
        mixture,
        global_batch_size=data.global_batch_size,
        micro_batch_size=data.micro_batch_size,
        rank=rows.rank,
        world=rows.size,
    )
    _warn_early(mixture)
    parts: dict[str, Callable[[], Iterable[Batch]]] = {}
    for source in _open_sources(data.validation) if data.validation else ():
        if source.task in parts:
            raise ConfigError(
                f"data.validation has task {source.task!r} twice. Rename one of the two."
            )
        documents = _fitting(source, tokenizer, data)
        parts[source.task] = lambda docs=documents: _held_out_batches(  # type: ignore[misc]
            docs, tokenizer, data, rows
        )
    return TrainingData(
        loader,
        data.seq_len,
        parts,
        objective=rename_inputs({"input": "input_ids"}),
        save_tokenizer=tokenizer.save_pretrained,
        close=lambda: log_skipped(
            mixture.skipped.values(),
            loader.state_dict()["samples"],
            "samples",
            mixture.instances_of,
        ),
    )


def _warn_early(mixture: TaskMixture) -> None:
    """Warn before the run if many of the first samples would be skipped."""
    problems = mixture.survey(_SURVEYED)
    looked_at = min(_SURVEYED, mixture.samples_per_epoch)
    if is_much(len(problems), looked_at):
        what = "samples read before the run"
        log_skipped(problems.values(), looked_at, what, mixture.instances_of)


def _open_tokenizer(config: Any) -> CPMBeeTokenizer:
    named = config.data.tokenizer
    if named is None and config.init_from is None:
        raise ConfigError(
            "data.tokenizer is not set. Use a directory with CPM-Bee's vocab.txt, or start from a "
            "model with --init-from."
        )
    folder = Path(named) if named is not None else find_model(str(config.init_from))
    tokenizer = CPMBeeTokenizer.from_pretrained(folder)
    if len(tokenizer) != config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, but the model has "
            f"vocab_size={config.model.vocab_size}. Use the tokenizer of the model, or for a "
            f"new model set --model.vocab-size {len(tokenizer)}."
        )
    return tokenizer


def _open_sources(paths: Iterable[str]) -> list[TaskSource]:
    """Open .jsonl files and mixture files."""
    sources: list[TaskSource] = []
    for path in paths:
        if path.endswith(".json"):
            sources += load_mixture(path)
        else:
            sources.append(TaskSource(Path(path).stem, DocumentFile(path)))
    if not sources:
        raise ConfigError(
            "data.paths is empty. Pass --data.paths FILE.jsonl, with one document per "
            "line, or a mixture."
        )
    return sources


def _fitting(
    source: TaskSource, tokenizer: CPMBeeTokenizer, config: DocumentConfig
) -> list[dict[str, Any]]:
    """Return a task's held-out documents that can be encoded, after the task's first transform.

    Raises:
        DataError: a document cannot be encoded and `skip_bad` is off, or no document is left.
    """
    fitting, left_out = [], []
    for number in range(len(source.documents)):
        document = dict(source.documents[number])
        try:
            document = source.maps[0](document) if source.maps else document
            build_instance(document, tokenizer, max_length=config.seq_len)
        except DataError as error:
            if not (config.skip_bad or isinstance(error, TooLongError)):
                raise DataError(f"{source.where(number)}: {error}") from error
            left_out.append(reason_of(error))
            continue
        fitting.append(document)
    what = f"held-out documents of task {source.task!r}"
    log_skipped(left_out, len(source.documents), what)
    if not fitting:
        raise DataError(
            f"no validation document of task {source.task!r} can be used: all are invalid or "
            f"longer than data.seq_len={config.seq_len}. Add valid documents, or raise "
            "data.seq_len."
        )
    return fitting


def _held_out_batches(
    documents: list[dict[str, Any]],
    tokenizer: CPMBeeTokenizer,
    config: DocumentConfig,
    rows: World,
) -> Iterator[Batch]:
    """Yield this rank's batches of one epoch; a rank without data yields a batch without labels."""
    all_batches = iter_documents(
        documents, tokenizer, max_length=config.seq_len, batch_size=config.micro_batch_size
    )
    batches = islice(all_batches, config.validation_batches)
    while group := list(islice(batches, rows.size)):
        arrays = group[min(rows.rank, len(group) - 1)].inputs
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if rows.rank >= len(group):
            batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
        yield batch
