"""Loads examples, built on demand, as batches of tensors of fixed widths.

The example with the global sample index n, and its random choices, depend only on (seed, n), so the
order is the same for any number of processes, and a run resumes exactly. `document_segments.py` and
the recipes implement the sources of examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bmforge.batch import IGNORE_INDEX
from bmforge.data import Batch, TokenStore
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, permute
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import World
from bmforge.recipes.inputs.file_digests import describe_change, digest_files
from bmforge.recipes.run import TrainingData
from bmforge.value_ranges import check_values

__all__ = [
    "ExampleConfig",
    "ExampleLoader",
    "ExampleSource",
    "collate",
    "digest_stores",
    "iter_held_out",
    "open_examples",
]

Seed = tuple[int | str, ...]


@dataclass(kw_only=True)
class ExampleConfig:
    """Data options of a run that trains on examples.

    Args:
        paths: data files, or token stores if the task reads them.
        validation: held-out files for evaluation, in the same format as `paths`.
        tokenizer: directory of the tokenizer (if None: the tokenizer of `init_from`).
        seq_len: maximum sequence length in tokens.
        global_batch_size: number of sequences per optimizer step, over all processes.
        micro_batch_size: number of sequences per forward pass of one process.
        grad_accum_steps: number of gradient accumulation steps; sets global_batch_size to
            micro_batch_size x grad_accum_steps x processes / (tp x pp x cp) (if None: derived from
            global_batch_size).
        split: weights of the training, validation and unused parts into which the documents of a
            token store are split, such as 949 50 1 (if empty: train on all documents).
        validation_batches: maximum number of micro-batches per evaluation (if None: all).
        seed: random seed of the sample order and of random choices within samples.
    """

    paths: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    tokenizer: str | None = None
    seq_len: int = 512
    global_batch_size: int = 32
    micro_batch_size: int = 8
    grad_accum_steps: int | None = None
    split: tuple[float, ...] = ()
    validation_batches: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or if there are no paths."""
        check_values(self, "data.")
        if not self.paths:
            raise ConfigError("data.paths is empty. Pass the training files with --data.paths.")


class ExampleSource(Protocol):
    """Interface of a data set that `ExampleLoader` reads.

    Attributes:
        columns: dict from tensor name to (width, padding value); ``labels`` is one of the names.
        fingerprint: hex digest that changes whenever an example changes.

    A source that reads token stores also has `content`, an int digest of their contents. A source
    whose examples are not sequences of integers has a method `collate`, which builds batches.
    """

    columns: Mapping[str, tuple[int, int]]
    fingerprint: str

    def __len__(self) -> int:
        """Return the number of examples."""

    def make(self, index: int, seed: Seed) -> Example:
        """Return the example at `index`; its random choices depend only on `seed`."""


class ExampleLoader:
    """Endless iterator over optimizer steps; an item is a list of this rank's micro-batches.

    The examples of a step are ordered by micro-batch, then rank. If the global batch size is not a
    multiple of the micro-batches of all ranks, padding examples without labels fill the last ones,
    so that all ranks have the same shapes.

    Args:
        source: the examples; each is used once per epoch.
        config: an `ExampleConfig`, or another config with the same sizes and seed.
        rank: data-parallel rank of this process.
        world: number of data-parallel ranks.

    Raises:
        ConfigError: a size is out of range.
        DataError: the source has no examples.
    """

    is_endless = True

    def __init__(self, source: ExampleSource, config: Any, rank: int = 0, world: int = 1) -> None:
        config.check()
        if len(source) == 0:
            raise DataError(
                f"there is no training example in data.paths={list(config.paths)} (needed: at "
                "least one record). Check that the files are not empty, and that an answer "
                f"fits into data.seq_len={config.seq_len}."
            )
        self._source, self._config = source, config
        self._rank, self._world = rank, world
        self._samples = 0
        self._files = digest_files(config.paths)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next optimizer step."""
        config = self._config
        size, total = config.micro_batch_size, config.global_batch_size
        first = self._samples
        batches = []
        for start in range(0, total, size * self._world):
            slots = range(start + self._rank * size, start + (self._rank + 1) * size)
            rows = [self._row(first + slot if slot < total else None) for slot in slots]
            batches.append(_collate(rows, self._source))
        self._samples += total
        return batches

    def _row(self, number: int | None) -> Example:
        """Return the example with a global sample index; for None, an unlabeled padding example."""
        if number is None:
            return _unlabel(self._source.make(0, ("padding",)))
        count, seed = len(self._source), self._config.seed
        epoch, position = divmod(number, count)
        key = derive_key("examples", seed, epoch)
        index = int(permute(np.array([position]), count, key)[0])
        return self._source.make(index, ("example", seed, number))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, which is the same on every rank."""
        return {
            "samples": self._samples,
            "seed": self._config.seed,
            "dataset": self._source.fingerprint,
            "content": getattr(self._source, "content", 0),
            "files": self._files,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly at a saved position, with any number of ranks and any batch size.

        Raises:
            ConfigError: the state belongs to other examples or a different seed.
        """
        self.check_state(state)
        self._samples = int(state["samples"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a state belongs to other examples or a different seed."""
        own_state = self.state_dict()
        state = {"content": own_state["content"], **state}  # states of earlier versions lack it
        if state["seed"] != own_state["seed"]:
            raise ConfigError(
                f"data.seed={own_state['seed']}, but the run began with data.seed={state['seed']}, "
                "so the order of the samples cannot be continued. Restore the value, or start a "
                "new run."
            )
        if any(state.get(key) != own_state[key] for key in ("dataset", "content")):
            raise ConfigError(
                f"{describe_change(state.get('files'), self._files)}, so the order of the samples "
                "cannot be continued. Restore the data, start a new run in another run_dir, or "
                "continue in a new order with --override data."
            )


def iter_held_out(
    source: ExampleSource, config: Any, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield this rank's batches of one epoch in order; every epoch has the same batches.

    All ranks yield the same number of batches; padding examples without labels are added.
    """
    size, total = config.micro_batch_size, len(source)
    if config.validation_batches is not None:
        total = min(total, config.validation_batches * size)
    for start in range(rank * size, total + rank * size, size * world):
        rows = [
            source.make(i, ("held out", i)) if i < total else _unlabel(source.make(0, ("padding",)))
            for i in range(start, start + size)
        ]
        yield _collate(rows, source)


def open_examples(
    source: ExampleSource,
    held_out: ExampleSource | None,
    config: ExampleConfig,
    rows: World,
    **fields: Any,
) -> TrainingData:
    """Build the `TrainingData` of a run from example sources.

    Args:
        source: training examples.
        held_out: examples for evaluation; None if the run has none.
        config: sizes and seed.
        rows: data-parallel rank and size of this process.
        fields: further fields of `TrainingData`, such as `save_tokenizer`.
    """
    parts = {}
    if held_out is None and config.validation_batches is not None:
        raise ConfigError(
            f"data.validation_batches={config.validation_batches} has no effect without "
            "data.validation. Set both, or leave it out."
        )
    if held_out is not None and len(held_out):
        parts["validation"] = lambda: iter_held_out(held_out, config, rows.rank, rows.size)
    loader = ExampleLoader(source, config, rows.rank, rows.size)
    return TrainingData(loader, config.seq_len, parts, epoch_rows=len(source), **fields)


def digest_stores(stores: Sequence[TokenStore]) -> int:
    """Return a 63-bit digest of the contents of token stores, independent of their paths."""
    return int(fingerprint_of([store.digest() for store in stores])[:16], 16) >> 1


def _unlabel(example: Example) -> Example:
    return {**example, "labels": [IGNORE_INDEX] * len(example["labels"])}


def _collate(rows: Sequence[Example], source: ExampleSource) -> Batch:
    """Collate examples with their source's `collate`, or if it has none, with this module's."""
    own = getattr(source, "collate", None)
    return collate(rows, source.columns) if own is None else own(rows)


def collate(rows: Sequence[Example], columns: Mapping[str, tuple[int, int]]) -> Batch:
    """Stack examples into a batch of tensors, padded on the right.

    Args:
        rows: B examples.
        columns: dict from tensor name to (width, padding value).

    Shape:
        every tensor: (B, width), int64
    """
    batch = {}
    for name, (width, filling) in columns.items():
        table = np.full((len(rows), width), filling, dtype=np.int64)
        for line, row in zip(table, rows, strict=True):
            line[: len(row[name])] = row[name]
        batch[name] = torch.from_numpy(table)
    return batch
