"""Data loader for CPM-Bee: packs the samples of a task mixture into micro-batches.

Instances are packed by best fit. As soon as more sequences than a global batch are open, the oldest
ones form the next optimizer step. The state contains the sample indices in the open sequences, so
that a run resumes exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee.batch import (
    BestFit,
    Instance,
    RowBatch,
    build_instance,
    collate_rows,
)
from bmforge.tokenizers.cpm_bee.mixture import TaskMixture
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["DocumentLoader", "iter_documents"]


class DocumentLoader:
    """Endless iterator over optimizer steps; each item is a list of this rank's micro-batches.

    Each micro-batch is a dict of the tensors listed in `collate_rows`, padded to the mixture's
    window. Every rank packs all sequences but returns only its own, so that the packing does not
    depend on the world size.

    Args:
        mixture: source of the instances.
        global_batch_size: number of sequences per optimizer step, over all ranks.
        micro_batch_size: number of sequences per forward pass on one rank.
        rank: data-parallel rank.
        world: number of data-parallel ranks.

    Raises:
        ConfigError: a value is out of range, or the global batch size is not divisible.
    """

    def __init__(
        self,
        mixture: TaskMixture,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if min(global_batch_size, micro_batch_size, world) < 1 or not 0 <= rank < world:
            raise ConfigError(
                f"global_batch_size={global_batch_size}, micro_batch_size={micro_batch_size} and "
                f"world={world} must be at least 1, and rank={rank} must be from 0 to world - 1."
            )
        if global_batch_size % (micro_batch_size * world):
            raise ConfigError(
                f"global_batch_size={global_batch_size} must be a multiple of "
                f"micro_batch_size={micro_batch_size} times world={world}."
            )
        self.mixture = mixture
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._rank, self._world = rank, world
        self._fingerprint = mixture.fingerprint()
        self._step = self._next = 0
        self._open = BestFit(mixture.max_length)
        self._instances: dict[int, Instance] = {}

    def __iter__(self) -> Iterator[list[dict[str, Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        """Return the micro-batches of the next optimizer step."""
        return [
            {name: torch.from_numpy(values) for name, values in batch.inputs.items()}
            for batch in self.next_rows()
        ]

    def next_rows(self) -> list[RowBatch]:
        """Return the micro-batches of the next step as arrays, with the task of each token."""
        barren = 0
        while len(self._open.rows) <= self._global_batch_size:
            barren = 0 if self._add_next() else barren + 1
            if barren >= self.mixture.samples_per_epoch:
                raise DataError(
                    f"all {barren} samples of an epoch were skipped, because the documents are "
                    f"invalid or longer than max_length={self.mixture.max_length}. Raise "
                    "max_length, or correct the documents."
                )
        rows = [
            [self._instances.pop(number) for number in row]
            for row in self._open.take(self._global_batch_size)
        ]
        self._step += 1
        stride, size = self._micro_batch_size * self._world, self._micro_batch_size
        starts = range(self._rank * size, len(rows), stride)
        return [
            collate_rows(
                rows[start : start + size], self.mixture.tokenizer, self.mixture.max_length
            )
            for start in starts
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, which is equal on all ranks."""
        return {
            "step": self._step,
            "samples": self._next,
            "open_rows": [list(row) for row in self._open.rows],
            "seed": self.mixture.seed,
            "dataset": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly from a saved state, with any world size.

        Raises:
            ConfigError: the state has another seed, mixture or window, or lacks an entry.
        """
        own = self.state_dict()
        missing = [key for key in own if key not in state]
        if missing:
            raise ConfigError(
                f"the loader state with the keys {sorted(state)} lacks the keys {missing}. Pass a "
                "state that state_dict() returned."
            )
        for key in ("seed", "dataset"):
            if state[key] != own[key]:
                raise ConfigError(
                    f"the loader state has {key}={state[key]}, but this loader has "
                    f"{key}={own[key]}, so the data order cannot be resumed. Restore the "
                    "documents, tasks, max_length and seed of the saved run, or start a new run."
                )
        self._step, self._next = int(state["step"]), int(state["samples"])
        self._open, self._instances = BestFit(self.mixture.max_length), {}
        for row in state["open_rows"]:
            numbered = [(int(number), self.mixture.instance(int(number))) for number in row]
            self._instances.update(
                {n: instance for n, instance in numbered if instance is not None}
            )
            self._open.restore(
                [(n, len(instance)) for n, instance in numbered if instance is not None]
            )

    def _add_next(self) -> bool:
        """Add the next sample to an open sequence; return False if the sample is skipped."""
        number, self._next = self._next, self._next + 1
        instance = self.mixture.instance(number)
        if instance is None:
            return False
        self._instances[number] = instance
        self._open.add(number, len(instance))
        return True


def iter_documents(
    documents: Sequence[Mapping[str, Any]],
    tokenizer: CPMBeeTokenizer,
    *,
    max_length: int,
    batch_size: int,
    task: str = "",
) -> Iterator[RowBatch]:
    """Pack all documents in order and yield the batches; the last batch may be smaller.

    Raises:
        DataError: see `encode_document`; documents longer than the window are not skipped.
    """
    open_rows, instances = BestFit(max_length), {}
    for i, document in enumerate(documents):
        instances[i] = build_instance(document, tokenizer, max_length=max_length, task=task)
        open_rows.add(i, len(instances[i]))
        if len(open_rows.rows) > batch_size:
            yield _collate(open_rows.take(batch_size), instances, tokenizer)
    while open_rows.rows:
        yield _collate(open_rows.take(batch_size), instances, tokenizer)


def _collate(
    rows: Sequence[Sequence[int]], instances: dict[int, Instance], tokenizer: CPMBeeTokenizer
) -> RowBatch:
    return collate_rows([[instances.pop(i) for i in row] for row in rows], tokenizer)
