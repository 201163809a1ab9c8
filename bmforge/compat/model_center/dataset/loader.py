"""Distributed data loader: the same number of samples per process, or every sample exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from bmforge.compat.bmtrain.runtime import config, rank, world_size
from bmforge.errors import ConfigError, DataError

__all__ = ["DistributedDataLoader", "share_batches"]


class DistributedDataLoader:
    """Batches of this process's part of a dataset; every process gets equally many batches.

    With `shuffle`, for training, each epoch has a different order, and a few samples are repeated
    so that every process has the same number of samples. Without `shuffle`, for evaluation, every
    sample occurs exactly once, and the last batches may differ in size.

    Args:
        dataset: dataset of tensors with a length.
        shuffle: True to use a different order in every epoch.
        seed: random seed of the order.
        options: arguments of torch's DataLoader (`batch_size`, `num_workers`, `collate_fn`, ...).

    Raises:
        DistributedError: init_distributed was not called.
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
        # A process without samples left loads one sample, and returns its batch with zero rows.
        self.loader = DataLoader(dataset, batch_sampler=_Batches(batches), **options)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch, on this process's device."""
        if self.sampler is not None:
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
        for number, batch in enumerate(self.loader):
            placed = tree_map_only(Tensor, lambda tensor: tensor.to(config.device), batch)
            sampler = self.loader.batch_sampler
            if isinstance(sampler, _Batches) and not sampler.batches[number]:
                placed = _empty(placed)
            yield placed

    def __len__(self) -> int:
        """Return the number of batches per epoch, the same on every process."""
        return len(self.loader)


def share_batches(
    count: int, batch_size: int, rank: int, world: int, drop_last: bool = False
) -> list[list[int]]:
    """Return the sample indices of every batch of one process; no sample is repeated.

    Args:
        count: number of samples.
        batch_size: largest batch size.
        rank: rank of the process, which takes every `world`-th sample.
        world: number of processes.
        drop_last: True to drop samples that do not fill a batch on every process.
    """
    own_indices = list(range(rank, count, world))
    if drop_last:
        number = (count // world) // batch_size
        return [own_indices[n * batch_size : (n + 1) * batch_size] for n in range(number)]
    number = math.ceil(math.ceil(count / world) / batch_size)
    batches = []
    for still in range(number - 1, -1, -1):
        # Full batches first, but at least one sample is left for each later batch.
        size = min(batch_size, max(len(own_indices) - still, 0))
        batches.append(own_indices[:size])
        own_indices = own_indices[size:]
    return batches


class _Batches(Sampler[list[int]]):
    """Sampler of precomputed batches.

    For an empty batch it yields one sample, whose tensors `_empty` then reduces to zero rows.
    """

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch or [0]

    def __len__(self) -> int:
        return len(self.batches)


class _Nothing(Dataset[Any]):
    """Empty dataset, for a split whose labels are not public."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise DataError(f"index={index} is out of range, because the split has no examples.")


def _empty(batch: Any) -> Any:
    """Return a batch with zero rows."""
    if isinstance(batch, Tensor | Sequence) and not isinstance(batch, str):
        return batch[:0]
    return {name: _empty(value) for name, value in batch.items()}
