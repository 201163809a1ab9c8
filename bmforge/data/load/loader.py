"""Loads micro-batches of token sequences in an order given by (seed, epoch, sample index).

Optimizer step s trains on the global sample indices s G to s G + G - 1, where G is the global batch
size. They are assigned to slots [micro-batch][rank][sequence]; slots beyond G contain padding
sequences whose labels are all -100. So all ranks have batches of the same shape, and the sequences
of a step do not depend on the number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.packing import Dataset, document_starts, reset_positions
from bmforge.data.load.prefetch import Prefetcher
from bmforge.errors import ConfigError, DataError

__all__ = ["Batch", "DataLoader", "iter_once"]


# Entries of a loader's state that must match, and the settings that determine them.
_ORDER = {
    "seed": "the seed",
    "dataset": "the size of the corpus, seq_len or the mixture",
    "content": "the content of the corpus",
}
_EARLIER = (
    " The state is from an earlier version, in which the order of a mixture depended on "
    "the spelling of its paths. Continue with that version, or start a new run from the "
    "weights."
)


class DataLoader:
    """Endless iterator over optimizer steps; yields this rank's micro-batches of each step.

    An item is a list of ceil(G / (micro_batch_size * world)) batches, each a dict of int64 tensors
    of shape (B, T). ``labels`` equal ``input_ids`` (the model shifts them), except for -100 in
    padding. With `reset_at_documents`, a batch also has ``position_ids``, which restart after each
    eos, and ``document_ids``, 0, 1, ... within the sequence; the label of the first token of a
    document is then -100, so that nothing is predicted across a boundary. If G is not a multiple of
    micro_batch_size * world, a batch also has an ``attention_mask``, which is 0 in the padding
    sequences.

    Args:
        dataset: a `PackedDataset` or a `Mixture`.
        global_batch_size: sequences per optimizer step over all ranks, G.
        micro_batch_size: sequences per forward pass on one rank.
        rank: data-parallel rank of this process.
        world: number of data-parallel ranks.
        seed: random seed of the sample order.
        reset_at_documents: True to add position and document ids per document; the dataset needs
            its eos_id.
        prefetch_steps: number of steps that a thread prepares in advance; 0 for no thread.

    Raises:
        ConfigError: a number is out of range, or the dataset lacks an eos_id that is needed.
        DataError: the corpus is shorter than one sequence.
    """

    is_endless = True

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        reset_at_documents: bool = False,
        prefetch_steps: int = 2,
    ) -> None:
        _check_at_least(1, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
        _check_at_least(0, prefetch_steps=prefetch_steps)
        _check_rank(rank, world)
        dataset.check_trainable()
        self.micro_batches_per_step = -(-global_batch_size // (micro_batch_size * world))
        self._maker = _StepMaker(
            dataset, global_batch_size, micro_batch_size, rank, world, seed,
            _eos_id(dataset, reset_at_documents), self.micro_batches_per_step,
        )  # fmt: skip
        self._seed = seed
        self._fingerprint, self._content = dataset.fingerprint(), dataset.content()
        self._rows = dataset.num_held_out_rows()
        self._global_batch_size = global_batch_size
        self._prefetch_steps = prefetch_steps
        self._step = 0
        self._samples = 0
        self._prefetcher: Prefetcher[list[Batch]] | None = None
        self._stop_at_exit: weakref.finalize | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next optimizer step."""
        batches = self._make_or_take()
        self._step += 1
        self._samples += self._global_batch_size
        return batches

    def _make_or_take(self) -> list[Batch]:
        if self._prefetch_steps == 0:
            return self._maker.make(self._samples)
        if self._prefetcher is None:
            maker, first, size = self._maker, self._samples, self._global_batch_size
            self._prefetcher = Prefetcher(
                lambda i: maker.make(first + i * size), 0, self._prefetch_steps
            )
            self._stop_at_exit = weakref.finalize(self, self._prefetcher.stop)
        try:
            return self._prefetcher.take()
        except BaseException:
            self.close()
            raise

    def state_dict(self) -> dict[str, int]:
        """Return the state to resume from: the position after the last step that was returned."""
        return {
            "step": self._step,
            "samples": self._samples,
            "seed": self._seed,
            "dataset": self._fingerprint,
            "content": self._content,
            "rows": self._rows,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume exactly at `state`; the world size and batch size may differ.

        Raises:
            ConfigError: the state has a different seed or corpus, so the order would differ, or it
                lacks an entry (except `content`, which earlier versions did not save).
        """
        self.check_state(state)
        self.close()
        self._step, self._samples = int(state["step"]), int(state["samples"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if `load_state_dict` cannot resume at `state`."""
        own_state = self.state_dict()
        missing = [key for key in own_state if key not in state and key not in ("content", "rows")]
        if missing:
            raise ConfigError(
                f"the loader state with the keys {sorted(state)} lacks the keys {missing}, so "
                "DataLoader.state_dict did not return it. Pass the state that was saved with the "
                "checkpoint."
            )
        for key, what in _ORDER.items():
            if key in state and state[key] != own_state[key]:
                sizes = f" ({state.get('rows')} sequences then, {own_state['rows']} now)"
                rows = sizes if "rows" in state else ""
                raise ConfigError(
                    f"the loader state has {key}={state[key]}, but this loader has "
                    f"{key}={own_state[key]}, because {what} changed{rows}. The sample order "
                    f"cannot be resumed. Restore {what}, start a new run, or continue in a new "
                    f"order with --override data.{'' if 'content' in state else _EARLIER}"
                )

    def close(self) -> None:
        """Stop the prefetch thread and discard its batches; the next item starts a new thread."""
        if self._stop_at_exit is not None:
            self._stop_at_exit()
        self._prefetcher = self._stop_at_exit = None

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _StepMaker:
    """Builds the micro-batches of a step; a separate class, so that a thread can run it."""

    dataset: Dataset
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world: int
    seed: int
    eos_id: int | None
    micro_batches: int

    def make(self, first_sample: int) -> list[Batch]:
        """Return this rank's micro-batches of the step that begins at `first_sample`."""
        firsts = (np.arange(self.micro_batches) * self.world + self.rank) * self.micro_batch_size
        slots = (firsts[:, None] + np.arange(self.micro_batch_size)).ravel()
        real = int((slots < self.global_batch_size).sum())
        rows = np.zeros((len(slots), self.dataset.seq_len), dtype=np.int64)
        if real:
            rows[:real] = self.dataset.training_rows(first_sample + slots[:real], self.seed)
        lengths = np.where(np.arange(len(slots)) < real, self.dataset.seq_len, 0)
        columns = dict(_batch(rows, lengths, self.eos_id))
        if len(slots) * self.world > self.global_batch_size:
            # Same on all ranks and micro-batches, as pipeline stages need equal inputs.
            columns["attention_mask"] = _mask_rows(lengths, self.dataset.seq_len)
        parts = {key: value.split(self.micro_batch_size) for key, value in columns.items()}
        return [{key: parts[key][m] for key in parts} for m in range(self.micro_batches)]


def _mask_rows(lengths: NDArray[np.int64], seq_len: int) -> Any:
    """Return the attention mask, (B, T), of sequences with the given lengths.

    Padding sequences are masked, so that the load-balancing loss of MoE layers ignores them.
    """
    import torch

    return torch.from_numpy((np.arange(seq_len) < lengths[:, None]).astype(np.int64))


def iter_once(
    dataset: Dataset,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    max_batches: int | None = None,
    *,
    reset_at_documents: bool = False,
) -> Iterator[Batch]:
    """Yield this rank's batches of one epoch in stream order; every token is predicted once.

    All ranks get the same number of batches of the same shape; missing sequences are filled with
    padding whose labels are -100. Only the first token of a corpus, which has no context, is not
    predicted.

    Args:
        dataset: a `PackedDataset` or a `Mixture`.
        batch_size: sequences per batch on one rank.
        rank: data-parallel rank of this process.
        world: number of data-parallel ranks.
        max_batches: largest number of batches over all ranks, so that the sequences do not depend
            on the world size (default: the whole corpus).
        reset_at_documents: True to add position and document ids per document; the dataset needs
            its eos_id.

    Raises:
        ConfigError: a number is out of range.
        DataError: the corpus has too few tokens to predict one.
    """
    _check_at_least(1, batch_size=batch_size)
    _check_rank(rank, world)
    total = dataset.num_held_out_rows()
    if total == 0:
        raise DataError(
            "the validation corpus has fewer than 2 tokens, so there is nothing to predict. "
            "Add text, or raise validation_fraction."
        )
    if max_batches is not None:
        _check_at_least(1, max_batches=max_batches)
        total = min(total, max_batches * batch_size)
    eos_id = _eos_id(dataset, reset_at_documents)
    return _held_out_batches(dataset, batch_size, rank, world, total, eos_id)


def _held_out_batches(
    dataset: Dataset, batch_size: int, rank: int, world: int, total: int, eos_id: int | None
) -> Iterator[Batch]:
    """Yield the batches of `iter_once`, without checking the arguments."""
    for first in range(rank * batch_size, total + rank * batch_size, batch_size * world):
        numbers = np.arange(first, max(first, min(first + batch_size, total)))
        rows = np.zeros((batch_size, dataset.seq_len), dtype=np.int64)
        lengths = np.zeros(batch_size, dtype=np.int64)
        rows[: len(numbers)], lengths[: len(numbers)] = dataset.held_out_rows(numbers)
        yield _batch(rows, lengths, eos_id)


def _batch(rows: NDArray[np.int64], lengths: NDArray[np.int64], eos_id: int | None) -> Batch:
    """Convert sequences into a batch of tensors; with `eos_id`, add position and document ids."""
    import torch  # imported here because preparing a corpus needs no tensors

    labels = rows.copy()
    if len(lengths) and int(lengths.min()) < rows.shape[1]:
        labels[np.arange(rows.shape[1]) >= lengths[:, None]] = IGNORE_INDEX
    batch = {"input_ids": torch.from_numpy(rows), "labels": torch.from_numpy(labels)}
    if eos_id is not None:
        starts = document_starts(rows, lengths, eos_id)
        labels[starts] = IGNORE_INDEX
        positions, documents = reset_positions(starts)
        batch["position_ids"] = torch.from_numpy(positions)
        batch["document_ids"] = torch.from_numpy(documents)
    return batch


def _eos_id(dataset: Dataset, reset_at_documents: bool) -> int | None:
    if reset_at_documents and dataset.eos_id is None:
        raise ConfigError(
            "reset_at_documents=True needs an end-of-document token. Create the dataset with "
            "eos_id, for example PackedDataset(store, seq_len, eos_id=0)."
        )
    return dataset.eos_id if reset_at_documents else None


def _check_at_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}.")


def _check_rank(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank={rank} must be from 0 to {world - 1}, because world={world}.")
