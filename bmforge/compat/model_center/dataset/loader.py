"""Batches for every process, on its device: all examples once in evaluation, equal shares in
training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from bmforge.compat.bmtrain.runtime import config, rank, world_size
from bmforge.errors import ConfigError, DataError

__all__ = ["DistributedDataLoader", "share_batches"]


class DistributedDataLoader:
    """A process's part of a dataset in batches; every process makes equally many of them.

    Shuffled, each epoch is in another order, and every process has the same number of examples, for
    which a few are taken twice. Not shuffled, as in evaluation, every example comes exactly once:
    where shares differ by one, so do some batches.

    Args:
        dataset: has a length and examples of tensors.
        shuffle: an order of its own for every epoch.
        seed: of the order.
        options: of torch's DataLoader (`batch_size`, `num_workers`, `collate_fn`, `drop_last`...).

    Raises:
        DistributedError: before init_distributed.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, **options: Any
    ) -> None:
        self.shuffle, self.epoch = shuffle, 0
        self.sampler: DistributedSampler[Any] | None = None
        if not len(dataset):  # type: ignore[arg-type]
            self.loader: DataLoader[Any] = DataLoader(_Nothing())
            return
        if shuffle:
            self.sampler = DistributedSampler(dataset, world_size(), rank(), True, seed)
            self.loader = DataLoader(dataset, sampler=self.sampler, **options)
            return
        size, drops = options.pop("batch_size", 1), options.pop("drop_last", False)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"batch_size={size!r} must be at least 1.")
        count = len(dataset)  # type: ignore[arg-type]
        batches = share_batches(count, size, rank(), world_size(), drops)
        # An empty batch, where a process has none left, is cut off an example's.
        self.loader = DataLoader(dataset, batch_sampler=_Batches(batches), **options)

    def __iter__(self) -> Iterator[Any]:
        """Return the next epoch's batches, on this process's device."""
        if self.sampler is not None:
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
        for number, batch in enumerate(self.loader):
            placed = _place(batch)
            sampler = self.loader.batch_sampler
            if isinstance(sampler, _Batches) and not sampler.batches[number]:
                placed = _empty(placed)
            yield placed

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every process."""
        return len(self.loader)


def share_batches(
    count: int, batch_size: int, rank: int, world: int, drop_last: bool = False
) -> list[list[int]]:
    """Return the examples of every batch of one process, without any twice.

    Args:
        count: number of examples.
        batch_size: most examples of a batch.
        rank: of the process, which takes every `world`-th example.
        world: number of processes.
        drop_last: leave out what does not fill a batch on every process.
    """
    mine = list(range(rank, count, world))
    if drop_last:
        number = (count // world) // batch_size
        return [mine[n * batch_size : (n + 1) * batch_size] for n in range(number)]
    number = math.ceil(math.ceil(count / world) / batch_size)
    batches = []
    for still in range(number - 1, -1, -1):
        # Full ones first, but something is left for each that is still to come.
        size = min(batch_size, max(len(mine) - still, 0))
        batches.append(mine[:size])
        mine = mine[size:]
    return batches


class _Batches(Sampler[list[int]]):
    """Batches that are known beforehand; for an empty one, an example to make it of."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch or [0]

    def __len__(self) -> int:
        return len(self.batches)


class _Nothing(Dataset[Any]):
    """No examples: a split whose labels are kept secret."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise DataError(f"there is no example {index}: the split is empty.")


def _place(batch: Any) -> Any:
    """Move tensors to this process's device."""
    if isinstance(batch, Tensor):
        return batch.to(config.device)
    if isinstance(batch, dict):
        return {name: _place(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and not isinstance(batch, str):
        return type(batch)(_place(value) for value in batch)
    return batch


def _empty(batch: Any) -> Any:
    """Return a batch without its rows."""
    if isinstance(batch, Tensor | Sequence) and not isinstance(batch, str):
        return batch[:0]
    return {name: _empty(value) for name, value in batch.items()}
