"""Reads the micro-batches of every step from a loader, epoch after epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = ["BatchReader", "Loader", "restarts_order"]


# Fields that determine the order of the samples. If one changes, a saved position is invalid.
_ORDER_FIELDS = frozenset(
    ("data", *(f"data.{n}" for n in ("paths", "weights", "seq_len", "seed", "reset_at_documents")))
)


def restarts_order(overridden: Collection[str]) -> bool:
    """Return True if overriding these fields makes a resumed run start with a new sample order."""
    return not _ORDER_FIELDS.isdisjoint(overridden)


class Loader(Protocol):
    """Interface of data loaders for the Trainer; `data.DataLoader` implements it.

    A loader whose `is_endless` is True never ends. For other loaders, all processes check before
    every step whether the loader has ended on any process.
    """

    def __next__(self) -> Sequence[Batch]:
        """Return this process's micro-batches of the next optimizer step.

        Raises:
            StopIteration: the epoch has ended; the loader's `__iter__`, if any, begins the next
                epoch.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""


class BatchReader:
    """Reads the batches of a loader, and starts the next epoch when the loader ends.

    Args:
        loader: data loader, a `Loader`.
        num_epochs: number of epochs over a finite loader.
        device: device of the model.
        mesh: mesh of the model, or None for one process.

    Attributes:
        epoch: index of the current epoch, starting at 0.
        ended: True after the last epoch.
    """

    def __init__(
        self, loader: Loader, num_epochs: int, device: torch.device, mesh: DeviceMesh | None
    ) -> None:
        self._loader, self._num_epochs, self._device = loader, num_epochs, device
        self._mesh = mesh
        self._batches: Any = loader
        self.epoch, self.ended = 0, False

    def read(self, step: int) -> Sequence[Batch] | None:
        """Return the micro-batches for step `step` + 1, or None after the last epoch.

        If the loader ends on any process, the epoch ends on all processes, because every step runs
        on all of them.
        """
        batches = self._take()
        if batches is None and self.epoch + 1 < self._num_epochs:
            if getattr(self._loader, "__iter__", None) is None:
                raise ConfigError(
                    f"train.num_epochs={self._num_epochs} needs a loader that can start another "
                    "epoch, but this loader has no __iter__. Add one, or set "
                    "train.num_epochs=1."
                )
            self.epoch += 1
            self._batches = iter(self._loader)  # type: ignore[call-overload]
            batches = self._take()
        self.ended = batches is None
        if batches is None:
            get_logger().info(
                "the loader is exhausted after step %d, in epoch %d of %d, so training ends",
                *(step, self.epoch + 1, self._num_epochs),
            )
        return batches

    def resume(self, state: Mapping[str, Any], overridden: Collection[str]) -> None:
        """Skip the batches that the saved run has already read.

        Args:
            state: result of `Trainer.state_dict`.
            overridden: config fields (such as ``train.optim.lr``) and tables (such as ``data``)
                that the user has changed intentionally; if they determine the sample order, the
                loader starts from the beginning.
        """
        self.epoch = state.get("epoch", 0)
        if not restarts_order(overridden):
            self._loader.load_state_dict(state["loader"])
        else:
            get_logger().info(
                "the data was changed with --override, so the samples are read from the beginning"
            )

    def _take(self) -> Sequence[Batch] | None:
        """Return the next micro-batches; None on all processes if the epoch ended on any process.

        Comm: one all-reduce of an integer, over several processes with a loader that can end.
        """
        batches: Sequence[Batch] | None = next(self._batches, None)
        if getattr(self._loader, "is_endless", False):
            return batches
        has_ended = torch.tensor(int(batches is None), device=self._device)
        if self._mesh is not None and self._mesh.size() > 1:
            dist.all_reduce(has_ended, op=dist.ReduceOp.MAX)
        return None if has_ended.item() else batches
