"""Opens the text of a run: directories of `bmforge prepare`, or bare token stores.

A bare token store is a pair of files .bin and .idx (Megatron-LM's format) without the record of
its tokenizer, splits and licenses that `bmforge prepare` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bmforge.data import (
    Batch,
    DataLoader,
    Mixture,
    PackedDataset,
    PrepareReport,
    check_vocabulary,
    iter_once,
    load_tokenizer,
    open_store,
    parse_conditions,
    select_store,
)
from bmforge.data.prepare.tokenize import end_of_text_id
from bmforge.errors import ConfigError, DataError
from bmforge.logging import get_logger
from bmforge.parallel import World, run_on_first
from bmforge.recipes.inputs.selection import (
    check_where,
    open_text,
    place_of,
    read_report,
    train_prefix,
)
from bmforge.recipes.inputs.splitting import StorePart, check_split
from bmforge.recipes.inputs.vocabulary import check_tokenizers

__all__ = [
    "Corpus",
    "CorpusConfig",
    "HeldOut",
    "open_corpus",
    "open_held_out",
]


@dataclass(kw_only=True)
class CorpusConfig:
    """Text of a run: prepared directories or token stores.

    Args:
        paths: training corpora: directories written by `bmforge prepare`, or prefixes of .bin/.idx
            token stores; several are mixed. Conditions after a path select documents, as in
            `corpus?language=zh&date>=2020`.
        where: conditions on the documents of all paths, including held-out documents, such as
            language=zh or quality>=0.5. They compare source, language, license, date or quality;
            source, language and license accept comma-separated lists and the wildcard *.
        weights: sampling weight of each path (if empty: equal weights).
        seq_len: sequence length in tokens.
        global_batch_size: number of sequences per optimizer step, over all processes.
        grad_accum_steps: number of gradient accumulation steps; sets global_batch_size to
            micro_batch_size x grad_accum_steps x processes / (tp x pp x cp) (if None: derived from
            global_batch_size).
        micro_batch_size: number of sequences per forward pass of one process.
        reset_at_documents: restart position ids and attention at every document in a packed
            sequence.
        tokenizer: directory of the tokenizer that produced the token stores; it is exported with
            the model (if None: the tokenizer in the prepared directory).
        eos_id: id of the token at the end of every document (if None: the id recorded in the
            prepared directory, or else that of the tokenizer).
        validation: prefix of the validation token store (if None: the store in the first prepared
            directory).
        split: weights of the training, validation and unused parts into which the documents of a
            token store are split, such as 949 50 1 (if empty: train on all documents).
        validation_batches: maximum number of micro-batches per evaluation (if None: all).
        seed: random seed of the sample order.
        prefetch_steps: number of optimizer steps whose batches are loaded ahead.
    """

    paths: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    seq_len: int = 512
    global_batch_size: int = 32
    micro_batch_size: int = 8
    grad_accum_steps: int | None = None
    reset_at_documents: bool = False
    tokenizer: str | None = None
    eos_id: int | None = None
    validation: str | None = None
    split: tuple[float, ...] = ()
    validation_batches: int | None = None
    seed: int = 0
    prefetch_steps: int = 2


@dataclass(frozen=True)
class Corpus:
    """Corpus of a run, with its loader, held-out data, tokenizer, and end-of-document token."""

    loader: DataLoader
    validation: PackedDataset | None
    validation_text_bytes: int | None
    tokenizer_dir: Path | None
    eos_id: int | None
    config: CorpusConfig

    def held_out_batches(self, world: World) -> Iterator[Batch]:
        """Yield this process's batches of one epoch over the held-out data."""
        assert self.validation is not None
        return iter_once(
            self.validation,
            self.config.micro_batch_size,
            world.rank,
            world.size,
            self.config.validation_batches,
            reset_at_documents=self.config.reset_at_documents,
        )


def open_corpus(
    config: CorpusConfig, vocab_size: int, world: World, init_from: str | None = None
) -> Corpus:
    """Open the token stores of a run and check them against the model's vocabulary.

    Args:
        config: paths and sizes.
        vocab_size: vocabulary size of the model.
        world: data-parallel rank and size of this process.
        init_from: initial model of the run; its tokenizer must be that of the corpora.

    Raises:
        ConfigError: there are no paths, the numbers of weights and paths differ, or the corpora
            have different tokenizers.
        DataError: a store is missing, damaged, too short, or has ids beyond `vocab_size`.
    """
    _check_paths(config)
    run_on_first(lambda: _check_stores(config, vocab_size, init_from))
    first = read_report(config.paths[0])
    tokenizer_dir, eos_id = _find_end(config, first)
    weights = config.weights or (1.0,) * len(config.paths)
    stores = [open_text(path, config.where, config.split) for path in config.paths]
    datasets = [PackedDataset(store, config.seq_len, eos_id) for store in stores]
    # The sample order depends on these names; they do not contain the path, since a corpus may be
    # moved.
    names = [f"data.paths[{number}]" for number in range(len(datasets))]
    parts = dict(zip(names, zip(datasets, weights, strict=True), strict=True))
    loader = DataLoader(
        datasets[0] if len(datasets) == 1 else Mixture(parts),
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        rank=world.rank,
        world=world.size,
        seed=config.seed,
        reset_at_documents=config.reset_at_documents,
        prefetch_steps=config.prefetch_steps,
    )
    held_out = _validation_prefix(config)
    validation = None
    if held_out is not None:
        validation = _open_validation(held_out, config, eos_id)
    elif any(config.split[1:2]):
        part = StorePart(config.paths[0], config.split, 1)
        validation = PackedDataset(part, config.seq_len, eos_id)
    own = first is not None and config.validation is None and not config.where
    return Corpus(
        loader,
        validation,
        first.validation.text_bytes if own and first is not None else None,
        tokenizer_dir,
        eos_id,
        config,
    )


@dataclass(frozen=True)
class HeldOut:
    """Held-out token store, which is read once, in sequences of a given length.

    Attributes:
        dataset: sequences of the store.
        text_bytes: size of the text in bytes; None if unknown.
    """

    dataset: PackedDataset
    text_bytes: int | None

    def batches(self, size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield the batches of one epoch for this rank, with `size` sequences each."""
        return iter_once(self.dataset, size, rank, world)


def open_held_out(path: str, seq_len: int, vocab_size: int, model: str | None) -> HeldOut:
    """Open the held-out split of a prepared directory, or all of a bare token store.

    Args:
        path: the directory, or the store without ``.bin`` or ``.idx``.
        seq_len: sequence length in tokens.
        vocab_size: vocabulary size of the model.
        model: directory of the model, whose tokenizer must be that of the text.

    Raises:
        ConfigError: there is no held-out split, or the text was prepared with a different
            tokenizer.
        DataError: a store is missing or damaged, too short, or has ids beyond `vocab_size`.
    """
    report = read_report(path)
    prefix = Path(path) if report is None else report.validation_prefix
    if prefix is None:
        raise ConfigError(
            f"{path!r} has no validation data. Prepare the corpus again with "
            "--validation-fraction, or use another token store."
        )
    run_on_first(lambda: check_tokenizers((path,), model, None))
    store = open_store(prefix)
    run_on_first(lambda: check_vocabulary(store, vocab_size))
    text_bytes = None if report is None else report.validation.text_bytes
    return HeldOut(PackedDataset(store, seq_len), text_bytes)


def _find_end(config: CorpusConfig, report: PrepareReport | None) -> tuple[Path | None, int | None]:
    """Return the run's tokenizer directory and the id of its end-of-document token."""
    tokenizer_dir = None if report is None else report.tokenizer_dir
    eos_id = config.eos_id
    if config.tokenizer is not None:
        tokenizer_dir = Path(config.tokenizer)
    if eos_id is None and report is not None:
        eos_id = report.eos_id
    elif eos_id is None and config.tokenizer is not None:
        eos_id = end_of_text_id(load_tokenizer(config.tokenizer))
    return tokenizer_dir, eos_id


def _open_validation(prefix: str, config: CorpusConfig, eos_id: int | None) -> PackedDataset | None:
    """Open the held-out documents that match the conditions; return None if there are none."""
    try:
        store = select_store(open_store(prefix), parse_conditions(config.where))
    except DataError as error:
        if not config.where:
            raise
        get_logger().warning("there is no validation data: %s", error)
        return None
    return PackedDataset(store, config.seq_len, eos_id)


def _check_paths(config: CorpusConfig) -> None:
    if not config.paths:
        raise ConfigError(
            "data.paths is empty. Prepare a corpus with `bmforge prepare TEXT... --out DIR`, then "
            "pass --data.paths DIR."
        )
    if len(set(config.paths)) != len(config.paths):
        raise ConfigError(
            f"data.paths={list(config.paths)} contains a path twice. List it once, with a "
            "larger weight."
        )
    check_where(config.where, config.paths, config.split)
    check_split(config.split, config.validation, config.paths)
    if config.weights and (len(config.weights) != len(config.paths) or len(config.paths) == 1):
        raise ConfigError(
            f"data.weights has {len(config.weights)} numbers for {len(config.paths)} paths "
            "(needed: one per path, or none for a single path)."
        )


def _check_stores(config: CorpusConfig, vocab_size: int, init_from: str | None) -> None:
    """Check that the token ids of all stores are in the model's vocabulary.

    The record of a prepared directory has its vocabulary size, so only bare stores are read.
    """
    check_tokenizers([*dict.fromkeys(map(place_of, config.paths))], init_from, config.tokenizer)
    for path in config.paths:
        report = read_report(path)
        if report is None or report.vocab_size > vocab_size:
            check_vocabulary(open_store(train_prefix(path)), vocab_size)
    held_out = _validation_prefix(config)
    if held_out is not None:
        store = open_store(held_out)
        check_vocabulary(store, vocab_size)
        if store.num_tokens < 2:
            raise DataError(
                f"validation store {held_out!r} has {store.num_tokens} tokens (needed: at least "
                "2). Use a longer text."
            )


def _validation_prefix(config: CorpusConfig) -> str | None:
    if config.validation is not None:
        return config.validation
    report = read_report(config.paths[0])
    prefix = None if report is None else report.validation_prefix
    return None if prefix is None else str(prefix)
